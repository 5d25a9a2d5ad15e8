"""A pipeline on this machine starts a dead stage again by itself, and gives up where that does not help."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest
from lane_helpers import Program
from model_files import Parrot, parrot, sparse
from pipeline_helpers import PATIENCE, SMALL, child_processes, children_of
from restart_helpers import command_line, kill, wait_for_ends, wait_for_new_process, watched

from skippy_zmq import LocalPipeline
from skippy_zmq.errors import DeadlineError, OptionError, RetryableError, SkippyError, StageLostError, UserError

pytest_plugins = ("pipeline_fixtures",)
pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", "polly", context=512)


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts follow one another at once; how long to wait in between is nothing that a test needs."""
    monkeypatch.setattr("skippy_zmq.supervision.RESTART_DELAY_SECONDS", 0.0)


def _answers(pipeline: LocalPipeline) -> None:
    """Ask as a program that has just begun."""
    with pipeline.client(timeout=PATIENCE) as client:
        assert client.generate("x").text == "polly"


@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_a_killed_stage_comes_back(victims: tuple[int, ...], model: Parrot, caplog: pytest.LogCaptureFixture) -> None:
    with LocalPipeline(model.path, stages=3, **SMALL) as pipeline, pipeline.client(timeout=PATIENCE) as client:
        assert client.generate("x").text == "polly"
        before, known = pipeline.process_ids, [facts.stage for facts in pipeline.stages]
        words = kill(pipeline, *victims)
        assert any(f"stage of layers {pipeline.layers[i]} was killed by signal 9" in words for i in victims)
        pipeline.wait_until_ready(PATIENCE)
        assert pipeline.failure() == ""
        assert pipeline.restarts == len(victims)
        for index, (old, new) in enumerate(zip(before, pipeline.process_ids, strict=True)):
            assert (old == new) == (index not in victims)
            assert (known[index] == pipeline.stages[index].stage) == (index not in victims)
        _answers(pipeline)
        assert client.generate("x").text == "polly"
        assert child_processes() == set(pipeline.process_ids)
    records = [record for record in caplog.records if record.name == "skippy_zmq.local"]
    assert [record.levelno for record in records] == [logging.WARNING] * len(victims)
    assert all("was killed by signal 9" in record.getMessage() for record in records)


def test_one_stage_alone_comes_back(model: Parrot) -> None:
    with LocalPipeline(model.path, stages=1, **SMALL) as pipeline:
        kill(pipeline, 0)
        pipeline.wait_until_ready(PATIENCE)
        _answers(pipeline)


def test_a_stage_that_was_asked_to_end_by_somebody_else_comes_back(model: Parrot) -> None:
    with LocalPipeline(model.path, stages=2, **SMALL) as pipeline:
        assert "ended with status 0" in kill(pipeline, 1, number=signal.SIGTERM)
        pipeline.wait_until_ready(PATIENCE)
        _answers(pipeline)


def test_a_stage_that_dies_again_while_it_starts_comes_back(model: Parrot, no_delay: None) -> None:
    with LocalPipeline(model.path, stages=3, **SMALL) as pipeline:
        pid = pipeline.process_ids[1]
        for _ in range(3):
            os.kill(pid, signal.SIGKILL)
            pid = wait_for_new_process(pipeline, 1, pid)
        pipeline.wait_until_ready(PATIENCE)
        assert pipeline.restarts == 3
        _answers(pipeline)


def test_without_restart_a_stage_stays_dead_and_the_others_alive(model: Parrot) -> None:
    with LocalPipeline(model.path, stages=3, restart=False, **SMALL) as pipeline:
        words = kill(pipeline, 1)
        assert f"stage of layers {pipeline.layers[1]} was killed by signal 9" in words
        with pytest.raises(DeadlineError, match="not ready within"):
            pipeline.wait_until_ready(0.5)
        assert pipeline.failure() == words
        assert pipeline.restarts == 0
        for index in (0, 2):
            os.kill(pipeline.process_ids[index], 0)


