"""The end: nothing unsent holds a process up, and nothing sent is lost when draining was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from transport_helpers import PATIENCE, Transport

from skippy_zmq.transport import Endpoint, Link, Server, SocketFactory

pytest_plugins = ("transport_fixtures",)

# Programs that end in the middle of things. All must end by themselves: waiting for a peer that never comes would not.
PREAMBLE = """
import signal, sys
from skippy_zmq.transport import *
factory = SocketFactory()
endpoint = Endpoint.parse(sys.argv[1])
"""
ENDINGS = {
    "nothing listens": """
link = Link(factory, endpoint, routing_id=b"client")
try:
    link.send([bytes(1 << 20)])
except PeerGone as error:
    link.close(); factory.close(); sys.exit(f"{error}")
""",
    "exception": """
with factory:
    link = Link(factory, endpoint, routing_id=b"client")
    raise SystemExit("callback failed")
""",
    "interrupt": """
loop = Loop()
link = loop.add(Link(factory, endpoint, routing_id=b"client"))
signal.signal(signal.SIGALRM, signal.default_int_handler)
try:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True:
        loop.wait(None)
except KeyboardInterrupt:
    loop.close(); factory.close(); sys.exit("interrupted")
""",
    "terminated with a server": """
server = Server(factory, Endpoint.parse("0"))
loop = Loop()
loop.add(server)
loop.add(Link(factory, endpoint, routing_id=b"stage"))
stop = []
signal.signal(signal.SIGALRM, lambda *_: (stop.append(1), loop.wake()))
signal.setitimer(signal.ITIMER_REAL, 0.05)
while not stop:
    loop.wait(None)
loop.close(); factory.close(drain_seconds=600); sys.exit("terminated")
""",
    "queue to a reader that stopped": """
server = Server(factory, endpoint)
loop = Loop()
loop.add(server)
link = loop.add(Link(factory, endpoint, routing_id=b"client"))
while not link.connected:
    loop.wait(None)
link.send([b"hello"])
while (message := server.receive()) is None:
    loop.wait(None)
try:
    while True:
        server.send(message.peer, [bytes(1 << 20)])
except QueueFull as error:
    loop.close(); factory.close(); sys.exit(f"{error}")
""",
}


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_program_ends(socket_dir: Path, ending: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREAMBLE + ENDINGS[ending], f"ipc://{socket_dir}/nobody"],
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )
    assert ran.returncode == 1
    assert len(ran.stderr.splitlines()) == 1, ran.stderr
    if ending in ("nothing listens", "queue to a reader that stopped"):
        assert f"ipc://{socket_dir}/nobody" in ran.stderr


def test_close_is_idempotent_in_any_order(leak_check: None, socket_dir: Path) -> None:
    factory = SocketFactory()
    server = Server(factory, Endpoint.parse(f"ipc://{socket_dir}/stage"))
    link = Link(factory, server.endpoint, routing_id=b"client")
    assert factory.n_open == 4
    link.close()
    link.close()
    factory.close()
    assert factory.n_open == 0
    server.close()
    server.close()
    factory.close()
    assert list(socket_dir.iterdir()) == []


def test_forgotten_sockets_are_counted_and_closed(leak_check: None) -> None:
    with SocketFactory() as factory:
        server = Server(factory, Endpoint.parse("0"))
        assert factory.n_open == 2
    assert factory.n_open == 0
    server.close()


def test_failed_bind_and_connect_leave_nothing_open(transport: Transport, socket_dir: Path) -> None:
    taken = transport.server().endpoint
    before = transport.factory.n_open
    for endpoint in (str(taken), f"ipc://{socket_dir}/none/stage", "0.0.0.0:0"):
        with pytest.raises(Exception, match="cannot bind"):
            Server(transport.factory, Endpoint.parse(endpoint))
    with pytest.raises(Exception, match="cannot connect"):
        Link(transport.factory, Endpoint.parse("127.0.0.1:0"), routing_id=b"client")
    assert transport.factory.n_open == before


@pytest.mark.parametrize("sender", ["server", "link"])
def test_draining_hands_over_everything_queued(leak_check: None, socket_dir: Path, sender: str) -> None:
    """The reader starts to read only when the sender is closing."""
    reader_script = """
import sys
from skippy_zmq.transport import *
role, address = sys.argv[1:]
with SocketFactory(limits=SocketLimits(receive_messages=1000)) as factory, Loop() as loop:
    endpoint = Endpoint.parse(address)
    if role == "server":
        end = loop.add(Link(factory, endpoint, routing_id=b"reader"))
        while not end.connected:
            loop.wait(None)
        end.send([b"ready"])
    else:
        end = loop.add(Server(factory, endpoint))
        print("ready", flush=True)
    sys.stdin.readline()
    count = 0
    while count < 200:
        loop.wait(None)
        while (message := end.receive()) is not None:
            assert message.frames == [b"%d" % count, bytes(100_000)]
            count += 1
    print(count)
    end.close()
"""
    address = f"ipc://{socket_dir}/stage"
    factory = SocketFactory()
    endpoint = Endpoint.parse(address)
    server = Server(factory, endpoint) if sender == "server" else None
    reader = subprocess.Popen(
        [sys.executable, "-c", reader_script, sender, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    if server is not None:
        zmq.select([server.poll_sockets[0]], [], [], PATIENCE)
        message = server.receive()
        assert message is not None
        assert message.frames == [b"ready"]
        for number in range(200):
            server.send(message.peer, [b"%d" % number, bytes(100_000)])
    else:
        assert reader.stdout.readline() == "ready\n"
        link = Link(factory, endpoint, routing_id=b"writer")
        while not link.connected:
            zmq.select([link.poll_sockets[1]], [], [], PATIENCE)
            link.refresh()
        for number in range(200):
            link.send([b"%d" % number, bytes(100_000)])
    reader.stdin.write("\n")
    reader.stdin.flush()
    factory.close(drain_seconds=PATIENCE)
    if server is not None:
        server.close()
    output, _ = reader.communicate(timeout=PATIENCE)
    assert output == "200\n"
