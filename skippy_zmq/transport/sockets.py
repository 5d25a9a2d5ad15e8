"""The one place that makes sockets: every option is set here, before any bind or connect."""

from __future__ import annotations

import functools
import re
import secrets
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import zmq

from skippy_zmq.errors import EndpointError, OptionError
from skippy_zmq.transport.endpoints import BindTarget, ConnectTarget
from skippy_zmq.transport.security import Security, check_public_key
from skippy_zmq.transport.zap import ZAP_DOMAIN, Authenticator
from skippy_zmq.wire.limits import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES

# Frames above this end the connection that announced them, before any memory is taken.
MAX_FRAME_BYTES = max(MAX_PAYLOAD_BYTES, MAX_HEADER_BYTES)
# Messages queued towards one peer; credit keeps the real number far below, so reaching it means a reader that stopped.
SEND_QUEUE_MESSAGES = 1000
# Messages held for a server per peer: a peer that floods is not read any more. See ``_heartbeats`` for why it is not
# smaller, and why links have no such limit.
RECEIVE_QUEUE_MESSAGES = 1000
_UNLIMITED = 0

HEARTBEAT_INTERVAL_MS = 2_000
# A heartbeat waits behind a frame on its way: the largest usual payload must pass a slow network within this time.
HEARTBEAT_TIMEOUT_MS = 15_000
HANDSHAKE_TIMEOUT_MS = 10_000
CONNECT_TIMEOUT_MS = 5_000
# Links dial again themselves (see Link); libzmq's own attempt would deliver the old queue to a restarted peer.
RECONNECT_NEVER_MS = 24 * 3_600_000
LISTEN_BACKLOG = 128
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3
# How long a closing listener may take to leave its address; it is a matter of microseconds.
UNBIND_TIMEOUT_MS = 5_000

_MAX_ROUTING_ID_BYTES = 255
_NAME = re.compile(r"[!-~]+\Z")

Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """Limits of every socket of a factory: bytes per frame; messages queued per peer towards it, and from it.

    ``receive_messages`` is for servers; a link takes what the stage it asked sends.
    """

    frame_bytes: int = MAX_FRAME_BYTES
    send_messages: int = SEND_QUEUE_MESSAGES
    receive_messages: int = RECEIVE_QUEUE_MESSAGES

    def __post_init__(self) -> None:
        for name, value in (
            ("frame_bytes", self.frame_bytes),
            ("send_messages", self.send_messages),
            ("receive_messages", self.receive_messages),
        ):
            if value < 1:  # 0 and -1 mean "no limit" to libzmq
                raise OptionError(f"socket limit {name} {value}: wanted at least 1")


def boot_nonce() -> str:
    """A fresh text per process start, so that a restarted peer is a new peer."""
    return secrets.token_hex(8)


def routing_id(name: str, nonce: str) -> bytes:
    """``<name>-<nonce>``, the id under which peers see a process; raises OptionError for names that do not fit."""
    identity = f"{name}-{nonce}"
    if not _NAME.match(identity) or len(identity) > _MAX_ROUTING_ID_BYTES or not name:
        raise OptionError(
            f"name {name!r}: wanted 1 to {_MAX_ROUTING_ID_BYTES - 1 - len(nonce)} printable ASCII characters, no spaces"
        )
    return identity.encode()


class Owner(Protocol):
    """Who holds sockets of a factory and knows what else to undo when they close."""

    def close(self, drain_seconds: float = 0.0) -> None: ...


