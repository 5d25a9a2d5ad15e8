"""Where a stage listens: this machine alone unless told otherwise, never over another's (Z02, Z07, Z09)."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import tiny
from stage_peers import Asker, Peer
from stage_processes import SMALL, StageProcess, error_line, run_many
from transport_helpers import Transport

from skippy_zmq.stage.config import parse_config

pytest_plugins = ("transport_fixtures", "stage_fixtures")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1)


def _whole(model: Path, bind: str) -> tuple[str, ...]:
    return ("--model", str(model), "--layers", "0:4", "--bind", bind, *SMALL)


def _listeners() -> set[tuple[str, int]]:
    """Addresses of this machine's tcp listeners, hexadecimal as the kernel shows them, and their ports."""
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net", table)
        rows = path.read_text().splitlines()[1:] if path.exists() else []
        for fields in map(str.split, rows):
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A":
                found.add((address, int(port, 16)))
    return found


def test_without_an_address_it_is_loopback() -> None:
    assert parse_config(["--model", "m", "--layers", "0:1"]).bind == "tcp://127.0.0.1:7700"


@pytest.mark.parametrize("bind", ["0", "localhost:0"])
def test_a_port_alone_is_loopback(
    bind: str, model: Path, start_stage: Callable[..., StageProcess], transport: Transport
) -> None:
    stage = start_stage(*_whole(model, bind))
    endpoint = stage.ready()["endpoint"]
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    assert host == "127.0.0.1"
    assert [address for address, p in _listeners() if p == int(port)] == ["0100007F"]
    assert len(Asker(transport, endpoint).tokens((5, 6), max_tokens=3)) == 3
    assert stage.stop() == 0
    assert "WARNING" not in stage.stderr()


def test_every_interface_is_refused_without_keys(model: Path) -> None:
    binds = ("tcp://0.0.0.0:0", "*:0", "tcp://*:7700", "tcp://[::]:0")
    for bind, (code, stderr) in zip(binds, run_many([_whole(model, bind) for bind in binds]), strict=True):
        assert code == 2, bind
        assert "open to the network and there are no keys" in error_line(stderr)


def test_every_interface_on_purpose_warns_once(model: Path, start_stage: Callable[..., StageProcess]) -> None:
    stage = start_stage(*_whole(model, "tcp://0.0.0.0:0"), "--allow-plaintext")
    stage.ready()
    assert stage.stop() == 0
    warnings = [line for line in stage.stderr().splitlines() if "WARNING" in line]
    assert len(warnings) == 1
    assert "without encryption or authentication" in warnings[0]


def test_clients_need_an_address_that_they_can_use(model: Path) -> None:
    last = ("--model", str(model), "--layers", "2:4", "--first", "ipc:///nowhere/0", "--allow-plaintext", *SMALL)
    table = {
        ("--bind", "tcp://0.0.0.0:0"): "clients cannot connect to tcp://0.0.0.0:",
        ("--bind", "tcp://*:0"): "clients cannot connect to tcp://0.0.0.0:",
        ("--bind", "0", "--advertise", "tcp://*:5000"): "clients cannot connect to tcp://*:5000: --advertise",
        ("--bind", "0", "--advertise", "tcp://here:0"): "clients cannot connect to tcp://here:0: --advertise",
    }
    results = run_many([(*last, *arguments) for arguments in table])
    for (arguments, wanted), (code, stderr) in zip(table.items(), results, strict=True):
        assert code == 2, arguments
        assert wanted in error_line(stderr)
    fine = ("--bind", "tcp://0.0.0.0:0", "--advertise", "tcp://example.invalid:7701")
    assert [code for code, _ in run_many([(*last, *fine)])] == [0]


def test_addresses_that_cannot_be(model: Path, socket_dir: Path, tmp_path: Path) -> None:
    long = f"ipc://{tmp_path}/{'d' * 150}"
    table = {
        long: (long, "at most"),
        f"ipc://{socket_dir}/none/socket": ("directory", "does not exist"),
        "ipc://": ("wanted ipc:// and the path",),
        "udp://127.0.0.1:1": ("transport 'udp' is not supported",),
        "tcp://127.0.0.1": ("no port",),
        "tcp://127.0.0.1:70000": ("wanted 0 to 65535",),
        "tcp://no-such-host.invalid:1": ("no-such-host.invalid",),
    }
    results = run_many([_whole(model, bind) for bind in table])
    for (bind, words), (code, stderr) in zip(table.items(), results, strict=True):
        assert code == 2, bind
        for word in words:
            assert word in error_line(stderr)


