"""StageModel: batches that do not fit are refused and change nothing; lanes keep their books; loads can be stopped."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny
from msgspec import structs

from skippy_zmq import _native
from skippy_zmq.certify.workload import micro_batches
from skippy_zmq.errors import ModelFileError, NativeError, OptionError, ProtocolError
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.repacking import may_repack
from skippy_zmq.runtime.stage_model import Crossing, LaneRows, StageModel, Tokens
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import LayerRange

ARCH = Path(__file__).parent / "data" / "arch"
N_CTX, N_BATCH, N_UBATCH, LANES, N_VOCAB = 64, 24, 16, 3, 300
OPTIONS = StageOptions(ctx_size=N_CTX, lanes=LANES, batch_size=N_BATCH, ubatch_size=N_UBATCH, threads=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


def open_stage(path: Path, start: int, end: int, options: StageOptions = OPTIONS, **others: Any) -> StageModel:
    return StageModel(open_model(path), LayerRange(start, end), options, **others)


def ids(*values: int) -> Tokens:
    return np.array(values, np.int32)


def tokens(n: int) -> Tokens:
    return ids(*((7 * i + 5) % N_VOCAB for i in range(n)))


class Pair:
    """Two stages of a model of four layers; ``first`` has run what ``last`` is about to get."""

    def __init__(self, path: Path) -> None:
        self.first, self.last = open_stage(path, 0, 2), open_stage(path, 2, 4)
        self.first.serve(self.last.wanted)

    def run(self, rows: list[LaneRows], outputs: tuple[int, ...] = ()) -> None:
        batch = tokens(sum(count for _, _, count in rows))
        self.last.run(rows, batch, outputs, self.first.run(rows, batch))

    def position(self, lane: int) -> int:
        assert self.first.position(lane) == self.last.position(lane)
        return self.first.position(lane)


@pytest.fixture(scope="module")
def undisturbed(path: Path) -> list[np.ndarray[Any, Any]]:
    pair = Pair(path)
    pair.run([(0, 0, 8)])
    pair.run([(0, 8, 2)], (0, 1))
    return [pair.last.logits(row) for row in (0, 1)]


def assert_goes_on_undisturbed(pair: Pair, undisturbed: list[np.ndarray[Any, Any]]) -> None:
    """``pair`` holds 8 tokens of lane 0 and gives the next two rows' bits as if nothing had happened."""
    assert [pair.position(lane) for lane in range(LANES)] == [8, 0, 0]
    pair.run([(0, 8, 2)], (0, 1))
    for row, wanted in enumerate(undisturbed):
        assert np.array_equal(pair.last.logits(row), wanted)


@pytest.mark.parametrize(
    ("rows", "batch", "complaint"),
    [
        ([(0, 9, 1)], tokens(1), "would leave a gap: this stage holds 8"),
        ([(1, 1, 1)], tokens(1), "would leave a gap: this stage holds 0"),
        ([(0, -1, 1)], tokens(1), "do not fit in a context"),
        ([(0, 8, N_CTX)], tokens(N_CTX), f"do not fit in a context of {N_CTX}"),
        ([(0, 2**31 - 1, 2)], tokens(2), "do not fit in a context"),
        ([(LANES, 0, 1)], tokens(1), f"lane {LANES}: wanted 0 to {LANES - 1}"),
        ([(-1, 0, 1)], tokens(1), "lane -1: wanted 0"),
        ([(0, 8, 1), (0, 9, 1)], tokens(2), "lane 0 stands twice"),
        ([(0, 8, 0)], tokens(0), "0 rows, wanted at least 1"),
        ([(0, 8, -3)], tokens(3), "-3 rows, wanted at least 1"),
        ([], tokens(0), "a batch of 0 rows"),
        ([(0, 8, 3)], tokens(2), "a batch of 3 rows and 2 tokens"),
        ([(0, 8, 2)], tokens(3), "a batch of 2 rows and 3 tokens"),
        ([(0, 8, N_UBATCH + 1)], tokens(N_UBATCH + 1), f"a micro-batch of {N_UBATCH + 1} rows: wanted at most"),
        ([(1, 0, 9), (2, 0, 9)], tokens(18), "a micro-batch of 18 rows: wanted at most"),
        ([(0, 8, 15), (2, 0, 10)], tokens(25), f"wanted equal numbers from 1 to {N_BATCH}"),
        ([(0, 8, 1)], ids(N_VOCAB), f"token {N_VOCAB}: wanted 0 to {N_VOCAB - 1}"),
        ([(0, 8, 2)], ids(5, -1), "token -1: wanted 0"),
    ],
)
def test_batch_that_does_not_fit(
    path: Path, undisturbed: list[np.ndarray[Any, Any]], rows: list[LaneRows], batch: Tokens, complaint: str
) -> None:
    pair = Pair(path)
    pair.run([(0, 0, 8)])
    with pytest.raises(ProtocolError, match=complaint):
        pair.first.run(rows, batch)
    assert_goes_on_undisturbed(pair, undisturbed)


