"""ZeroMQ sockets: addresses, options, keys, and moving frames; the only importer of zmq.

Owns: which address may be bound or reached (``endpoints``, ``ipc_path``), every socket option (``sockets``), CURVE
keys and the allow-list (``security``, ``zap``), sending and receiving multipart messages (``frames``, ``link``,
``loopback``) and waiting for them (``loop``). Does not own: what the frames mean (``wire``), who may send what when,
and retries of requests.

Every socket belongs to the thread that made it; only ``Loop.wake`` may be called from elsewhere. No call here blocks,
apart from ``Loop.wait``, name lookup before a bind or connect, and closing, which is bounded by the drain time given.
"""

from __future__ import annotations

from skippy_zmq.transport.endpoints import (
    BindTarget,
    ConnectTarget,
    Endpoint,
    check_bind,
    check_connect,
)
from skippy_zmq.transport.frames import (
    ZERO_COPY_BYTES,
    Frame,
    Incoming,
    PeerGone,
    QueueFull,
    SendableFrame,
    SendTracker,
)
from skippy_zmq.transport.link import Link, LinkEvent, LinkEventKind, Server
from skippy_zmq.transport.loop import Loop
from skippy_zmq.transport.loopback import Loopback
from skippy_zmq.transport.security import (
    KeyPair,
    Security,
    generate_keys,
    load_allowed_clients,
    load_keys,
    load_public_key,
)
from skippy_zmq.transport.sockets import (
    MAX_FRAME_BYTES,
    SocketFactory,
    SocketLimits,
    boot_nonce,
    routing_id,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "ZERO_COPY_BYTES",
    "BindTarget",
    "ConnectTarget",
    "Endpoint",
    "Frame",
    "Incoming",
    "KeyPair",
    "Link",
    "LinkEvent",
    "LinkEventKind",
    "Loop",
    "Loopback",
    "PeerGone",
    "QueueFull",
    "Security",
    "SendTracker",
    "SendableFrame",
    "Server",
    "SocketFactory",
    "SocketLimits",
    "boot_nonce",
    "check_bind",
    "check_connect",
    "generate_keys",
    "load_allowed_clients",
    "load_keys",
    "load_public_key",
    "routing_id",
]
