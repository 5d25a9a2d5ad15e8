"""Waiting for whatever comes first: a message, a change of a connection, a file descriptor, a deadline, a wake-up."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import zmq

from skippy_zmq.transport.link import Link, Server

Source = Server | Link | int
_MAX_POLL_MS = 2**31 - 1  # poll(2) takes an int; waiting is repeated after it
# For one round of busy polling; libzmq's own thread, which shares the core, needs less.
_SHARED_CORE_SECONDS = 0.0005
_MAKE_WAY_MS = 5  # sleeping, for whoever else wants this core; it is ten times what was taken from them
# A wait that has been as long may well go on: other work begins, although what it leaves in the core's own cache makes
# the next message slower to handle.
_QUIET_SECONDS = 0.001
_T = TypeVar("_T", Server, Link, int)


class Loop:
    """Blocks one thread on many sources. ``wake`` is the only call for other threads and signal handlers."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        # By what is polled; the second is there where that is a monitor, and tells what it has to say.
        self._sources: dict[zmq.Socket[bytes] | int, tuple[Source, Server | Link | None]] = {}
        self._links: list[Link] = []
        self._servers: list[Server] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        # Held while the pipe is written to or closed: its number may be another file's right after. Reentrant, for a
        # signal handler that interrupts its holder.
        self._wake_lock = threading.RLock()
        self._closed = False

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def wakeup_fd(self) -> int:
        """The end of a pipe that wakes the loop when written to; fit for signal.set_wakeup_fd."""
        return self._wake_write

    def add(self, source: _T) -> _T:
        """Wait for ``source`` too: a Server, a Link or a file descriptor to read from."""
        for index, pollable in enumerate(_pollables(source)):
            monitored = source if isinstance(source, Link | Server) and index else None
            self._sources[pollable] = source, monitored
            self._poller.register(pollable, zmq.POLLIN)
        if isinstance(source, Link):
            self._links.append(source)
        elif isinstance(source, Server):
            self._servers.append(source)
        return source

    def remove(self, source: Source) -> None:
        """Wait for ``source`` no more; to be called before it is closed."""
        for pollable in _pollables(source):
            del self._sources[pollable]
            self._poller.unregister(pollable)
        if isinstance(source, Link):
            self._links.remove(source)
        elif isinstance(source, Server):
            self._servers.remove(source)

    def wait(
        self, timeout: float | None, busy_poll: float = 0.0, meanwhile: Callable[[], object] | None = None
    ) -> list[Source]:
        """Sources with something to read; block for ``timeout`` seconds at most, without end for None.

        For the first ``busy_poll`` seconds the sources are asked again and again instead, except for some milliseconds
        whenever somebody else wants this core: a core that sleeps takes a while to wake, and computes more slowly at
        first. After the first millisecond ``meanwhile`` is called in between, for microseconds of what can wait.
        The list may be empty early, after ``wake`` for one. Drain what is listed: ``receive`` until None, ``events``,
        ``take_losses``.
        """
        ready: list[Source] = [link for link in self._links if link.pending]
        ready += [server for server in self._servers if server.pending]
        waits = [] if timeout is None else [timeout]
        waits += [link.redial_at - time.monotonic() for link in self._links if link.redial_at is not None]
        wait_ms = 0 if ready else _milliseconds(min(waits)) if waits else -1
        for pollable, _ in self._poll(wait_ms, busy_poll, meanwhile):
            if pollable == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                continue
            source, monitored = self._sources[pollable]
            if monitored is not None:
                monitored.refresh()
                if isinstance(source, Server) and not source.pending:
                    continue  # somebody has connected, which is nothing to tell
            if source not in ready:
                ready.append(source)
        self._redial()
        return ready

    def _poll(self, wait_ms: int, busy_poll: float, meanwhile: Callable[[], object] | None) -> list[tuple[Any, int]]:
        if busy_poll > 0 and wait_ms:
            now = time.monotonic()
            quiet = now + _QUIET_SECONDS
            end = now + (busy_poll if wait_ms < 0 else min(busy_poll, wait_ms / 1000))
            while now < end:
                if ready := self._poller.poll(0):
                    return ready
                if meanwhile is not None and now >= quiet:
                    meanwhile()
                os.sched_yield()
                before, now = now, time.monotonic()
                if now - before > _SHARED_CORE_SECONDS:  # somebody else ran here meanwhile
                    if ready := self._poller.poll(_MAKE_WAY_MS if wait_ms < 0 else min(_MAKE_WAY_MS, wait_ms)):
                        return ready
                    now = time.monotonic()
        return self._poller.poll(wait_ms)

    def _redial(self) -> None:
        now = time.monotonic()
        for link in self._links:
            if link.redial_at is not None and link.redial_at <= now:
                link.redial()

    def wake(self) -> None:
        """Make the present or next ``wait`` return; callable from any thread and from a signal handler, at any time."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # full: it will wake anyway
            if not self._closed:
                os.write(self._wake_write, b"\0")

    def close(self) -> None:
        """Give up the wake-up pipe; may be called twice. Sources stay open: they belong to whoever made them."""
        with self._wake_lock:
            if not self._closed:
                self._closed = True
                os.close(self._wake_read)
                os.close(self._wake_write)


def _pollables(source: Source) -> tuple[zmq.Socket[bytes] | int, ...]:
    return (source,) if isinstance(source, int) else source.poll_sockets


def _milliseconds(seconds: float) -> int:
    # Rounded up: a wait that ends just before its deadline would be repeated.
    return max(0, min(math.ceil(seconds * 1000), _MAX_POLL_MS))
