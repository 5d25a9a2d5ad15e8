"""What the planner says a stage will hold is what a stage that was opened holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny

from skippy_zmq import LocalPipeline
from skippy_zmq.plan.costs import layer_costs
from skippy_zmq.plan.planner import Machine, PlannedStage, balanced_split, cache_settings, plan_stages
from skippy_zmq.runtime.options import StageOptions, check_options
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.demo_models import demo_model
from skippy_zmq.sources.gguf_model import GgufModel, open_model
from skippy_zmq.topology import LayerRange

ARCHITECTURES = sorted((Path(__file__).parent / "data" / "arch").glob("*.gguf"))
# Buffers are estimated, upwards: of what is allocated at least this part and at most so many times it.
LEAST, MOST = 0.95, 3.0
MOST_OF_RECURRENT = 10.0  # whose buffers are those of their recurrent layers, which a stage may not have
RECURRENT = {"granitehybrid-dense"}

SETTINGS: list[dict[str, Any]] = [
    {},
    {"lanes": 3, "cache_type_k": "q8_0", "cache_type_v": "q8_0", "ctx_size": 200},
    {"lanes": 2, "flash_attn": "off", "ubatch_size": 64},
    {"swa_full": False, "ubatch_size": 64},
]


def options_of(settings: dict[str, Any]) -> StageOptions:
    return check_options({"ctx_size": 256, "lanes": 1, "threads": 1, **settings}, "options")


def planned(source: GgufModel, options: StageOptions, boundaries: tuple[int, ...]) -> Iterator[PlannedStage]:
    """The stages of a plan that has to cut at these layers, because nothing else fits."""
    costs = layer_costs(source, cache_settings(source, options))
    unlimited = plan_stages(source, [Machine()] * (len(boundaries) + 1), options)
    edges = (0, *boundaries, source.n_layers)
    for start, end in itertools.pairwise(edges):
        yield PlannedStage(
            LayerRange(start, end),
            costs.weights_bytes(start, end),
            costs.cache_bytes(start, end),
            max(stage.compute for stage in unlimited.stages),
            0.0,
            None,
        )


def check(path: Path, settings: dict[str, Any], boundaries: tuple[int, ...], most: float = MOST) -> None:
    source, options = open_model(path), options_of(settings)
    for stage in planned(source, options, boundaries):
        memory = StageModel(source, stage.layers, options).memory()
        assert (stage.weights, stage.kv) == (memory.weights, memory.kv), stage.layers
        assert LEAST * memory.compute <= stage.compute <= most * memory.compute, stage.layers


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", [{"tied": True}, {"tied": False}, {"quant": "q4_0", "n_layers": 5}], ids=str)
def test_bytes_of_small_models(tmp_path: Path, shape: dict[str, Any], settings: dict[str, Any]) -> None:
    path = tiny(tmp_path / "model.gguf", hidden=128, ffn=256, **shape)
    for boundaries in ((), (1,), (1, 3)):
        check(path, settings, boundaries)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("path", ARCHITECTURES, ids=lambda path: path.stem)
def test_bytes_of_other_architectures(path: Path, settings: dict[str, Any]) -> None:
    check(path, settings, (1, 3), MOST_OF_RECURRENT if path.stem in RECURRENT else MOST)


def test_architectures_are_there() -> None:
    assert {path.stem for path in ARCHITECTURES} > RECURRENT


@pytest.mark.real_model
def test_bytes_of_a_real_pipeline() -> None:
    path = demo_model("smollm2")
    options = StageOptions(ctx_size=512, lanes=2, threads=1)
    plan = plan_stages(open_model(path), [Machine()] * 2, options)
    with LocalPipeline(path, stages=2, options=options) as pipeline:
        assert list(pipeline.layers) == plan.ranges
        for facts, stage in zip(pipeline.stages, plan.stages, strict=True):
            assert (facts.weights_bytes, facts.kv_bytes) == (stage.weights, stage.kv)
            assert LEAST * facts.compute_bytes <= stage.compute <= MOST * facts.compute_bytes


@pytest.mark.real_model
def test_the_output_head_counts_for_generating_and_not_for_reading() -> None:
    source = open_model(demo_model("smollm2"))
    cuts = {
        share: plan_stages(source, [Machine()] * 2, StageOptions(), decode_share=share).ranges[0].end
        for share in (0.0, 0.6, 1.0)
    }
    assert cuts[0.0] == 15
    assert 18 <= cuts[0.6] <= 20  # where bench/splits.py finds decoding to be fastest
    assert cuts[0.6] == balanced_split(source, 2, StageOptions())[0].end
    assert cuts[1.0] > cuts[0.6]


def test_experts_that_rest_take_no_time() -> None:
    path = next(path for path in ARCHITECTURES if path.stem == "llama-moe")
    source = open_model(path)
    costs = layer_costs(source, cache_settings(source, StageOptions()))
    used, count = (source.metadata[f"llama.expert_{key}"] for key in ("used_count", "count"))
    assert isinstance(used, int)
    assert isinstance(count, int)
    experts = sum(t.nbytes for t in source.tensors if t.name.startswith("blk.0.") and "_exps." in t.name)
    rest = costs.weights[0] - experts
    assert experts > 0
    assert costs.decode[0] == rest + experts * used / count
