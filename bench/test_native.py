"""The native side alone, one process: opening, and a decode step cut in two, against llama.cpp unsplit."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the stage program sets it, before llama.cpp is loaded

import numpy as np
from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Comparison
from bench.whole_model import WholeModel
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import split_at

CONTEXT = 4096
PROMPT = [1, *range(1000, 1063)]


def _open_whole(path: Path) -> None:
    WholeModel(path, n_ctx=CONTEXT, threads=1).close()


def _open_one_stage(path: Path) -> None:
    source = open_model(path)
    source.identity()
    StageModel(source, split_at([], source.n_layers)[0], StageOptions(lanes=1, threads=1, ctx_size=CONTEXT))


def test_opening_all_layers(smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """Checks, identity and dry runs included, against what llama.cpp takes for the same bytes."""
    result = comparison.run(
        "open, all layers", 1.3, lambda: _open_one_stage(smollm2), lambda: _open_whole(smollm2), rounds=9
    )
    benchmark.extra_info["ratio"] = result.ratio
    benchmark.pedantic(_open_one_stage, args=(smollm2,), rounds=3)


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
    whole.run(PROMPT, 0)
    split.run(PROMPT, 0)
    at = len(PROMPT)

    def step_whole() -> None:
        whole.trim(at)
        for position in range(at, at + 8):
            whole.run([700 + position], position)

    def step_split() -> None:
        for position in range(at, at + 8):
            split.run([700 + position], position)

    result = comparison.run("decode step, cut in two in one process", 1.03, step_split, step_whole, rounds=21)
    whole.trim(at)
    expected = whole.run([1234], at)
    split.run([1234], at)
    assert np.array_equal(expected.view(np.uint32), split.stages[1].logits(0).view(np.uint32))
    benchmark.extra_info["ratio"] = result.ratio
    benchmark.pedantic(step_split, rounds=5)
    whole.close()
