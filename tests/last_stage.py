"""The last stage of a ring in the hands of a test: it sees every batch that stage 0 forms, and answers when it likes.

It runs no model. Stage 0 is a real process and feeds back whatever token it is told.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stage_peers import Peer
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.stage.engine import MESSAGES_PER_TURN
from skippy_zmq.transport import boot_nonce, routing_id
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.limits import MAX_FRAMES

TOKEN = 5  # every answer is made of it
# More time than any batch takes is said to have been spent at stages: nothing of it on links, which are short then.
SHORT_LINKS = wire.BatchTimes(spent_us=1 << 50, compute_us=2000, slowest_us=1000)
LONG_LINKS = wire.BatchTimes(spent_us=2, compute_us=2, slowest_us=1)  # nearly all of it


@dataclass(slots=True)
class Session:
    """What came of a session until now, by its request's name."""

    opened: wire.SessionOpen
    rows: int = 0
    tokens: int = 0
    batches: list[int] = field(default_factory=list)


class LastStage:
    """Listens at ``endpoint``, where stage 0 expects the stage behind it; the two must be the whole ring."""

    def __init__(self, transport: Transport, endpoint: str, stage_0: str, **facts: Any) -> None:
        """``facts``: what it says of itself that stage 0 does not say."""
        self._transport = transport
        self._server = transport.server(endpoint, max_frames=MAX_FRAMES)
        incoming = transport.message(self._server)
        hello = decode(incoming.frames)[0]
        assert isinstance(hello, wire.Hello)
        assert hello.facts is not None
        identity = routing_id("played", boot_nonce())
        self.facts = dataclasses.replace(
            hello.facts,
            stage=identity.decode(),
            endpoint=endpoint,
            layer_start=hello.facts.layer_end,
            layer_end=hello.facts.n_layers,
            wanted=hello.facts.offered,
            kv_page_tokens=0,
            kv_page_bytes=0,
            offered=(),
            **facts,
        )
        self._upstream = incoming.peer
        self._server.send(self._upstream, encode(wire.Welcome((self.facts,), True)))
        self._ring = Peer(transport, stage_0, identity=identity)
        self._ring.greet("ring", self.facts)
        self.sessions: dict[str, Session] = {}  # by session
        self.order: list[str] = []  # requests, as their first rows came
        self.closed: list[wire.SessionClose] = []
        self.held: deque[wire.Activations] = deque()  # came, and was not answered
        self.batches: list[wire.Activations] = []  # all that ever came
        self.times = SHORT_LINKS  # of every batch that is answered

    def named(self, request: str) -> Session:
        """The session of a request; the last one where a name was used again."""
        return next(s for s in reversed(self.sessions.values()) if s.opened.request == request)

    def take(self) -> None:
        """Take whatever has come until now."""
        while (incoming := self._server.receive()) is not None:
            message = decode(incoming.frames)[0]
            if isinstance(message, wire.Activations):
                self._note(message)
            elif isinstance(message, wire.SessionClose):
                self.closed.append(message)
            else:
                assert isinstance(message, wire.Ping | wire.Hello), message

    def _note(self, batch: wire.Activations) -> None:
        for opened in batch.opens:
            self.sessions[opened.session] = Session(opened)
            self.order.append(opened.request)
        for rows in batch.rows:
            session = self.sessions[rows.session]
            assert rows.position == session.rows
            assert rows.lane == session.opened.lane
            session.rows += rows.n_rows
            session.batches.append(batch.batch)
        self.held.append(batch)
        self.batches.append(batch)

    def wait_for(self, n_held: int) -> None:
        """Wait until so many batches have come that were not answered."""

        def ask() -> bool | None:
            self.take()
            return len(self.held) >= n_held or None

        self._transport.until(ask)

    def answer(self) -> wire.Activations:
        """Answer the batch that came first, as a last stage would have it after it ran; the batch."""
        self.wait_for(1)
        batch = self.held.popleft()
        tokens = []
        for rows in batch.rows:
            session, end = self.sessions[rows.session], rows.position + rows.n_rows
            if not rows.sample:
                continue
            for position in range(rows.position if batch.phase == "replay" else rows.position + rows.n_rows - 1, end):
                session.tokens += 1
                reason = "length" if session.tokens >= session.opened.max_tokens else ""
                tokens.append(wire.SampledToken(rows.session, rows.lane, position + 1, TOKEN, reason))
        self._ring.send(wire.BatchDone(batch.batch, tuple(tokens), (), self.times))
        return batch

    def fail(self, code: str, words: str) -> None:
        """Answer the batch that came first: its sessions have ended here."""
        self.wait_for(1)
        batch = self.held.popleft()
        failed = tuple((rows.session, code, words) for rows in batch.rows)
        self._ring.send(wire.BatchDone(batch.batch, (), failed, self.times))

    def run_until(self, request: str, n_tokens: int) -> None:
        """Answer batch after batch until a request has so many tokens."""
        while request not in self.order or self.named(request).tokens < n_tokens:
            self.answer()

    def break_ring(self) -> None:
        """Connect to stage 0 anew, which has to take all that is under way for lost. All of it must be here."""
        for known in (self.sessions, self.order, self.held, self.batches):
            known.clear()
        self._ring.greet("ring", self.facts)

    def session_of(self, request: str) -> str:
        return self.named(request).opened.session


class Played:
    """A real stage 0 of two, the last stage in the hands of a test, and clients of both."""

    def __init__(self, transport: Transport, pipeline: StagePipeline, *, n_clients: int = 1, **facts: Any) -> None:
        self.stage_0 = pipeline.start(0)
        self.last = LastStage(transport, pipeline.endpoint_of(1), pipeline.endpoint_of(0), **facts)
        self.stage_0.ready()
        self.clients = [Peer(transport, pipeline.endpoint) for _ in range(n_clients)]
        for client in self.clients:
            client.greet()
        self._watch = Peer(transport, pipeline.endpoint)
        self._watch.greet()
        self._numbers = itertools.count()

    def counters(self) -> Mapping[str, int]:
        return self._watch.stats().counters

    def ask(self, n_prompt: int, max_tokens: int, *, client: int = 0, token_ids: Sequence[int] = ()) -> str:
        """Send a request; its name. Stage 0 has heard of it when this returns."""
        request = f"r{next(self._numbers)}"
        ask = wire.Generate(request, max_tokens, token_ids=tuple(token_ids) or (7,) * n_prompt)
        self.clients[client].send(ask)
        self.clients[client].stats()
        return request

    def settle(self) -> Mapping[str, int]:
        """Let stage 0 send all that it will before it gets another answer; its counters then.

        Once its count is that of the batches here, no answer is on its way. It forms a batch after a few messages at
        the latest; where the count stays through more of them, it had nothing to send.
        """
        seen: list[int] = []
        while len(seen) < MESSAGES_PER_TURN + 2:
            counters = self.counters()
            self.last.take()
            now = counters["now.batches_in_flight"]
            if now != len(self.last.held) or now not in seen:
                seen.clear()
            if now == len(self.last.held):
                seen.append(now)
        return counters
