"""The event loop of a link proxy: accepts, dials, and carries bytes both ways when they are due. One thread runs it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock

from skippy_zmq.errors import OptionError
from skippy_zmq.testing.shaping import MAX_PIECE_BYTES, Wire
from skippy_zmq.testing.stamped import ask_for_stamps, receive

# Closing with this drops what the kernel still holds, as a broken line does.
_ABORT = struct.pack("ii", 1, 0)

# A kernel wakes a sleeper about so late; the rest of the time is spent awake.
_EARLY = 200e-6

Dial = Callable[[], socket.socket]


class Flow:
    """One direction of a connection. ``None`` in the queue is the end of the stream, which travels like bytes."""

    __slots__ = ("blocked", "ended", "held_until", "n_bytes", "over", "queue", "sink", "source", "wire")

    def __init__(self, source: socket.socket, sink: socket.socket, wire: Wire) -> None:
        self.source = source
        self.sink = sink
        self.wire = wire
        self.queue: deque[tuple[float, bytes | memoryview | None]] = deque()
        self.n_bytes = 0
        self.held_until = -math.inf  # what waited at the source had no way in before
        self.blocked = False  # the sink takes no more for now
        self.ended = False  # the source has said all
        self.over = False  # the sink has been told so, or is gone

    @property
    def wants_bytes(self) -> bool:
        return not self.ended and self.n_bytes < self.wire.shape.in_flight_bytes

    @property
    def next_at(self) -> float:
        return self.queue[0][0] if self.queue and not self.blocked else math.inf

    def read(self, scratch: memoryview) -> None:
        """Take what the source has, and say when it comes out."""
        room = self.wire.shape.in_flight_bytes - self.n_bytes
        try:
            n, came = receive(self.source, scratch[:room])
        except BlockingIOError:
            return
        except OSError:  # a lost peer: what it had sent still arrives
            n, came = 0, time.monotonic()
        entered = max(came, self.held_until)
        if n == 0:
            self.ended = True
            self.queue.append((self.wire.arrival(entered, 0), None))
            return
        self.n_bytes += n
        for piece in self.wire.pieces(bytes(scratch[:n])):
            self.queue.append((self.wire.arrival(entered, len(piece)), piece))

    def deliver(self, now: float) -> None:
        """Hand on what is due by ``now``."""
        if not self.wants_bytes:
            self.held_until = now
        while self.queue and not self.blocked and self.queue[0][0] <= now:
            due, data = self.queue[0]
            try:
                if data is None:
                    self.over = True
                    self.sink.shutdown(socket.SHUT_WR)
                else:
                    sent = self.sink.send(data)
                    self.n_bytes -= sent
                    if sent < len(data):
                        self.queue[0] = (due, memoryview(data)[sent:])
                        continue
            except BlockingIOError:
                self.blocked = True
                return
            except OSError:  # nobody reads it any more
                self.give_up()
                return
            self.queue.popleft()

    def give_up(self) -> None:
        self.queue.clear()
        self.n_bytes = 0
        self.ended = self.over = True


class Connection:
    """Two sockets and the flows between them; ``near`` was accepted, ``far`` is being dialled until ``established``."""

    def __init__(self, near: socket.socket, far: socket.socket, forward: Wire, back: Wire) -> None:
        self.near = near
        self.far = far
        self.established = False
        self.forward = Flow(near, far, forward)
        self.back = Flow(far, near, back)
        self.flows = (self.forward, self.back)

    @property
    def over(self) -> bool:
        return self.forward.over and self.back.over

    def interest(self, sock: socket.socket) -> int:
        """The events that matter on one of the two sockets now."""
        if not self.established:
            return selectors.EVENT_WRITE if sock is self.far else 0
        source, sink = (self.forward, self.back) if sock is self.near else (self.back, self.forward)
        reads = selectors.EVENT_READ if source.wants_bytes else 0
        return reads | (selectors.EVENT_WRITE if sink.blocked and not sink.over else 0)

    def close(self) -> None:
        self.near.close()
        self.far.close()


class Pump:
    """Owns the listener, the connections and a pipe that wakes it. ``run`` until ``stop``; ``call`` from other threads.

    ``dial`` makes a non-blocking socket that has begun to connect to the other side; OSError where that fails at once.
    """

    def __init__(self, listener: socket.socket, dial: Dial, forward: Wire, back: Wire) -> None:
        self.connections: list[Connection] = []
        self.paused = False
        self._listener = listener
        self._dial = dial
        self._forward = forward
        self._back = back
        self._selector = selectors.DefaultSelector()
        self._interest: dict[socket.socket, int] = {}
        self._scratch = memoryview(bytearray(MAX_PIECE_BYTES))
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._calls: deque[tuple[Callable[[], int], Future[int]]] = deque()
        self._lock = Lock()
        self._stopping = self._ended = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    # ---- for other threads

    def call(self, function: Callable[[], int]) -> int:
        """Have ``function`` run by the loop and return its result; raises OptionError once the loop has ended."""
        future: Future[int] = Future()
        with self._lock:
            if self._ended:
                raise OptionError("link proxy: closed")
            self._calls.append((function, future))
            os.write(self._wake_write, b"\0")
        return future.result()

    # ---- in the loop, by ``call``

    def stop(self) -> int:
        self._stopping = True
        return len(self.connections)

    def pause(self) -> int:
        self.paused = True
        return len(self.connections)

    def resume(self) -> int:
        self.paused = False
        for connection in self.connections:
            for flow in connection.flows:
                flow.held_until = time.monotonic()
        return len(self.connections)

    def cut(self) -> int:
        """Drop every connection with what is under way on it; how many there were."""
        n_connections = len(self.connections)
        for connection in self.connections:
            for sock in (connection.near, connection.far):
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
            self._close(connection)
        self.connections.clear()
        return n_connections

    # ---- the loop

    def run(self) -> None:
        """Carry bytes until stopped, then close everything but the listener's file."""
        try:
            while not self._stopping:
                self._step()
        finally:
            with self._lock:
                self._ended = True
                calls, self._calls = self._calls, deque()
            for _, future in calls:
                future.set_exception(OptionError("link proxy: closed"))
            for connection in self.connections:
                self._close(connection)
            self.connections.clear()
            self._selector.close()
            self._listener.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _step(self) -> None:
        self._wait()
        if not self.paused:
            for key, events in self._selector.select(0):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._take(key.data, key.fileobj, events)
        self._run_calls()
        if self.paused:
            return
        for connection in self.connections:
            if connection.over:
                self._close(connection)
            else:
                self._watch(connection)
        self.connections = [c for c in self.connections if not c.over]

    def _wait(self) -> None:
        """Until a socket or a call is there, or something has come out."""
        if self.paused:
            select.select([self._wake_read], [], [])
            return
        next_at = min((flow.next_at for c in self.connections if c.established for flow in c.flows), default=math.inf)
        while True:
            # Also before it is due: so it is in the caches when it is.
            self._deliver()
            left = next_at - time.monotonic()
            if left <= 0:
                os.sched_yield()  # whoever it was for may have to run on this core
                return
            # select, since epoll counts whole milliseconds.
            ready, _, _ = select.select([self._selector], [], [], None if left == math.inf else max(0.0, left - _EARLY))
            if ready:
                return

    def _deliver(self) -> None:
        now = time.monotonic()
        for connection in self.connections:
            if connection.established:
                for flow in connection.flows:
                    flow.deliver(now)

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        with self._lock:
            calls, self._calls = self._calls, deque()
        for function, future in calls:
            try:
                future.set_result(function())
            except OSError as error:
                future.set_exception(error)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            try:
                far = self._dial()
            except OSError:
                near.close()
                continue
            near.setblocking(False)
            if near.family != socket.AF_UNIX:
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ask_for_stamps(near)
            ask_for_stamps(far)
            connection = Connection(near, far, self._forward, self._back)
            self.connections.append(connection)
            self._watch(connection)

    def _take(self, connection: Connection, sock: object, events: int) -> None:
        if connection.over:
            return  # it ended while other events of this step were taken
        if not connection.established:
            if connection.far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                for flow in connection.flows:
                    flow.give_up()
            connection.established = True
            return
        source, sink = connection.flows if sock is connection.near else connection.flows[::-1]
        if events & selectors.EVENT_READ:
            source.read(self._scratch)
        if events & selectors.EVENT_WRITE:
            sink.blocked = False

    def _watch(self, connection: Connection) -> None:
        for sock in (connection.near, connection.far):
            wanted, now = connection.interest(sock), self._interest.get(sock, 0)
            if wanted == now:
                continue
            if not now:
                self._selector.register(sock, wanted, connection)
            elif wanted:
                self._selector.modify(sock, wanted, connection)
            else:
                self._selector.unregister(sock)
            self._interest[sock] = wanted

    def _close(self, connection: Connection) -> None:
        for sock in (connection.near, connection.far):
            if self._interest.pop(sock, 0):
                self._selector.unregister(sock)
        connection.close()