def test_neighbours_that_cannot_be(model: Path, socket_dir: Path) -> None:
    file = socket_dir / "file"
    file.write_text("content")
    ends = ("ipc://" + "d" * 150, f"ipc://{file}", "tcp://0.0.0.0:5000", "tcp://127.0.0.1:0", "nonsense://x")
    lines = []
    for end in ends:
        arguments = ("--model", str(model), "--bind", f"ipc://{socket_dir}/s", *SMALL)
        lines.append((*arguments, "--layers", "0:2", "--next", end))
        lines.append((*arguments, "--layers", "2:4", "--first", end))
    for arguments, (code, stderr) in zip(lines, run_many(lines), strict=True):
        assert code == 2, arguments
        assert arguments[-1].rpartition("/")[2] in error_line(stderr)
    assert file.read_text() == "content"
    assert {path.name for path in socket_dir.iterdir()} == {"file"}


def test_a_tcp_port_that_is_taken(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        [(code, stderr)] = run_many([_whole(model, endpoint)])
    assert code == 2
    assert endpoint in error_line(stderr)
    assert "in use" in error_line(stderr)


def test_what_is_no_socket_is_left_alone(model: Path, socket_dir: Path) -> None:
    file, folder, link = (socket_dir / name for name in ("file", "folder", "link"))
    file.write_text("content")
    folder.mkdir()
    link.symlink_to(file)
    paths = (file, folder, link)
    for path, (code, stderr) in zip(paths, run_many([_whole(model, f"ipc://{path}") for path in paths]), strict=True):
        assert code == 2
        assert f"cannot bind ipc://{path}: that is " in error_line(stderr)
    assert file.read_text() == "content"
    assert folder.is_dir()
    assert link.readlink() == file
    assert {path.name for path in socket_dir.iterdir()} == {"file", "folder", "link"}


def test_one_path_has_one_stage_and_survives_a_crash(
    model: Path, socket_dir: Path, start_stage: Callable[..., StageProcess], transport: Transport
) -> None:
    path = socket_dir / "socket"
    arguments = _whole(model, f"ipc://{path}")
    first = start_stage(*arguments)
    first.ready()
    for code, stderr in run_many([arguments, arguments]):
        assert code == 2
        assert error_line(stderr) == f"cannot bind ipc://{path}: another process is listening on it"
    asker = Asker(transport, f"ipc://{path}")
    asker.tokens((5, 6), max_tokens=3)
    asker.close()
    first.kill()
    assert path.is_socket()
    second = start_stage(*arguments)
    second.ready()
    asker = Asker(transport, f"ipc://{path}")
    asker.tokens((5, 6), max_tokens=3)
    asker.close()
    assert second.stop() == 0
    assert list(socket_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "neighbour", "layers"),
    [
        (signal.SIGTERM, "ipc", "0:2"),
        (signal.SIGINT, "tcp", "0:2"),
        (signal.SIGINT, "ipc", "2:4"),
        (signal.SIGTERM, "tcp", "2:4"),
    ],
)
def test_a_missing_neighbour_does_not_keep_a_stage(
    number: signal.Signals,
    neighbour: str,
    layers: str,
    model: Path,
    socket_dir: Path,
    start_stage: Callable[..., StageProcess],
    transport: Transport,
) -> None:
    where = f"ipc://{socket_dir}/nobody" if neighbour == "ipc" else "tcp://127.0.0.1:9"
    bind = f"ipc://{socket_dir}/socket"
    link = "--next" if layers == "0:2" else "--first"
    # nothing is under way, so there is nothing to drain
    stage = start_stage(
        "--model", model, "--layers", layers, "--bind", bind, link, where, "--drain-seconds", 3600, *SMALL
    )
    client = Peer(transport, bind)
    assert client.greet().ready == (layers == "2:4")
    stage.send_signal(number)
    assert stage.wait() == 0
    assert "Traceback" not in stage.stderr()
    assert "error:" not in stage.stderr()
    assert list(socket_dir.iterdir()) == []
