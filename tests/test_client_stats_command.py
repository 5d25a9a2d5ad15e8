"""``--stats`` and ``--watch`` over real stages: what they print, where, and what they do when a stage goes away."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from model_files import parrot
from pipeline_helpers import PATIENCE, run_client
from stage_processes import StagePipeline, stage_environment

from skippy_zmq import AsyncClient, Client
from skippy_zmq.client import PipelineStats
from skippy_zmq.client.__main__ import main
from skippy_zmq.errors import RetryableError, SkippyError

pytest_plugins = ("transport_fixtures", "stage_fixtures")

RANGES = "0:1 1:3 3:4"
N_TOKENS = 11
ESCAPE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", "alpha beta ", end="loop").path


@pytest.fixture(scope="module")
def standing(module_dir: Path, model: Path) -> Iterator[StagePipeline]:
    """A pipeline that nobody ends, and that has answered something."""
    with StagePipeline(module_dir, model, RANGES) as pipeline:
        pipeline.start_all()
        with Client(pipeline.endpoint) as client:
            assert client.generate("x", max_tokens=N_TOKENS).text == "alpha beta "
        yield pipeline


@pytest.fixture
def pipeline(make_pipeline: Callable[..., StagePipeline], model: Path) -> StagePipeline:
    return make_pipeline(model, RANGES).start_all()


@contextmanager
def watching(*arguments: object, **streams: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "skippy_zmq.client", *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        env=stage_environment(),
        text=True,
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def line_with(program: subprocess.Popen[str], wanted: Callable[[str], bool]) -> str:
    """The first line to come that is wanted."""
    assert program.stdout is not None
    for line in program.stdout:
        if wanted(line):
            return line
    raise AssertionError(f"the program ended with {program.wait(PATIENCE)}")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--watch", "0"], "--watch 0: wanted at least"),
        (["--watch", "nan"], "--watch nan: wanted at least"),
        (["--watch", "inf"], "--watch inf: wanted at least"),
        (["--watch", "often"], "--watch"),
        (["--watch", "--prompt", "x"], "--watch: wanted no prompt"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--connect", "7700", *argv]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert words in printed.err


def test_watching_is_for_pipelines_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "m.gguf", "--watch"]) == 2
    assert "--watch: only with --connect" in capsys.readouterr().err


def test_tables_on_standard_output(standing: StagePipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = run_client("--connect", standing.endpoint, "--stats")
    assert (ended.status, ended.errors) == (0, "")
    assert max(map(len, ended.output.splitlines())) <= 80
    assert f"3 stages at {standing.endpoint}: ready\n" in ended.output
    for index, layers in enumerate(standing.ranges):
        assert re.search(rf"^ +{index}  {layers} +stage-\S+ +{standing.endpoint_of(index)}$", ended.output, re.M)
    assert "\x1b" not in ended.output


def test_one_json_object_for_scripts(standing: StagePipeline) -> None:
    ended = run_client("--connect", standing.endpoint, "--stats", "--json")
    assert (ended.status, ended.errors) == (0, "")
    values = ended.json()
    assert (values["ready"], values["missing_layers"]) == (True, [])
    assert [stage["layers"] for stage in values["stages"]] == standing.ranges
    assert [stage["facts"]["endpoint"] for stage in values["stages"]] == [*map(standing.endpoint_of, range(3))]
    for stage in values["stages"]:
        assert stage["error"] is None
        assert stage["counters"]["compute_us"] > 0
        assert stage["derived"]["rows_per_batch"] >= 1
        assert 0 <= stage["derived"]["bubble_share"] <= 1
    assert values["stages"][-1]["counters"]["tokens"] >= N_TOKENS
    ring = values["ring"]
    assert ring["hops"] == 3
    assert ring["round_trip_us"] >= ring["compute_us"] > 0


def test_stats_may_follow_an_answer(standing: StagePipeline) -> None:
    ask = ("--connect", standing.endpoint, "--prompt", "x", "--max-tokens", N_TOKENS, "--stats")
    ended = run_client(*ask)
    assert (ended.status, ended.output) == (0, "alpha beta \n")
    assert f"{N_TOKENS} generated (length)" in ended.errors
    assert "3 stages" in ended.errors
    ended = run_client(*ask, "--json")
    assert (ended.status, ended.errors) == (0, "")
    answer = ended.json()
    assert answer["text"] == "alpha beta "
    assert len(answer["stats"]["stages"]) == 3


def test_both_clients_give_the_same(standing: StagePipeline) -> None:
    async def ask() -> PipelineStats:
        async with AsyncClient(standing.endpoint) as client:
            return await client.stats(timeout=PATIENCE)

    with Client(standing.endpoint) as client:
        stats = client.stats(timeout=PATIENCE)
        assert stats.complete
        assert [stage.facts for stage in stats] == list(client.stages)
    same = asyncio.run(ask())
    assert [stage.facts for stage in same] == [stage.facts for stage in stats]
    assert [set(stage.counters) for stage in same] == [set(stage.counters) for stage in stats]


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(standing: StagePipeline, timeout: float) -> None:
    async def ask() -> None:
        async with AsyncClient(standing.endpoint) as client:
            await client.stats(timeout=timeout)

    with Client(standing.endpoint) as client, pytest.raises(SkippyError, match="timeout"):
        client.stats(timeout=timeout)
    with pytest.raises(SkippyError, match="timeout"):
        asyncio.run(ask())


def test_a_lost_stage_is_shown_with_the_others_and_comes_back(pipeline: StagePipeline) -> None:
    with Client(pipeline.endpoint) as client:
        before = client.stats()
        pipeline[1].kill()
        stats = client.stats(timeout=1.0)
        while stats.ready:  # stage 0 hears of it in its own time
            stats = client.stats(timeout=1.0)
        assert [stage.failure is None for stage in stats] == [True, False, True]
        assert stats[1].facts == before[1].facts
        assert pipeline.endpoint_of(1) in str(stats[1].failure)
        ended = run_client("--connect", pipeline.endpoint, "--stats")
        assert (ended.status, ended.errors) == (RetryableError.exit_code, "")
        assert "not ready" in ended.output
        assert "layers 1:4: no stage known" in ended.output
        pipeline.start(1).ready()
        pipeline[0].ready()
        stats = client.stats()
        assert stats.complete
        assert stats[1].facts.stage != before[1].facts.stage
        assert stats[0].facts.stage == before[0].facts.stage


def test_watching_prints_lines_survives_a_lost_stage_and_ends_with_ctrl_c(pipeline: StagePipeline) -> None:
    with watching("--connect", pipeline.endpoint, "--watch", 0.2) as program:
        assert program.stdout is not None
        assert "tokens/s" in program.stdout.readline()
        first = program.stdout.readline().split()
        assert (first[1:3], first[5]) == (["-", "-"], "0/4")
        with Client(pipeline.endpoint) as client:
            client.generate("x", max_tokens=60)
        line_with(program, lambda line: line.split()[1] not in ("-", "0"))
        pipeline[2].kill()
        line_with(program, lambda line: line.split()[-1] == "lost")
        pipeline.start(2).ready()
        line_with(program, lambda line: "lost" not in line)
        line_with(program, lambda line: line.split()[-1].startswith("0%"))
        pipeline[0].kill()
        line_with(program, lambda line: line.split()[7] == "lost")
        pipeline.start(0).ready()
        line = line_with(program, lambda line: "lost" not in line)
        assert "\x1b" not in line
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=PATIENCE)
    assert (program.returncode, errors) == (130, "")


def test_watching_with_json_prints_an_object_per_interval(standing: StagePipeline) -> None:
    with watching("--connect", standing.endpoint, "--watch", 0.1, "--json") as program:
        assert program.stdout is not None
        first, second = (json.loads(program.stdout.readline()) for _ in range(2))
        program.send_signal(signal.SIGINT)
        program.communicate(timeout=PATIENCE)
    assert (first["rows_per_s"], first["stages"][0]["derived"]) == (None, None)
    assert second["time"] > first["time"]
    assert second["rows_per_s"] == 0
    assert second["stages"][0]["derived"]["interval_s"] > 0
    assert second["stages"][0]["counters"]["rows"] > 0


def test_watching_nothing_ends_with_one_line(tmp_path: Path) -> None:
    ended = run_client("--connect", f"ipc://{tmp_path}/s0", "--watch", "--timeout", 0.5)
    assert (ended.status, ended.output, ended.errors.count("\n")) == (2, "", 1)
    assert f"cannot reach ipc://{tmp_path}/s0" in ended.errors


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of 30 lines: what shows on it, and what a program writes to."""
    shown, written = pty.openpty()
    fcntl.ioctl(written, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    try:
        yield shown, written
    finally:
        os.close(shown)
        os.close(written)


def read_until(shown: int, text: str, enough: Callable[[str], bool]) -> str:
    while not enough(text):
        text += os.read(shown, 65536).decode()
    return text


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_terminal_is_redrawn_in_place_and_left_as_it_was(
    standing: StagePipeline, monkeypatch: pytest.MonkeyPatch, columns: int, number: signal.Signals, status: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    with (
        terminal(columns) as (shown, written),
        watching("--connect", standing.endpoint, "--watch", 0.1, stdout=written) as program,
    ):
        text = read_until(shown, "", lambda text: text.count("\x1b[J") > 3)
        program.send_signal(number)
        text = read_until(shown, text, lambda text: "credit waits" in text.partition("\x1b[?1049l")[2])
        assert (program.wait(PATIENCE), program.communicate()[1]) == (status, "")
    assert text.startswith("\x1b[?1049h")
    before, _, after = text.partition("\x1b[?1049l")
    assert "\x1b" not in after
    frames = before.split("\x1b[H")[2:-1]
    assert frames
    for frame in frames:
        assert frame.endswith("\x1b[J")
        lines = ESCAPE.sub("", frame).splitlines()
        assert max(map(len, lines)) < columns
        assert all(f" {layers} " in frame for layers in standing.ranges)
        # Nothing is cleared but what stands behind a line and below the last one.
        assert set(ESCAPE.findall(frame)) <= {"\x1b[K", "\x1b[J", "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m"}


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_escape_codes_where_they_are_not_wanted(
    standing: StagePipeline, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(name, value)
    with (
        terminal(80) as (shown, written),
        watching("--connect", standing.endpoint, "--watch", 0.1, stdout=written) as program,
    ):
        text = read_until(shown, "", lambda text: text.count("\n") > 3)
        program.send_signal(signal.SIGINT)
        assert program.wait(PATIENCE) == 130
    assert "\x1b" not in text
    assert text.count("tokens/s") == 1
