"""Who is connected to a stage, in which role, and whether the pipeline from here on is ready.

The handshake with the stage in front, the next one and the ring; sending to all of them; what to do when one is lost.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from skippy_zmq.errors import HandshakeError, ProtocolError, RetryableError, SkippyError
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.stage.batches import RingAnswer, RingMessage
from skippy_zmq.stage.handshake import check_crossing, check_neighbours, check_pipeline, check_ring
from skippy_zmq.stage.meters import Meters
from skippy_zmq.transport import Link, LinkEvent, LinkEventKind, PeerGone, QueueFull, SendTracker, Server
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.failures import exception_of

log = logging.getLogger("skippy_zmq.stage")

PROBE_SECONDS = 2.0  # of silence, after which an upstream that has sessions here is asked for
GREET_AGAIN_SECONDS = 1.0  # after a next stage that could not take this one just now
MAX_PEERS = 4096  # remembered; a client silent for longer than so many others has to say HELLO again


class Listener(Protocol):
    """Whoever has the sessions, and has to act as neighbours come and go."""

    def pipeline_joined(self, stages: tuple[wire.StageFacts, ...]) -> None:
        """Everything from here on is ready; nobody has been told yet."""

    def ring_lost(self, why: str) -> None:
        """Batches under way will not come back, though the next stage is still there."""

    def next_lost(self, why: str) -> None:
        """The stages behind know nothing of any session any more."""

    def end_sessions(self) -> None:
        """Whoever the sessions here belong to is gone, or cannot be told what becomes of them."""

    def client_came(self, client: bytes) -> None:
        """Perhaps not for the first time: then it has begun anew."""

    def client_forgotten(self, client: bytes) -> None:
        """Too many others came after it."""


class Neighbours:
    """The peers of a stage, the pipeline behind it, and messages to both.

    ``next_link``: to the stage behind, None for the last one. ``ring_link``: from the last stage to stage 0, None
    elsewhere and in a ring of one. ``on_ready`` is called with the facts of all stages from here on, once upstream
    and clients have been told that they are ready.
    """

    def __init__(
        self,
        model: StageModel,
        facts: wire.StageFacts,
        meters: Meters,
        server: Server,
        next_link: Link | None,
        ring_link: Link | None,
        listener: Listener,
        on_ready: Callable[[tuple[wire.StageFacts, ...]], object],
    ) -> None:
        self._model = model
        self._facts = facts
        self._meters = meters
        self._server = server
        self._next_link = next_link
        self._ring_link = ring_link
        self._listener = listener
        self._on_ready = on_ready
        # Routing id -> role of those that were welcomed, the one silent for longest first.
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        self.upstream: bytes | None = None  # routing id
        self._heard_at = 0.0  # from the upstream, monotonic seconds
        self._behind: tuple[wire.StageFacts, ...] = ()  # once known: the stages behind, in layer order
        self._announced = False
        self._greet_at: float | None = None  # when to say HELLO to the next stage again

    # ---- state

    @property
    def ready(self) -> bool:
        """Whether this stage and everything behind it is ready; stage 0 also needs the ring closed."""
        if self._model.is_first and not self._model.is_last:
            return self.ring is not None
        return self._model.is_last or bool(self._behind)

    @property
    def ring(self) -> bytes | None:
        """Routing id of the last stage behind this one, once it has closed the ring; no other's tokens count."""
        last = self._behind[-1].stage.encode() if self._behind else b""
        return last if self._peers.get(last) == "ring" else None

    @property
    def stages(self) -> tuple[wire.StageFacts, ...]:
        """This one and those behind, as far as they are known."""
        return (self._facts, *self._behind)

    def heard_from(self, peer: bytes) -> str | None:
        """Note that a peer has spoken; its role, None where it has to say HELLO first."""
        role = self._peers.get(peer)
        if role is not None:
            self._peers.move_to_end(peer)
        return role

    def announce(self) -> None:
        """Say that the pipeline from here on is ready, where it has become so. Raises HandshakeError."""
        if not self.ready:
            self._announced = False
            return
        if self._announced:
            return
        self._announced = True
        if self._model.is_first:
            try:
                check_pipeline(self.stages)
            except HandshakeError:
                self._behind = ()
                self._announced = False
                raise
        self._listener.pipeline_joined(self.stages)
        for peer, role in list(self._peers.items()):
            if role in ("upstream", "client"):
                self.send(peer, wire.Ready(self.stages))
        self._on_ready(self.stages)

    # ---- sending

    def send(self, peer: bytes, message: wire.Message, payloads: Sequence[memoryview] = ()) -> bool:
        """Send to one that dialed this stage; False where it is gone, or does not read."""
        return self._send(peer, message, payloads, track=False) is not None

    def send_tracked(
        self, peer: bytes, message: wire.Message, payloads: Sequence[memoryview] = ()
    ) -> SendTracker | None:
        """The same, with what says when it has left; None where the peer is gone, or does not read."""
        return self._send(peer, message, payloads, track=True)

    def _send(
        self, peer: bytes, message: wire.Message, payloads: Sequence[memoryview], *, track: bool
    ) -> SendTracker | None:
        try:
            return self._server.send(peer, encode(message, payloads), track=track)
        except PeerGone:
            self._peers.pop(peer, None)
        except QueueFull as error:
            log.warning("%s", error)
            self._meters.error("queue_full")
        return None

    def send_down(self, message: RingMessage, payloads: Sequence[memoryview] = ()) -> None:
        """Send to the next stage; it is lost where it does not take a batch."""
        if self._next_link is None:
            return
        try:
            self._next_link.send(encode(message, payloads))
        except (PeerGone, QueueFull) as error:
            # Ends of sessions need not reach a stage that is gone: it forgets them when it is greeted again.
            if isinstance(message, wire.Activations):
                if isinstance(error, QueueFull):
                    self._next_link.redial()  # a connection that does not take messages any more is no use
                self._lost_next(str(error))

    def send_round(self, answer: RingAnswer) -> None:
        """Last stage: send to stage 0."""
        if self._ring_link is not None:
            try:
                self._ring_link.send(encode(answer))
            except (PeerGone, QueueFull) as error:
                log.warning("%s", error)
                self._meters.error("ring")

    # ---- time

    def next_deadline(self, *, sessions_open: bool) -> float | None:
        """When ``tick`` is due (monotonic seconds), if at all."""
        probe_at = self._heard_at + PROBE_SECONDS if sessions_open and self.upstream is not None else None
        return min((at for at in (self._greet_at, probe_at) if at is not None), default=None)

    def tick(self, now: float, *, sessions_open: bool) -> None:
        """Do what is due by ``now``."""
        if self._greet_at is not None and self._greet_at <= now:
            self._greet_next()
        if sessions_open and self.upstream is not None and now >= self._heard_at + PROBE_SECONDS:
            self._probe_upstream(self.upstream, now)

    # ---- whoever dialed this stage

    def welcome(self, peer: bytes, hello: wire.Hello) -> None:
        """Take in a peer, or raise HandshakeError, ProtocolError or RetryableError (another is in its place)."""
        if hello.peer.encode() != peer:
            raise ProtocolError(f"HELLO of {hello.peer!r} came over a connection of another routing id")
        if hello.facts is not None and hello.facts.stage != hello.peer:
            raise ProtocolError(f"HELLO of {hello.peer!r} has the facts of {hello.facts.stage!r}")
        if hello.role == "upstream":
            assert hello.facts is not None
            check_neighbours(hello.facts, self._facts)
            check_crossing(hello.facts, self._facts)
            self._make_room_for(peer)
            self._listener.end_sessions()
            self.upstream = peer
        elif hello.role == "ring":
            assert hello.facts is not None
            check_ring(self._facts, hello.facts)
            if peer == self.ring:
                # The connection is a new one: what the last stage had to say of batches under way is lost.
                self._listener.ring_lost("the ring link was made anew")
                self._announced = False  # clients have to hear of it, to go on
        else:  # maybe a new process, or a new connection, under a known id
            self._listener.client_came(peer)
        self._peers[peer] = hello.role
        self._peers.move_to_end(peer)
        if len(self._peers) > MAX_PEERS:
            oldest = next(p for p in self._peers if p not in (self.upstream, self.ring))
            del self._peers[oldest]
            self._listener.client_forgotten(oldest)
        log.info("welcome, %s %s", hello.role, hello.peer)
        self.send(peer, wire.Welcome(self.stages, self.ready))
        self.announce()

    def _make_room_for(self, peer: bytes) -> None:
        """Raise RetryableError while another stage is in front of this one; one that went away does not count."""
        if self.upstream not in (None, peer) and self.send(self.upstream, wire.Ping(0)):
            raise RetryableError(f"{self.upstream.decode()} is in front of {self._facts.stage} already")

    def upstream_spoke(self) -> None:
        """It sent something down the ring: for a while it need not be asked whether it is there."""
        self._heard_at = time.monotonic()

    def _probe_upstream(self, upstream: bytes, now: float) -> None:
        """Nobody owns the sessions of an upstream that is gone: end them here and behind, and free their lanes."""
        self._heard_at = now
        if not self.send(upstream, wire.Ping(0)):
            log.warning("%s in front of this stage is gone", upstream.decode())
            self.upstream = None
            self._listener.end_sessions()

    def tell_upstream(self) -> None:
        """This stage is about to end. Where nobody is there to hear it, nobody owns the sessions here any more."""
        message = wire.Error("shutting_down", f"stage {self._facts.stage} is shutting down", "", True)
        if self.upstream is not None and not self.send(self.upstream, message):
            self._listener.end_sessions()

    # ---- whom this stage dials

    def link_changed(self, link: Link, event: LinkEvent) -> None:
        """A link was made, lost or refused."""
        if event.kind is LinkEventKind.CONNECTED:
            self._greet(link)
        elif event.kind is LinkEventKind.DISCONNECTED and link is self._next_link:
            self._lost_next(event.detail)
        else:
            log.warning("%s", event.detail)
            if event.kind is LinkEventKind.DISCONNECTED:  # the ring: what runs here can be told to nobody
                self._listener.end_sessions()

    def take(self, link: Link, message: wire.Message) -> None:
        """Something came over ``link``. Raises the error that it reports where the stage there refuses this one."""
        if link is self._next_link:
            self._from_next(message)
        elif isinstance(message, wire.Error) and not message.retry:
            raise self._refused(message, "stage 0")

    def _greet(self, link: Link) -> None:
        role = "upstream" if link is self._next_link else "ring"
        with contextlib.suppress(PeerGone):  # lost again already: the next event says so
            link.send(encode(wire.Hello(role, self._facts.stage, self._facts)))

    def _greet_next(self) -> None:
        self._greet_at = None
        if self._next_link is not None and self._next_link.connected and not self._behind:
            self._greet(self._next_link)

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
            check_neighbours(self._facts, downstream)
            check_crossing(self._facts, downstream)
            self._model.serve(downstream.wanted)
            if message.ready:
                self._behind = message.stages
        elif isinstance(message, wire.Ready):
            self._behind = message.stages
        elif isinstance(message, wire.Ping):
            if self._next_link is not None:
                with contextlib.suppress(PeerGone, QueueFull):  # lost again already, which the next event says
                    self._next_link.send(encode(wire.Pong(message.nonce, self.ready)))
            return
        else:
            raise ProtocolError(f"{type(message).__name__} from the next stage")
        self.announce()

    @staticmethod
    def _refused(message: wire.Error, by: str) -> SkippyError:
        error = exception_of(message)
        return type(error)(f"{by} refused this one: {error}", code=error.code)

    def _lost_next(self, why: str) -> None:
        """Something behind went away: whoever is in front must know."""
        if self._behind:
            log.warning("lost the stages behind: %s", why)
        self._behind = ()
        was_announced = self._announced
        self._announced = False
        self._listener.next_lost(why)
        if was_announced and self.upstream is not None:
            self.send(self.upstream, wire.Error("stage_lost", why, "", True))
