"""Servers and links for tests over real sockets, and waiting for what happens on them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from skippy_zmq.transport import (
    Endpoint,
    Incoming,
    Link,
    LinkEvent,
    LinkEventKind,
    Loop,
    Security,
    Server,
    SocketFactory,
    SocketLimits,
)

# How long to wait before a test is given up; nothing is ever asserted about time.
PATIENCE = 60.0
_T = TypeVar("_T")


class Transport:
    """Makes servers and links on one factory and one loop, and closes them."""

    def __init__(self, security: Security | None = None, limits: SocketLimits | None = None) -> None:
        self.factory = SocketFactory(security=security, limits=limits)
        self.loop = Loop()
        self._open: list[Server | Link] = []
        self._n_links = 0

    def server(self, endpoint: str = "tcp://127.0.0.1:0", **options: object) -> Server:
        server = self.loop.add(Server(self.factory, Endpoint.parse(endpoint), **options))  # type: ignore[arg-type]
        self._open.append(server)
        return server

    def link(self, endpoint: Endpoint | str, *, routing_id: bytes = b"", **options: object) -> Link:
        self._n_links += 1
        where = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        identity = routing_id or b"link-%d" % self._n_links
        link = self.loop.add(Link(self.factory, where, routing_id=identity, **options))  # type: ignore[arg-type]
        self._open.append(link)
        return link

    def drop(self, source: Server | Link, drain_seconds: float = 0.0) -> None:
        self.loop.remove(source)
        self._open.remove(source)
        source.close(drain_seconds)

    def until(self, ask: Callable[[], _T | None]) -> _T:
        """What ``ask`` returns once it returns something true, asked again after whatever happens on the sockets."""
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = ask()
            if answer:
                return answer
            assert time.monotonic() < deadline, "nothing happened"
            for source in self.loop.wait(deadline - time.monotonic()):
                if isinstance(source, Server):
                    source.take_losses()

    def settled(self, ask: Callable[[], bool]) -> None:
        """Wait until ``ask`` says so; for what no socket tells of, so it is asked again and again."""
        deadline = time.monotonic() + PATIENCE
        while not ask():
            assert time.monotonic() < deadline, "nothing happened"
            self.loop.wait(0.02)

    def connected(self, link: Link) -> Link:
        self.event(link, LinkEventKind.CONNECTED)
        return link

    def event(self, link: Link, kind: LinkEventKind) -> LinkEvent:
        return self.until(lambda: next((event for event in link.events() if event.kind is kind), None))

    def message(self, source: Server | Link) -> Incoming:
        return self.until(source.receive)

    def exchange(self, link: Link, server: Server, text: bytes = b"hello") -> None:
        """A message there and back, checked."""
        link.send([text])
        received = self.message(server)
        assert received.frames == [text]
        server.send(received.peer, [text, text])
        assert self.message(link).frames == [text, text]

    def close(self) -> None:
        for source in self._open:
            source.close()
        self._open.clear()
        self.loop.close()
        n_open = self.factory.n_open
        self.factory.close()
        assert n_open == 0
