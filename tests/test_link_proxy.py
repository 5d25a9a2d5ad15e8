"""A link proxy changes when bytes arrive and nothing else: not which, not in what order, not what the stages answer."""

from __future__ import annotations

import contextlib
import hashlib
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import tiny
from pipeline_helpers import greedy_reference
from stage_peers import Asker
from stage_processes import StagePipeline, stage_environment
from transport_helpers import PATIENCE, Transport

from skippy_zmq.errors import EndpointError, OptionError
from skippy_zmq.testing.link_proxy import LinkProxy

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_MEGABYTE = 1 << 20
_NOISE = random.Random(3).randbytes(3 * _MEGABYTE + 17)

# ---- bytes


class Far:
    """The other side: listens on tcp or ipc and hands out the connections that come."""

    def __init__(self, protocol: str, directory: Path) -> None:
        self.path = directory / "far"
        if protocol == "tcp":
            self.socket = socket.create_server(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{self.socket.getsockname()[1]}"
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.bind(str(self.path))
            self.socket.listen()
            self.endpoint = f"ipc://{self.path}"
        self.socket.settimeout(PATIENCE)

    def accept(self) -> socket.socket:
        connection, _ = self.socket.accept()
        connection.settimeout(PATIENCE)
        return connection


@pytest.fixture(params=["tcp", "ipc"])
def far(request: pytest.FixtureRequest, leak_check: None, socket_dir: Path) -> Iterator[Far]:
    far = Far(request.param, socket_dir)
    with far.socket:
        yield far


@pytest.fixture
def make_proxy(far: Far, socket_dir: Path) -> Iterator[Callable[..., LinkProxy]]:
    """Starts proxies in front of ``far``, of its protocol; nothing of theirs may be left in the end."""
    with contextlib.ExitStack() as stack:

        def make(**values: Any) -> LinkProxy:
            listen = "tcp://127.0.0.1:0" if far.endpoint.startswith("tcp") else f"ipc://{socket_dir}/near"
            return stack.enter_context(LinkProxy(listen, far.endpoint, **values))

        yield make
    assert {path.name for path in socket_dir.iterdir()} <= {"far"}


def _dial(endpoint: str) -> socket.socket:
    if endpoint.startswith("tcp"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    connection.connect(endpoint.removeprefix("ipc://"))
    return connection


def _received(connection: socket.socket, size: int) -> bytes:
    with connection.makefile("rb", buffering=0) as reader:
        data = bytearray()
        while len(data) < size and (more := reader.read(size - len(data))):
            data += more
    return bytes(data)


def _ends(connection: socket.socket) -> bool:
    """Whether the other side ends the connection without another byte; waits for it."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


_SHAPES: list[dict[str, Any]] = [
    {},
    {"delay_s": 0.02},
    {"delay_s": 0.005, "jitter_s": 0.02, "seed": 4},
    {"bandwidth_bytes_per_s": 20e6},
    {"delay_s": 0.01, "jitter_s": 0.01, "bandwidth_bytes_per_s": 20e6},
]


@pytest.mark.parametrize("values", _SHAPES, ids=str)
def test_bytes_and_their_order_are_kept(values: dict[str, Any], far: Far, make_proxy: Callable[..., LinkProxy]) -> None:
    """Both ways at once, in writes of all sizes; then one half is closed and the other still speaks."""
    sizes = random.Random(5)

    def answer(connection: socket.socket) -> None:
        data = b""
        while more := connection.recv(1 << 16):
            data += more
            connection.sendall(more)
        connection.sendall(hashlib.sha256(data).digest())

    proxy = make_proxy(**values)
    with _dial(proxy.endpoint) as near, far.accept() as there:
        thread = threading.Thread(target=answer, args=(there,))
        thread.start()
        echo: list[bytes] = []
        reader = threading.Thread(target=lambda: echo.append(_received(near, len(_NOISE))))
        reader.start()
        sent = 0
        while sent < len(_NOISE):
            size = sizes.choice((1, 100, 2304, 70_000, 400_000))
            near.sendall(_NOISE[sent : sent + size])
            sent += size
        reader.join()
        assert echo == [_NOISE]
        near.shutdown(socket.SHUT_WR)
        assert _received(near, 32) == hashlib.sha256(_NOISE).digest()
        thread.join()
        there.close()
        assert _ends(near)


def test_many_connections_at_once(far: Far, make_proxy: Callable[..., LinkProxy]) -> None:
    proxy = make_proxy(delay_s=0.01, jitter_s=0.01)
    pairs = []
    for number in range(20):
        near = _dial(proxy.endpoint)
        near.sendall(b"%2d" % number)
        pairs.append((near, far.accept()))
    heard = [there.recv(2) for _, there in pairs]
    assert sorted(heard) == sorted(b"%2d" % number for number in range(20))
    for near, there in pairs:
        there.close()
        assert _ends(near)
        near.close()


def test_nothing_arrives_before_its_time(far: Far, make_proxy: Callable[..., LinkProxy]) -> None:
    proxy = make_proxy(delay_s=0.03, jitter_s=0.01, bandwidth_bytes_per_s=5e6)
    with _dial(proxy.endpoint) as near, far.accept() as there:
        for source, sink in ((near, there), (there, near)) * 3:
            sent_at = time.monotonic()
            source.sendall(b"now")
            assert _received(sink, 3) == b"now"
            assert time.monotonic() >= sent_at + 0.03
        sent_at = time.monotonic()
        thread = threading.Thread(target=near.sendall, args=(_NOISE[:_MEGABYTE],))
        thread.start()
        assert _received(there, _MEGABYTE) == _NOISE[:_MEGABYTE]
        assert time.monotonic() >= sent_at + 0.03 + _MEGABYTE / 5e6
        thread.join()


def test_a_receiver_that_does_not_read_stops_the_sender(far: Far, make_proxy: Callable[..., LinkProxy]) -> None:
    """And nothing is lost by it."""
    proxy = make_proxy(delay_s=0.005)
    kernel_bytes = 64 * _MEGABYTE  # more than four socket buffers hold
    with _dial(proxy.endpoint) as near, far.accept() as there:
        near.setblocking(False)
        digest, sent = hashlib.sha256(), 0
        while select.select([], [near], [], 0.5)[1]:
            with contextlib.suppress(BlockingIOError):
                n = near.send(_NOISE)
                digest.update(_NOISE[:n])
                sent += n
            assert sent < proxy.shape.in_flight_bytes + kernel_bytes
        assert sent > 0
        assert hashlib.sha256(_received(there, sent)).digest() == digest.digest()


def test_cut_ends_every_connection_and_new_ones_work(far: Far, make_proxy: Callable[..., LinkProxy]) -> None:
    proxy = make_proxy(delay_s=3600.0)
    assert proxy.cut() == 0
    pairs = [(_dial(proxy.endpoint), far.accept()) for _ in range(3)]
    pairs[0][0].sendall(b"never arrives")
    assert proxy.cut() == 3
    for end in (end for pair in pairs for end in pair):
        assert _ends(end)
        end.close()
    with _dial(proxy.endpoint), far.accept():
        assert proxy.cut() == 1


def test_pause_holds_everything_and_resume_lets_it_go(far: Far, make_proxy: Callable[..., LinkProxy]) -> None:
    proxy = make_proxy()
    with _dial(proxy.endpoint) as near, far.accept() as there:
        proxy.pause()
        near.sendall(b"to the far side")
        there.sendall(b"to the near side")
        assert select.select([near, there], [], [], 0.2)[0] == []
        proxy.resume()
        assert _received(there, 15) == b"to the far side"
        assert _received(near, 16) == b"to the near side"
        proxy.pause()
        assert proxy.cut() == 1
        assert _ends(near)


@pytest.mark.parametrize("loser", ["near", "far"])
def test_a_side_that_is_gone_is_gone_for_the_other(loser: str, far: Far, make_proxy: Callable[..., LinkProxy]) -> None:
    """What it had said arrives before."""
    proxy = make_proxy(delay_s=0.01)
    near, there = _dial(proxy.endpoint), far.accept()
    lost, other = (near, there) if loser == "near" else (there, near)
    lost.sendall(b"last words")
    lost.close()
    assert _received(other, 10) == b"last words"
    assert _ends(other)
    other.close()


def test_nobody_behind_it(leak_check: None, socket_dir: Path) -> None:
    with LinkProxy(f"ipc://{socket_dir}/near", f"ipc://{socket_dir}/far") as proxy:
        for _ in range(3):
            with _dial(proxy.endpoint) as near:
                assert _ends(near)
        far = Far("ipc", socket_dir)
        with far.socket, _dial(proxy.endpoint) as near, far.accept() as there:
            near.sendall(b"there now")
            assert _received(there, 9) == b"there now"


def test_addresses_that_cannot_be_right(leak_check: None, socket_dir: Path) -> None:
    target = f"ipc://{socket_dir}/far"
    (socket_dir / "file").write_text("kept")
    for listen in ("tcp://0.0.0.0:0", "*:7000", f"ipc://{socket_dir}/file", f"ipc://{socket_dir}/none/near"):
        with pytest.raises(EndpointError, match="cannot bind"):
            LinkProxy(listen, target).start()
    with pytest.raises(EndpointError):
        LinkProxy("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    for listen in (f"ipc://{socket_dir}/near", "tcp://127.0.0.1:0"):
        with LinkProxy(listen, target) as proxy, pytest.raises(EndpointError, match="cannot bind"):
            LinkProxy(proxy.endpoint, target).start()
    assert (socket_dir / "file").read_text() == "kept"


def test_before_and_after(leak_check: None, socket_dir: Path) -> None:
    proxy = LinkProxy("tcp://127.0.0.1:0", f"ipc://{socket_dir}/far")
    proxy.close()
    for use in (lambda: proxy.endpoint, proxy.pause, proxy.resume, proxy.cut):
        with pytest.raises(OptionError, match="not started"):
            use()
    proxy.start()
    with pytest.raises(OptionError, match="started already"):
        proxy.start()
    with _dial(proxy.endpoint):
        proxy.close()
        proxy.close()
    with pytest.raises(OptionError, match="closed"):
        proxy.cut()


# ---- the program

_PROGRAM = [sys.executable, "-m", "skippy_zmq.testing.link_proxy"]


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGINT", "stdin"])
def test_program(ending: str, far: Far, socket_dir: Path) -> None:
    command = [*_PROGRAM, "--exit-with-stdin", "--delay-ms", "5", "--jitter-ms", "1"]
    command += ["--link", "tcp://127.0.0.1:0", far.endpoint, "--link", f"ipc://{socket_dir}/near", far.endpoint]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=stage_environment()
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        endpoints = [program.stdout.readline().decode().split() for _ in range(2)]
        assert [words[0] for words in endpoints] == ["LISTENING", "LISTENING"]
        for _, endpoint in endpoints:
            with _dial(endpoint) as near, far.accept() as there:
                near.sendall(b"hello")
                assert _received(there, 5) == b"hello"
        if ending == "stdin":
            program.stdin.close()
        else:
            program.send_signal(getattr(signal, ending))
        assert program.wait(PATIENCE) == 0
        assert program.stderr.read() == b""
    assert not (socket_dir / "near").exists()


def test_program_that_cannot_start() -> None:
    for arguments, words in (
        (("--link", "tcp://0.0.0.0:0", "tcp://127.0.0.1:7700"), "cannot bind tcp://0.0.0.0:0"),
        (("--link", "0", "tcp://127.0.0.1:7700", "--delay-ms", "-1"), "link delay_s"),
    ):
        command = [*_PROGRAM, *arguments]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=stage_environment()
        )
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr.startswith("error: ")
        assert words in ended.stderr
        assert ended.stderr.count("\n") == 1


# ---- stages

_CONTEXT, _N_TOKENS = 256, 16


class DistantPipeline(StagePipeline):
    """Two stages whose links go through proxies, one for each direction of the ring."""

    def __init__(self, directory: Path, model: Path, shape: dict[str, Any]) -> None:
        super().__init__(directory, model, "0:2 2:4")
        self.to_last = LinkProxy(f"ipc://{directory}/to-1", self.endpoint_of(1), **shape).start()
        self.to_first = LinkProxy(f"ipc://{directory}/to-0", self.endpoint_of(0), **shape).start()

    def arguments(self, index: int) -> list[str]:
        through = {self.endpoint_of(1): self.to_last.endpoint, self.endpoint_of(0): self.to_first.endpoint}
        arguments = super().arguments(index)
        place = arguments.index("--first" if index else "--next") + 1
        arguments[place] = through[arguments[place]]
        return arguments

    def close(self) -> None:
        super().close()
        self.to_last.close()
        self.to_first.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    choose = random.Random(6)
    return [tuple(choose.randrange(4, 300) for _ in range(length)) for length in (1, 64, 150)]


@pytest.fixture(scope="module")
def alone(model: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return greedy_reference(model, prompts, _N_TOKENS, n_ctx=_CONTEXT, n_batch=64)


@pytest.mark.parametrize(
    "shape", [{}, {"delay_s": 0.01, "jitter_s": 0.01}, {"delay_s": 0.002, "bandwidth_bytes_per_s": 1e6}], ids=str
)
def test_stages_that_are_far_apart_answer_the_same(
    shape: dict[str, Any],
    transport: Transport,
    socket_dir: Path,
    model: Path,
    prompts: list[tuple[int, ...]],
    alone: list[list[int]],
) -> None:
    """Also after the link between them was cut in the middle of an answer, which ends with an error then."""
    with DistantPipeline(socket_dir, model, shape) as pipeline:
        pipeline.start_all()
        asker = Asker(transport, pipeline.endpoint)
        requests = [asker.ask(prompt, max_tokens=_N_TOKENS) for prompt in prompts]
        assert [asker.answer(request).token_ids for request in requests] == alone
        running = asker.ask(prompts[0], max_tokens=200)
        asker.wait(running, lambda answer: bool(answer.token_ids))
        pipeline.to_last.pause()
        assert pipeline.to_last.cut() == 1
        assert asker.answer(running).code == "stage_lost"
        pipeline.to_last.resume()
        pipeline[0].ready()
        again = Asker(transport, pipeline.endpoint)
        requests = [again.ask(prompt, max_tokens=_N_TOKENS) for prompt in prompts]
        assert [again.answer(request).token_ids for request in requests] == alone
        for index in range(2):
            assert pipeline[index].stop() == 0
