"""Messages over a connection, and what becomes of them when the other side is slow, gone or back."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zmq
from transport_helpers import PATIENCE, Transport

from skippy_zmq.errors import OptionError
from skippy_zmq.transport import (
    ZERO_COPY_BYTES,
    Endpoint,
    LinkEventKind,
    PeerGone,
    QueueFull,
    SendTracker,
    SocketLimits,
    boot_nonce,
    routing_id,
)
from skippy_zmq.wire.limits import MAX_FRAMES

pytest_plugins = ("transport_fixtures",)


def _send_until_full(send: Callable[[int], object], match: str) -> int:
    """Call ``send`` with 0, 1, 2 ... until it is refused; return the number of messages taken."""
    numbers = itertools.count()

    def forever() -> None:
        for number in numbers:
            send(number)

    with pytest.raises(QueueFull, match=match):
        forever()
    return next(numbers) - 1


def _fill_both_queues(transport: Transport, send: Callable[[], None], sent: Sequence[object], queue: int) -> None:
    """Send until the queues of both sides, of ``queue`` messages each, are full, and not only the sender's own."""

    def full() -> bool:
        _send_until_full(lambda _: send(), "does not read")
        return len(sent) >= 2 * queue

    transport.settled(full)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, socket_dir: Path) -> str:
    return f"ipc://{socket_dir}/stage" if request.param == "ipc" else "tcp://127.0.0.1:0"


def test_frames_arrive_as_they_were_sent(transport: Transport, address: str) -> None:
    server = transport.server(address)
    link = transport.connected(transport.link(server.endpoint, routing_id=b"stage-1"))
    large = bytes(range(256)) * (ZERO_COPY_BYTES // 128)
    frames = [b"\1\2", b"", bytearray(b"header"), memoryview(b"view"), large, memoryview(large)[1:]]
    link.send(frames)
    received = transport.message(server)
    assert received.peer == b"stage-1"
    assert [bytes(frame) for frame in received.frames] == [bytes(frame) for frame in frames]
    server.send(received.peer, received.frames)
    assert [bytes(frame) for frame in transport.message(link).frames] == [bytes(frame) for frame in frames]
    assert server.receive() is None
    assert link.receive() is None


def test_large_frames_are_views_and_outlive_the_sockets(transport: Transport) -> None:
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    link.send([bytes(ZERO_COPY_BYTES), bytes(ZERO_COPY_BYTES - 1)])
    large, small = transport.message(server).frames
    assert isinstance(large, memoryview)
    assert isinstance(small, bytes)
    transport.drop(link)
    transport.drop(server)
    assert bytes(large) == bytes(ZERO_COPY_BYTES)


def test_view_of_wider_items_counts_bytes(transport: Transport) -> None:
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    items = memoryview(bytes(4 * ZERO_COPY_BYTES)).cast("f")
    tracker = link.send([items], track=True)
    assert bytes(transport.message(server).frames[0]) == bytes(4 * ZERO_COPY_BYTES)
    assert tracker.wait(PATIENCE)


def test_tracker_covers_every_frame(make_transport: Callable[..., Transport]) -> None:
    """A large first frame before a small last one: the memory is free only once the first has left."""
    transport = make_transport(limits=SocketLimits(send_messages=4, receive_messages=4))
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    buffer = bytearray(8 << 20)
    trackers: list[SendTracker] = []
    _fill_both_queues(transport, lambda: trackers.append(link.send([buffer, b"last"], track=True)), trackers, 4)
    assert not trackers[-1].done
    assert not trackers[-1].wait(0)
    for _ in trackers:
        transport.message(server)
    assert trackers[-1].wait(PATIENCE)
    buffer[:] = b"\1" * len(buffer)


@pytest.mark.parametrize("before", [b"before", b""])
def test_memory_of_small_messages_is_free_at_once(before: bytes, transport: Transport) -> None:
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    buffer = bytearray(before)
    tracker = link.send([buffer, buffer], track=True)
    buffer[:] = b"after!"[: len(before)]
    assert transport.message(server).frames == [before, before]
    assert tracker.wait(PATIENCE)


def test_small_messages_are_tracked_until_they_are_read(make_transport: Callable[..., Transport]) -> None:
    """Or until their connection ends."""
    transport = make_transport(limits=SocketLimits(send_messages=100, receive_messages=100))
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    trackers: list[SendTracker] = []
    frames = [b"head", bytes(ZERO_COPY_BYTES - 1)]
    _fill_both_queues(transport, lambda: trackers.append(link.send(frames, track=True)), trackers, 100)

    def n_unread() -> int:
        return sum(not tracker.done for tracker in trackers)

    n_before = n_unread()
    assert n_before  # how many is the kernel's and libzmq's matter: their buffers hold more or less
    for _ in range(100):
        transport.message(server)
    transport.settled(lambda: n_unread() < n_before)
    transport.drop(link)
    transport.until(lambda: all(tracker.done for tracker in trackers))


def test_too_many_frames_are_counted_not_kept(transport: Transport) -> None:
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint, routing_id=b"peer"))
    link.send([b"x"] * MAX_FRAMES)
    assert len(transport.message(server).frames) == MAX_FRAMES
    link.send([b"x"] * 1000)
    received = transport.message(server)
    assert (received.peer, received.frames, received.excess) == (b"peer", [], 1000 - MAX_FRAMES)
    server.send(b"peer", [b"x"] * (MAX_FRAMES + 1))
    assert transport.message(link).excess == 1
    transport.exchange(link, server)


