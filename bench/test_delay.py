"""A ring whose links are long: what a delay costs beyond itself, and how much of it eight streams hide."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.pipelines import Pipeline
from bench.splits import DECODE_SPLIT
from bench.workloads import prompts

HOPS = 2  # of a token: stage 0 to stage 1 and back
DELAYS_MS = (0, 10, 50)  # 0: without a proxy
STREAMS, PROMPT, STEPS = 8, 32, 24
WARM = 8  # the scheduler learns how long the ring is
OVERHEAD_MS = 1.0
PLOT = "link delay"

Pipelines = dict[int, Pipeline]


@pytest.fixture(scope="module")
def pipelines(smollm2: Path) -> Iterator[Pipelines]:
    options = ("--lanes", str(STREAMS), "--ctx-size", "512")
    with ExitStack() as stack:
        yield {
            ms: stack.enter_context(
                Pipeline(smollm2, [DECODE_SPLIT], *options, delay_s=ms / 1000 if ms else None),
            )
            for ms in DELAYS_MS
        }


def test_delay(pipelines: Pipelines, smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """One stream: time per token = compute + hops x delay + P. The tokens are the same at every delay."""
    texts = prompts(smollm2, STREAMS, PROMPT)
    overheads: dict[int, list[float]] = {ms: [] for ms in DELAYS_MS}
    expected: list[list[int]] = []

    def run(ms: int, streams: int) -> float:
        measured = pipelines[ms].decode(texts[:streams], warm=WARM, steps=STEPS, count_compute=streams == 1)
        expected[:] = expected or measured.tokens
        assert measured.tokens == expected[:streams]
        seconds = measured.seconds / STEPS
        if streams == 1:
            overheads[ms].append(seconds - pipelines[ms].compute_s - HOPS * ms / 1000)
        return seconds

    calls = {(ms, streams): lambda ms=ms, streams=streams: run(ms, streams) for streams in (8, 1) for ms in DELAYS_MS}
    named = {f"{streams} x {ms} ms": call for (ms, streams), call in calls.items()}
    seconds = alternate(benchmark, 3, named)
    alone, together = ({ms: seconds[f"{streams} x {ms} ms"] for ms in DELAYS_MS} for streams in (1, STREAMS))
    for ms in DELAYS_MS:
        overhead_ms = statistics.median(overheads[ms][1:]) * 1000
        if ms:
            name = f"link delay, {ms} ms per hop: P of 1 ms"
            comparison.at_most(1.0, name, overhead_ms, OVERHEAD_MS, "ms per token")
        else:
            comparison.figure("link delay, none: P", overhead_ms, "ms per token")
        comparison.point(PLOT, "one stream", ms, 1 / alone[ms])
        # Neither faster than without a delay, nor may a token come before its row has been round the ring.
        bound = min(STREAMS / together[0], STREAMS / (alone[0] + HOPS * ms / 1000))
        rate = STREAMS / together[ms]
        comparison.point(PLOT, "eight streams", ms, rate)
        comparison.point(PLOT, "bound of eight streams", ms, bound)
        comparison.figure(f"link delay, {ms} ms per hop, 8 streams: bound", bound, "tokens/s")
        comparison.figure(f"link delay, {ms} ms per hop, 8 streams: share of the bound", rate / bound, "ratio")
