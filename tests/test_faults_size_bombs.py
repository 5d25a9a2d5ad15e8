"""Z11: what announces more than it is, is more than allowed, or is no message at all: refused, and paid for by nobody.

The codec alone: test_wire_hostile. The sockets alone, other noise included: test_transport_hostile.
"""

from __future__ import annotations

import contextlib
import random
import struct
import subprocess
import sys
from collections.abc import Iterator

import msgpack
import pytest
from fault_helpers import GREETING, Memory, Scene, TcpPipeline, closed_by_peer, n_descriptors, until
from wire_values import BATCH, BATCH_PAYLOADS

from skippy_zmq.transport.sockets import HANDSHAKE_TIMEOUT_MS
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.limits import MAX_FRAMES, MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from skippy_zmq.wire.messages import GENERATION, Kind

pytest_plugins = ("transport_fixtures", "stage_fixtures", "fault_fixtures")

_KINDS = (Kind.PING, Kind.GENERATE, Kind.ACTIVATIONS, Kind.BATCH_DONE)
_ANNOUNCED = {
    "array": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x05",
}


def _bombs() -> Iterator[tuple[str, list[bytes], str]]:
    """Name, frames, and the code of the answer."""
    for kind in _KINDS:
        prefix = bytes((GENERATION, kind))
        for name, header in _ANNOUNCED.items():
            yield f"{kind.name}: {name} of 2^32-1", [prefix, header], "protocol"
            yield f"{kind.name}: {name} of 2^32-1 inside", [prefix, b"\x91" + header], "protocol"
        yield f"{kind.name}: nested 100,000 times", [prefix, b"\x91" * 100_000], "protocol"
        yield f"{kind.name}: wide and nested 100,000 times", [prefix, b"\xdc\x04\x00" * 100_000], "protocol"
        yield f"{kind.name}: a header above its limit", [prefix, bytes(MAX_HEADER_BYTES + 1)], "too_large"
        yield f"{kind.name}: 1,000 frames", [prefix, b"\x90", *[bytes(64 << 10)] * 998], "too_large"
        yield f"{kind.name}: a frame too many", [prefix, b"\x90", *[b""] * (MAX_FRAMES - 1)], "too_large"
    for shape, payload in (
        ([1 << 20, 1 << 20], bytes(8)),
        ([1 << 27] * 4, bytes(8)),
        ([1 << 20, 1 << 20], b""),
        ([1 << 63, 2], bytes(8)),
    ):
        for nbytes in (len(payload), MAX_PAYLOAD_BYTES, 1 << 42):
            yield f"shape {shape} of {nbytes} bytes", _batch(shape, nbytes, payload), "protocol"


def _batch(shape: list[int], nbytes: int, payload: bytes) -> list[bytes]:
    prefix, header, *_ = encode(BATCH, BATCH_PAYLOADS)
    fields = msgpack.unpackb(header)
    fields[7] = [["l_out-14", 0, 0, "f32", shape, nbytes]]
    return [bytes(prefix), msgpack.packb(fields), payload]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("greeted", [False, True])
def test_messages_that_are_too_much(greeted: bool, index: int, scene: Scene) -> None:
    """One refusal each, with memory for one message at most, while the good client works on."""
    memory = Memory(scene.pipeline[index].pid)
    peer = scene.peer(index, greeted=greeted)
    for name, frames, code in _bombs():
        peer.send_frames(frames)
        error = peer.expect(wire.Error)
        assert (name, error.code, error.retry) == (name, code, False)
    peer.greet()  # and nothing else was on its way
    assert memory.growth < MAX_MESSAGE_BYTES
    assert peer.stats().counters["errors.protocol"] > 0
    scene.good.wait_for(2)


@pytest.mark.parametrize("index", [0, 1])
def test_the_largest_payload_that_is_allowed_is_refused_without_a_copy(index: int, scene: Scene) -> None:
    """A stranger's; its size is right, its sender is not."""
    memory = Memory(scene.pipeline[index].pid)
    peer = scene.peer(index)
    frames = _batch([1 << 20, MAX_PAYLOAD_BYTES >> 22], MAX_PAYLOAD_BYTES, bytes(MAX_PAYLOAD_BYTES))
    for _ in range(3):
        peer.send_frames(frames)
        assert peer.expect(wire.Error).code == "protocol"
    assert memory.growth < MAX_MESSAGE_BYTES