class SocketFactory:
    """Owns the ZeroMQ context, the sockets made from it, and the allow-list thread.

    Sockets have LINGER 0 from birth: nothing unsent can hold up the end of the process. ``close(drain_seconds)`` is the
    explicit way to let queued messages out first.
    """

    def __init__(
        self, *, security: Security | None = None, limits: SocketLimits | None = None, io_threads: int = 1
    ) -> None:
        _reuse_freed_frames()
        self.security = security
        self.limits = limits or SocketLimits()
        self._context: zmq.Context[Socket] = zmq.Context(io_threads)
        self._sockets: set[Socket] = set()
        self._owners: set[Owner] = set()
        self._authenticator: Authenticator | None = None
        self._n_monitors = self._n_pairs = 0

    def __enter__(self) -> SocketFactory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def n_open(self) -> int:
        """Sockets made and not yet closed."""
        return len(self._sockets)

    @property
    def refused_handshakes(self) -> int:
        """Connections turned away because their key is not on the allow-list."""
        return self._authenticator.refused if self._authenticator else 0

    def adopt(self, owner: Owner) -> None:
        """Remember to close ``owner``."""
        self._owners.add(owner)

    def release(self, owner: Owner) -> None:
        """``owner`` has closed."""
        self._owners.discard(owner)

    def router(self, target: BindTarget) -> Socket:
        """A ROUTER bound to ``target``; raises EndpointError naming it."""
        socket = self._socket(zmq.ROUTER, target.ipv6)
        try:
            # Messages to nobody are an error, and a peer that comes back under its id replaces its dead connection.
            socket.setsockopt(zmq.RCVHWM, self.limits.receive_messages)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            socket.setsockopt(zmq.BACKLOG, LISTEN_BACKLOG)
            if self.security is not None:
                if self._authenticator is None:
                    self._authenticator = Authenticator(self._context, self.security)
                socket.setsockopt(zmq.CURVE_SERVER, 1)
                socket.setsockopt(zmq.CURVE_SECRETKEY, self.security.keys.secret)
                socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
                # Without it libzmq lets everybody in when nobody answers its question.
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            socket.bind(target.address)
        except zmq.ZMQError as error:
            self.discard(socket)
            raise EndpointError(f"cannot bind {target.endpoint}: {_reason(error)}") from error
        return socket

    def dealer(self, identity: bytes, target: ConnectTarget, server_key: bytes | None) -> Socket:
        """A DEALER to ``target``, not yet connected: the caller connects once it watches the socket.

        ``server_key``: public key of the peer, needed exactly where this process has keys (OptionError otherwise).
        """
        if (server_key is None) != (self.security is None):
            have = (
                "a key of the peer but no keys of this process"
                if server_key
                else "keys of this process but no key of the peer"
            )
            raise OptionError(f"connection to {target.endpoint}: {have}; wanted both or neither")
        if not 1 <= len(identity) <= _MAX_ROUTING_ID_BYTES or identity[0] == 0:
            raise OptionError(f"routing id {identity!r}: wanted 1 to {_MAX_ROUTING_ID_BYTES} bytes, the first not zero")
        key = check_public_key(server_key, f"key of {target.endpoint}") if server_key is not None else None
        socket = self._socket(zmq.DEALER, target.ipv6)
        for option, value in _heartbeats().items():
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.ROUTING_ID, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_NEVER_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        if key is not None and self.security is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self.security.keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.security.keys.secret)
        return socket

    def pair(self) -> tuple[Socket, Socket]:
        """Two ends of a connection within this process."""
        self._n_pairs += 1
        address = f"inproc://skippy.pair.{self._n_pairs}"
        one, other = self._socket(zmq.PAIR, ipv6=False), self._socket(zmq.PAIR, ipv6=False)
        one.bind(address)
        other.connect(address)
        return one, other

    def monitor(self, socket: Socket, events: int) -> Socket:
        """A PAIR that receives ``events`` of ``socket``; discard it before that one."""
        self._n_monitors += 1
        address = f"inproc://skippy.monitor.{self._n_monitors}"
        pair = self._socket(zmq.PAIR, ipv6=False)
        socket.monitor(address, events)
        pair.connect(address)
        return pair

    def unbind(self, socket: Socket) -> None:
        """Stop listening, and return once the address is free; closing alone would leave that to a later moment.

        The connections that came in end with the listener, and whatever was queued for them is dropped.
        """
        watch = self.monitor(socket, zmq.EVENT_CLOSED | zmq.EVENT_CLOSE_FAILED)
        try:
            socket.unbind(last_endpoint(socket))
            watch.poll(UNBIND_TIMEOUT_MS)
        except zmq.ZMQError:
            return  # not bound any more
        finally:
            socket.monitor(None, 0)
            self.discard(watch)

    def discard(self, socket: Socket, drain_seconds: float = 0.0) -> None:
        """Close ``socket``; may be called twice. Its queue lives on in the background, at most ``drain_seconds``."""
        self._sockets.discard(socket)
        if not socket.closed:
            socket.close(linger=max(0, round(drain_seconds * 1000)))  # below 0 would be for ever

    def close(self, drain_seconds: float = 0.0) -> None:
        """Close every server, link and socket, and the context; may be called twice.

        Returns when all queued messages were handed to the kernel, at the latest after ``drain_seconds``; a message to
        a peer that does not read is dropped then. A peer whose own receive queue is full at that moment can still lose
        what the kernel holds (libzmq stops reading a connection that ended): where the last message matters, wait for
        its answer before closing.
        """
        for owner in list(self._owners):
            owner.close(drain_seconds)
        for socket in list(self._sockets):
            self.discard(socket, drain_seconds)
        if self._authenticator is not None:
            self._authenticator.close()
        if not self._context.closed:
            self._context.term()

    def _socket(self, kind: int, ipv6: bool) -> Socket:
        socket = self._context.socket(kind)
        self._sockets.add(socket)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: self.limits.send_messages,
            # A full queue is no help to a link (``_heartbeats``), and would block libzmq's I/O thread behind a monitor.
            zmq.RCVHWM: _UNLIMITED,
            zmq.MAXMSGSIZE: self.limits.frame_bytes,
            zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_IDLE_S,
            zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_INTERVAL_S,
            zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_PROBES,
            zmq.IPV6: int(ipv6),
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        return socket


@functools.cache
def _reuse_freed_frames() -> None:
    """Have the memory of large frames reused: glibc would give it back and take fresh, zeroed memory for the next ones.

    Once a block of its own mapping was freed, glibc keeps blocks up to that size (at most 32 MiB) and twice as much at
    the end of its heaps (mallopt(3), M_MMAP_THRESHOLD). Nothing of this block is ever touched.
    """
    np.empty(31 << 20, np.uint8)


def _heartbeats() -> dict[int, int]:
    """Options for links alone; the time to live that a link sends along makes the server watch it as well.

    libzmq (4.3.5, zeromq/libzmq#4364) aborts the process when a heartbeat is due on a connection that is lost while its
    receive queue is full, or taken over by another under the same id. So a server beats not, a link's queue is never
    full, and a server's is long enough not to be, since it also aborts on a heartbeat left unread there.
    """
    return {
        zmq.HEARTBEAT_IVL: HEARTBEAT_INTERVAL_MS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
        zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT_MS,
    }


def last_endpoint(socket: Socket) -> str:
    """The address a socket is bound to, the port chosen by the system included."""
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _reason(error: zmq.ZMQError) -> str:
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