def test_a_stage_that_dies_again_and_again_ends_the_pipeline(model: Parrot, no_delay: None) -> None:
    with LocalPipeline(model.path, stages=3, restart_limit=2, **SMALL) as pipeline:
        with watched([pipeline.process_ids[index] for index in (0, 2)]) as others:
            for _ in range(3):
                kill(pipeline, 1)
                if pipeline.restarts < 2:
                    pipeline.wait_until_ready(PATIENCE)
            wait_for_ends(others)
        why = rf"stage of layers {pipeline.layers[1]} was killed by signal 9: .*3 ends within 60 s: not started again"
        for ask in (lambda: pipeline.wait_until_ready(PATIENCE), pipeline.client, lambda: pipeline.generate("x")):
            with pytest.raises(SkippyError, match=why):
                ask()
        assert "3 ends within 60 s" in pipeline.failure()
        assert pipeline.restarts == 2


def test_an_answer_under_way_ends_with_the_pipeline(tmp_path: Path, no_delay: None) -> None:
    """Nobody waits for a stage that nothing will bring back, however long stage 0 would."""
    endless = parrot(tmp_path / "endless.gguf", "polly ", end="loop", context=100_000)
    options = {**SMALL, "ctx_size": 65536, "lanes": 1, "recover_seconds": 3600}
    with LocalPipeline(endless.path, stages=3, restart_limit=1, **options) as pipeline:
        with pipeline.client(timeout=PATIENCE) as client:
            stream = client.stream("x", max_tokens=60_000)
            next(stream)
            pid = pipeline.process_ids[1]
            os.kill(pid, signal.SIGKILL)
            os.kill(wait_for_new_process(pipeline, 1, pid), signal.SIGKILL)
            with pytest.raises(RetryableError, match=r"shutting down|connection lost"):
                for _ in stream:
                    pass
        assert "2 ends within 60 s" in pipeline.failure()


def test_an_answer_under_way_goes_on(tmp_path: Path) -> None:
    endless = parrot(tmp_path / "endless.gguf", "polly ", end="loop", context=4096)
    with LocalPipeline(endless.path, stages=3, **{**SMALL, "ctx_size": 4096}) as pipeline:
        with pipeline.client(timeout=PATIENCE) as client:
            stream = client.stream("x", max_tokens=600)
            tokens = list(next(stream).token_ids)
            os.kill(pipeline.process_ids[1], signal.SIGKILL)
            tokens += [token for chunk in stream for token in chunk.token_ids]
        assert tokens == [endless.token_ids[i % 6] for i in range(600)]
        assert pipeline.restarts == 1


def test_ends_long_ago_do_not_count(model: Parrot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippy_zmq.supervision.RESTART_WINDOW_SECONDS", 0.0)
    with LocalPipeline(model.path, stages=2, restart_limit=1, **SMALL) as pipeline:
        for _ in range(3):
            kill(pipeline, 0)
            pipeline.wait_until_ready(PATIENCE)
        assert pipeline.restarts == 3


def test_a_mistake_of_the_user_is_not_tried_again(model: Parrot, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(model.path.read_bytes())
    with LocalPipeline(path, split=[2], **SMALL) as pipeline:
        path.unlink()
        kill(pipeline, 1)
        with pytest.raises(UserError, match=r"stage of layers 2:4 ended with status 2: .*mine\.gguf"):
            pipeline.wait_until_ready(PATIENCE)
        assert pipeline.restarts == 1


def test_a_stage_that_the_system_cannot_start_is_tried_again(model: Parrot, nothing_left: Path, no_delay: None) -> None:
    directory, elsewhere = nothing_left / "mine", nothing_left / "elsewhere"
    directory.mkdir()
    with LocalPipeline(model.path, split=[2], directory=directory, **SMALL) as pipeline:
        directory.rename(elsewhere)  # no place for the log
        kill(pipeline, 1)
        with pytest.raises(SkippyError, match=r"stage of layers 2:4 could not be started: No such file or directory"):
            pipeline.wait_until_ready(PATIENCE)
        assert pipeline.restarts == 0
        elsewhere.rename(directory)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_the_log_keeps_what_was_said_before(model: Parrot, nothing_left: Path) -> None:
    directory = nothing_left / "mine"
    directory.mkdir()
    with LocalPipeline(model.path, stages=2, directory=directory, **SMALL) as pipeline:
        with (directory / "s1.log").open("a") as log:
            log.write("the last straw\n")
        assert kill(pipeline, 1).endswith("killed by signal 9: the last straw")
        pipeline.wait_until_ready(PATIENCE)
        assert "killed by signal 9: it said nothing" in kill(pipeline, 1)
        assert "the last straw\n" in (directory / "s1.log").read_text()
        pipeline.wait_until_ready(PATIENCE)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_a_stage_that_dies_in_the_first_start_is_not_started_again(tmp_path: Path) -> None:
    model = sparse(tmp_path / "sparse.gguf", n_layers=8, layer_bytes=32 << 20)
    pipeline = LocalPipeline(model, stages=2, mmap=False, ctx_size=64)
    errors: list[SkippyError] = []

    def start() -> None:
        try:
            pipeline.start()
        except SkippyError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    while not (pids := pipeline.process_ids):
        os.sched_yield()
    os.kill(pids[1], signal.SIGKILL)
    starter.join(PATIENCE)
    assert ["was killed by signal 9" in str(error) for error in errors] == [True]
    assert pipeline.process_ids == ()


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1, 2)])
def test_closing_right_after_a_death(victims: tuple[int, ...], model: Parrot) -> None:
    with LocalPipeline(model.path, stages=3, **SMALL) as pipeline:
        for index in victims:
            os.kill(pipeline.process_ids[index], signal.SIGKILL)


