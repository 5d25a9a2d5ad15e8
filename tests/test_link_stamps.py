"""Bytes enter a link when the kernel took them in, not when the proxy came to look."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from transport_helpers import PATIENCE

from skippy_zmq.testing.pump import Flow
from skippy_zmq.testing.shaping import LinkShape, Wire
from skippy_zmq.testing.stamped import ask_for_stamps, receive

Pair = tuple[socket.socket, socket.socket]
DELAY = 3600.0
LOOKED_LATE = 0.2
CLOCKS_APART = 0.001  # the wall clock may be set right a little, meanwhile


def _pair(family: str) -> Pair:
    if family == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname(), timeout=PATIENCE)
        there, _ = listener.accept()
    return near, there


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Near end, and an end that notes when bytes come, if its kind can; the kernel begins a little later."""
    near, there = _pair(request.param)
    with near, there:
        there.settimeout(PATIENCE)
        ask_for_stamps(there)
        give_up = time.monotonic() + PATIENCE
        while there.family != socket.AF_UNIX:
            near.sendall(b"first")
            now = time.monotonic()
            if receive(there, memoryview(bytearray(100)))[1] < now:
                break
            assert now < give_up
        yield near, there


def test_when_bytes_came_in(pair: Pair) -> None:
    near, there = pair
    before = time.monotonic()
    near.sendall(b"bytes")
    time.sleep(LOOKED_LATE)
    looked = time.monotonic()
    n, came = receive(there, memoryview(bytearray(100)))
    assert n == 5
    if there.family == socket.AF_UNIX:
        assert looked <= came <= time.monotonic()
    else:
        assert before - CLOCKS_APART <= came < looked - LOOKED_LATE / 2


def test_the_end_and_nothing_at_all(pair: Pair) -> None:
    near, there = pair
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        receive(there, memoryview(bytearray(1)))
    near.close()
    there.settimeout(PATIENCE)
    assert receive(there, memoryview(bytearray(1)))[0] == 0


def test_bytes_that_had_no_way_in_enter_late(pair: Pair) -> None:
    """Whether the link was full or dead: the delay counts from when it was open again."""
    near, there = pair
    flow = Flow(there, near, Wire(LinkShape(DELAY), "seed"))
    for held in (False, True):
        before = time.monotonic()
        near.sendall(b"bytes")
        time.sleep(LOOKED_LATE)
        looked = time.monotonic()
        if held:
            flow.held_until = looked
        flow.read(memoryview(bytearray(100)))
        due, data = flow.queue.pop()
        assert data == b"bytes"
        if held or there.family == socket.AF_UNIX:
            assert due >= looked + DELAY
        else:
            assert before + DELAY - CLOCKS_APART <= due < looked + DELAY - LOOKED_LATE / 2


def test_a_full_link_holds_what_comes(pair: Pair) -> None:
    near, there = pair
    flow = Flow(there, near, Wire(LinkShape(0.0, bandwidth_bytes_per_s=1.0), "seed"))
    flow.n_bytes = flow.wire.shape.in_flight_bytes
    now = time.monotonic()
    flow.deliver(now)
    assert flow.held_until == now
    flow.n_bytes = 0
    flow.deliver(now + 1)
    assert flow.held_until == now
