"""Noise, size bombs and half-open connections on a bound address: the offender goes, a normal client sees no error."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transport_helpers import PATIENCE, Transport

from skippy_zmq.transport import MAX_FRAME_BYTES, Link, LinkEventKind, Server, SocketLimits

pytest_plugins = ("transport_fixtures",)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x08offender"


class Pair:
    """A server with a normal client, and raw connections to it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.server: Server = transport.server()
        self.link: Link = transport.connected(transport.link(self.server.endpoint))
        self.transport.exchange(self.link, self.server)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.endpoint.port), timeout=PATIENCE)

    def handshaken(self) -> socket.socket:
        """A raw connection that has become a ZeroMQ peer."""
        connection = self.raw()
        connection.sendall(GREETING + bytes([4, len(READY)]) + READY)
        with connection.makefile("rb") as reader:
            assert reader.read(64)[:1] == b"\xff"
            flags, size = reader.read(2)
            assert flags == 4
            assert reader.read(size)[:6] == b"\x05READY"
        return connection

    def unharmed(self) -> None:
        """The normal client's connection was never lost, and new ones are still taken."""
        self._exchange(self.link)
        assert self.link.events() == []
        other = self.transport.connected(self.transport.link(self.server.endpoint))
        self._exchange(other)
        self.transport.drop(other)

    def _exchange(self, link: Link) -> None:
        link.send([b"question"])
        # libzmq takes some noise for messages of its oldest protocol: they come in as such, for the codec to refuse.
        while (received := self.transport.message(self.server)).frames != [b"question"]:
            pass
        self.server.send(received.peer, [b"answer"])
        assert self.transport.message(link).frames == [b"answer"]


@pytest.fixture
def pair(transport: Transport) -> Iterator[Pair]:
    pair = Pair(transport)
    yield pair
    pair.unharmed()


def _wait_until_closed(connection: socket.socket) -> None:
    """Return when the other side has ended the connection; TimeoutError where it does not."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        random.Random(1).randbytes(4096),
        random.Random(2).randbytes(1 << 20),
        b"\0" * 4096,
        b"\xff" * 4096,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    ],
    ids=["http", "random", "long random", "zeros", "ones", "tls"],
)
def test_noise(pair: Pair, noise: bytes) -> None:
    for _ in range(10):
        with pair.raw() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(noise)
        with pair.handshaken() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(noise)


def test_half_open_connections(pair: Pair) -> None:
    connections = [pair.raw() for _ in range(200)]
    try:
        connections[0].sendall(GREETING[:11])
        pair.unharmed()
    finally:
        for connection in connections:
            connection.close()


def test_well_formed_raw_message_arrives(pair: Pair) -> None:
    """The raw peer of these tests does speak ZeroMQ, so that what they refuse is refused for its size alone."""
    with pair.handshaken() as connection:
        connection.sendall(b"\x01\x03one\x00\x03two")
        received = pair.transport.message(pair.server)
        assert (received.peer, received.frames) == (b"offender", [b"one", b"two"])


def _resident_peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize("announced", [2 << 30, (1 << 63) - 1, MAX_FRAME_BYTES + 1])
def test_announced_size_bomb(pair: Pair, announced: int) -> None:
    before = _resident_peak_kib()
    for _ in range(20):
        with pair.handshaken() as connection:
            connection.sendall(b"\x02" + struct.pack(">Q", announced))
            _wait_until_closed(connection)
    assert _resident_peak_kib() - before < 64 << 10
    assert pair.server.receive() is None


def test_frame_at_the_limit_passes_and_above_it_only_the_offender_goes(
    make_transport: Callable[..., Transport],
) -> None:
    transport = make_transport(limits=SocketLimits(frame_bytes=1000))
    generous = make_transport()
    server = transport.server()
    normal = transport.connected(transport.link(server.endpoint, routing_id=b"normal"))
    offender = generous.connected(generous.link(server.endpoint, routing_id=b"offender"))
    offender.send([bytes(1000)] * 3)
    assert transport.message(server).frames == [bytes(1000)] * 3
    offender.send([bytes(10), bytes(1001)])
    generous.event(offender, LinkEventKind.DISCONNECTED)
    assert server.receive() is None
    transport.exchange(normal, server)
    assert normal.events() == []
    offender_back = generous.connected(offender)
    offender_back.send([b"sorry"])
    assert transport.message(server).frames == [b"sorry"]


def test_link_survives_a_frame_above_its_limit(make_transport: Callable[..., Transport], socket_dir: Path) -> None:
    """libzmq never reconnects after this; the link does."""
    stage = make_transport()
    client = make_transport(limits=SocketLimits(frame_bytes=1000))
    server = stage.server(f"ipc://{socket_dir}/stage")
    link = client.connected(client.link(server.endpoint, routing_id=b"client"))
    link.send([b"hello"])
    stage.message(server)
    server.send(b"client", [bytes(1001)])
    client.event(link, LinkEventKind.DISCONNECTED)
    client.connected(link)
    link.send([b"again"])
    assert stage.message(server).frames == [b"again"]
    server.send(b"client", [b"welcome"])
    assert client.message(link).frames == [b"welcome"]
