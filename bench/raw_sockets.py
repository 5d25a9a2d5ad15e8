"""Raw pyzmq, as a careful program uses it: blocking, plain calls for small messages, no copies of large ones."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import zmq

from bench.peers import ROOT

Exchange = Callable[[int], float]  # how many messages; seconds

LARGE_BYTES = 65536  # pyzmq's own threshold: below it a copy costs less than avoiding it


class RawSocket:
    """A bound ROUTER or a connected DEALER for messages whose last frame has ``payload_bytes``."""

    def __init__(self, kind: int, address: str, payload_bytes: int) -> None:
        self._copy = payload_bytes < LARGE_BYTES
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.linger = 0
        if kind == zmq.ROUTER:
            self._socket.bind(address)
        else:
            self._socket.connect(address)

    def send(self, frames: Sequence[Any]) -> None:
        self._socket.send_multipart(frames, copy=self._copy)

    def receive(self) -> Sequence[Any]:
        frames: Sequence[Any] = self._socket.recv_multipart(copy=self._copy)
        return frames

    def close(self) -> None:
        self._context.destroy(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def frames_of(payload_bytes: int) -> list[bytes]:
    return [b"ab", b"header", bytes(payload_bytes)]


@contextmanager
def far_end(kind: str, answer: str, payload_bytes: int, address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.echo_program", kind, answer, str(payload_bytes), address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == address.encode()
            yield
        finally:
            process.kill()


@contextmanager
def raw_exchange(
    address: str, payload_bytes: int, window: int, payloads: Sequence[bytes | memoryview] = ()
) -> Iterator[Exchange]:
    """``payloads``: what to send in turns, in place of one and the same memory, which stays in the caches."""
    messages = [[b"ab", b"header", payload] for payload in payloads] or [frames_of(payload_bytes)]
    with RawSocket(zmq.DEALER, address, payload_bytes) as dealer:

        def exchange(count: int) -> float:
            started = time.perf_counter()
            for number in range(count + window):
                if number >= window:
                    dealer.receive()
                if number < count:
                    dealer.send(messages[number % len(messages)])
            return time.perf_counter() - started

        yield exchange
