"""Time to the first token of a prompt of which all stages remember almost everything, against a new one."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.pipelines import Pipeline
from bench.splits import PREFILL_SPLIT
from bench.workloads import prompts

TOKENS, KNOWN, ROUNDS = 1024, 1000, 5


@pytest.mark.parametrize("pin", [False, True], ids=["2 threads each", "pinned"])
def test_known_prefix(pin: bool, smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """The answer is the one that a pipeline gives which remembers nothing.

    The stages as a local pipeline starts them, all cores being everybody's; and pinned to a core each, where there is
    no target: 64 tokens in one chunk, the least that gives the same bits, keep one of the two cores idle, and a new
    prompt none, so that 2/17 is the least there.
    """
    texts = prompts(smollm2, 2 * ROUNDS + 4, TOKENS)
    remembered, fresh = texts[0], iter(texts[1:])
    ends = itertools.count(1)
    options = ("--lanes", "1", "--ctx-size", "2048", "--ubatch-size", "128")
    threads = 1 if pin else 2
    with (
        Pipeline(smollm2, [PREFILL_SPLIT], *options, "--kv-cache-bytes", "1G", threads=threads, pin=pin) as pipeline,
        Pipeline(smollm2, [PREFILL_SPLIT], *options, threads=threads, pin=pin) as forgetful,
    ):
        pipeline.prefill([remembered])

        def known() -> float:
            other_end = texts[-next(ends)][KNOWN:]
            prompt = [*remembered[:KNOWN], *other_end]
            started = time.perf_counter()
            stream = pipeline.stream(prompt, 1)
            tokens = list(next(stream).token_ids)
            seconds = time.perf_counter() - started
            for chunk in stream:
                tokens += chunk.token_ids
            assert stream.result.reused_tokens == KNOWN // 64 * 64
            assert [tokens] == forgetful.prefill([prompt]).tokens
            return seconds

        def cold() -> float:
            return pipeline.prefill([next(fresh)]).seconds

        seconds = alternate(benchmark, ROUNDS, {"known": known, "cold": cold})
    name = f"time to first token, {KNOWN} of {TOKENS} tokens known: none known"
    if pin:
        comparison.figure(f"{name}, pinned stages", seconds["known"] / seconds["cold"], "")
    else:
        comparison.at_most(0.1, name, seconds["known"] * 1e3, seconds["cold"] * 1e3, "ms")
