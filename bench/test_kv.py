"""Pages of a lane of the real model, out and in, against copying as many bytes in as many calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.workloads import prompts
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import Logits, StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import split_at

TOKENS, CHUNK = 1024, 512
PAGES = (64, TOKENS)  # tokens of a page: as prompts are kept, and as a session is exported


class Lanes:
    """All layers in one stage; lane 0 holds ``TOKENS`` tokens, lane 1 is imported into."""

    def __init__(self, path: Path) -> None:
        source = open_model(path)
        options = StageOptions(lanes=2, threads=1, ctx_size=TOKENS + 64, ubatch_size=CHUNK)
        self.stage = StageModel(source, split_at([], source.n_layers)[0], options)
        (self.tokens,) = prompts(path, 1, TOKENS + 1)
        for position in range(0, TOKENS, CHUNK):
            chunk = np.array(self.tokens[position : position + CHUNK], np.int32)
            self.stage.run([(0, position, CHUNK)], chunk)

    def next_logits(self, lane: int) -> Logits:
        self.stage.run([(lane, TOKENS, 1)], np.array(self.tokens[-1:], np.int32), [0])
        logits = self.stage.logits(0)
        self.stage.trim(lane, TOKENS)
        return logits


@pytest.fixture(scope="module")
def lanes(smollm2: Path) -> Lanes:
    return Lanes(smollm2)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    kept = call()  # freeing it is not part of either side
    seconds = time.perf_counter() - started
    del kept
    return seconds


@pytest.mark.parametrize("page", PAGES)
def test_pages_out_and_in(page: int, lanes: Lanes, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """The lane that was imported into must give the bits of the one that computed its tokens."""
    stage = lanes.stage
    ranges = [(first, first + page) for first in range(0, TOKENS, page)]
    pages = [stage.export_kv(0, *tokens) for tokens in ranges]
    targets = [np.zeros_like(payload) for payload in pages]
    counts = [page] * len(pages)

    def copy_into() -> None:
        for target, payload in zip(targets, pages, strict=True):
            np.copyto(target, payload)

    out_of = {
        "export": partial(_timed, lambda: [stage.export_kv(0, *tokens) for tokens in ranges]),
        "copy out": partial(_timed, lambda: [payload.copy() for payload in pages]),
        "import": partial(_timed, lambda: stage.import_kv(1, pages, counts)),
        "copy in": partial(_timed, copy_into),
    }
    seconds = alternate(benchmark, 41, out_of)
    gigabytes = sum(payload.nbytes for payload in pages) / 1e9
    exported, copied_out, imported, copied_in = (gigabytes / seconds[name] for name in out_of)
    what = f"{TOKENS} tokens in pages of {page}: memcpy"
    comparison.at_least(0.5, f"KV export of {what}", exported, copied_out, "GB/s")
    comparison.at_least(0.5, f"KV import of {what}", imported, copied_in, "GB/s")
    assert np.array_equal(lanes.next_logits(0).view(np.uint32), lanes.next_logits(1).view(np.uint32))
