"""A stream that decodes while long prompts keep arriving: the longest that it waits for a token."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.engines import checked
from bench.peers import Peer
from bench.pipelines import GREEDY, Pipeline
from bench.splits import DECODE_SPLIT
from bench.workloads import prompts
from skippy_zmq.client import AsyncClient

CONTEXT, LONG, SHORT, TOKENS = 1024, 960, 32, 40
CHUNK = 128
AT_ONCE = 2  # long prompts in the pipeline


async def _decode_beside(endpoint: str, short: Sequence[int], long: Iterator[Sequence[int]]) -> list[tuple[int, float]]:
    """The tokens of ``short`` and when each came; meanwhile prompts of ``long`` follow each other."""

    async def keep_asking(client: AsyncClient) -> None:
        for prompt in long:
            await client.generate(token_ids=prompt, max_tokens=1, sampling=GREEDY)

    tokens = []
    async with AsyncClient(endpoint) as client, asyncio.TaskGroup() as group:
        asking = [group.create_task(keep_asking(client)) for _ in range(AT_ONCE)]
        async with client.stream(token_ids=short, max_tokens=TOKENS, sampling=GREEDY) as stream:
            async for chunk in stream:
                tokens += [(token, time.perf_counter()) for token in chunk.token_ids]
        for task in asking:
            task.cancel()
    return tokens


def test_worst_gap(smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """At most one chunk and one step through all layers, each as llama.cpp takes with one thread at that depth.

    The stream's tokens are those that it gets alone.
    """
    (short,) = prompts(smollm2, 1, SHORT)
    long_prompts = prompts(smollm2, 8, LONG)
    chunking = ("--chunk-policy", "fixed", "--chunk-sizes", str(CHUNK))
    options = ("--lanes", "4", "--ctx-size", str(CONTEXT), *chunking)
    all_gaps: list[float] = []
    with (
        Pipeline(smollm2, [DECODE_SPLIT], *options) as ours,
        Peer(smollm2, threads=1, lanes=1, ctx_size=CONTEXT, ubatch_size=CHUNK) as whole,
    ):
        expected = whole.decode([short], warm=0, steps=TOKENS - 1).tokens[0]

        def worst_gap() -> float:
            came = asyncio.run(_decode_beside(ours.endpoints[0], short, itertools.cycle(long_prompts)))
            assert [token for token, _ in came] == expected
            gaps = [after - before for (_, before), (_, after) in itertools.pairwise(came)]
            all_gaps.extend(gaps)
            return max(gaps)

        seconds = alternate(
            benchmark,
            5,
            {
                "worst gap": worst_gap,
                "chunk": checked(partial(whole.chunk, long_prompts[0], CHUNK), None),
                "step": checked(partial(whole.decode, [short], warm=2, steps=1), None),
            },
        )
    bound = seconds["chunk"] + seconds["step"]
    name = "decoding beside long prompts, worst gap: one chunk and one step"
    comparison.at_most(1.0, name, seconds["worst gap"] * 1000, bound * 1000, "ms")
    comparison.figure("decoding beside long prompts: median gap", statistics.median(all_gaps) * 1000, "ms")
