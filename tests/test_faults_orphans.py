"""L01: stages end with whoever started them, in order and in time, with work under way; nothing else is touched.

Ends of single stages are in test_stage_shutdown, of a pipeline without work in test_local_pipeline.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lane_helpers import Program, recited
from model_files import Parrot, parrot, sparse
from pipeline_helpers import children_of
from stage_peers import Asker
from stage_processes import PATIENCE, StagePipeline, stage_environment
from transport_helpers import Transport

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_STREAMS, _CONTEXT = 4, 65536
_ENDLESS = _CONTEXT - 16
_OPTIONS = ("--lanes", str(_STREAMS), "--ctx-size", str(_CONTEXT))

_PARENT = f"""
import json, sys
from skippy_zmq import LocalPipeline
with LocalPipeline(sys.argv[1], stages=2, directory=sys.argv[2], ctx_size={_CONTEXT}, lanes={_STREAMS}) as pipeline:
    print(json.dumps([pipeline.endpoint, *pipeline.process_ids]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "home again ", end="loop", context=_CONTEXT)


@pytest.fixture
def bystanders(
    make_pipeline: Callable[..., StagePipeline], model: Parrot, make_transport: Callable[..., Transport]
) -> Iterator[None]:
    """A pipeline of somebody else and a program in our process group: both must be there and well afterwards."""
    pipeline = make_pipeline(model.path, "0:2 2:4").start_all()
    with Program("-c", "import signal; signal.pause()") as program:
        yield
        assert program.running
        assert os.getpgid(program.process.pid) == os.getpgid(0)
    asker = Asker(make_transport(), pipeline.endpoint)
    assert asker.tokens((5,), max_tokens=20) == recited(model, 20)
    assert [pipeline[index].stop() for index in (0, 1)] == [0, 0]


class Parent:
    """A program that runs a pipeline of two stages in ``directory``, and hands on what becomes of them."""

    def __init__(self, model: Parrot, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PARENT, str(model.path), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=stage_environment(),
        )
        assert self.process.stdout is not None
        self.endpoint, *pids = json.loads(self.process.stdout.readline())
        self._stages = [os.pidfd_open(pid) for pid in pids]

    def stages_end(self) -> None:
        """Wait until every stage is gone."""
        for stage in self._stages:
            assert select.select([stage], [], [], PATIENCE)[0] == [stage]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.stages_end()
        for stage in self._stages:
            os.close(stage)


def _streams(asker: Asker) -> list[str]:
    """As many as there are lanes, all under way."""
    requests = [asker.ask((5, 6), max_tokens=_ENDLESS) for _ in range(_STREAMS)]
    for request in requests:
        asker.wait(request, lambda answer: len(answer.token_ids) > 2)
    return requests


def _all_end_in_order(asker: Asker, requests: list[str], model: Parrot) -> None:
    """Each gets a last word, and what came before it is right. Which stage ends first is chance."""
    for request in requests:
        answer = asker.answer(request)
        assert answer.code in ("shutting_down", "stage_lost")
        assert answer.error is not None
        assert answer.error.retry
        assert answer.token_ids == recited(model, len(answer.token_ids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_parent_ends_with_streams_under_way(
    number: signal.Signals, bystanders: None, model: Parrot, socket_dir: Path, transport: Transport
) -> None:
    directory = socket_dir / "mine"
    directory.mkdir()
    for _ in range(2):  # the second time at once, on the same addresses
        with contextlib.closing(Parent(model, directory)) as parent:
            asker = Asker(transport, parent.endpoint)
            requests = _streams(asker)
            parent.process.send_signal(number)
            _all_end_in_order(asker, requests, model)
            parent.stages_end()
            asker.close()
        assert sorted(path.name for path in directory.iterdir()) == ["s0.log", "s1.log"]
        for log in directory.iterdir():
            assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("twice", [False, True])
def test_stages_are_told_to_end_with_streams_under_way(
    number: signal.Signals,
    twice: bool,
    make_pipeline: Callable[..., StagePipeline],
    model: Parrot,
    transport: Transport,
) -> None:
    """All of them at once, as Ctrl-C in a terminal does; the second signal does not wait for the grace time."""
    pipeline = make_pipeline(model.path, "0:2 2:4", *_OPTIONS, "--drain-seconds", "600" if twice else "0.3")
    pipeline.start_all()
    asker = Asker(transport, pipeline.endpoint)
    requests = _streams(asker)
    for index in (0, 1):
        pipeline[index].send_signal(number)
    if twice:
        while not (refused := asker.run((5,), max_tokens=1)).error:  # until it has noticed
            pass
        assert refused.code == "shutting_down"
        for index in (0, 1):
            pipeline[index].send_signal(number)
    _all_end_in_order(asker, requests, model)
    for index in (0, 1):
        assert pipeline[index].wait() == 0
        assert "Traceback" not in pipeline[index].stderr()
    asker.close()
    pipeline.start_all()  # at once, on the same addresses
    asker = Asker(transport, pipeline.endpoint)
    assert asker.tokens((5,), max_tokens=20) == recited(model, 20)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The directory for temporary files of a program; it must leave nothing there."""
    with tempfile.TemporaryDirectory(prefix="skt") as directory:
        yield Path(directory)
        assert list(Path(directory).iterdir()) == []


def _client(model: Path, temporary: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The client with a pipeline of its own, in a process group of its own as in a terminal."""
    command = [sys.executable, "-m", "skippy_zmq.client", "--model", str(model), "--prompt", "x", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=stage_environment(TMPDIR=str(temporary)),
        process_group=0,
    )


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_a_program_with_stages_of_its_own(
    times: int, bystanders: None, model: Parrot, temporary: Path
) -> None:
    options = ("--ctx-size", str(_CONTEXT), "--max-tokens", str(_ENDLESS), "--local-stages", "2")
    with _client(model.path, temporary, *options) as program:
        assert program.stdout is not None
        assert program.stdout.read(11) == b"home again "
        stages = [os.pidfd_open(pid) for pid in children_of(program.pid)]
        assert len(stages) == 2
        for _ in range(times):
            os.killpg(program.pid, signal.SIGINT)
        _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == 130
    assert b"Traceback" not in errors
    for stage in stages:
        assert select.select([stage], [], [], PATIENCE)[0] == [stage]
        os.close(stage)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_stages_load(
    number: signal.Signals, status: int, bystanders: None, tmp_path: Path, temporary: Path
) -> None:
    model = sparse(tmp_path / "sparse.gguf", n_layers=8, layer_bytes=32 << 20)
    with _client(model, temporary, "--no-mmap", "--ctx-size", "64") as program:
        # Sockets are bound before weights are read.
        while not (sockets := list(temporary.rglob("s0"))) and program.poll() is None:
            os.sched_yield()
        assert sockets
        stages = [os.pidfd_open(pid) for pid in children_of(program.pid)]
        os.killpg(program.pid, number)
        _, errors = program.communicate(timeout=PATIENCE)
    assert program.returncode == status
    assert b"Traceback" not in errors
    for stage in stages:
        assert select.select([stage], [], [], PATIENCE)[0] == [stage]
        os.close(stage)
