"""The two ends of a connection: a Server that peers connect to, and a Link to one peer."""

from __future__ import annotations

import enum
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from skippy_zmq.transport import takeover
from skippy_zmq.transport.endpoints import Endpoint, check_bind, check_connect
from skippy_zmq.transport.frames import (
    Incoming,
    PeerGone,
    QueueFull,
    SendableFrame,
    SendTracker,
    has_input,
    receive_frames,
    send_frames,
)
from skippy_zmq.transport.ipc_path import IpcClaim
from skippy_zmq.transport.sockets import SocketFactory, last_endpoint
from skippy_zmq.wire.limits import MAX_FRAMES

# A lost or refused connection is dialled again after the first time, then after twice as long each, up to the last.
REDIAL_SECONDS = 0.05
REDIAL_MAX_SECONDS = 1.0

_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
_EVENT = struct.Struct("=HI")


class Server:
    """Owns a bound ROUTER. ``endpoint`` is the real one, the port chosen by the system included.

    ``warning`` is a line for the operator where the address is open to others without keys, else "".
    """

    def __init__(
        self,
        factory: SocketFactory,
        endpoint: Endpoint,
        *,
        allow_plaintext: bool = False,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        """Bind; raise EndpointError where that is not possible or not safe."""
        self._factory = factory
        self._max_frames = max_frames + 1  # the routing id comes first
        self._claim = IpcClaim(endpoint.path) if endpoint.transport == "ipc" else None
        try:
            target = check_bind(endpoint, encrypted=factory.security is not None, allow_plaintext=allow_plaintext)
            self._socket = factory.router(target)
            if self._claim is not None:
                self._claim.note_bound()
            self._monitor = factory.monitor(self._socket, takeover.WATCHED)
        except BaseException:
            if self._claim is not None:
                self._claim.release()
            raise
        self._connections = takeover.Connections(self._monitor)
        factory.adopt(self)
        self.warning = target.warning
        self.endpoint = endpoint if self._claim is not None else Endpoint.parse(last_endpoint(self._socket))

    @property
    def poll_sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return (self._socket, self._monitor)

    def take_losses(self) -> int:
        """Connections of peers that ended since the last call, as of ``refresh``; whose, only sending tells."""
        return self._connections.take_losses()

    @property
    def pending(self) -> bool:
        """Whether connections ended that ``take_losses`` has not told of, and that no longer show on the sockets."""
        return self._connections.pending

    def refresh(self) -> None:
        """Take in what the monitor has to say; Loop.wait calls it when there is something."""
        self._connections.refresh()

    def send(self, peer: bytes, frames: Sequence[SendableFrame], *, track: bool = False) -> SendTracker:
        """Queue a message for ``peer`` without waiting.

        Raises PeerGone (nobody has that id) or QueueFull (it does not read); either way nothing of it was sent. Memory
        of large frames may be reused only when the tracker (``track=True``) is done; small frames at once.
        """
        try:
            return self._send(peer, frames, track)
        except zmq.ZMQError:
            has_input(self._socket)  # what it knew about the peer may have been out of date
        try:
            return self._send(peer, frames, track)
        except zmq.Again as error:
            raise QueueFull(f"{self.endpoint}: peer {_shown(peer)} does not read: its queue is full") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerGone(f"{self.endpoint}: peer {_shown(peer)} is not connected") from error

    def _send(self, peer: bytes, frames: Sequence[SendableFrame], track: bool) -> SendTracker:
        return send_frames(self._socket, (peer, *frames), track)

    def receive(self) -> Incoming | None:
        """The next message, or None when there is none."""
        received = receive_frames(self._socket, self._max_frames, with_source=True)
        if received is None:
            return None
        frames, excess, source = received
        peer = bytes(frames[0])
        self._connections.note(peer, source)
        return Incoming(peer, [], excess) if excess else Incoming(peer, frames[1:])

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop listening and close; may be called twice. See SocketFactory.close for draining.

        The address is free on return, or, with ``drain_seconds``, once the factory is closed.
        """
        if not self._socket.closed:
            self._socket.monitor(None, 0)
        self._factory.discard(self._monitor)
        if drain_seconds <= 0 and not self._socket.closed:
            self._factory.unbind(self._socket)
        self._factory.discard(self._socket, drain_seconds)
        if self._claim is not None:
            self._claim.release()
        self._factory.release(self)


class LinkEventKind(enum.Enum):
    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    HANDSHAKE_FAILED = "handshake failed"


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """What happened to a connection. DISCONNECTED: whatever was sent and not answered may not have arrived."""

    kind: LinkEventKind
    detail: str = ""


class Link:
    """Owns a DEALER to one peer, and what is known about that connection; inside a Loop it is dialled again for ever.

    Every connection starts empty: what was queued for a lost one is dropped, never delivered to the next. What had
    arrived can still be received. (IMMEDIATE=1, libzmq's way to the former, drops what has arrived as well.)
    ``connected`` is as of the last ``events``, ``send`` or ``Loop.wait``.
    """

    def __init__(
        self,
        factory: SocketFactory,
        endpoint: Endpoint,
        *,
        routing_id: bytes,
        server_key: bytes | None = None,
        max_frames: int = MAX_FRAMES,
    ) -> None:
        """Start connecting; raise EndpointError where that can never work, OptionError for keys that do not fit."""
        self.endpoint = endpoint
        self.connected = False
        self._factory = factory
        self._max_frames = max_frames
        self._events: deque[LinkEvent] = deque()
        self._inbox: deque[Incoming] = deque()
        self._redial_at: float | None = None
        self._redial_seconds = REDIAL_SECONDS
        target = check_connect(endpoint)
        self._address = target.address
        self._socket = factory.dealer(routing_id, target, server_key)
        self._monitor = factory.monitor(self._socket, _WATCHED)
        factory.adopt(self)
        try:
            self._socket.connect(self._address)
        except BaseException:
            self.close()
            raise

    @property
    def poll_sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return (self._socket, self._monitor)

    @property
    def redial_at(self) -> float | None:
        """When (time.monotonic) ``redial`` is due, if at all; Loop.wait sees to it."""
        return self._redial_at

    def send(self, frames: Sequence[SendableFrame], *, track: bool = False) -> SendTracker:
        """Queue a message without waiting; raise PeerGone (not connected) or QueueFull (the peer does not read).

        A connection that is lost at this very moment shows as a DISCONNECTED event instead. Memory of large frames may
        be reused only when the tracker (``track=True``) is done; small frames at once.
        """
        if not self.connected:
            self.refresh()
            if not self.connected:
                raise PeerGone(f"{self.endpoint} is not connected")
        try:
            return send_frames(self._socket, frames, track)
        except zmq.Again:
            has_input(self._socket)  # what it knew about the peer may have been out of date
        try:
            return send_frames(self._socket, frames, track)
        except zmq.Again as error:
            self.refresh()
            if self.connected:
                raise QueueFull(f"{self.endpoint} does not read: its queue is full") from error
            raise PeerGone(f"{self.endpoint} is not connected") from error

    def receive(self) -> Incoming | None:
        """The next message, or None when there is none. Ask before ``events``: it came before the loss they report."""
        if self._inbox:
            return self._inbox.popleft()
        return self._receive()

    def _receive(self) -> Incoming | None:
        received = receive_frames(self._socket, self._max_frames)
        if received is None:
            return None
        frames, excess, _ = received
        return Incoming(b"", [], excess) if excess else Incoming(b"", frames)

    @property
    def pending(self) -> bool:
        """Whether there is an event or a message that no longer shows on the sockets."""
        return bool(self._events or self._inbox)

    def events(self) -> list[LinkEvent]:
        """What happened to the connection since the last call, oldest first."""
        self.refresh()
        events = list(self._events)
        self._events.clear()
        return events

    def refresh(self) -> None:
        """Take in what the monitor has to say; Loop.wait calls it when there is something."""
        while has_input(self._monitor):
            event, value = _EVENT.unpack(self._monitor.recv(zmq.NOBLOCK))
            self._monitor.recv(zmq.NOBLOCK)  # the address
            self._note(event, value)

    def redial(self) -> None:
        """Give up what is left of the last connection and start a new one."""
        self._redial_at = None
        while (message := self._receive()) is not None:
            self._inbox.append(message)
        self._socket.disconnect(self._address)
        self._socket.connect(self._address)

    def close(self, drain_seconds: float = 0.0) -> None:
        """Close; may be called twice. See SocketFactory.close for draining."""
        if not self._socket.closed:
            self.refresh()
            self._socket.monitor(None, 0)
        self._factory.discard(self._monitor)
        # Without a connection there is nobody to drain to.
        self._factory.discard(self._socket, drain_seconds if self.connected else 0.0)
        self._factory.release(self)
        self.connected = False

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._redial_at = None
            self._redial_seconds = REDIAL_SECONDS
            self._events.append(LinkEvent(LinkEventKind.CONNECTED))
            return
        if self._redial_at is None:  # one failure comes as several events
            self._redial_at = time.monotonic() + self._redial_seconds
            self._redial_seconds = min(2 * self._redial_seconds, REDIAL_MAX_SECONDS)
        if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED):
            if self.connected:  # a connection that never got through its handshake has been reported as such
                self._events.append(LinkEvent(LinkEventKind.DISCONNECTED, f"{self.endpoint}: connection lost"))
            self.connected = False
        else:
            detail = f"{self.endpoint}: {_failure(event, value)}"
            self._events.append(LinkEvent(LinkEventKind.HANDSHAKE_FAILED, detail))


def _failure(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return f"the peer refused our key (status {value})"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value in (zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, zmq.PROTOCOL_ERROR_ZMTP_UNEXPECTED_COMMAND):
            return "the two sides use different security: keys on one side only"
        return f"the other side does not speak ZeroMQ as we do (libzmq error {value:#x})"
    return "the peer closed the connection during the handshake: not a stage, or keys that do not fit ours"


def _shown(peer: bytes) -> str:
    return peer.decode() if peer.isascii() and peer.decode().isprintable() else f"0x{peer.hex()}"