@pytest.mark.parametrize("batch", [np.array([1, 2]), np.array([1.0, 2.0], np.float32), np.ones((1, 2), np.int32)])
def test_tokens_of_another_type_are_not_converted(path: Path, batch: Any) -> None:
    stage = open_stage(path, 0, 2)
    with pytest.raises(TypeError):
        stage.run([(0, 0, 2)], batch)
    assert stage.position(0) == 0


Change = Callable[[list[Crossing]], list[Crossing]]


def described(**values: Any) -> Change:
    def change(arriving: list[Crossing]) -> list[Crossing]:
        (item,) = arriving
        return [Crossing(structs.replace(item.descriptor, **values), item.data)]

    return change


def shortened(arriving: list[Crossing]) -> list[Crossing]:
    (item,) = arriving
    return [Crossing(item.descriptor, np.frombuffer(bytes(item.data)[:-4], np.uint8))]


def with_extra(arriving: list[Crossing]) -> list[Crossing]:
    (item,) = arriving
    return [item, Crossing(structs.replace(item.descriptor, name="other"), item.data)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda _: [], "0 tensors arrived, wanted 1"),
        (lambda arriving: arriving * 2, "2 tensors arrived, wanted 1"),
        (with_extra, "2 tensors arrived, wanted 1"),
        (shortened, "wanted 512 bytes of f32"),
        (described(name="other"), "tensor 'other' of micro-batch 0 was not asked for"),
        (described(occurrence=1), "was not asked for"),
        (described(micro_batch=1), "of micro-batch 1 was not asked for"),
        (described(micro_batch=-1), "was not asked for"),
        (described(dtype="f16"), "is 512 bytes of f16 with 128 elements, wanted 512 bytes of f32"),
        (described(dtype="f99"), "tensor type 'f99' does not exist"),
        (described(shape=(64, 3, 1, 1)), "wanted 512 bytes of f32"),
        (described(shape=(64, 1, 1, 1)), "wanted 512 bytes of f32"),
        (described(shape=(64, 0, 1, 1)), "does not fit its 512 bytes"),
        (described(shape=(2**62, 4, 1, 1)), "does not fit its 512 bytes"),
        (described(shape=()), "wanted 1 to 4 dimensions"),
        (described(shape=(64, 2, 1, 1, 1)), "wanted 1 to 4 dimensions"),
    ],
)
def test_arriving_tensors_that_do_not_fit(
    path: Path, undisturbed: list[np.ndarray[Any, Any]], change: Change, complaint: str
) -> None:
    pair = Pair(path)
    pair.run([(0, 0, 8)])
    rows, batch = [(0, 8, 2)], tokens(2)
    arriving = pair.first.run(rows, batch)
    with pytest.raises(ProtocolError, match=complaint):
        pair.last.run(rows, batch, (0,), change(arriving))
    assert pair.last.position(0) == 8
    pair.last.run(rows, batch, (0, 1), arriving)
    for row, wanted in enumerate(undisturbed):
        assert np.array_equal(pair.last.logits(row), wanted)


@pytest.mark.parametrize(
    ("outputs", "complaint"),
    [
        ((1, 0), "output row 0: wanted rising rows below 4"),
        ((1, 1), "output row 1: wanted rising rows below 4"),
        ((4,), "output row 4: wanted rising rows below 4"),
        ((-1,), "output row -1: wanted rising rows below 4"),
        ((0, 1, 2, 3), f"4 output rows: wanted at most {LANES}"),
    ],
)
def test_outputs_that_do_not_fit(path: Path, outputs: tuple[int, ...], complaint: str) -> None:
    pair = Pair(path)
    arriving = pair.first.run([(0, 0, 4)], tokens(4))
    with pytest.raises(ProtocolError, match=complaint):
        pair.last.run([(0, 0, 4)], tokens(4), outputs, arriving)
    assert pair.last.position(0) == 0
    pair.last.run([(0, 0, 4)], tokens(4), (1, 3), arriving)
    assert not np.array_equal(pair.last.logits(1), pair.last.logits(3))
    with pytest.raises(ProtocolError, match="row 2 of the last batch has no logits"):
        pair.last.logits(2)


def test_logits_of_a_stage_that_has_none(path: Path) -> None:
    stage = open_stage(path, 0, 2)
    with pytest.raises(ProtocolError, match="logits were asked of a stage that is not the last"):
        stage.run([(0, 0, 1)], tokens(1), (0,))


