"""What ``--reproducible`` costs, with one thread per stage and with two; it has no target."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.engines import checked
from bench.pipelines import Pipeline
from bench.splits import DECODE_SPLIT
from bench.workloads import prompts

LANES, PROMPT, STEPS, LONG = 8, 32, 24, 512


@pytest.mark.parametrize("threads", [1, 2])
def test_reproducible(threads: int, smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """Rates with it as a share of those without; stages of two threads share both cores."""
    options = ("--lanes", str(LANES), "--ctx-size", "1024")
    short, long = prompts(smollm2, LANES, PROMPT), prompts(smollm2, 1, LONG)
    with ExitStack() as stack:
        runs = {}
        for word, more in (("with", ("--reproducible",)), ("without", ())):
            pipeline = stack.enter_context(
                Pipeline(smollm2, [DECODE_SPLIT], *options, *more, threads=threads, pin=threads == 1)
            )
            for streams in (LANES, 1):
                run = partial(pipeline.decode, short[:streams], warm=4, steps=STEPS)
                expected = run().tokens
                # Without it, tokens may depend on how the streams happened to meet.
                runs[word, f"decode, {streams} stream{'s' if streams > 1 else ''}"] = checked(
                    run, expected if more else None
                )
            runs[word, f"prefill of {LONG}"] = checked(partial(pipeline.prefill, long), None)
        named = {f"{what}, {word}": run for (word, what), run in runs.items()}
        seconds = alternate(benchmark, 3, named, warm_rounds=0)
    for what in dict.fromkeys(what for _, what in runs):
        share = seconds[f"{what}, without"] / seconds[f"{what}, with"]
        plural = "s" if threads > 1 else ""
        comparison.figure(f"--reproducible, {threads} thread{plural} per stage: {what}", share, "of the rate without")
