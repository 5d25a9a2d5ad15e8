"""Our Link and Server beside raw pyzmq DEALER and ROUTER, between two processes: ping-pong and stream."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.raw_sockets import Exchange, far_end, frames_of, raw_exchange
from skippy_zmq.transport import Endpoint, Link, Loop, SocketFactory

HOP_BYTES = 2304  # 576 floats: one row of SmolLM2
MIB = 1 << 20
SIZES = {"2.3 KB": HOP_BYTES, "64 KiB": MIB // 16, "1 MiB": MIB, "8 MiB": 8 * MIB}
HOP_TARGET, STREAM_TARGET = 1.5, 0.8
TARGETED = {("ipc", HOP_BYTES, "echo"), ("ipc", MIB, "acknowledge")}
WINDOW = 4  # messages under way in a stream, as the ring's credit would have it


@contextmanager
def _link(address: str, payload_bytes: int, window: int) -> Iterator[Exchange]:
    frames = frames_of(payload_bytes)
    with SocketFactory() as factory, Loop() as loop:
        link = Link(factory, Endpoint.parse(address), routing_id=b"bench")
        loop.add(link)
        while not link.events():  # the first says that it is connected
            loop.wait(5)

        def receive() -> Sequence[bytes | memoryview]:
            while (incoming := link.receive()) is None:
                loop.wait(5)
            return incoming.frames

        def exchange(count: int) -> float:
            started = time.perf_counter()
            for number in range(count + window):
                if number >= window:
                    answer = receive()
                if number < count:
                    link.send(frames)
            seconds = time.perf_counter() - started
            assert [bytes(frame) for frame in answer] == frames[: len(answer)]
            return seconds

        yield exchange
        loop.remove(link)
        link.close()


def _per_message(exchange: Exchange, count: int) -> float:
    return exchange(count) / count


def _address(transport: str, directory: str, kind: str) -> str:
    if transport == "ipc":
        return f"ipc://{directory}/{kind}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("answer", ["echo", "acknowledge"], ids=["ping-pong", "stream"])
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("size", SIZES)
def test_sockets(size: str, transport: str, answer: str, comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """A message there and back, one after the other; and a window of messages that are only acknowledged."""
    payload_bytes = SIZES[size]
    window = 1 if answer == "echo" else WINDOW
    count = max(12, min(300, 24 * MIB // payload_bytes))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        calls = {}
        for kind, connect in (("link", _link), ("raw", raw_exchange)):
            address = _address(transport, directory, kind)
            stack.enter_context(far_end(kind, answer, payload_bytes, address))
            exchange = stack.enter_context(connect(address, payload_bytes, window))
            calls[kind] = partial(_per_message, exchange, count)
        seconds = alternate(benchmark, 15, calls)
    name = f"{'there and back' if answer == 'echo' else 'stream'}, {size}, {transport}"
    if (transport, payload_bytes, answer) not in TARGETED:
        comparison.figure(f"{name}: time of raw", seconds["link"] / seconds["raw"], "ratio")
    elif answer == "echo":
        comparison.at_most(HOP_TARGET, f"hop: {name}", seconds["link"] * 1e6, seconds["raw"] * 1e6, "us")
    else:
        rates = {kind: payload_bytes / MIB / value for kind, value in seconds.items()}
        comparison.at_least(STREAM_TARGET, f"hop: {name}", rates["link"], rates["raw"], "MiB/s")
    for kind, value in seconds.items():
        if answer == "echo":
            comparison.figure(f"{name}: {kind}", value * 1e6, "us")
        else:
            comparison.figure(f"{name}: {kind}", payload_bytes / MIB / value, "MiB/s")
            comparison.point("link throughput", f"{kind}, {transport}", payload_bytes, payload_bytes / MIB / value)
