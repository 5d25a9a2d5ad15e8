"""One hop: a message of the size of a decode activation there and back, our link against raw pyzmq."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import zmq
from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Comparison
from skippy_zmq.transport import Endpoint, Link, Loop, Server, SocketFactory

PAYLOAD = bytes(2304)  # 576 floats: one row of SmolLM2
ROUNDS = 200


def _answer_raw(context: zmq.Context[zmq.Socket[bytes]], address: str, ready: threading.Event) -> None:
    socket = context.socket(zmq.ROUTER)
    socket.bind(address)
    ready.set()
    while len(frames := socket.recv_multipart()) > 2:
        socket.send_multipart(frames)
    socket.close(0)


def _answer_link(factory: SocketFactory, address: str, ready: threading.Event) -> None:
    server = Server(factory, Endpoint.parse(address))
    with Loop() as loop:
        loop.add(server)
        ready.set()
        while True:
            loop.wait(None)
            while (incoming := server.receive()) is not None:
                if len(incoming.frames) < 2:
                    server.close()
                    return
                server.send(incoming.peer, incoming.frames)


def test_hop(comparison: Comparison, benchmark: BenchmarkFixture) -> None:
    """Ping-pong over ipc between two threads."""
    with tempfile.TemporaryDirectory() as folder, SocketFactory() as factory, zmq.Context() as context, Loop() as loop:
        addresses = [f"ipc://{Path(folder)}/raw", f"ipc://{Path(folder)}/link"]
        threads = []
        for target, owner, address in (
            (_answer_raw, context, addresses[0]),
            (_answer_link, factory, addresses[1]),
        ):
            ready = threading.Event()
            threads.append(threading.Thread(target=target, args=(owner, address, ready)))
            threads[-1].start()
            assert ready.wait(10)
        raw = context.socket(zmq.DEALER)
        raw.connect(addresses[0])
        link = Link(factory, Endpoint.parse(addresses[1]), routing_id=b"bench")
        loop.add(link)
        while not link.connected:
            loop.wait(5)

        def ping_raw() -> None:
            for _ in range(ROUNDS):
                raw.send_multipart([b"ab", b"header", PAYLOAD])
                raw.recv_multipart()

        def ping_link() -> None:
            for _ in range(ROUNDS):
                link.send([b"ab", b"header", PAYLOAD])
                while (incoming := link.receive()) is None:
                    loop.wait(5)
                assert bytes(incoming.frames[2]) == PAYLOAD

        result = comparison.run("hop over ipc, 2.3 KB there and back", 1.5, ping_link, ping_raw, rounds=15)
        benchmark.extra_info["ratio"] = result.ratio
        benchmark.pedantic(ping_link, rounds=5)
        raw.send(b"end")
        link.send([b"end"])
        for thread in threads:
            thread.join(10)
        raw.close(0)
        loop.remove(link)
        link.close()
