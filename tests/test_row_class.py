"""Row classes: measured on a stage's own layers, without a trace, kept for later starts, said to others."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny
from stage_processes import SMALL, StageProcess, error_line, run_many

from skippy_zmq.errors import OptionError
from skippy_zmq.runtime.options import StageOptions, check_options
from skippy_zmq.runtime.row_class import LONG_CONTEXT, MOST_ROWS, RowClass, measure_sizes, row_class
from skippy_zmq.runtime.row_class_cache import MOST_FILES, row_class_directory, stage_row_class
from skippy_zmq.runtime.stage_model import Crossing, LaneRows, StageModel
from skippy_zmq.sources.demo_models import demo_model
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.stage.facts import check_reproducible, stage_facts
from skippy_zmq.topology import LayerRange

pytest_plugins = ("transport_fixtures", "stage_fixtures")

ARCH = Path(__file__).parent / "data" / "arch"
ENOUGH = 3600.0  # seconds; nothing here takes as long
LANES = 5


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have one kernel for any number of rows."""
    return tiny(tmp_path_factory.mktemp("model") / "q4_1.gguf", quant="q4_1", heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose matrices have another kernel for a lone row."""
    return tiny(tmp_path_factory.mktemp("model") / "f32.gguf")


def open_stage(path: Path, start: int = 0, end: int = 0, **options: Any) -> StageModel:
    source = open_model(path)
    values = {"ctx_size": 1024, "lanes": LANES, "threads": 1, "batch_size": 256, "ubatch_size": 256, **options}
    return StageModel(source, LayerRange(start, end or source.n_layers), check_options(values, "options"))


def measured(stage: StageModel) -> RowClass:
    return row_class(measure_sizes(stage, ENOUGH, {}), min(MOST_ROWS, stage.options.lanes))


# ---- from what was measured to a class


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [
        ({}, 1, RowClass(1, 1)),
        ({}, 4, RowClass(1, 1, complete=False)),
        ({2: False}, 4, RowClass(1, 1)),
        ({2: True}, 4, RowClass(1, 1, complete=False)),
        ({2: True, 1: True}, 2, RowClass(1, 2)),
        ({2: True, 1: True}, 4, RowClass(1, 2, complete=False)),
        ({2: True, 1: True, 3: False}, 4, RowClass(1, 2)),
        ({2: True, 1: True, 3: True, 4: True}, 4, RowClass(1, 4)),
        ({2: True, 1: False}, 2, RowClass(1, 1)),
        ({2: True, 1: False}, 4, RowClass(1, 1, complete=False)),
        ({2: True, 1: False, 3: False}, 4, RowClass(1, 1)),
        ({2: True, 1: False, 3: True}, 3, RowClass(2, 3)),
        ({2: True, 1: False, 3: True, 4: False}, 4, RowClass(2, 3)),
        ({2: True, 1: False, 3: True}, 4, RowClass(2, 3, complete=False)),
    ],
)
def test_class_of_sizes(sizes: dict[int, bool], most: int, wanted: RowClass) -> None:
    assert row_class(sizes, most) == wanted


def test_words() -> None:
    assert "alone and beside up to 7 others" in str(RowClass(1, 8))
    assert "of 2 to 8 rows, but others alone" in str(RowClass(2, 8))
    assert "computed alone" in str(RowClass())
    assert str(RowClass(1, 8, complete=False)) == f"{RowClass(1, 8)} (there was no time to try more)"


# ---- what is measured


@pytest.mark.parametrize("layers", [(0, 4), (0, 2), (1, 3), (2, 4)])
def test_threads_share_a_lone_row_out(quantized: Path, layers: tuple[int, int]) -> None:
    """Known: with two threads flash attention splits a lone row's cells, but only in a long context."""
    assert measured(open_stage(quantized, *layers)) == RowClass(1, LANES)
    assert measured(open_stage(quantized, *layers, threads=2)) == RowClass(2, LANES)
    assert measured(open_stage(quantized, *layers, threads=2, ctx_size=256)) == RowClass(1, LANES)
    assert measured(open_stage(quantized, *layers, threads=2, reproducible=True)) == RowClass(1, LANES)
    eight_bit = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    assert measured(open_stage(quantized, *layers, threads=2, **eight_bit)) == RowClass(1, LANES)


def test_kernels_of_their_own_for_a_lone_row(float32: Path) -> None:
    assert measured(open_stage(float32)) == RowClass(2, LANES)
    assert measured(open_stage(float32, lanes=2)) == RowClass(1, 1)
    assert measured(open_stage(float32, lanes=1)) == RowClass(1, 1)
    assert measured(open_stage(float32, ubatch_size=4)) == RowClass(2, 4, complete=False)
    assert row_class(measure_sizes(open_stage(float32, ubatch_size=4), ENOUGH, {}), 4) == RowClass(2, 4)


def test_no_more_than_sixteen_rows(quantized: Path) -> None:
    sizes = measure_sizes(open_stage(quantized, lanes=20), ENOUGH, {})
    assert sizes == dict.fromkeys((2, 1, *range(3, 17)), True)


@pytest.mark.test_models
@pytest.mark.parametrize("layers", [(0, 9), (9, 18)])
def test_kernels_for_four_rows(layers: tuple[int, int]) -> None:
    gemma = demo_model("gemma3")
    assert measured(open_stage(gemma, *layers)) == RowClass(1, 3)
    assert measured(open_stage(gemma, *layers, threads=2)) == RowClass(2, 3)
    assert measured(open_stage(gemma, *layers, threads=2, reproducible=True)) == RowClass(1, 3)


@pytest.mark.real_model
@pytest.mark.parametrize("layers", [(0, 3), (27, 30)])
def test_smollm2(layers: tuple[int, int]) -> None:
    smollm2 = demo_model("smollm2")
    assert measured(open_stage(smollm2, *layers)) == RowClass(1, LANES)
    assert measured(open_stage(smollm2, *layers, threads=2)) == RowClass(2, LANES)
    assert measured(open_stage(smollm2, *layers, threads=2, reproducible=True)) == RowClass(1, LANES)


# ---- trials leave no trace


def session(stages: Sequence[StageModel]) -> list[bytes]:
    """Everything that leaves and all logits of a few batches on empty lanes."""
    seen: list[bytes] = []

    def run(rows: list[LaneRows], outputs: Sequence[int]) -> None:
        tensors: list[Crossing] = []
        tokens = np.array([(37 * i + 11 * len(seen)) % stages[0].n_vocab for i in range(sum(r[2] for r in rows))])
        for stage in stages:
            tensors = stage.run(rows, tokens.astype(np.int32), outputs if stage.is_last else (), tensors)
            seen.extend(bytes(tensor.data) for tensor in tensors)
        seen.extend(stages[-1].logits(row).tobytes() for row in outputs)

    run([(0, 0, 70)], (69,))
    run([(1, 0, 5), (2, 0, 5)], (4, 9))
    run([(0, 70, 1), (1, 5, 1), (2, 5, 1)], (0, 1, 2))
    run([(3, 0, 2)], (1,))
    return seen


@pytest.mark.parametrize("options", [{}, {"flash_attn": "off"}, {"swa_full": False}, {"cache_type_k": "q4_0"}], ids=str)
@pytest.mark.parametrize("name", sorted(path.stem for path in ARCH.glob("*.gguf")))
def test_a_measured_stage_computes_as_if_it_had_not_been(name: str, options: dict[str, Any]) -> None:
    def stages() -> list[StageModel]:
        path = ARCH / f"{name}.gguf"
        n_ctx = min(1024, open_model(path).n_positions or 1024)
        both = [open_stage(path, start, end, threads=2, ctx_size=n_ctx, **options) for start, end in ((0, 2), (2, 4))]
        both[0].serve(both[1].wanted)
        return both

    if name == "granitehybrid-dense" and options.get("cache_type_k") == "q4_0":
        options = {"cache_type_k": "f32", "cache_type_v": "f32"}  # its heads are no whole blocks
    tried = stages()
    for stage in tried:
        memory = stage.memory()
        first = measured(stage)
        assert first.complete
        assert measured(stage) == first
        assert [stage.position(lane) for lane in range(LANES)] == [0] * LANES
        assert stage.memory() == memory
        if not options:
            assert first == RowClass(2, LANES)
    assert session(tried) == session(stages())


# ---- the trials themselves


@pytest.fixture
def context(quantized: Path) -> Any:
    return open_stage(quantized, 1, 3, threads=2).native_context


def test_lanes_after_a_trial(context: Any) -> None:
    context.pretend(1, 200)
    context.pretend(1, 100)
    context.pretend(2, 8)
    assert [context.position(lane) for lane in range(LANES)] == [0, 300, 8, 0, 0]
    context.trial(1, 2)
    assert [context.position(lane) for lane in range(LANES)] == [0, 300, 8, 0, 0]
    context.forget_trials()
    assert [context.position(lane) for lane in range(LANES)] == [0] * LANES


def test_each_lane_has_its_row(context: Any) -> None:
    """The same again and beside others, another on another lane; contents of the cache count."""
    (lone,) = context.trial(1, 1)
    rows = context.trial(0, 3)
    assert rows[1] == lone
    assert context.trial(0, 3) == rows
    key = ("l_out-2", 0)
    assert len({row[key] for row in rows}) == 3
    for _ in range(4):
        context.pretend(1, LONG_CONTEXT // 4)
    (with_context,) = context.trial(1, 1)
    assert with_context[key] != lone[key]
    (again,) = context.trial(1, 1)
    assert again == with_context
    context.forget_trials()
    assert context.trial(1, 1)[0] == lone
    context.forget_trials()
    for _ in range(8):
        context.pretend(1, LONG_CONTEXT // 8)
    assert context.trial(1, 1)[0][key] == with_context[key]


@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (2, 4)])
def test_rows_differ_from_lane_to_lane(quantized: Path, layers: tuple[int, int]) -> None:
    rows = open_stage(quantized, *layers).native_context.trial(0, LANES)
    assert len({tuple(sorted(row.items())) for row in rows}) == LANES


def test_what_lanes_pretend_to_hold_has_contents(quantized: Path) -> None:
    """Once a trial is made; before, the cells are empty."""
    seen = set()
    for with_trial in (False, True):
        stage = open_stage(quantized, 0, 2)
        stage.serve([spec for spec in stage.offered if spec.name == "l_out-1"])
        stage.native_context.pretend(0, 8)
        if with_trial:
            stage.native_context.trial(0, 1)
        (crossing,) = stage.run([(0, 8, 1)], np.array([5], np.int32))
        seen.add(bytes(crossing.data))
    assert len(seen) == 2


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (0, LANES + 1), (LANES, 1), (1, LANES), (0, -1)])
def test_trials_on_lanes_that_are_not_there(context: Any, first: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"on {count} lanes from lane {first} on: wanted lanes 0 to 4"):
        context.trial(first, count)


