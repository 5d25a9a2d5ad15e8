"""A kept session from the stages to a client and back, over ipc, against raw ZeroMQ with the same pages."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.pipelines import GREEDY, Pipeline
from bench.raw_sockets import far_end, raw_exchange
from bench.splits import PREFILL_SPLIT
from bench.test_link import WINDOW
from bench.workloads import prompts
from skippy_zmq.kv.descriptor import PageDescriptor
from skippy_zmq.kv.page import KvPage
from skippy_zmq.wire.messages import StageFacts

PROMPT, PAGE_TOKENS, ROUNDS = 1984, 64, 15
TARGET = 0.7


def test_pages_over_ipc(smollm2: Path, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """What comes back from the stages is what they are given again, and a request that names it goes on from it."""
    (prompt,) = prompts(smollm2, 1, PROMPT)
    # Room for a few sessions: raw ZeroMQ uses the same memory again and again, so the stages, too, are to make room in
    # what they have rather than to take pages that the system never gave to anybody before.
    options = ("--lanes", "1", "--ctx-size", "2304", "--kv-cache-bytes", "96M", "--kv-page-tokens", str(PAGE_TOKENS))
    with (
        Pipeline(smollm2, [PREFILL_SPLIT], *options, pin=False) as pipeline,
        tempfile.TemporaryDirectory() as directory,
    ):
        kept = pipeline.client.generate(token_ids=prompt, max_tokens=2, sampling=GREEDY, keep=True)
        pages: list[KvPage] = []
        facts = pipeline.client.export_pages(kept.session, pages.append)
        nbytes = sum(page.payload.nbytes for page in pages)

        def export() -> float:
            taken: list[PageDescriptor] = []  # pages are let go, as raw messages are and as a save does
            started = time.perf_counter()
            pipeline.client.export_pages(kept.session, lambda page: taken.append(page.descriptor))
            seconds = time.perf_counter() - started
            assert set(taken) == {page.descriptor for page in pages}
            return seconds

        def of_stage(stage: StageFacts) -> list[KvPage]:
            return [page for page in pages if page.descriptor.layers[0].layer == stage.layer_start]

        def bring() -> float:
            with pipeline.client_again() as client:  # pages that a client brought already are not looked at again
                client.tokenize("a")
                started = time.perf_counter()
                name = client.import_pages(facts.token_ids, facts.n_prompt, of_stage)
                seconds = time.perf_counter() - started
                goes_on = client.generate(token_ids=[*facts.token_ids, 1], max_tokens=1, sampling=GREEDY, session=name)
                assert goes_on.reused_tokens == len(facts.token_ids)
                return seconds

        size = max(page.payload.nbytes for page in pages)
        address = f"ipc://{directory}/raw"
        payloads = [page.payload for page in pages]
        with far_end("raw", "acknowledge", size, address), raw_exchange(address, size, WINDOW, payloads) as exchange:

            def raw() -> float:
                return exchange(len(payloads))

            seconds = alternate(benchmark, ROUNDS, {"export": export, "import": bring, "raw": raw})
    rates = {name: nbytes / 1e9 / value for name, value in seconds.items()}
    for name in ("export", "import"):
        comparison.at_least(TARGET, f"KV {name} over ipc: raw ZeroMQ", rates[name], rates["raw"], "GB/s")
