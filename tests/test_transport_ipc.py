"""Unix socket paths: too long, occupied, stale, contested (Z09)."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from transport_helpers import Transport

from skippy_zmq.errors import EndpointError
from skippy_zmq.transport import Endpoint, check_connect
from skippy_zmq.transport.ipc_path import MAX_PATH_BYTES

pytest_plugins = ("transport_fixtures",)

# Binds when it is told to, says how that went, and stays until its standard input ends.
STARTER = """
import sys
from skippy_zmq.errors import EndpointError
from skippy_zmq.transport import Endpoint, Server, SocketFactory
print("started", flush=True)
sys.stdin.readline()
with SocketFactory() as factory:
    try:
        server = Server(factory, Endpoint.parse(sys.argv[1]))
    except EndpointError as error:
        print(error, flush=True)
    else:
        print("bound", flush=True)
        sys.stdin.read()
        server.close()
"""


def _start(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, f"ipc://{path}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert _line(process) == "started"
    return process


def _go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.communicate(timeout=20)


def _leave_stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()


def test_too_long_names_path_length_and_limit(transport: Transport, socket_dir: Path) -> None:
    path = f"{socket_dir}/".ljust(150, "x")
    with pytest.raises(EndpointError, match=rf"{path}: path of 150 bytes: .* at most {MAX_PATH_BYTES}"):
        transport.server(f"ipc://{path}")
    with pytest.raises(EndpointError, match="150 bytes"):
        transport.link(f"ipc://{path}")
    assert list(socket_dir.iterdir()) == []


def test_length_counts_bytes_not_characters(transport: Transport, socket_dir: Path) -> None:
    path = f"{socket_dir}/" + "ö" * 50
    with pytest.raises(EndpointError, match=f"path of {len(path.encode())} bytes"):
        transport.server(f"ipc://{path}")


def test_longest_path_works(transport: Transport, socket_dir: Path) -> None:
    server = transport.server("ipc://" + f"{socket_dir}/".ljust(MAX_PATH_BYTES, "x"))
    transport.exchange(transport.connected(transport.link(server.endpoint)), server)


def test_missing_directory(transport: Transport, socket_dir: Path) -> None:
    with pytest.raises(EndpointError, match=f"directory {socket_dir}/none does not exist"):
        transport.server(f"ipc://{socket_dir}/none/stage")


@pytest.mark.parametrize("kind", ["an ordinary file", "a directory", "a symbolic link", "dangling", "a special file"])
def test_what_is_not_a_socket_stays_untouched(transport: Transport, socket_dir: Path, kind: str) -> None:
    path, target = socket_dir / "stage", socket_dir / "target"
    if kind == "an ordinary file":
        path.write_text("content")
    elif kind == "a directory":
        path.mkdir()
    elif kind == "a special file":
        subprocess.run(["mkfifo", str(path)], check=True)
    else:
        path.symlink_to(target)
        if kind == "a symbolic link":
            target.write_text("content")
    before = path.lstat()
    with pytest.raises(EndpointError, match="a symbolic link" if kind == "dangling" else kind):
        transport.server(f"ipc://{path}")
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    if kind in ("an ordinary file", "a symbolic link"):
        assert path.read_text() == "content"
    assert {entry.name for entry in socket_dir.iterdir()} <= {"stage", "target"}


def test_connecting_to_a_file_is_refused(socket_dir: Path) -> None:
    (socket_dir / "stage").write_text("content")
    with pytest.raises(EndpointError, match="that is an ordinary file, wanted a socket"):
        check_connect(Endpoint.parse(f"ipc://{socket_dir}/stage"))
    check_connect(Endpoint.parse(f"ipc://{socket_dir}/later"))


def test_stale_socket_is_replaced(transport: Transport, socket_dir: Path) -> None:
    path = socket_dir / "stage"
    _leave_stale_socket(path)
    server = transport.server(f"ipc://{path}")
    transport.exchange(transport.connected(transport.link(server.endpoint)), server)


def test_restart_after_kill(transport: Transport, socket_dir: Path) -> None:
    path = socket_dir / "stage"
    killed = _start(path)
    _go(killed)
    assert _line(killed) == "bound"
    with pytest.raises(EndpointError, match="another process is listening"):
        transport.server(f"ipc://{path}")
    killed.send_signal(signal.SIGKILL)
    _end(killed)
    assert path.is_socket()
    server = transport.server(f"ipc://{path}")
    transport.exchange(transport.connected(transport.link(server.endpoint)), server)


def test_second_live_stage_is_refused_and_the_first_serves_on(transport: Transport, socket_dir: Path) -> None:
    server = transport.server(f"ipc://{socket_dir}/stage")
    link = transport.connected(transport.link(server.endpoint))
    second = _start(socket_dir / "stage")
    _go(second)
    assert "another process is listening" in _line(second)
    _end(second)
    transport.exchange(link, server)
    transport.exchange(transport.connected(transport.link(server.endpoint)), server)


def test_listener_that_is_not_ours_is_respected(transport: Transport, socket_dir: Path) -> None:
    path = socket_dir / "stage"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(EndpointError, match="another process is listening"):
            transport.server(f"ipc://{path}")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_one_of_many_that_start_at_once_wins(transport: Transport, socket_dir: Path) -> None:
    path = socket_dir / "stage"
    for stale in (False, True):
        if stale:
            _leave_stale_socket(path)
        starters = [_start(path) for _ in range(3)]
        for starter in starters:
            _go(starter)
        answers = [_line(starter) for starter in starters]
        assert answers.count("bound") == 1
        assert sum("another process is listening" in answer for answer in answers) == len(starters) - 1
        link = transport.connected(transport.link(f"ipc://{path}"))
        transport.drop(link)
        _end(*starters)
        assert list(socket_dir.iterdir()) == []


@pytest.mark.parametrize("protocol", ["ipc", "tcp"])
def test_address_is_free_once_closed(transport: Transport, socket_dir: Path, protocol: str) -> None:
    endpoint = f"ipc://{socket_dir}/stage" if protocol == "ipc" else "tcp://127.0.0.1:0"
    for _ in range(20):
        server = transport.server(endpoint)
        endpoint = str(server.endpoint)
        link = transport.connected(transport.link(server.endpoint))
        transport.exchange(link, server)
        transport.drop(server)
        transport.drop(link)
    assert list(socket_dir.iterdir()) == []


def test_foreign_lock_file_stays_untouched(transport: Transport, socket_dir: Path) -> None:
    lock = socket_dir / "stage.lock"
    lock.write_text("content")
    with pytest.raises(EndpointError, match="is not an empty lock file"):
        transport.server(f"ipc://{socket_dir}/stage")
    assert lock.read_text() == "content"
    lock.unlink()
    lock.symlink_to(socket_dir / "victim")
    with pytest.raises(EndpointError, match=f"lock file {lock}"):
        transport.server(f"ipc://{socket_dir}/stage")
    assert not (socket_dir / "victim").exists()