def test_positions(path: Path) -> None:
    pair = Pair(path)
    pair.run([(0, 0, 5), (2, 0, 3)])
    pair.run([(0, 5, 1), (1, 0, 1)])
    assert [pair.position(lane) for lane in range(LANES)] == [6, 1, 3]
    for stage in (pair.first, pair.last):
        stage.trim(0, 4)
        stage.trim(0, 9)  # it holds fewer already
        stage.trim(2, 0)
    assert [pair.position(lane) for lane in range(LANES)] == [4, 1, 0]
    pair.run([(0, 2, 3)])  # a batch may begin before the end of a lane
    pair.run([(1, 0, 2)])
    assert [pair.position(lane) for lane in range(LANES)] == [5, 2, 0]
    for lane, position in ((LANES, 0), (-1, 0), (0, -1)):
        with pytest.raises(ProtocolError, match="wanted lanes 0 to 2"):
            pair.first.trim(lane, position)
    assert [pair.position(lane) for lane in range(LANES)] == [5, 2, 0]


@pytest.mark.parametrize("by_trim", [True, False])
def test_a_trimmed_lane_goes_on_as_if_the_rest_had_never_been(path: Path, by_trim: bool) -> None:
    straight, trimmed = Pair(path), Pair(path)
    straight.run([(0, 0, 8)])
    trimmed.run([(0, 0, 8)])
    trimmed.run([(0, 8, 4)])
    if by_trim:
        trimmed.first.trim(0, 8)
        trimmed.last.trim(0, 8)
    for pair in (straight, trimmed):
        pair.run([(0, 8, 2)], (1,))
    assert np.array_equal(straight.last.logits(1), trimmed.last.logits(1))


def test_a_lane_that_cannot_forget_a_part() -> None:
    stage = open_stage(ARCH / "granitehybrid-dense.gguf", 0, 4)
    assert not stage.can_trim
    stage.run([(0, 0, 4)], tokens(4) % stage.n_vocab)
    with pytest.raises(ProtocolError, match="cannot forget part of a lane"):
        stage.trim(0, 2)
    with pytest.raises(ProtocolError, match="cannot forget part of a lane that holds 4"):
        stage.run([(0, 2, 1)], ids(1))
    assert stage.position(0) == 4
    stage.trim(0, 0)
    assert stage.position(0) == 0


def test_a_full_context_can_be_used_to_its_last_token(path: Path) -> None:
    stage = open_stage(path, 0, 4)
    for start in range(0, N_CTX, N_UBATCH):
        stage.run([(0, start, N_UBATCH)], tokens(N_UBATCH))
    assert stage.position(0) == N_CTX == stage.n_ctx
    with pytest.raises(ProtocolError, match="do not fit"):
        stage.run([(0, N_CTX, 1)], ids(1))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 4)],
        [(0, 0, 4), (1, 0, 4)],
        [(0, 0, 4), (1, 0, 3), (2, 0, 3)],
        [(0, 0, 2), (2, 0, 2)],
        [(2, 0, 1), (1, 0, 1), (0, 0, 1)],
    ],
)
def test_micro_batches(path: Path, rows: list[LaneRows]) -> None:
    pair = Pair(path)
    wanted = [sum(count for _, _, count in group) for group in micro_batches(rows)]
    assert pair.first.micro_batch_rows(rows) == wanted
    leaving = pair.first.run(rows, tokens(sum(wanted)))
    (spec,) = pair.last.wanted
    assert [item.descriptor.micro_batch for item in leaving] == list(range(len(wanted)))
    assert [item.descriptor.nbytes for item in leaving] == [spec.row_bytes * n for n in wanted]
    assert all(memoryview(item.data).nbytes == item.descriptor.nbytes for item in leaving)
    swapped = [
        Crossing(structs.replace(item.descriptor, micro_batch=len(wanted) - 1 - n), item.data)
        for n, item in enumerate(leaving)
    ]
    if wanted != wanted[::-1]:
        with pytest.raises(ProtocolError, match="wanted"):
            pair.last.run(rows, tokens(sum(wanted)), (), swapped)
    pair.last.run(rows, tokens(sum(wanted)), (), leaving[::-1])  # the order of arrival does not matter


def test_serving_what_is_not_there(path: Path) -> None:
    first, last = open_stage(path, 0, 2), open_stage(path, 2, 4)
    with pytest.raises(ProtocolError, match="'nothing' is not on offer"):
        first.serve([dataclasses.replace(last.wanted[0], name="nothing")])
    assert first.run([(0, 0, 1)], ids(1)) == []  # nothing is sent that nobody asked for


