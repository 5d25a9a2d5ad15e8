"""Connections that end while their messages wait: libzmq would abort the process at the next heartbeat (Z05, Z11).

Each ending is tried on a server or a link in a child process, which must be there, and serve, well after that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stage_processes import stage_environment
from transport_helpers import PATIENCE

from skippy_zmq.transport.sockets import HEARTBEAT_INTERVAL_MS

_COMMON = """
import socket, struct, sys
import zmq
from skippy_zmq.transport import *

WELL_AFTER = float(sys.argv[2])
FLOOD = 5000
GREETING = b"\\xff" + bytes(8) + b"\\x7f\\x03\\x01" + b"NULL".ljust(20, b"\\0") + b"\\0" + bytes(31)
READY = b"\\x05READY\\x0bSocket-Type\\x00\\x00\\x00\\x06DEALER\\x08Identity\\x00\\x00\\x00"
factory, loop = SocketFactory(), Loop()
server = loop.add(Server(factory, Endpoint.parse(sys.argv[1])))

def connection(identity):
    '''A plain connection that has become a peer, and that ends with a reset.'''
    if server.endpoint.transport == "tcp":
        peer = socket.create_connection((server.endpoint.host, server.endpoint.port), timeout=60)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    else:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.connect(server.endpoint.path)
    ready = READY + bytes([len(identity)]) + identity
    peer.sendall(GREETING + bytes([4, len(ready)]) + ready)
    with peer.makefile("rb") as reader:
        reader.read(64)
        reader.read(reader.read(2)[1])
    return peer

def message():
    while (incoming := server.receive()) is None:
        loop.wait(60)
    return incoming

def drain():
    while server.receive() is not None:
        pass

def serves():
    peer = connection(b"afterwards")
    peer.sendall(b"\\0\\5hello")
    while message().frames != [b"hello"]:
        pass
    server.send(b"afterwards", [b"there"])
    with peer.makefile("rb") as reader:
        assert reader.read(7) == b"\\0\\5there"
    peer.close()
"""

_ENDINGS = {
    "a flood that nobody reads": """
peer = connection(b"flood")
peer.setblocking(False)
try:
    while peer.send(b"\\0\\1x" * FLOOD):
        pass
except BlockingIOError:
    pass
loop.wait(60)
peer.close()
""",
    "a flood with heartbeats": """
peer = connection(b"flood")
peer.sendall(b"\\0\\1x" * 200 + (b"\\4\\7\\4PING\\0\\0" + b"\\0\\1x" * 10) * 20)
message()
peer.close()
""",
    "the older of two of one id": """
older = connection(b"same")
older.sendall(b"\\0\\1a")
message()
newer = connection(b"same")
newer.sendall(b"\\0\\1b")
assert message().frames == [b"b"]
try:
    older.sendall(b"\\0\\1c" * 5)
    while older.recv(100):
        pass
except OSError:
    pass  # it has been ended
older.close()
server.send(b"same", [b"yours"])
with newer.makefile("rb") as reader:
    assert reader.read(7) == b"\\0\\5yours"
""",
    "many in a row": """
for number in range(50):
    peer = connection(b"noisy")
    peer.sendall(bytes(4096))
    peer.close()
    drain()
""",
}

_AFTER = """
idle = Loop()
idle.wait(WELL_AFTER)
drain()
idle.wait(WELL_AFTER)
serves()
idle.close()
server.close()
factory.close()
loop.close()
print("served")
"""

_LINK = """
link = Link(factory, server.endpoint, routing_id=b"slow")
loop.add(link)
while not link.connected:
    loop.wait(60)
link.send([b"hello"])
message()
loop.remove(link)
for number in range(900):
    server.send(b"slow", [b"%d" % number])
server.close(drain_seconds=60)
idle = Loop()
idle.wait(WELL_AFTER)
for number in range(900):
    assert link.receive().frames == [b"%d" % number]
assert [event.kind for event in link.events()][-1] is LinkEventKind.DISCONNECTED
factory.close()
print("served")
"""


def _run(script: str, protocol: str, directory: Path) -> None:
    address = f"ipc://{directory}/stage" if protocol == "ipc" else "tcp://127.0.0.1:0"
    done = subprocess.run(
        [sys.executable, "-c", script, address, str(1.25 * HEARTBEAT_INTERVAL_MS / 1000)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=stage_environment(),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "served\n", "")


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
@pytest.mark.parametrize("ending", _ENDINGS)
def test_server_outlives_a_peer(ending: str, protocol: str, tmp_path: Path) -> None:
    _run(_COMMON + _ENDINGS[ending] + _AFTER, protocol, tmp_path)


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_slow_client_outlives_a_stage(protocol: str, tmp_path: Path) -> None:
    """Whoever reads an answer slowly is not ended by the end of the stage, and loses nothing of what had arrived."""
    _run(_COMMON + _LINK, protocol, tmp_path)
