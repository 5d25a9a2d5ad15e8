"""The event loop of a stage: sockets in, batches through the model, messages out. One thread does everything.

Ring messages (batches, session ends) are run strictly in the order in which they came; whatever else arrives is
answered between two batches. libzmq's own thread moves bytes while the model computes.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Sequence

from skippy_zmq.errors import ProtocolError, RetryableError, SkippyError, StageLostError
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.stage.absences import Absences
from skippy_zmq.stage.batches import BatchRunner, RingAnswer, RingMessage
from skippy_zmq.stage.head import Head
from skippy_zmq.stage.last import TokenSource
from skippy_zmq.stage.meters import Meters
from skippy_zmq.stage.neighbours import Neighbours
from skippy_zmq.stage.page_requests import UnreadPages, exported, imported
from skippy_zmq.stage.pages import LanePages
from skippy_zmq.stage.queue import RingQueue
from skippy_zmq.stage.rehearsal import Rehearsal
from skippy_zmq.stage.texts import detokenized, tokenize
from skippy_zmq.stage.tokenizing import BackgroundTokenizer
from skippy_zmq.transport import Incoming, Link, Loop, Loopback, Server
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode
from skippy_zmq.wire.failures import error_message

log = logging.getLogger("skippy_zmq.stage")

_REHEARSED = (wire.Activations, wire.BatchDone)
MESSAGES_PER_TURN = 16  # taken between two batches: a peer that never stops sending must not hold those up


class Stage:
    """A stage between its neighbours. ``run`` returns when it was asked to stop and has drained.

    ``facts``: what this stage says of itself. ``next_link``: to the stage behind, None for the last one. ``ring_link``:
    from the last stage to stage 0, None elsewhere and in a ring of one. ``loopback``: from this stage to itself.
    """

    def __init__(
        self,
        model: StageModel,
        facts: wire.StageFacts,
        pages: LanePages,
        loop: Loop,
        server: Server,
        next_link: Link | None,
        ring_link: Link | None,
        loopback: Loopback,
        on_ready: Callable[[tuple[wire.StageFacts, ...]], object],
        exit_fd: int | None = None,
    ) -> None:
        self.model = model
        self.facts = facts
        self.loop = loop
        self._exit_fd = exit_fd
        self.meters = Meters()
        self._neighbours = Neighbours(model, facts, self.meters, server, next_link, ring_link, self, on_ready)
        self._queue = RingQueue()
        self._stop_at: float | None = None
        self._draining = False
        self.head: Head | None = None
        self.tokens: TokenSource | None = None
        self._tokenizer = BackgroundTokenizer(loop.wake)
        if model.is_last:
            self.tokens = TokenSource(model, self.send_to_client)
        self._pages = pages
        self._unread_pages = UnreadPages()
        self._rehearsal = Rehearsal(model, loopback, self._can_schedule) if model.warm_bytes else None
        self._absences = Absences(model.options.recover_seconds)
        self._batches = BatchRunner(
            model, facts, self.tokens, self.meters, pages, self._neighbours.send_down, self._answer
        )
        if model.is_first:
            self.head = Head(
                model,
                facts,
                self.meters,
                self._batches,
                pages,
                self._tokenizer,
                self.send_to_client,
                self._close_session,
            )
            loop.add(self.head.renderer.fileno())
        loop.add(server)
        for link in (next_link, ring_link):
            if link is not None:
                loop.add(link)
        if exit_fd is not None:
            loop.add(exit_fd)

    # ---- state

    @property
    def busy(self) -> bool:
        if self._queue or self._batches.sessions:
            return True
        return self.head is not None and self.head.busy

    def stop(self, drain_seconds: float) -> None:
        """Take no new requests, let running ones finish for ``drain_seconds`` at most, then return from ``run``."""
        until = time.monotonic() + drain_seconds
        self._stop_at = until if self._stop_at is None else min(until, self._stop_at)

    def close(self) -> None:
        """Free what belongs to this stage alone; sockets belong to whoever made them."""
        if self.head is not None:
            self.loop.remove(self.head.renderer.fileno())
            self.head.close()

    # ---- sending

    def send_to_client(self, client: bytes, message: wire.Message, payloads: Sequence[memoryview] = ()) -> bool:
        if isinstance(message, wire.Error):
            self.meters.error(message.code)
        return self._neighbours.send(client, message, payloads)

    def _answer(self, answer: RingAnswer) -> None:
        if self.head is not None:  # a ring of one
            self.head.take_answer(answer)
        else:
            self._neighbours.send_round(answer)

    def _close_session(self, session: str, lane: int, reason: str) -> None:
        """Stage 0: end a session here and down the ring, in line with the batches."""
        self._batches.close(wire.SessionClose(session, lane, reason))

    # ---- the loop

    def run(self) -> None:
        """Serve until stopped. Raises HandshakeError or ProtocolError where a neighbour refuses this stage."""
        self._neighbours.announce()
        busy_poll = self.model.options.busy_poll_seconds
        while not self._finished():
            for source in self.loop.wait(
                self._timeout(), busy_poll if self._batches.sessions else 0.0, self._rehearsal
            ):
                if isinstance(source, Server):
                    self._drain_server(source)
                elif isinstance(source, Link):
                    self._drain_link(source)
                elif source == self._exit_fd:
                    self._read_exit_fd(source)
                elif self.head is not None:
                    self.head.requests.rendered()
            self._work()  # first of all: tokens wait for it, and what is due can wait for a batch
            now = time.monotonic()
            self._tokenizer.deliver()
            self._neighbours.tick(now, sessions_open=self._batches.sessions > 0)
            if (due := self._absences.due) is not None and due <= now:
                self._look_for_importers(now)
            if self.head is not None:
                self.head.tick(now)
                if self._neighbours.ready:
                    self.head.requests.start_waiting()

    def _look_for_importers(self, now: float) -> None:
        """Give up the pages of clients that have gone and do not come back."""

        def is_there(client: bytes) -> bool:
            return self._neighbours.send(client, wire.Ping(0))

        for client in self._absences.look(now, self._pages.importers, is_there):
            log.info("client %r is gone, and so are the pages that it brought", client)
            self.client_forgotten(client)

    def _read_exit_fd(self, fd: int) -> None:
        if not os.read(fd, 4096):  # whoever started this stage is gone
            self.loop.remove(fd)
            self.stop(0)

    def _timeout(self) -> float | None:
        if self._queue or self._can_schedule():
            return 0.0
        times = []
        if self.head is not None and (deadline := self.head.next_deadline()) is not None:
            times.append(deadline)
        greet_or_probe_at = self._neighbours.next_deadline(sessions_open=self._batches.sessions > 0)
        times += [at for at in (self._stop_at, self._absences.due, greet_or_probe_at) if at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _can_schedule(self) -> bool:
        return self.head is not None and self._neighbours.ready and self.head.has_work

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        if not self._draining:
            self._draining = True
            self._neighbours.tell_upstream()
        if self.busy and time.monotonic() < self._stop_at:
            return False
        if self.head is not None:
            self.head.fail_all(StageLostError("the stage is shutting down", code="shutting_down"))
        return True

    def _work(self) -> None:
        """Run one thing: the oldest message of the ring, or the next batch of stage 0."""
        if self._queue:
            self._batches.run(*self._queue.take())
        elif self.head is not None and self._neighbours.ready:
            self.head.run_next()

    # ---- messages

    def _drain_server(self, server: Server) -> None:
        if server.take_losses():
            if self.head is not None:
                self.head.connections_ended()
            self._absences.connection_ended(time.monotonic())
        for _ in range(MESSAGES_PER_TURN):
            incoming = server.receive()
            if incoming is None:
                return
            request = ""
            try:
                message, payloads = self._decoded(incoming)
                request = getattr(message, "request", "")
                self._handle(incoming.peer, message, payloads)
                if self._rehearsal is not None and isinstance(message, _REHEARSED):
                    self._rehearsal.last = incoming.frames
            except SkippyError as error:
                self.meters.error(error.code)
                log.info("peer %r: %s", incoming.peer, error)
                self._neighbours.send(incoming.peer, error_message(error, request))
            except Exception as error:  # a bug of ours must not end the other sessions
                log.exception("while handling a message")
                self._neighbours.send(incoming.peer, error_message(error, request))

    def _drain_link(self, link: Link) -> None:
        self._receive_from(link)  # what arrived before the connection was lost comes first
        for event in link.events():
            self._neighbours.link_changed(link, event)
        self._receive_from(link)

    def _receive_from(self, link: Link) -> None:
        while (incoming := link.receive()) is not None:
            message, _ = self._decoded(incoming)
            self._neighbours.take(link, message)

    @staticmethod
    def _decoded(incoming: Incoming) -> tuple[wire.Message, list[memoryview]]:
        if incoming.excess:
            raise ProtocolError(f"message: {incoming.excess} frames too many", code="too_large")
        return decode(incoming.frames)

    def _handle(self, peer: bytes, message: wire.Message, payloads: list[memoryview]) -> None:
        if isinstance(message, wire.Hello):
            self._neighbours.welcome(peer, message)
            return
        role = self._neighbours.heard_from(peer)
        if role is None:
            raise ProtocolError(f"{type(message).__name__} before HELLO", code="not_ready")
        match message:
            case wire.Activations() | wire.SessionClose() | wire.BatchFailed() | wire.KvMatch() | wire.KvKeep() if (
                peer == self._neighbours.upstream
            ):
                self._take_ring_message(message, payloads)
            case wire.BatchDone() | wire.KvAnswer() if role == "ring" and self.head is not None:
                if peer == self._neighbours.ring:  # else of a ring that broke: its sessions have been told
                    self.head.take_answer(message)
            case wire.Generate() if role == "client" and self.head is not None:
                self.head.requests.submit(peer, message, accepting=self._why_not_accepting())
            case wire.Cancel() if role == "client" and self.head is not None:
                self.head.requests.cancel(peer, message.request)
            case wire.Resume() if role == "client" and self.head is not None:
                # Else it speaks of a ring that broke again: it will hear READY, and say so once more.
                if self._neighbours.ready:
                    self.head.requests.resume(peer, message)
            case wire.KvSession() | wire.KvAdopt() if role == "client" and self.head is not None:
                self._neighbours.send(peer, self.head.requests.session_reply(peer, message))
            case wire.KvExport() if role == "client":
                self._export(peer, message)
            case wire.KvImport() if role == "client":
                if not self._neighbours.send(peer, imported(message, payloads, self._pages, peer)):
                    self._absences.connection_ended(time.monotonic())  # before this was read, and may have been noted
            case wire.Tokenize() if self.head is not None:
                tokenize(message, self.head.requests, self._tokenizer, functools.partial(self._neighbours.send, peer))
            case wire.Detokenize():
                self._neighbours.send(peer, detokenized(message, self.model))
            case wire.Stats():
                self._neighbours.send(peer, wire.StatsReply(message.request, self.facts, self._counters()))
            case wire.Ping():
                self._neighbours.send(peer, wire.Pong(message.nonce, self._neighbours.ready))
            case wire.Pong() if role == "upstream":
                pass  # that it could be asked was what there was to know
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for this stage from a peer of role {role!r}")

    def _export(self, client: bytes, asked: wire.KvExport) -> None:
        self._unread_pages.check(client)
        pages, payloads = exported(asked, self._pages, client)
        if (tracker := self._neighbours.send_tracked(client, pages, payloads)) is not None:
            self._unread_pages.add(client, tracker, sum(payload.nbytes for payload in payloads))

    def _why_not_accepting(self) -> SkippyError | None:
        if self._stop_at is not None:
            return RetryableError("the stage is shutting down", code="shutting_down")
        if not self._neighbours.ready:
            return RetryableError("the pipeline is not ready yet", code="not_ready")
        return None

    def _take_ring_message(self, message: RingMessage, payloads: list[memoryview]) -> None:
        self._neighbours.upstream_spoke()
        lanes: list[int] = []
        if isinstance(message, wire.Activations):
            if message.layer_end != self.facts.layer_start:
                raise ProtocolError(
                    f"activations of layers {message.layer_start}:{message.layer_end} for a stage that begins at layer "
                    f"{self.facts.layer_start}"
                )
            lanes += [entry.lane for entry in message.rows]
        if isinstance(message, wire.Activations | wire.BatchFailed):
            lanes += [opened.lane for opened in message.opens]
        for lane in lanes:
            if lane >= self.facts.lanes:
                raise ProtocolError(f"lane {lane}: wanted 0 to {self.facts.lanes - 1}")
        self._queue.put(message, payloads)

    def _counters(self) -> dict[str, int]:
        counters = self.meters.snapshot()
        counters |= {
            "now.sessions": self._batches.sessions,
            "now.queue": len(self._queue),
            "now.kv_cells": self._batches.kv_cells,
            **self._pages.counters(),
        }
        if self.head is not None:
            counters |= self.head.counters(len(self._neighbours.stages))
        if self.tokens is not None:
            counters |= {"tokens": self.tokens.tokens, "undelivered": self.tokens.undelivered}
        return counters

    # ---- what is heard of neighbours: see Listener

    def pipeline_joined(self, stages: tuple[wire.StageFacts, ...]) -> None:
        if self.head is not None:
            self.head.join(stages)

    def ring_lost(self, why: str) -> None:
        if self.head is not None:
            self.head.lose(why)

    def next_lost(self, why: str) -> None:
        self._batches.drop_all()
        self.ring_lost(why)

    def end_sessions(self) -> None:
        self._queue.clear()
        self._batches.close_all()

    def client_came(self, client: bytes) -> None:
        if self.head is not None:
            self.head.requests.forget_client(client)
        if self.tokens is not None:
            self.tokens.forget_client(client)
        self._absences.is_back(client)

    def client_forgotten(self, client: bytes) -> None:
        self._pages.forget_client(client)
        if self.head is not None:
            self.head.forget_imports(client)
