"""How a stage ends: it finishes what runs, takes nothing new, and always ends with exit code 0 when asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import Parrot, parrot, sparse
from stage_peers import Asker, Peer
from stage_processes import PATIENCE, SMALL, StagePipeline, StageProcess, error_line, stage_environment
from transport_helpers import Transport

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_CONTEXT = ("--ctx-size", "2048", "--lanes", "2")
_LONG = 1000  # tokens; long enough to be under way still when something else was sent and answered


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "row, row, row your boat; ", end="loop")


@pytest.fixture
def start_pipeline(make_pipeline: Callable[..., StagePipeline], model: Parrot) -> Callable[..., StagePipeline]:
    return lambda *options: make_pipeline(model.path, "0:2 2:4", *_CONTEXT, *options).start_all()


def _long_request(asker: Asker) -> str:
    request = asker.ask((5, 6), max_tokens=_LONG)
    asker.wait(request, lambda answer: len(answer.token_ids) > 2)
    return request


def _until_refused(asker: Asker) -> None:
    """Ask for one token again and again, until the stage has noticed that it is to end."""
    while not (answer := asker.run((5,), max_tokens=1)).error:
        assert answer.finish_reason == "length"
    assert answer.code == "shutting_down"
    assert answer.error.retry


def test_what_runs_is_finished_and_nothing_new_begins(
    start_pipeline: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    pipeline = start_pipeline("--drain-seconds", "600")
    asker = Asker(transport, pipeline.endpoint)
    running = _long_request(asker)
    pipeline[0].send_signal(signal.SIGTERM)
    _until_refused(asker)
    answer = asker.answer(running)
    n = len(model.pieces)
    assert answer.finish_reason == "length"
    assert answer.token_ids == [model.token_ids[i % n] for i in range(_LONG)]
    assert pipeline[0].wait() == 0
    assert "Traceback" not in pipeline[0].stderr()
    assert pipeline[1].stop() == 0


def test_a_second_signal_ends_it_at_once(start_pipeline: Callable[..., StagePipeline], transport: Transport) -> None:
    pipeline = start_pipeline("--drain-seconds", "600")
    asker = Asker(transport, pipeline.endpoint)
    running = _long_request(asker)
    pipeline[0].send_signal(signal.SIGTERM)
    _until_refused(asker)
    pipeline[0].send_signal(signal.SIGTERM)
    answer = asker.answer(running)
    assert answer.code == "shutting_down"
    assert pipeline[0].wait() == 0
    assert "Traceback" not in pipeline[0].stderr()


def test_time_to_drain_is_limited(start_pipeline: Callable[..., StagePipeline], transport: Transport) -> None:
    pipeline = start_pipeline("--drain-seconds", "0.05")
    asker = Asker(transport, pipeline.endpoint)
    requests = [asker.ask((5, 6), max_tokens=_LONG) for _ in range(4)]  # two wait for a lane
    asker.wait(requests[1], lambda answer: len(answer.token_ids) > 2)
    pipeline[0].send_signal(signal.SIGTERM)
    assert [asker.answer(request).code for request in requests] == ["shutting_down"] * 4
    assert pipeline[0].wait() == 0
    # The stage behind holds nothing of it for the next stage 0.
    pipeline.start(0).ready()
    asker.close()
    asker = Asker(transport, pipeline.endpoint)
    assert len(asker.tokens((5,), max_tokens=5)) == 5
    asker.last.at_rest()


def test_the_last_stage_finishes_too(start_pipeline: Callable[..., StagePipeline], transport: Transport) -> None:
    pipeline = start_pipeline("--drain-seconds", "600")
    asker = Asker(transport, pipeline.endpoint)
    running = _long_request(asker)
    pipeline[1].send_signal(signal.SIGINT)
    assert "is shutting down" in pipeline[0].logged("next stage: ")
    assert asker.answer(running).finish_reason == "length"
    assert pipeline[1].wait() == 0
    assert asker.run((5,)).code in ("not_ready", "stage_lost")
    pipeline.start(1)
    pipeline[0].ready()
    asker.close()
    assert len(Asker(transport, pipeline.endpoint).tokens((5,), max_tokens=5)) == 5


def test_nothing_is_finished_for_a_stage_0_that_crashed(
    start_pipeline: Callable[..., StagePipeline], transport: Transport
) -> None:
    pipeline = start_pipeline("--drain-seconds", "600")
    _long_request(Asker(transport, pipeline.endpoint))
    pipeline[0].kill()
    assert pipeline[1].stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads(
    number: signal.Signals,
    start_stage: Callable[..., StageProcess],
    socket_dir: Path,
    tmp_path: Path,
    transport: Transport,
) -> None:
    model = sparse(tmp_path / "sparse.gguf", n_layers=8, layer_bytes=32 << 20)
    bind = f"ipc://{socket_dir}/socket"
    stage = start_stage(
        "--model", model, "--layers", "0:4", "--bind", bind, "--next", f"ipc://{socket_dir}/next", "--no-mmap", *SMALL
    )
    Peer(transport, bind)  # it listens before it loads
    stage.send_signal(number)
    assert stage.wait() == 0
    assert stage.silent
    assert "Traceback" not in stage.stderr()
    assert "error:" not in stage.stderr()
    assert list(socket_dir.iterdir()) == []


def test_it_ends_when_its_standard_input_does(
    start_pipeline: Callable[..., StagePipeline], transport: Transport
) -> None:
    pipeline = start_pipeline("--drain-seconds", "600")
    asker = Asker(transport, pipeline.endpoint)
    running = _long_request(asker)
    for index in (0, 1):
        stdin = pipeline[index].process.stdin
        assert stdin is not None
        stdin.write(b"what is written there does not matter\n")
        stdin.close()
    assert asker.answer(running).code in ("shutting_down", "stage_lost")  # whichever stage ends first
    assert [pipeline[index].wait() for index in (0, 1)] == [0, 0]


@pytest.mark.parametrize("target", ["/dev/full", "a pipe that nobody reads"])
def test_nobody_reads_what_it_prints(target: str, socket_dir: Path, model: Parrot, transport: Transport) -> None:
    bind = f"ipc://{socket_dir}/s"
    arguments = ("--model", str(model.path), "--layers", "0:4", "--bind", bind, *SMALL)
    if target == "/dev/full":
        output = os.open(target, os.O_WRONLY)
    else:
        unread, output = os.pipe()
        os.close(unread)
    with subprocess.Popen(
        [sys.executable, "-m", "skippy_zmq.stage", *arguments, "--exit-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.PIPE,
        env=stage_environment(),
    ) as stage:
        os.close(output)
        asker = Asker(transport, bind)
        assert len(asker.tokens((5,), max_tokens=5)) == 5
        _, stderr = stage.communicate(timeout=PATIENCE)
    assert stage.returncode == 0
    assert b"READY could not be printed" in stderr
    assert b"Traceback" not in stderr
    assert b"Exception ignored" not in stderr


def test_a_standard_input_that_is_not_there(model: Parrot, socket_dir: Path) -> None:
    arguments = ("--model", str(model.path), "--layers", "0:4", "--bind", f"ipc://{socket_dir}/s", "--exit-with-stdin")
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "skippy_zmq.stage", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=stage_environment(),
    )
    assert done.returncode == 2
    assert error_line(done.stderr) == "--exit-with-stdin: there is no standard input"


_PARENT = """
import subprocess, sys
stage = subprocess.Popen([sys.executable, "-m", "skippy_zmq.stage", *sys.argv[1:]], stdin=subprocess.PIPE)
stage.wait()
"""


def test_it_does_not_outlive_whoever_started_it(socket_dir: Path, model: Parrot) -> None:
    arguments = ("--model", str(model.path), "--layers", "0:4", "--bind", f"ipc://{socket_dir}/s", *SMALL)
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, *arguments, "--exit-with-stdin"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=stage_environment(),
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith(b"READY ")
        parent.kill()
        # The stage and all it started hold the other ends of these pipes.
        _, stderr = parent.communicate(timeout=PATIENCE)
    assert b"Traceback" not in stderr
    assert list(socket_dir.iterdir()) == []
