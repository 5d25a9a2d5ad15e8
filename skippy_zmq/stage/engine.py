"""The event loop of a stage: sockets in, batches through the model, messages out. One thread does everything.

Ring messages (batches, session ends) are run strictly in the order in which they came; whatever else arrives is
answered between two batches. libzmq's own thread moves bytes while the model computes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from skippy_zmq.errors import (
    HandshakeError,
    ProtocolError,
    RetryableError,
    SkippyError,
    StageLostError,
)
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.stage.absences import Absences
from skippy_zmq.stage.batches import BatchRunner, RingAnswer, RingMessage
from skippy_zmq.stage.handshake import check_crossing, check_neighbours, check_pipeline, check_ring
from skippy_zmq.stage.head import Head
from skippy_zmq.stage.last import TokenSource
from skippy_zmq.stage.meters import Meters
from skippy_zmq.stage.page_requests import exported, imported
from skippy_zmq.stage.pages import LanePages
from skippy_zmq.stage.queue import RingQueue
from skippy_zmq.stage.texts import detokenized, tokenize
from skippy_zmq.stage.tokenizing import BackgroundTokenizer
from skippy_zmq.transport import Incoming, Link, LinkEventKind, Loop, PeerGone, QueueFull, Server
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.failures import error_message, exception_of

log = logging.getLogger("skippy_zmq.stage")

PROBE_SECONDS = 2.0  # of silence, after which an upstream that has sessions here is asked for
GREET_AGAIN_SECONDS = 1.0  # after a next stage that could not take this one just now
MESSAGES_PER_TURN = 16  # taken between two batches: a peer that never stops sending must not hold those up
MAX_PEERS = 4096  # remembered; a client silent for longer than so many others has to say HELLO again


class Stage:
    """A stage between its neighbours. ``run`` returns when it was asked to stop and has drained.

    ``facts``: what this stage says of itself. ``next_link``: to the stage behind, None for the last one. ``ring_link``:
    from the last stage to stage 0, None elsewhere and in a ring of one.
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
        on_ready: Callable[[tuple[wire.StageFacts, ...]], object],
        exit_fd: int | None = None,
    ) -> None:
        self.model = model
        self.facts = facts
        self.loop = loop
        self.server = server
        self.next_link = next_link
        self.ring_link = ring_link
        self._on_ready = on_ready
        self._exit_fd = exit_fd
        self.meters = Meters()
        # Routing id -> role of those that were welcomed, the one silent for longest first.
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        self._upstream: bytes | None = None
        self._heard_at = 0.0  # from the upstream, monotonic seconds
        self._behind: tuple[wire.StageFacts, ...] = ()  # once known: the stages behind, in layer order
        self._announced = False
        self._queue = RingQueue()
        self._stop_at: float | None = None
        self._draining = False
        self.head: Head | None = None
        self.tokens: TokenSource | None = None
        self._tokenizer = BackgroundTokenizer(loop.wake)
        self._greet_at: float | None = None  # when to say HELLO to the next stage again
        if model.is_last:
            self.tokens = TokenSource(model, self.send_to_client)
        self._pages = pages
        self._absences = Absences(model.options.recover_seconds)
        self._batches = BatchRunner(model, facts, self.tokens, self.meters, pages, self._send_down, self._answer)
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
    def ready(self) -> bool:
        """Whether this stage and everything behind it is ready; stage 0 also needs the ring closed."""
        if self.model.is_first and not self.model.is_last:
            return self._ring is not None
        return self.model.is_last or bool(self._behind)

    @property
    def _ring(self) -> bytes | None:
        """Routing id of the last stage behind this one, once it has closed the ring; no other's tokens count."""
        last = self._behind[-1].stage.encode() if self._behind else b""
        return last if self._peers.get(last) == "ring" else None

    @property
    def stages(self) -> tuple[wire.StageFacts, ...]:
        return (self.facts, *self._behind)

    @property
    def busy(self) -> bool:
        if self._queue or self._batches.sessions:
            return True
        return self.head is not None and self.head.busy

    def stop(self, drain_seconds: float) -> None:
        """Take no new requests, let running ones finish for ``drain_seconds`` at most, then return from ``run``."""
        until = time.monotonic() + drain_seconds
        self._stop_at = until if self._stop_at is None else min(until, self._stop_at)

    def _announce(self) -> None:
        """Say that the pipeline from here on is ready, where it has become so."""
        if not self.ready:
            self._announced = False
            return
        if self._announced:
            return
        self._announced = True
        if self.model.is_first:
            try:
                check_pipeline(self.stages)
            except HandshakeError:
                self._behind = ()
                self._announced = False
                raise
            if self.head is not None:
                self.head.join(self.stages)
        for peer, role in list(self._peers.items()):
            if role in ("upstream", "client"):
                self._send_to(peer, wire.Ready(self.stages))
        self._on_ready(self.stages)

    def _not_ready(self, why: str) -> None:
        """Something behind went away: whoever is in front must know."""
        was = self._announced
        self._announced = False
        if self.head is not None:
            self.head.lose(why)
        if was and self._upstream is not None:
            self._send_to(self._upstream, wire.Error("stage_lost", why, "", True))

    # ---- sending

    def _send_to(self, peer: bytes, message: wire.Message, payloads: Sequence[memoryview] = ()) -> bool:
        try:
            self.server.send(peer, encode(message, payloads))
        except PeerGone:
            self._peers.pop(peer, None)
            return False
        except QueueFull as error:
            log.warning("%s", error)
            self.meters.error("queue_full")
            return False
        return True

    def send_to_client(self, client: bytes, message: wire.Message, payloads: Sequence[memoryview] = ()) -> bool:
        if isinstance(message, wire.Error):
            self.meters.error(message.code)
        return self._send_to(client, message, payloads)

    def _send_down(self, message: RingMessage, payloads: Sequence[memoryview] = ()) -> None:
        if self.next_link is None:
            return
        try:
            self.next_link.send(encode(message, payloads))
        except (PeerGone, QueueFull) as error:
            # Ends of sessions need not reach a stage that is gone: it forgets them when it is greeted again.
            if isinstance(message, wire.Activations):
                if isinstance(error, QueueFull):
                    self.next_link.redial()  # a connection that does not take messages any more is no use
                self._lost_next(str(error))

    def _answer(self, answer: RingAnswer) -> None:
        if self.head is not None:  # a ring of one
            self.head.take_answer(answer)
        elif self.ring_link is not None:
            try:
                self.ring_link.send(encode(answer))
            except (PeerGone, QueueFull) as error:
                log.warning("%s", error)
                self.meters.error("ring")

    def _close_session(self, session: str, lane: int, reason: str) -> None:
        """Stage 0: end a session here and down the ring, in line with the batches."""
        self._batches.close(wire.SessionClose(session, lane, reason))

    # ---- the loop

    def run(self) -> None:
        """Serve until stopped. Raises HandshakeError or ProtocolError where a neighbour refuses this stage."""
        self._announce()
        busy_poll = self.model.options.busy_poll_seconds
        while not self._finished():
            for source in self.loop.wait(self._timeout(), busy_poll if self._batches.sessions else 0.0):
                if isinstance(source, Server):
                    self._drain_server(source)
                elif isinstance(source, Link):
                    self._drain_link(source)
                elif source == self._exit_fd:
                    self._read_exit_fd(source)
                elif self.head is not None:
                    self.head.requests.rendered()
            now = time.monotonic()
            self._tokenizer.deliver()
            if self._greet_at is not None and self._greet_at <= now:
                self._greet_next()
            if self._owes_a_sign and now >= self._heard_at + PROBE_SECONDS:
                self._probe_upstream(now)
            if (due := self._absences.due) is not None and due <= now:
                self._look_for_importers(now)
            if self.head is not None:
                self.head.tick(now)
                if self.ready:
                    self.head.requests.start_waiting()
            self._work()

    @property
    def _owes_a_sign(self) -> bool:
        return self._upstream is not None and self._batches.sessions > 0

    def _probe_upstream(self, now: float) -> None:
        """Nobody owns the sessions of an upstream that is gone: end them here and behind, and free their lanes."""
        self._heard_at = now
        if self._upstream is not None and not self._send_to(self._upstream, wire.Ping(0)):
            log.warning("%s in front of this stage is gone", self._upstream.decode())
            self._upstream = None
            self._forget_sessions()

    def _look_for_importers(self, now: float) -> None:
        """Give up the pages of clients that have gone and do not come back."""
        for client in self._absences.look(now, self._pages.importers, lambda peer: self._send_to(peer, wire.Ping(0))):
            log.info("client %r is gone, and so are the pages that it brought", client)
            self._forget_imports(client)

    def _forget_imports(self, client: bytes) -> None:
        self._pages.forget_client(client)
        if self.head is not None:
            self.head.forget_imports(client)

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
        times += [at for at in (self._stop_at, self._greet_at, self._absences.due) if at is not None]
        if self._owes_a_sign:
            times.append(self._heard_at + PROBE_SECONDS)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _can_schedule(self) -> bool:
        return self.head is not None and self.ready and self.head.has_work

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        if not self._draining:
            self._draining = True
            self._tell_upstream()
        if self.busy and time.monotonic() < self._stop_at:
            return False
        if self.head is not None:
            self.head.fail_all(StageLostError("the stage is shutting down", code="shutting_down"))
        return True

    def _tell_upstream(self) -> None:
        """This stage is about to end. Where nobody is there to hear it, nobody owns the sessions here any more."""
        message = wire.Error("shutting_down", f"stage {self.facts.stage} is shutting down", "", True)
        if self._upstream is not None and not self._send_to(self._upstream, message):
            self._forget_sessions()

    def _work(self) -> None:
        """Run one thing: the oldest message of the ring, or the next batch of stage 0."""
        if self._queue:
            self._batches.run(*self._queue.take())
        elif self.head is not None and self.ready:
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
            except SkippyError as error:
                self.meters.error(error.code)
                log.info("peer %r: %s", incoming.peer, error)
                self._send_to(incoming.peer, error_message(error, request))
            except Exception as error:  # a bug of ours must not end the other sessions
                log.exception("while handling a message")
                self._send_to(incoming.peer, error_message(error, request))

    @staticmethod
    def _decoded(incoming: Incoming) -> tuple[wire.Message, list[memoryview]]:
        if incoming.excess:
            raise ProtocolError(f"message: {incoming.excess} frames too many", code="too_large")
        return decode(incoming.frames)

    def _handle(self, peer: bytes, message: wire.Message, payloads: list[memoryview]) -> None:
        if isinstance(message, wire.Hello):
            self._welcome(peer, message)
            return
        role = self._peers.get(peer)
        if role is None:
            raise ProtocolError(f"{type(message).__name__} before HELLO", code="not_ready")
        self._peers.move_to_end(peer)
        match message:
            case wire.Activations() | wire.SessionClose() | wire.BatchFailed() | wire.KvMatch() | wire.KvKeep() if (
                peer == self._upstream
            ):
                self._take_ring_message(message, payloads)
            case wire.BatchDone() | wire.KvAnswer() if role == "ring" and self.head is not None:
                if peer == self._ring:  # else of a ring that broke: its sessions have been told
                    self.head.take_answer(message)
            case wire.Generate() if role == "client" and self.head is not None:
                self.head.requests.submit(peer, message, accepting=self._why_not_accepting())
            case wire.Cancel() if role == "client" and self.head is not None:
                self.head.requests.cancel(peer, message.request)
            case wire.Resume() if role == "client" and self.head is not None:
                if self.ready:  # else it speaks of a ring that broke again: it will hear READY, and say so once more
                    self.head.requests.resume(peer, message)
            case wire.KvSession() | wire.KvAdopt() if role == "client" and self.head is not None:
                self._send_to(peer, self.head.requests.session_reply(peer, message))
            case wire.KvExport() if role == "client":
                self._send_to(peer, *exported(message, self._pages, peer))
            case wire.KvImport() if role == "client":
                if not self._send_to(peer, imported(message, payloads, self._pages, peer)):
                    self._absences.connection_ended(time.monotonic())  # before this was read, and may have been noted
            case wire.Tokenize() if self.head is not None:
                tokenize(message, self.head.requests, self._tokenizer, functools.partial(self._send_to, peer))
            case wire.Detokenize():
                self._send_to(peer, detokenized(message, self.model))
            case wire.Stats():
                self._send_to(peer, wire.StatsReply(message.request, self.facts, self._counters()))
            case wire.Ping():
                self._send_to(peer, wire.Pong(message.nonce, self.ready))
            case wire.Pong() if role == "upstream":
                pass  # that it could be asked was what there was to know
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for this stage from a peer of role {role!r}")

    def _why_not_accepting(self) -> SkippyError | None:
        if self._stop_at is not None:
            return RetryableError("the stage is shutting down", code="shutting_down")
        if not self.ready:
            return RetryableError("the pipeline is not ready yet", code="not_ready")
        return None

    def _take_ring_message(self, message: RingMessage, payloads: list[memoryview]) -> None:
        self._heard_at = time.monotonic()
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
            counters |= self.head.counters(len(self.stages))
        if self.tokens is not None:
            counters |= {"tokens": self.tokens.tokens, "undelivered": self.tokens.undelivered}
        return counters

    # ---- handshake

    def _welcome(self, peer: bytes, hello: wire.Hello) -> None:
        if hello.peer.encode() != peer:
            raise ProtocolError(f"HELLO of {hello.peer!r} came over a connection of another routing id")
        if hello.facts is not None and hello.facts.stage != hello.peer:
            raise ProtocolError(f"HELLO of {hello.peer!r} has the facts of {hello.facts.stage!r}")
        if hello.role == "upstream":
            assert hello.facts is not None
            check_neighbours(hello.facts, self.facts)
            check_crossing(hello.facts, self.facts)
            self._make_room_for(peer)
            self._forget_sessions()
            self._upstream = peer
        elif hello.role == "ring":
            assert hello.facts is not None
            check_ring(self.facts, hello.facts)
            if peer == self._ring and self.head is not None:
                # The connection is a new one: what the last stage had to say of batches under way is lost.
                self.head.lose("the ring link was made anew")
                self._announced = False  # clients have to hear of it, to go on
        else:  # maybe a new process, or a new connection, under a known id
            if self.head is not None:
                self.head.requests.forget_client(peer)
            if self.tokens is not None:
                self.tokens.forget_client(peer)
            self._absences.is_back(peer)
        self._peers[peer] = hello.role
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_PEERS:
            oldest = next(p for p in self._peers if p not in (self._upstream, self._ring))
            del self._peers[oldest]
            self._forget_imports(oldest)
        log.info("welcome, %s %s", hello.role, hello.peer)
        self._send_to(peer, wire.Welcome(self.stages, self.ready))
        self._announce()

    def _make_room_for(self, peer: bytes) -> None:
        """Raise RetryableError while another stage is in front of this one; one that went away does not count."""
        if self._upstream not in (None, peer) and self._send_to(self._upstream, wire.Ping(0)):
            raise RetryableError(f"{self._upstream.decode()} is in front of {self.facts.stage} already")

    def _forget_sessions(self) -> None:
        self._queue.clear()
        self._batches.close_all()

    def _drain_link(self, link: Link) -> None:
        self._receive_from(link)  # what arrived before the connection was lost comes first
        for event in link.events():
            if event.kind is LinkEventKind.CONNECTED:
                self._greet(link)
            elif event.kind is LinkEventKind.DISCONNECTED and link is self.next_link:
                self._lost_next(event.detail)
            else:
                log.warning("%s", event.detail)
                if event.kind is LinkEventKind.DISCONNECTED:  # the ring: what runs here can be told to nobody
                    self._forget_sessions()
        self._receive_from(link)

    def _greet(self, link: Link) -> None:
        role = "upstream" if link is self.next_link else "ring"
        with contextlib.suppress(PeerGone):  # lost again already: the next event says so
            link.send(encode(wire.Hello(role, self.facts.stage, self.facts)))

    def _greet_next(self) -> None:
        self._greet_at = None
        if self.next_link is not None and self.next_link.connected and not self._behind:
            self._greet(self.next_link)

    def _receive_from(self, link: Link) -> None:
        while (incoming := link.receive()) is not None:
            message, _ = self._decoded(incoming)
            if link is self.next_link:
                self._from_next(message)
            elif isinstance(message, wire.Error) and not message.retry:
                raise self._refused(message, "stage 0")

    def _from_next(self, message: wire.Message) -> None:
        if isinstance(message, wire.Error):
            if message.code == "stage_lost":
                self._lost_next(message.message)
                return
            if message.retry:
                log.warning("next stage: %s", message.message)
                self._greet_at = time.monotonic() + GREET_AGAIN_SECONDS
                return
            raise self._refused(message, "the next stage")
        if isinstance(message, wire.Welcome):
            downstream = message.stages[0]
            check_neighbours(self.facts, downstream)
            check_crossing(self.facts, downstream)
            self.model.serve(downstream.wanted)
            if message.ready:
                self._behind = message.stages
        elif isinstance(message, wire.Ready):
            self._behind = message.stages
        elif isinstance(message, wire.Ping):
            if self.next_link is not None:
                with contextlib.suppress(PeerGone, QueueFull):  # lost again already, which the next event says
                    self.next_link.send(encode(wire.Pong(message.nonce, self.ready)))
            return
        else:
            raise ProtocolError(f"{type(message).__name__} from the next stage")
        self._announce()

    @staticmethod
    def _refused(message: wire.Error, by: str) -> SkippyError:
        error = exception_of(message)
        return type(error)(f"{by} refused this one: {error}", code=error.code)

    def _lost_next(self, why: str) -> None:
        if self._behind:
            log.warning("lost the stages behind: %s", why)
        self._behind = ()
        self._batches.drop_all()
        self._not_ready(why)

    def close(self) -> None:
        """Free what belongs to this stage alone; sockets belong to whoever made them."""
        if self.head is not None:
            self.loop.remove(self.head.renderer.fileno())
            self.head.close()