def test_a_failed_run_leaves_its_lanes_where_they_stood() -> None:
    """Positions beyond a learned table fail inside llama.cpp; the source is told to have none, so they get there."""
    source = open_model(ARCH / "gpt2-dense.gguf")
    assert source.n_positions is not None
    endless = dataclasses.replace(source, n_positions=None)
    options = StageOptions(ctx_size=source.n_positions + 64, lanes=2, ubatch_size=64, threads=1)
    stage = StageModel(endless, LayerRange(0, 4), options)
    batch = np.zeros(64, np.int32)
    stage.run([(1, 0, 3)], batch[:3])
    for start in range(0, source.n_positions, 64):
        stage.run([(0, start, 64)], batch)
    with pytest.raises(NativeError, match="layers 0:4"):
        stage.run([(0, source.n_positions, 1)], batch[:1])
    assert [stage.position(lane) for lane in (0, 1)] == [source.n_positions, 3]
    stage.run([(1, 3, 1)], ids(7), (0,))
    again = StageModel(source, LayerRange(0, 4), StageOptions(ctx_size=256, lanes=2, ubatch_size=64, threads=1))
    again.run([(1, 0, 3)], batch[:3])
    again.run([(1, 3, 1)], ids(7), (0,))
    assert np.array_equal(stage.logits(0), again.logits(0))


def test_one_thread_at_a_time(path: Path) -> None:
    stage = open_stage(path, 0, 4)
    refusals: list[str] = []
    barrier = threading.Barrier(2)

    def use() -> None:
        barrier.wait()
        for _ in range(50):
            try:
                stage.run([(0, 0, 16)], tokens(16))
            except NativeError as error:
                refusals.append(str(error))

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refusals) < 100
    assert all("already running a batch on another thread" in text for text in refusals)
    assert stage.position(0) == 16


def test_progress(path: Path) -> None:
    seen: list[float] = []
    open_stage(path, 1, 3, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def stop(_done: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_stage(path, 1, 3, progress=stop)


def test_the_kernels_of_this_build_run() -> None:
    assert _native.amx_fault() == ""


def test_weights_are_left_as_they_are_where_llama_cpp_would_crash_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What such a build does must be said by hand here: this one has no such fault, as the test above shows."""
    path = tiny(tmp_path / "q4_0.gguf", quant="q4_0")

    def logits(**others: Any) -> np.ndarray[Any, Any]:
        stage = open_stage(path, 0, 4, OPTIONS.model_copy(update=others))
        assert stage.weight_layout == "file"
        stage.run([(0, 0, 8), (1, 0, 8)], tokens(16), (15,))
        return stage.logits(15)

    wanted = logits(repack=False)
    monkeypatch.setattr(_native, "amx_fault", lambda: "AMX ends with a crash")
    assert np.array_equal(logits(), wanted)
    assert "AMX ends with a crash; weights are not rearranged for the CPU" in caplog.text
    assert "install --no-cache-dir --force-reinstall --no-deps llama-cpp-python==" in caplog.text
    caplog.clear()
    assert np.array_equal(logits(repack=False), wanted)
    assert not caplog.text


@pytest.mark.parametrize(("hidden", "repacked"), [(32, False), (64, True)])
def test_rows_of_one_block_are_not_laid_out_for_amx(
    hidden: int, repacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether this processor has AMX or not."""
    monkeypatch.setattr(_native, "has_amx", lambda: True)
    source = open_model(tiny(tmp_path / "q8_0.gguf", quant="q8_0", hidden=hidden))
    assert may_repack(source) == repacked
    assert ("has rows of 32 values" in caplog.text) != repacked
    assert StageModel(source, LayerRange(0, 4), OPTIONS).weight_layout == ("amx" if repacked else "file")

    # 40 rows, where such a kernel would begin with what its output held before
    def last_logits(repack: bool) -> np.ndarray[Any, Any]:
        stage = StageModel(source, LayerRange(0, 4), StageOptions(ctx_size=N_CTX, threads=1, repack=repack))
        stage.run([(0, 0, 40)], tokens(40), (39,))
        return stage.logits(39)

    assert np.allclose(last_logits(True), last_logits(False), atol=1e-3)


def test_ranges_and_files_that_cannot_be_opened(path: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the model has 4 layers"):
        open_stage(path, 2, 5)
    source = open_model(path)
    moved = path.with_name("moved.gguf")
    path.rename(moved)
    try:
        with pytest.raises(ModelFileError, match="cannot open"):
            StageModel(source, LayerRange(0, 2), OPTIONS)
    finally:
        moved.rename(path)


def test_text(path: Path) -> None:
    stage = open_stage(path, 2, 4)
    text = "The end of the world\n ä 東"
    found = stage.tokenize(text, add_special=False)
    assert stage.detokenize(found) == text.encode()
    assert stage.n_vocab == N_VOCAB
    assert [stage.is_end_of_generation(token) for token in (-1, 0, 1, N_VOCAB)] == [False, False, True, False]
    assert stage.piece(1) == b""
    assert stage.piece(1, special=True) == b"</s>"