def test_nobody_under_that_id(transport: Transport) -> None:
    server = transport.server()
    with pytest.raises(PeerGone, match=rf"{server.endpoint}: peer nobody is not connected"):
        server.send(b"nobody", [b"token"])
    with pytest.raises(PeerGone, match="peer 0x00ff is not connected"):
        server.send(b"\0\xff", [b"token"])


def test_nobody_at_that_address(transport: Transport, socket_dir: Path) -> None:
    link = transport.link(f"ipc://{socket_dir}/later")
    with pytest.raises(PeerGone, match="later is not connected"):
        link.send([b"activations"])
    server = transport.server(f"ipc://{socket_dir}/later")
    transport.exchange(transport.connected(link), server)


# Asks, and is killed before it can read the answer.
ASKER = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.routing_id = b"asker"
socket.connect(sys.argv[1])
socket.send(b"generate")
sys.stdin.read()
"""


def test_vanished_peer_is_noticed_not_passed_over(transport: Transport, address: str) -> None:
    server = transport.server(address)
    asker = subprocess.Popen([sys.executable, "-c", ASKER, str(server.endpoint)], stdin=subprocess.PIPE)
    assert transport.message(server).frames == [b"generate"]
    asker.kill()
    asker.communicate(timeout=PATIENCE)
    other = transport.connected(transport.link(server.endpoint))

    def stream() -> str:
        try:
            server.send(b"asker", [b"token"])
        except PeerGone as error:
            return str(error)
        transport.exchange(other, server)
        return ""

    assert "peer asker is not connected" in transport.until(stream)
    transport.exchange(other, server)


def test_slow_reader_fills_a_queue_of_known_size(make_transport: Callable[..., Transport], address: str) -> None:
    limits = SocketLimits(send_messages=16)
    transport = make_transport(limits=limits)
    server = transport.server(address)
    other = transport.connected(transport.link(server.endpoint, routing_id=b"other"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as slow:
        slow.routing_id, slow.rcvhwm, slow.linger = b"slow", 16, 0
        slow.connect(str(server.endpoint))
        slow.send(b"hello")
        assert transport.message(server).frames == [b"hello"]
        message = bytes(1 << 20)
        sent = _send_until_full(
            lambda number: server.send(b"slow", [b"%d" % number, message]), "peer slow does not read"
        )
        # Two queues and what the kernel and libzmq's I/O thread hold between them.
        assert sent < 4 * limits.send_messages
        transport.exchange(other, server)
        for number in range(sent):
            assert slow.recv_multipart()[0] == b"%d" % number
        server.send(b"slow", [b"again"])
        assert slow.recv() == b"again"


def test_link_that_is_not_read_holds_up_nobody(transport: Transport, address: str) -> None:
    """It keeps what it is sent in its own memory: libzmq trips over a full queue (test_transport_abort)."""
    server = transport.server(address)
    link = transport.connected(transport.link(server.endpoint, routing_id=b"slow"))
    other = transport.connected(transport.link(server.endpoint, routing_id=b"other"))
    transport.exchange(link, server)
    for number in range(5000):
        server.send(b"slow", [b"%d" % number])
        if number % 500 == 0:
            transport.exchange(other, server)
    assert [transport.message(link).frames for _ in range(5000)] == [[b"%d" % number] for number in range(5000)]


def test_link_to_a_slow_stage_says_so(make_transport: Callable[..., Transport]) -> None:
    transport = make_transport(limits=SocketLimits(send_messages=4, receive_messages=4))
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    _send_until_full(lambda _: link.send([bytes(1 << 20)]), f"{server.endpoint} does not read")
    assert transport.message(server).frames[0] == bytes(1 << 20)


def test_lost_connection_is_an_event_and_heals(transport: Transport, address: str) -> None:
    server = transport.server(address)
    endpoint = server.endpoint
    link = transport.connected(transport.link(endpoint))
    transport.drop(server)
    assert str(endpoint) in transport.event(link, LinkEventKind.DISCONNECTED).detail
    assert not link.connected
    with pytest.raises(PeerGone):
        link.send([b"activations"])
    server = transport.server(str(endpoint))
    transport.exchange(transport.connected(link), server)


def test_what_had_arrived_outlives_the_connection(transport: Transport, address: str) -> None:
    """A stage that says why it goes and goes: the reason can be read although the loss is noticed first."""
    server = transport.server(address)
    endpoint = str(server.endpoint)
    link = transport.connected(transport.link(server.endpoint, routing_id=b"client"))
    transport.exchange(link, server)
    for number in range(50):
        server.send(b"client", [b"last words %d" % number])
    transport.drop(server, drain_seconds=PATIENCE)
    transport.event(link, LinkEventKind.DISCONNECTED)
    restarted = transport.server(endpoint)
    transport.connected(link)
    assert [transport.message(link).frames for _ in range(50)] == [[b"last words %d" % number] for number in range(50)]
    transport.exchange(link, restarted)


def test_nothing_queued_for_a_lost_connection_reaches_the_next(
    make_transport: Callable[..., Transport], address: str
) -> None:
    transport = make_transport(limits=SocketLimits(send_messages=8, receive_messages=8))
    server = transport.server(address)
    endpoint = str(server.endpoint)
    link = transport.connected(transport.link(server.endpoint))
    _send_until_full(lambda _: link.send([b"old", bytes(1 << 20)]), "does not read")
    transport.drop(server)
    transport.event(link, LinkEventKind.DISCONNECTED)
    server = transport.server(endpoint)
    transport.connected(link)
    link.send([b"new"])
    assert transport.message(server).frames == [b"new"]


class _Interrupted(Sequence[bytes]):
    """Frames of a message during whose sending the peer goes away."""

    def __init__(self, n_frames: int, at: int, cut: Callable[[], None]) -> None:
        self._n_frames, self._at, self._cut = n_frames, at, cut

    def __len__(self) -> int:
        return self._n_frames

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        if index >= self._n_frames:
            raise IndexError
        if index == self._at:
            self._cut()
        return b"lost %d" % index


@pytest.mark.parametrize("at", [1, 2, 3])
def test_peer_that_leaves_in_the_middle_of_a_message(transport: Transport, at: int) -> None:
    """What is sent next arrives whole: libzmq would otherwise eat its first frames as the rest of the lost message."""
    server = transport.server()
    endpoint = str(server.endpoint)
    link = transport.connected(transport.link(server.endpoint))

    events = []

    def cut() -> None:
        transport.drop(server)
        events.append(transport.event(link, LinkEventKind.DISCONNECTED))

    with contextlib.suppress(PeerGone):  # libzmq may also take the rest and drop it; the event says so
        link.send(_Interrupted(4, at, cut))
    assert len(events) == 1
    server = transport.server(endpoint)
    transport.connected(link)
    link.send([b"first", b"second"])
    assert transport.message(server).frames == [b"first", b"second"]


@pytest.mark.parametrize("busy", [False, True])
def test_same_identity_restarts(transport: Transport, address: str, busy: bool) -> None:
    """Case: a client dies and comes back under its id; ``busy``: the stage looks at its socket only after both."""
    server = transport.server(address)
    for round_number in range(20):
        old = zmq.Context()
        new = zmq.Context()
        for context, text in ((old, b"old"), (new, b"new")):
            client = context.socket(zmq.DEALER)
            client.setsockopt(zmq.LINGER, 1000 if text == b"new" else 0)
            client.routing_id = b"fixed"
            client.connect(str(server.endpoint))
            client.send(b"%s %d" % (text, round_number))
            if text == b"old":
                if not busy:
                    assert transport.message(server).frames == [b"old %d" % round_number]
                client.close()
                old.term()
        wanted = b"new %d" % round_number
        while (received := transport.message(server)).frames != [wanted]:
            pass
        assert received.peer == b"fixed"
        server.send(received.peer, [b"for " + wanted])
        assert client.poll(int(PATIENCE * 1000))
        assert client.recv() == b"for " + wanted
        assert not client.poll(0)
        client.close()
        new.term()


def test_newcomer_takes_over_from_a_live_peer(transport: Transport, address: str) -> None:
    server = transport.server(address)
    first = transport.connected(transport.link(server.endpoint, routing_id=b"fixed"))
    transport.exchange(first, server)
    second = transport.connected(transport.link(server.endpoint, routing_id=b"fixed"))
    transport.exchange(second, server)
    assert first.receive() is None
    transport.event(first, LinkEventKind.DISCONNECTED)  # instead of silence


def test_take_overs_leave_nothing_open(transport: Transport, address: str) -> None:
    """And nobody else's connection is ended by one."""
    server = transport.server(address)
    other = transport.connected(transport.link(server.endpoint, routing_id=b"other"))
    transport.exchange(other, server)

    def n_descriptors() -> int:
        return len(list(Path("/dev/fd").iterdir()))

    before = n_descriptors()
    known = None
    for _ in range(20):
        link = transport.connected(transport.link(server.endpoint, routing_id=b"fixed"))
        transport.exchange(link, server)
        if known is not None:
            transport.drop(known)  # before it dials again, and takes over in its turn what may be under way then
        known = link
    assert known is not None
    transport.drop(known)
    transport.settled(lambda: server.receive() is None and n_descriptors() <= before)
    transport.exchange(other, server)
    assert other.events() == []


def test_routing_ids() -> None:
    assert routing_id("stage0", "abc") == b"stage0-abc"
    assert boot_nonce() != boot_nonce()
    for name in ("", "two words", "naïve", "x" * 255, "tab\t", "zero\0"):
        with pytest.raises(OptionError, match="name"):
            routing_id(name, boot_nonce())


@pytest.mark.parametrize("identity", [b"\0automatic", b"x" * 256])
def test_routing_id_that_libzmq_would_not_take(transport: Transport, identity: bytes) -> None:
    with pytest.raises(OptionError, match="routing id"):
        transport.link(Endpoint("tcp", "127.0.0.1", 1), routing_id=identity)


@pytest.mark.parametrize("field", ["frame_bytes", "send_messages", "receive_messages"])
@pytest.mark.parametrize("value", [0, -1])
def test_no_limit_is_not_a_limit(field: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"socket limit {field} {value}"):
        SocketLimits(**{field: value})
