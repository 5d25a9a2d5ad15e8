"""Raw pyzmq, as a careful program uses it: blocking, plain calls for small messages, no copies of large ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import zmq

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