@pytest.mark.parametrize("announced", [2 << 30, (1 << 63) - 1, MAX_PAYLOAD_BYTES + 1])
@pytest.mark.parametrize("index", [0, 1])
def test_a_frame_above_the_limit_ends_its_connection(
    index: int, announced: int, tcp_scene: Scene, tcp_pipeline: TcpPipeline
) -> None:
    """At once, before a byte of it is taken; also as a later frame of a message that began well."""
    memory = Memory(tcp_pipeline[index].pid)
    for number in range(10):
        for before in (b"", b"\x01\x02" + bytes((GENERATION, Kind.PING))):
            with tcp_pipeline.zmtp(index, b"offender-%d" % number) as connection:
                connection.sendall(before + b"\x02" + struct.pack(">Q", announced))
                with contextlib.suppress(ConnectionError):
                    connection.sendall(bytes(1 << 16))
                assert closed_by_peer(connection)
    assert memory.growth < 16 << 20
    tcp_scene.good.wait_for(2)


_NOISE = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "random": random.Random(1).randbytes(4096),
    "zeros": bytes(4096),
    "a greeting and noise": GREETING + random.Random(2).randbytes(4096),
}


@pytest.mark.parametrize("index", [0, 1])
def test_line_noise(index: int, tcp_scene: Scene, tcp_pipeline: TcpPipeline) -> None:
    """Whatever comes of it, every connection ends, and nobody else notices."""
    pid = tcp_pipeline[index].pid
    memory, before = Memory(pid), n_descriptors(pid)
    for number in range(20):
        for name, noise in _NOISE.items():
            with tcp_pipeline.connection(index) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(noise)
            identity = f"{name}-{number}".encode()
            with tcp_pipeline.zmtp(index, identity) as connection, contextlib.suppress(ConnectionError):
                connection.sendall(noise)
    tcp_scene.good.wait_for(2)
    until(lambda: n_descriptors(pid) <= before, tcp_scene)
    assert memory.growth < 32 << 20


@pytest.mark.parametrize("index", [0, 1])
def test_half_open_connections_are_ended(index: int, tcp_scene: Scene, tcp_pipeline: TcpPipeline) -> None:
    """200 that say nothing, or half a greeting, are held until the stage ends them.

    It does so HANDSHAKE_TIMEOUT_MS after each began: nobody can hold one for 60 s, and the test need not try.
    """
    pid = tcp_pipeline[index].pid
    memory, before = Memory(pid), n_descriptors(pid)
    assert HANDSHAKE_TIMEOUT_MS <= 10_000
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(tcp_pipeline.connection(index)) for _ in range(200)]
        for number, connection in enumerate(connections):
            connection.sendall(GREETING[: number % len(GREETING)])
        tcp_scene.good.wait_for(3)
        newcomer = tcp_scene.peer(index)  # others are let in meanwhile
        assert newcomer.ready()
        assert all(closed_by_peer(connection) for connection in connections)
    newcomer.close()
    until(lambda: n_descriptors(pid) <= before, tcp_scene)
    assert memory.growth < 32 << 20


# Sends the same message for as long as it is let, in blocks of thousands.
_FLOOD = """
import os, selectors, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
reads = sys.argv[2] == "True"
block = bytes.fromhex(sys.argv[3]) * 5000
selector = selectors.DefaultSelector()
connection.setblocking(False)
selector.register(connection, selectors.EVENT_WRITE | (selectors.EVENT_READ if reads else 0))
left = memoryview(block)
while True:
    for _, events in selector.select():
        if events & selectors.EVENT_READ:
            connection.recv(1 << 20)
        if events & selectors.EVENT_WRITE:
            left = left[connection.send(left):] or memoryview(block)
"""


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_flood_of_small_messages(index: int, reads: bool, tcp_scene: Scene, tcp_pipeline: TcpPipeline) -> None:
    """From a peer that never stops to send, with as many refusals to deliver: the others are served meanwhile."""
    memory = Memory(tcp_pipeline[index].pid)
    message = b"\x01\x02" + bytes((GENERATION, Kind.PING)) + b"\x00\x01\x90"
    with tcp_pipeline.zmtp(index, b"flood") as connection:
        number = connection.fileno()
        with subprocess.Popen(
            [sys.executable, "-c", _FLOOD, str(number), str(reads), message.hex()], pass_fds=(number,)
        ) as flood:
            try:
                tcp_scene.good.wait_for(10)
                assert tcp_scene.peer(1 - index).ready()
                assert flood.poll() is None
            finally:
                flood.kill()
    assert memory.growth < MAX_MESSAGE_BYTES
