"""The whole pipeline, prompts: until the first token is there, against llama.cpp in process and over RPC."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.engines import UBATCH, Engines, checked, engines
from bench.workloads import prompts

# name: (prompts, tokens of each, rounds, at least of in process with 2 threads, at least of RPC). Filling and draining
# two stages bounds a single prompt to chunks / (chunks + 1) of what two cores can do.
CASES = {
    "one prompt of 512": (1, 512, 7, 0.8, 1.05),
    "one prompt of 2048": (1, 2048, 3, 0.9, 1.1),
    "eight prompts of 256": (8, 256, 3, 0.95, 1.15),
}


@pytest.fixture(scope="module")
def running(smollm2: Path) -> Iterator[Engines]:
    with engines(smollm2, lanes=8, ctx_size=2304, decode=False) as all_of_them:
        yield all_of_them


@pytest.mark.parametrize("case", CASES)
def test_prefill(
    case: str, running: Engines, smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture
) -> None:
    """First tokens are those of llama.cpp, which computes the same chunks."""
    count, length, rounds, of_process, of_rpc = CASES[case]
    texts = prompts(smollm2, count, length)
    expected = running.two_threads.prefill(texts).tokens
    seconds = alternate(
        benchmark,
        rounds,
        {
            name: checked(partial(engine.prefill, texts), None if name == "rpc" else expected)
            for name, engine in running.named("ours", "two_threads", "one_thread", "rpc").items()
        },
        warm_rounds=1 if length <= 512 else 0,
    )
    rates = {name: count * length / value for name, value in seconds.items()}
    ours, unit = rates["ours"], "tokens/s"
    comparison.at_least(of_process, f"prefill, {case}: in process, 2 threads", ours, rates["two_threads"], unit)
    comparison.at_least(of_rpc, f"prefill, {case}: RPC", ours, rates["rpc"], unit)
    chunks = count * length // UBATCH
    bound = 2 * rates["one_thread"] * chunks / (chunks + 1)
    comparison.figure(f"prefill, {case}: bound of two stages", bound, unit)
    comparison.figure(f"prefill, {case}: share of the bound", ours / bound, "ratio")


def test_a_long_prompt_goes_on_as_in_process(running: Engines, smollm2: Path) -> None:
    """What follows 2048 tokens, with one thread per stage against one thread: the same tokens."""
    texts = prompts(smollm2, 1, 2048)
    ours = running.ours.decode(texts, warm=1, steps=12)
    assert ours.tokens == running.one_thread.decode(texts, warm=1, steps=12).tokens