def test_closing_while_a_stage_starts_again(model: Parrot) -> None:
    with LocalPipeline(model.path, stages=2, **SMALL) as pipeline:
        pid = pipeline.process_ids[0]
        os.kill(pid, signal.SIGKILL)
        wait_for_new_process(pipeline, 0, pid)


def test_closing_before_a_stage_starts_again(model: Parrot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skippy_zmq.supervision.RESTART_DELAY_SECONDS", 2 * PATIENCE)
    monkeypatch.setattr("skippy_zmq.supervision.MAX_DELAY_SECONDS", 2 * PATIENCE)
    with LocalPipeline(model.path, stages=2, **SMALL) as pipeline:
        for _ in range(2):  # the second restart is put off
            kill(pipeline, 1)
            if pipeline.restarts == 0:
                pipeline.wait_until_ready(PATIENCE)
        assert pipeline.restarts == 1


def test_closing_in_another_thread_ends_the_wait(model: Parrot) -> None:
    pipeline = LocalPipeline(model.path, stages=2, restart=False, **SMALL)
    pipeline.start()
    kill(pipeline, 1)
    closer = threading.Timer(0.2, pipeline.close)
    closer.start()
    with pytest.raises(SkippyError, match="closed"):
        pipeline.wait_until_ready(PATIENCE)
    closer.join(PATIENCE)
    assert pipeline.process_ids == ()
    assert pipeline.restarts == 0


def test_a_program_says_why_its_answer_ended(tmp_path: Path, nothing_left: Path) -> None:
    endless = parrot(tmp_path / "endless.gguf", "polly ", end="loop", context=100_000)
    options = ("--split", "2", "--ctx-size", "65536", "--lanes", "1", "--prompt", "x", "--max-tokens", "60000")
    with Program(
        "-m", "skippy_zmq.client", "--model", str(endless.path), *options, TMPDIR=str(nothing_left)
    ) as program:
        assert program.read(6) == b"polly "
        first = next(pid for pid in children_of(program.process.pid) if "--next" in command_line(pid))
        os.kill(first, signal.SIGKILL)
        _, errors = program.process.communicate(timeout=PATIENCE)
    words = "stage of layers 0:2 was killed by signal 9: it said nothing"
    assert errors.decode().splitlines() == [f"{words}; starting it again", f"error: {words}"]
    assert program.process.returncode == StageLostError.exit_code


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_means_nothing_is_refused(limit: int, model: Parrot) -> None:
    with pytest.raises(OptionError, match="restart_limit"):
        LocalPipeline(model.path, restart_limit=limit)