@pytest.mark.parametrize(
    ("n_rows", "complaint"), [(257, "at most 256"), (0, "wanted at least 1"), (-5, "wanted at least 1")]
)
def test_pretending_too_much(context: Any, n_rows: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        context.pretend(0, n_rows)
    assert context.position(0) == 0


def test_a_model_that_cannot_be_tried() -> None:
    """Positions beyond a learned table fail inside llama.cpp; the source is told to have none, so they get there."""
    source = open_model(ARCH / "gpt2-dense.gguf")
    assert source.n_positions is not None
    assert source.n_positions < LONG_CONTEXT
    endless = dataclasses.replace(source, n_positions=None)
    stage = StageModel(endless, LayerRange(0, 4), StageOptions(ctx_size=1024, lanes=2, threads=1))
    assert row_class(measure_sizes(stage, ENOUGH, {2: True}), 2) == RowClass(1, 1)
    assert [stage.position(lane) for lane in (0, 1)] == [0, 0]


# ---- time


class Clock:
    """Goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> float:
        self.seconds += 1
        return float(self.seconds)


def test_time_that_is_up(quantized: Path) -> None:
    stage = open_stage(quantized)
    assert measure_sizes(stage, 1, {}, clock=Clock()) == {}
    assert measure_sizes(stage, 3.5, {}, clock=Clock()) == {2: True, 1: True, 3: True}
    assert measure_sizes(stage, 0, {}, clock=Clock()) == {}


def test_a_later_start_goes_on(float32: Path) -> None:
    stage = open_stage(float32)
    known: dict[int, bool] = {}
    for size, alike in ((2, True), (1, False), (3, True), (4, True), (5, True)):
        assert size not in known
        known = measure_sizes(stage, 1.5, known, clock=Clock())
        assert known[size] is alike
    assert known == measure_sizes(stage, ENOUGH, {})
    assert measure_sizes(stage, ENOUGH, known, clock=Clock()) == known


# ---- kept for later starts


def never() -> float:
    raise AssertionError("nothing is to be measured")


def asked(
    stage: StageModel, directory: Path, clock: Callable[[], float] | None = None, seconds: float = 60
) -> RowClass:
    return stage_row_class(stage, "identity", seconds, directory=directory, clock=clock or Clock())


def test_measured_once(quantized: Path, tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there"
    stage = open_stage(quantized, threads=2)
    assert asked(stage, directory) == RowClass(2, LANES)
    assert asked(stage, directory, never) == RowClass(2, LANES)
    assert asked(open_stage(quantized, threads=2), directory, never) == RowClass(2, LANES)
    (file,) = directory.iterdir()
    assert json.loads(file.read_text())["sizes"] == {"2": True, "1": False, "3": True, "4": True, "5": True}


@pytest.mark.parametrize(
    "other",
    [
        {"threads": 1},
        {"threads_batch": 1},
        {"lanes": 4},
        {"ctx_size": 512},
        {"ubatch_size": 128},
        {"cache_type_k": "f32", "cache_type_v": "f32"},
        {"flash_attn": "off"},
        {"swa_full": False},
        {"repack": False},
        {"reproducible": True},
    ],
    ids=str,
)
def test_other_settings_are_measured_anew(quantized: Path, tmp_path: Path, other: dict[str, Any]) -> None:
    asked(open_stage(quantized, threads=2), tmp_path)
    stage = open_stage(quantized, **{"threads": 2, **other})
    with pytest.raises(AssertionError):
        asked(stage, tmp_path, never)


def test_other_models_and_layers_are_measured_anew(quantized: Path, tmp_path: Path) -> None:
    stage = open_stage(quantized, 0, 2)
    asked(stage, tmp_path)
    with pytest.raises(AssertionError):
        stage_row_class(stage, "another identity", 60, directory=tmp_path, clock=never)
    with pytest.raises(AssertionError):
        asked(open_stage(quantized, 2, 4), tmp_path, never)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"format": 1}',
        b'{"format": 1, "sizes": 3}',
        b'{"format": 1, "sizes": {"2": 1}}',
        b'{"format": 1, "sizes": {"two": true}}',
        b'{"format": 1, "sizes": {"99": true}}',
        b'{"format": 0, "sizes": {"2": false}}',
        b"[" * 60000,
    ],
)
def test_damaged_files_are_replaced(quantized: Path, tmp_path: Path, damage: bytes) -> None:
    stage = open_stage(quantized)
    asked(stage, tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage)
    assert asked(stage, tmp_path) == RowClass(1, LANES)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [good]


def test_a_directory_that_cannot_be_used(quantized: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert asked(open_stage(quantized), tmp_path / "file") == RowClass(1, LANES)


def test_time_ran_out_once(quantized: Path, tmp_path: Path) -> None:
    stage = open_stage(quantized)
    assert asked(stage, tmp_path, never, seconds=0) == RowClass(1, 1, complete=False)
    assert asked(stage, tmp_path, seconds=2.5) == RowClass(1, 2, complete=False)
    assert asked(stage, tmp_path, never, seconds=0) == RowClass(1, 2, complete=False)
    assert asked(stage, tmp_path, seconds=60) == RowClass(1, LANES)
    assert asked(stage, tmp_path, never) == RowClass(1, LANES)


def test_what_is_quick_is_not_kept(quantized: Path, tmp_path: Path) -> None:
    assert asked(open_stage(quantized), tmp_path, lambda: 0.0) == RowClass(1, LANES)
    assert list(tmp_path.iterdir()) == []


def test_files_that_were_not_used_for_long_go(quantized: Path, tmp_path: Path) -> None:
    stage = open_stage(quantized)
    asked(stage, tmp_path)
    (own,) = tmp_path.iterdir()
    for number in range(MOST_FILES + 10):
        path = tmp_path / f"{number}.json"
        path.write_text("{}")
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    os.utime(own, (0, 0))
    asked(stage, tmp_path, never)  # used, so the youngest again
    asked(open_stage(quantized, lanes=2), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == MOST_FILES
    assert own.name in left
    assert "11.json" not in left
    assert f"{MOST_FILES + 9}.json" in left


def test_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert row_class_directory() == tmp_path / "skippy-zmq" / "row-classes"


# ---- said to others


def test_facts(quantized: Path) -> None:
    facts = stage_facts(open_stage(quantized, reproducible=True), "identity", "stage", "", RowClass(2, 7))
    assert (facts.row_class_low, facts.row_class_high, facts.reproducible) == (2, 7, True)
    assert facts.window_rows == 1
    for high, lanes, flash_attn, wanted in ((7, 4, "on", 4), (3, 4, "on", 3), (7, 4, "off", 1)):
        model = open_stage(quantized, lanes=lanes, flash_attn=flash_attn)
        assert stage_facts(model, "identity", "stage", "", RowClass(1, high)).window_rows == wanted
    facts = stage_facts(open_stage(quantized), "identity", "stage", "")
    assert (facts.row_class_low, facts.row_class_high, facts.reproducible) == (1, 1, False)


def test_a_lone_row_that_differs_is_refused() -> None:
    check_reproducible(RowClass(1, 3), StageOptions(reproducible=True))
    check_reproducible(RowClass(2, 3), StageOptions())
    with pytest.raises(OptionError, match=r"--reproducible: a row computed alone .* batch of 2 to 3.*--lanes 1"):
        check_reproducible(RowClass(2, 3), StageOptions(reproducible=True))


def test_a_stage_says_its_class(
    start_stage: Callable[..., StageProcess], quantized: Path, socket_dir: Path, tmp_path: Path
) -> None:
    options = ("--layers", "0:4", "--lanes", 3, "--threads", 2, "--ctx-size", 1024)
    for number, (more, wanted) in enumerate(
        [((), (2, 3, False)), (("--reproducible",), (1, 3, True)), (("--row-class-seconds", 0), (1, 1, False))]
    ):
        # a folder each: the third must not find what the first measured
        stage = start_stage(
            "--model", quantized, *options, "--bind", f"ipc://{socket_dir}/{number}", *more,
            XDG_CACHE_HOME=str(tmp_path / str(number)),
        )  # fmt: skip
        (facts,) = stage.ready()["stages"]
        assert (facts["row_class_low"], facts["row_class_high"], facts["reproducible"]) == wanted


def test_a_stage_that_cannot_be_reproducible(float32: Path, socket_dir: Path) -> None:
    common = ["--model", str(float32), "--layers", "0:4", "--bind", f"ipc://{socket_dir}/s", *SMALL, "--reproducible"]
    cases = [[], ["--flash-attn", "off"], ["--flash-attn", "auto"], ["--no-swa-full"], ["--row-class-seconds", "-1"]]
    results = run_many([[*common, *more] for more in cases])
    assert [code for code, _ in results] == [2] * len(cases)
    messages = [error_line(stderr) for _, stderr in results]
    assert "a row computed alone has other bits here than in a batch of 2 to 4" in messages[0]
    assert "reproducible needs flash_attn on, got off" in messages[1]
    assert "reproducible needs flash_attn on, got auto" in messages[2]
    assert "reproducible needs swa_full" in messages[3]
    assert "row_class_seconds: wanted 0 to 3600, got -1.0" in messages[4]
