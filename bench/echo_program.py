"""The far end of the socket benchmarks: answers every message, over raw pyzmq or over our Server.

``python -m bench.echo_program raw|link echo|acknowledge PAYLOAD_BYTES ENDPOINT``. ``echo`` sends back what came,
``acknowledge`` only its first frame. A message of one frame is the end. Prints the endpoint once it listens.
"""

from __future__ import annotations

import sys

import zmq

from bench.raw_sockets import RawSocket
from skippy_zmq.transport import Endpoint, Loop, Server, SocketFactory


def serve_raw(address: str, payload_bytes: int, whole: bool) -> None:
    with RawSocket(zmq.ROUTER, address, payload_bytes) as socket:
        print(address, flush=True)
        while len(frames := socket.receive()) > 2:
            socket.send(frames if whole else frames[:2])


def serve_link(address: str, whole: bool) -> None:
    with SocketFactory() as factory, Loop() as loop:
        server = Server(factory, Endpoint.parse(address))
        loop.add(server)
        print(server.endpoint, flush=True)
        ended = False
        while not ended:
            loop.wait(None)
            while (incoming := server.receive()) is not None:
                if len(incoming.frames) < 2:
                    ended = True
                else:
                    server.send(incoming.peer, incoming.frames if whole else incoming.frames[:1])
        loop.remove(server)
        server.close()


def main() -> None:
    kind, answer, payload_bytes, address = sys.argv[1:]
    if kind == "raw":
        serve_raw(address, int(payload_bytes), answer == "echo")
    else:
        serve_link(address, answer == "echo")


if __name__ == "__main__":
    main()
