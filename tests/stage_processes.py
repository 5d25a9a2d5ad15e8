"""Starts real stage processes, collects what they print, and ends those that it started."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import skippy_zmq

# How long to wait before a test is given up; nothing is ever asserted about time.
PATIENCE = 60.0
# Small enough to start many stages at once.
# Requests fail at once where a stage is lost: tests of going on ask for it themselves.
SMALL = ("--ctx-size", "256", "--threads", "1", "--ubatch-size", "64", "--recover-seconds", "0")

_END = None

# Runs the stage program for one command line after another in a single process.
_MANY = """
import contextlib, io, json, sys
from skippy_zmq.stage.__main__ import main
for arguments in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main([*arguments, "--exit-with-stdin"])
        except SystemExit as stopped:
            code = stopped.code
    print(json.dumps([code, stderr.getvalue()]), flush=True)
"""


def stage_environment(**extra: str) -> dict[str, str]:
    """The environment of a child that imports the package this process runs, from whatever directory."""
    package = str(Path(skippy_zmq.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "GGML_NO_BACKTRACE": "1", **extra}


def run_many(command_lines: Sequence[Sequence[str]], **environment: str) -> list[tuple[int, str]]:
    """Exit code and stderr of the stage program for each of the command lines; what starts to serve ends at once.

    One process runs them all: a signal that ended it shows as a missing result.
    """
    done = subprocess.run(
        [sys.executable, "-c", _MANY, json.dumps([list(arguments) for arguments in command_lines])],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE * 4,
        env=stage_environment(**environment),
    )
    results = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    failed = command_lines[len(results)] if len(results) < len(command_lines) else None
    assert done.returncode == 0, (done.returncode, failed, done.stderr[-2000:])
    assert failed is None
    return results


def error_line(stderr: str) -> str:
    """The text of the one ``error:`` line that a stage's stderr must end with."""
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert lines[-1] == errors[0], stderr
    assert "Traceback" not in stderr, stderr
    return errors[0].removeprefix("error: ")


class StageProcess:
    """A running stage. It ends with this process, because its standard input does."""

    def __init__(self, *arguments: str, cwd: Path | None = None, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "skippy_zmq.stage", *arguments, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=stage_environment(**environment),
        )
        self._printed: queue.Queue[str | None] = queue.Queue()
        self._logged: queue.Queue[str | None] = queue.Queue()
        self._log: list[str] = []
        self._threads = [
            threading.Thread(target=_pump, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self._printed), (self.process.stderr, self._logged))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> dict[str, Any]:
        """Wait for the next READY line; what it says."""
        line = self._next(self._printed, "READY")
        word, _, rest = line.partition(" ")
        assert word == "READY", line
        values = json.loads(rest)
        assert isinstance(values, dict)
        return values

    @property
    def silent(self) -> bool:
        """Whether no READY line is there that ``ready`` has not returned."""
        return all(line is _END for line in self._printed.queue)

    def logged(self, text: str) -> str:
        """Wait for a line on standard error that holds ``text``."""
        while text not in (line := self._next(self._logged, f"log with {text!r}")):
            pass
        return line

    def _next(self, lines: queue.Queue[str | None], what: str) -> str:
        try:
            line = lines.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"no {what} from {self.process.args!r}:\n{self.stderr()}") from None
        if line is _END:
            raise AssertionError(f"no {what}, exit code {self.process.wait(PATIENCE)}:\n{self.stderr()}")
        if lines is self._logged:
            self._log.append(line)
        return line

    def stderr(self) -> str:
        """What was logged until now."""
        with contextlib.suppress(queue.Empty):
            while (line := self._logged.get_nowait()) is not _END:
                self._log.append(line)
            self._logged.put(_END)
        return "\n".join(self._log)

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a crash would, and wait for that."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def wait(self) -> int:
        """Wait for its end; the exit code (negative: the signal that ended it)."""
        code = self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "something that the stage started is still there"
        return code

    def stop(self) -> int:
        """Ask it to end, and wait for that; the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        """End it; may be called twice."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def _pump(stream: IO[bytes], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.decode(errors="replace").rstrip("\n"))
    lines.put(_END)


class StagePipeline:
    """The stages of one model, joined over ipc sockets in ``directory``; each may be started and ended by itself."""

    def __init__(self, directory: Path, model: Path, ranges: str, *options: str) -> None:
        """``ranges``: layer ranges from first to last, such as ``"0:2 2:4"``."""
        self.model = model
        self.ranges = ranges.split()
        self._directory = directory
        self._options = (*SMALL, *options)
        self._stages: dict[int, StageProcess] = {}
        self._ended: list[StageProcess] = []

    @property
    def endpoint(self) -> str:
        return self.endpoint_of(0)

    def endpoint_of(self, index: int) -> str:
        return f"ipc://{self._directory}/{index}"

    def arguments(self, index: int) -> list[str]:
        last = len(self.ranges) - 1
        arguments = ["--model", str(self.model), "--layers", self.ranges[index], "--bind", self.endpoint_of(index)]
        if index < last:
            arguments += ["--next", self.endpoint_of(index + 1)]
        elif last:
            arguments += ["--first", self.endpoint]
        return [*arguments, *self._options]

    def __getitem__(self, index: int) -> StageProcess:
        return self._stages[index]

    def start(self, index: int, *options: str) -> StageProcess:
        """Start a stage, anew where there was one."""
        if index in self._stages:
            self._ended.append(self._stages[index])
        self._stages[index] = StageProcess(*self.arguments(index), *options)
        return self._stages[index]

    def start_all(self) -> Self:
        """Start every stage and wait until each has said that it is ready."""
        for index in range(len(self.ranges)):
            self.start(index)
        for stage in self._stages.values():
            stage.ready()
        return self

    def close(self) -> None:
        for stage in (*self._stages.values(), *self._ended):
            stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()
