"""The whole pipeline, decoding: tokens per second of N streams, against llama.cpp in process and over RPC."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.engines import Engines, checked, engines
from bench.pipelines import Pipeline
from bench.splits import DECODE_SPLIT
from bench.workloads import prompts

LANES, CONTEXT, PROMPT, WARM = 16, 512, 32, 4
# streams: (steps, rounds). With two and four there is no target: they are for the plot.
CASES = {1: (48, 7), 2: (32, 3), 4: (32, 3), 8: (40, 7), 16: (32, 5)}
ENGINES = ("ours", "two_threads", "rpc")
PLOT = "decode throughput"
UNIT = "tokens/s"


@pytest.fixture(scope="module")
def running(smollm2: Path) -> Iterator[Engines]:
    with engines(smollm2, lanes=LANES, ctx_size=CONTEXT, decode=True) as all_of_them:
        yield all_of_them


@pytest.mark.parametrize("streams", CASES)
def test_decode(
    streams: int, running: Engines, smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture
) -> None:
    """Every stream's tokens are those of llama.cpp, with all streams in one batch and alone with one thread."""
    steps, rounds = CASES[streams]
    texts = prompts(smollm2, streams, PROMPT)
    expected = running.two_threads.decode(texts, warm=WARM, steps=steps).tokens
    alone = running.one_thread.decode(texts[-1:], warm=WARM, steps=steps).tokens
    assert alone == expected[-1:]
    half = max(1, streams // 2)  # of the streams: what a batch holds while two stages compute at once
    asked = dict.fromkeys(ENGINES, (texts, expected)) | {"one_thread": (texts[:half], expected[:half])}
    seconds = alternate(
        benchmark,
        rounds,
        {
            name: checked(
                partial(engine.decode, asked[name][0], warm=WARM, steps=steps),
                None if name == "rpc" else asked[name][1],
            )
            for name, engine in running.named(*asked).items()
        },
    )
    rates = {name: len(asked[name][0]) * steps / value for name, value in seconds.items()}
    for name in ENGINES:
        comparison.point(PLOT, name, streams, rates[name])
    ours = rates["ours"]
    if streams == 1:
        comparison.at_least(1.0, "decode, 1 stream: in process, 1 thread", ours, rates["one_thread"], UNIT)
        comparison.at_least(1.05, "decode, 1 stream: RPC", ours, rates["rpc"], UNIT)
    elif streams >= 8:
        name = f"decode, {streams} streams"
        comparison.at_least(0.9, f"{name}: in process, 2 threads", ours, rates["two_threads"], UNIT, aim=1.0)
        comparison.at_least(1.4, f"{name}: RPC", ours, rates["rpc"], UNIT, aim=1.7)
        comparison.figure(f"{name}: bound of two stages", 2 * rates["one_thread"], UNIT)
        comparison.figure(f"{name}: share of the bound", ours / (2 * rates["one_thread"]), "ratio")
    of_eight = comparison.curves[PLOT]["ours"].get("8")  # missing where this one runs alone
    if streams == 16 and of_eight is not None:
        comparison.at_least(1.0, "decode, 16 streams: ours with 8", ours, of_eight, UNIT)


def test_two_unpinned_stages_of_two_threads(
    running: Engines, smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture
) -> None:
    """One stream: the stages take turns on the same two cores."""
    steps, rounds = CASES[1]
    texts = prompts(smollm2, 1, PROMPT)
    expected = running.two_threads.decode(texts, warm=WARM, steps=steps).tokens
    options = ("--lanes", "1", "--ctx-size", str(CONTEXT))
    with Pipeline(smollm2, [DECODE_SPLIT], *options, threads=2, pin=False) as unpinned:
        seconds = alternate(
            benchmark,
            rounds,
            {
                name: checked(partial(engine.decode, texts, warm=WARM, steps=steps), expected)
                for name, engine in (("ours", unpinned), ("two_threads", running.two_threads))
            },
        )
    rates = {name: steps / value for name, value in seconds.items()}
    name = "decode, 1 stream, 2 unpinned stages of 2 threads: in process, 2 threads"
    comparison.at_least(0.95, name, rates["ours"], rates["two_threads"], UNIT)
