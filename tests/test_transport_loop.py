"""One wait for everything: messages, events, descriptors, deadlines, wake-ups."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from transport_helpers import PATIENCE, Transport

from skippy_zmq.transport import LinkEventKind, Loop

pytest_plugins = ("transport_fixtures",)


def test_wait_ends_at_its_deadline(transport: Transport) -> None:
    transport.server()
    assert transport.loop.wait(0) == []
    assert transport.loop.wait(0.001) == []


def test_busy_polling_sees_what_comes_and_ends_with_the_wait(transport: Transport) -> None:
    """Within the part that does not block, and after it."""
    server = transport.server()
    assert transport.loop.wait(0.001, busy_poll=PATIENCE) == []
    assert transport.loop.wait(0, busy_poll=PATIENCE) == []
    transport.loop.wake()
    assert transport.loop.wait(None, busy_poll=PATIENCE) == []
    with Loop() as loop:
        read, write = os.pipe()
        loop.add(read)
        for busy_poll in (1e-6, PATIENCE):
            writer = threading.Timer(0.01, os.write, (write, b"x"))
            writer.start()
            assert loop.wait(None, busy_poll=busy_poll) == [read]
            writer.join()
            os.read(read, 1)
        os.close(read)
        os.close(write)
    assert server.receive() is None


def test_what_is_done_meanwhile(leak_check: None) -> None:
    """Between two looks of busy polling, and never else."""
    done: list[int] = []

    def meanwhile() -> None:
        done.append(1)
        if len(done) == 3:
            os.write(write, b"x")

    with Loop() as loop:
        read, write = os.pipe()
        loop.add(read)
        assert loop.wait(0.001, 0.0, meanwhile) == []
        assert loop.wait(0, PATIENCE, meanwhile) == []
        assert done == []
        while len(done) < 3:  # on a busy core, polling ends early
            loop.wait(0.01, PATIENCE, meanwhile)
        assert loop.wait(PATIENCE, PATIENCE, meanwhile) == [read]
        assert len(done) == 3
        os.close(read)
        os.close(write)


def test_wake_from_another_thread(leak_check: None) -> None:
    with Loop() as loop:
        waker = threading.Thread(target=loop.wake)
        waker.start()
        assert loop.wait(None) == []
        waker.join()
        loop.wake()
        loop.wake()
        assert loop.wait(None) == []
        assert loop.wait(0) == []


def test_many_wakes_neither_block_nor_pile_up(leak_check: None) -> None:
    with Loop() as loop:
        for _ in range(70_000):
            loop.wake()
        assert loop.wait(None) == []


def test_signal_handler_ends_a_wait() -> None:
    """A signal that arrives while the loop blocks without end is acted upon at once."""
    script = """
import signal
from skippy_zmq.transport import Loop
stop = []
with Loop() as loop:
    signal.signal(signal.SIGTERM, lambda *_: (stop.append(1), loop.wake()))
    print("waiting", flush=True)
    while not stop:
        loop.wait(None)
print("stopped", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=PATIENCE) == ("stopped\n", None)
    assert process.returncode == 0


def test_wakeup_fd(leak_check: None) -> None:
    with Loop() as loop:
        os.write(loop.wakeup_fd, b"\x0f")
        assert loop.wait(None) == []
        assert not os.get_blocking(loop.wakeup_fd)


def test_many_sources_at_once(transport: Transport) -> None:
    servers = [transport.server() for _ in range(3)]
    links = [transport.connected(transport.link(server.endpoint)) for server in servers]
    left, right = socket.socketpair()
    with left, right:
        transport.loop.add(right.fileno())
        for link in links:
            link.send([b"hello"])
        left.send(b"x")
        waiting = {*servers, right.fileno()}
        while waiting:
            for source in transport.loop.wait(PATIENCE):
                waiting.discard(source)
                if source == right.fileno():
                    assert right.recv(10) == b"x"
                elif source in servers:
                    assert source.receive().frames == [b"hello"]
                    assert source.receive() is None
        transport.loop.remove(right.fileno())
        assert transport.loop.wait(0) == []


def test_unread_messages_stay_ready(transport: Transport) -> None:
    """Sending consumes libzmq's own notice of what has arrived; the loop must not go to sleep over it."""
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint, routing_id=b"peer"))
    transport.exchange(link, server)
    link.send([b"one"])
    link.send([b"two"])
    transport.until(lambda: server in transport.loop.wait(PATIENCE) or None)
    for _ in range(500):
        server.send(b"peer", [b"token"])
    seen = []
    while len(seen) < 2:
        assert server in transport.loop.wait(None)
        message = server.receive()
        if message is not None:
            seen.append(message.frames)
    assert seen == [[b"one"], [b"two"]]


def test_events_found_while_sending_are_reported(transport: Transport) -> None:
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    transport.drop(server)

    def lost() -> bool:
        link.refresh()
        return link.pending

    transport.until(lost)
    assert transport.loop.wait(None) == [link]
    assert [event.kind for event in link.events()] == [LinkEventKind.DISCONNECTED]


def test_removed_sources_are_not_reported(transport: Transport) -> None:
    server = transport.server()
    link = transport.connected(transport.link(server.endpoint))
    transport.loop.remove(server)
    link.send([b"hello"])
    with Loop() as other:
        other.add(server)
        while not (sources := other.wait(PATIENCE)):
            pass  # what its monitor had to say
        assert sources == [server]
        other.remove(server)
    assert transport.loop.wait(0) == []
    transport.loop.add(server)
    assert transport.message(server).frames == [b"hello"]


def test_peer_that_speaks_something_else_is_reported_and_dialled_again(transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        transport.loop.add(listener.fileno())

        def accept() -> socket.socket | None:
            with contextlib.suppress(BlockingIOError):
                return listener.accept()[0]
            return None

        link = transport.link(f"127.0.0.1:{listener.getsockname()[1]}")
        for _ in range(2):
            with transport.until(accept) as connection:
                connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NOSUCH".ljust(52, b"\0"))
                event = transport.event(link, LinkEventKind.HANDSHAKE_FAILED)
        assert str(link.endpoint) in event.detail
        assert not link.connected
        transport.loop.remove(listener.fileno())


@pytest.mark.parametrize("n_closes", [1, 2])
def test_close_is_idempotent(leak_check: None, n_closes: int) -> None:
    loop = Loop()
    for _ in range(n_closes):
        loop.close()


def test_wake_after_close_touches_no_other_file(leak_check: None) -> None:
    """The pipe's number may belong to another file by then, which nothing may be written to."""
    loop = Loop()
    number = loop.wakeup_fd
    loop.close()
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)
        if write != number:
            os.dup2(write, number)
        loop.wake()
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        for fd in {read, write, number}:
            os.close(fd)


def test_wakes_that_meet_close(leak_check: None) -> None:
    """Another thread wakes a loop until the moment at which it is closed, and after."""
    errors: list[BaseException] = []
    for _ in range(200):
        loop = Loop()
        started = threading.Event()

        def wake(loop: Loop = loop, started: threading.Event = started) -> None:
            try:
                for count in range(300):
                    loop.wake()
                    if count == 20:
                        started.set()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wake)
        thread.start()
        assert started.wait(PATIENCE)
        loop.close()
        thread.join(PATIENCE)
    assert not errors
