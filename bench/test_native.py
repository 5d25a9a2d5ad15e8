"""The native side alone, one process: opening, a decode step and a chunk cut in two, against llama.cpp unsplit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.whole_model import WholeModel
from bench.workloads import prompts
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import split_at

CONTEXT = 4096
PROMPT, STEPS, CHUNK = 64, 8, 128


def _timed(call: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def _open_whole(path: Path) -> None:
    WholeModel(path, n_ctx=CONTEXT, threads=1).close()


def _open_one_stage(path: Path) -> None:
    source = open_model(path)
    source.identity()
    StageModel(source, split_at([], source.n_layers)[0], StageOptions(lanes=1, threads=1, ctx_size=CONTEXT))


def test_opening_all_layers(smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """Checks, identity and dry runs included, against what llama.cpp takes for the same bytes."""
    calls = {"ours": partial(_timed, _open_one_stage, smollm2), "llama.cpp": partial(_timed, _open_whole, smollm2)}
    seconds = alternate(benchmark, 9, calls)
    ours, other = (seconds[name] * 1000 for name in calls)
    comparison.at_most(1.3, "opening all layers: llama.cpp", ours, other, "ms")


class Split:
    """Two stages in one process, one lane."""

    def __init__(self, path: Path, boundary: int) -> None:
        source = open_model(path)
        options = StageOptions(lanes=1, threads=1, ctx_size=CONTEXT)
        self.stages = [StageModel(source, layers, options) for layers in split_at([boundary], source.n_layers)]
        self.stages[0].serve(self.stages[1].wanted)

    def run(self, tokens: list[int], position: int) -> None:
        ids = np.array(tokens, np.int32)
        rows = [(0, position, len(tokens))]
        crossing = self.stages[0].run(rows, ids)
        self.stages[1].run(rows, ids, [len(tokens) - 1], crossing)


def test_decode_step_cut_in_two(smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """The same step, whole and cut in two, one thread; the logits must be the same bits."""
    whole, split = WholeModel(smollm2, n_ctx=CONTEXT, threads=1), Split(smollm2, 15)
    (tokens,) = prompts(smollm2, 1, PROMPT + STEPS + 1)
    at = PROMPT
    whole.run(tokens[:at], 0)
    split.run(tokens[:at], 0)

    def step_whole() -> None:
        whole.trim(at)
        for position in range(at, at + STEPS):
            whole.run([tokens[position]], position)

    def step_split() -> None:
        for position in range(at, at + STEPS):
            split.run([tokens[position]], position)

    calls = {"ours": partial(_timed, step_split), "llama.cpp": partial(_timed, step_whole)}
    seconds = alternate(benchmark, 21, calls)
    ours, other = (seconds[name] * 1000 / STEPS for name in calls)
    comparison.at_most(1.03, "decode step, cut in two in one process: llama.cpp", ours, other, "ms")
    whole.trim(at)
    expected = whole.run(tokens[-1:], at)
    split.run(tokens[-1:], at)
    assert np.array_equal(expected.view(np.uint32), split.stages[1].logits(0).view(np.uint32))
    whole.close()


def test_prefill_chunk_cut_in_two(smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """The same chunk at the beginning of a prompt, whole and cut in two, one thread; the same bits."""
    whole, split = WholeModel(smollm2, n_ctx=CONTEXT, threads=1), Split(smollm2, 15)
    (tokens,) = prompts(smollm2, 1, CHUNK)
    logits = []

    def chunk_whole() -> None:
        whole.clear()
        logits.append(whole.run(tokens, 0))

    calls = {"ours": partial(_timed, split.run, tokens, 0), "llama.cpp": partial(_timed, chunk_whole)}
    seconds = alternate(benchmark, 11, calls)
    ours, other = (seconds[name] * 1000 for name in calls)
    comparison.at_most(1.03, "prefill chunk of 128, cut in two in one process: llama.cpp", ours, other, "ms")
    assert np.array_equal(logits[-1].view(np.uint32), split.stages[1].logits(CHUNK - 1).view(np.uint32))
    whole.close()
