"""Plans for machines: within their memory, by their speed, or an error that says what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from model_files import sparse, tiny

from skippy_zmq.errors import OptionError
from skippy_zmq.plan.arguments import parse_size
from skippy_zmq.plan.planner import Machine, plan_stages
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.sources.gguf_model import GgufModel, open_model

OPTIONS = StageOptions(ctx_size=256, lanes=1)
GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GgufModel:
    """25 GiB of 100 layers, in a file of holes."""
    return open_model(sparse(tmp_path_factory.mktemp("sparse") / "model.gguf"))


def test_stages_take_what_fits(model: GgufModel) -> None:
    machines = [Machine(5 * GIB), Machine(16 * GIB), Machine(8 * GIB)]
    plan = plan_stages(model, machines, OPTIONS)
    assert [stage.layers.start for stage in plan.stages] == [0, *[stage.layers.end for stage in plan.stages][:-1]]
    assert plan.stages[-1].layers.end == 100
    for stage, machine in zip(plan.stages, machines, strict=True):
        assert machine.memory is not None
        assert stage.total == stage.weights + stage.kv + stage.compute <= machine.memory
    # The smallest is full, the others share the rest evenly, up to their own limits.
    assert plan.stages[0].total > 4.7 * GIB
    assert len(plan.stages[1].layers) > len(plan.stages[2].layers) > len(plan.stages[0].layers)


def test_a_machine_twice_as_fast_takes_twice_as_much(model: GgufModel) -> None:
    plan = plan_stages(model, [Machine(speed=1.0), Machine(speed=2.0), Machine(speed=1.0)], OPTIONS)
    assert [len(stage.layers) for stage in plan.stages] == [25, 50, 25]
    assert plan.balance > 0.99


def test_what_does_not_fit_is_said_with_what_is_missing(model: GgufModel) -> None:
    with pytest.raises(OptionError, match=r"the model does not fit: layers \d+:100 of 100 are left over") as caught:
        plan_stages(model, [Machine(8 * GIB), Machine(16 * GIB)], OPTIONS)
    text = str(caught.value)
    assert "2 stages have 24.0 GiB" in text
    lacking = re.search(r"each stage lacks ([0-9.]+) (GiB|MiB)", text)
    assert lacking is not None
    more = float(lacking[1]) * (GIB if lacking[2] == "GiB" else 2**20)
    assert plan_stages(model, [Machine(8 * GIB + round(1.05 * more)), Machine(16 * GIB + round(1.05 * more))], OPTIONS)
    less = round(0.9 * more)
    with pytest.raises(OptionError, match="does not fit"):
        plan_stages(model, [Machine(8 * GIB + less), Machine(16 * GIB + less)], OPTIONS)


def test_a_large_context_is_named_as_what_can_be_smaller(tmp_path: Path) -> None:
    model = open_model(tiny(tmp_path / "model.gguf"))
    options = StageOptions(ctx_size=65536, lanes=16)
    with pytest.raises(OptionError, match="a smaller --ctx-size, --lanes or KV cache type"):
        plan_stages(model, [Machine(128 << 20)] * 2, options)
    smaller = StageOptions(ctx_size=1024, lanes=1)
    assert plan_stages(model, [Machine(128 << 20)] * 2, smaller)


@pytest.mark.parametrize(
    ("machines", "share", "words"),
    [
        ([], 0.5, "0 stages: the model has 100 layers"),
        ([Machine()] * 65, 0.5, "65 stages: wanted at most 64"),
        ([Machine(speed=0.0)], 0.5, "speed: wanted a number above 0"),
        ([Machine()], 1.5, "decode share: wanted 0 to 1, got 1.5"),
        ([Machine()], float("nan"), "decode share"),
    ],
    ids=str,
)
def test_values_that_make_no_sense(model: GgufModel, machines: list[Machine], share: float, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        plan_stages(model, machines, OPTIONS, decode_share=share)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8G", 8 * GIB), ("1.5GiB", 3 * GIB // 2), ("512m", 2**29), ("1000", 1000), ("2 TB", 2**41), ("7KB", 7168)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "8X", "1e9", "9" * 30, "8G8G"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="wanted a size like 8G"):
        parse_size(text)
