"""Time to the first token of a prompt of which all stages remember almost everything, against a new one."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.pipelines import Pipeline
from bench.splits import PREFILL_SPLIT
from bench.workloads import prompts

TOKENS, KNOWN, ROUNDS = 1024, 1000, 5


def test_known_prefix(smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """The answer is the one that a pipeline gives which remembers nothing."""
    texts = prompts(smollm2, 2 * ROUNDS + 4, TOKENS)
    remembered, fresh = texts[0], iter(texts[1:])
    ends = itertools.count(1)
    options = ("--lanes", "1", "--ctx-size", "2048", "--ubatch-size", "128")
    with (
        Pipeline(smollm2, [PREFILL_SPLIT], *options, "--kv-cache-bytes", "1G") as pipeline,
        Pipeline(smollm2, [PREFILL_SPLIT], *options) as forgetful,
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
    comparison.at_most(0.1, name, seconds["known"] * 1e3, seconds["cold"] * 1e3, "ms")
