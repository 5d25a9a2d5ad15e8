"""A stage holds steady memory over many requests of all kinds: none leaves anything behind.

``SKIPPY_MEMORY_REQUESTS=10000`` makes it a long run; the default is short.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from lane_helpers import StageWatch, resident_kib
from model_files import tiny
from stage_peers import Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.wire.messages import ChatMessage, SamplingParams

pytest_plugins = ("transport_fixtures", "stage_fixtures")

N_REQUESTS = int(os.environ.get("SKIPPY_MEMORY_REQUESTS", "1500"))
_WARM_UP = 500  # requests, after which every buffer has the size that it will need
# Less than anything kept per request would come to: 1,000 requests of 1 KiB each, let alone 10,000 of them.
_GROWTH_KIB = 768
_AT_ONCE, _LANES = 8, 4
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


class Requests:
    """Requests of every kind, so many at once, in an order that is always the same."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._choose = random.Random(4)
        self.n_asked = 0
        self._open: list[str] = []

    def run(self, n_requests: int) -> None:
        """Until so many have been asked since the beginning; all are over then."""
        while self.n_asked < n_requests:
            self._open.append(self._ask())
            self.n_asked += 1
            if len(self._open) >= _AT_ONCE:
                self._end(self._open.pop(self._choose.randrange(len(self._open))))
        while self._open:
            self._end(self._open.pop())

    def _ask(self) -> str:
        n = self._choose.randrange
        name = f"q{self.n_asked}"
        kind = self.n_asked % 10
        tokens = [4 + n(256) for _ in range(1 + n(90))]
        if kind == 0:
            return self._asker.ask(request=name, max_tokens=6, prompt="a text that is tokenized " * n(4) + ".")
        if kind == 1:
            return self._asker.ask(request=name, max_tokens=6, messages=(ChatMessage("user", "x" * (1 + n(50))),))
        if kind == 2:
            return self._asker.ask(tokens, request=name, max_tokens=6, stop=("a", "never there"))
        if kind == 3:
            sampling = SamplingParams(temperature=0.8, seed=n(1000), repeat_penalty=1.1)
            return self._asker.ask(tokens, request=name, max_tokens=6, sampling=sampling)
        if kind == 4:
            return self._asker.ask(tokens, request=name, max_tokens=4, logits=True)
        if kind == 5:
            return self._asker.ask((1 << 20,), request=name)  # no such token
        if kind == 6:
            return self._asker.ask(tokens * 20, request=name, max_tokens=6, timeout_ms=1 + n(8))
        return self._asker.ask(tokens, request=name, max_tokens=1 + n(12))

    def _end(self, request: str) -> None:
        fails_by_itself = int(request[1:]) % 10 in (5, 6)
        if self._choose.random() < 0.2 and not fails_by_itself and not self._asker.answers[request].over:
            self._asker.cancel(request)
        self._asker.answer(request)


@pytest.mark.timeout(120 + N_REQUESTS // 5)
def test_memory_stays_as_it_is(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", chat_template=_TEMPLATE)
    # Room for few pages, so that prompts push one another out long before the count begins.
    options = ("--lanes", str(_LANES), "--ctx-size", "2048", "--kv-cache-bytes", "256K", "--log-level", "warning")
    pipeline = make_pipeline(path, "0:2 2:4", *options).start_all()
    watch = StageWatch(transport, pipeline)
    requests = Requests(Asker(transport, pipeline.endpoint))
    requests.run(_WARM_UP)
    watch.until_free()
    before = [resident_kib(pipeline[index].pid) for index in (0, 1)]
    requests.run(N_REQUESTS)
    watch.until_free()
    after = [resident_kib(pipeline[index].pid) for index in (0, 1)]
    assert max(new - old for old, new in zip(before, after, strict=True)) < _GROWTH_KIB, (before, after)
    assert watch.counters()["sessions"] > N_REQUESTS // 2
    assert [pipeline[index].stop() for index in (0, 1)] == [0, 0]
