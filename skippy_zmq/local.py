"""A whole pipeline on this machine: every stage a child process, joined over ipc."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from skippy_zmq.client import Client, Generation
from skippy_zmq.errors import DeadlineError, OptionError, RetryableError, SkippyError, UserError
from skippy_zmq.runtime.options import StageOptions, available_cores, check_options, to_arguments
from skippy_zmq.sources.models import open_model
from skippy_zmq.topology import LayerRange, split_at, split_evenly
from skippy_zmq.transport.ipc_path import check_length
from skippy_zmq.wire.messages import StageFacts

DEFAULT_STARTUP_SECONDS = 600.0
# How long stages may take to leave before they are killed; nothing of ours runs on them by then.
STOP_SECONDS = 5.0
DRAIN_SECONDS = 1.0
# A connection is lost a moment before the process behind it has ended.
_FAILURE_SECONDS = 1.0
_LOG_TAIL_BYTES = 4096
_SOCKET_DIRECTORY = "/tmp"  # where the usual place for temporary files has too long a path for sockets


@dataclass(slots=True)
class _Child:
    """A stage process. Its standard output ends when it does, which is how its end is noticed without polling."""

    layers: LayerRange
    log: Path
    process: subprocess.Popen[bytes]
    output: bytes = b""


class LocalPipeline:
    """Runs ``model`` as ``stages`` processes; use it with ``with``.

    ``model``: a GGUF file, the first of its shards, or a checkpoint.
    ``split``: layer numbers to cut at, in place of an even split. ``options``, and single ones by keyword
    (``ctx_size=512``), are those of ``python -m skippy_zmq.stage``. ``uncertified``: run an architecture that
    docs/architectures.md does not list. ``directory``: an existing one for sockets and logs;
    without it a private one is made and removed. Stages end with this process, however it ends.

    Raises ModelFileError and OptionError for what cannot run, DeadlineError after ``startup_timeout`` seconds, and
    SkippyError with a stage's own words where it fails.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        stages: int = 2,
        split: Sequence[int] | None = None,
        options: StageOptions | None = None,
        uncertified: bool = False,
        directory: str | Path | None = None,
        startup_timeout: float = DEFAULT_STARTUP_SECONDS,
        **overrides: Any,
    ) -> None:
        given = options.model_dump(exclude_unset=True) if options is not None else {}
        self.options = check_options({**given, **overrides}, "options")
        self.model = Path(model)
        self.stages: tuple[StageFacts, ...] = ()
        n_layers = open_model(self.model).n_layers
        self.layers = tuple(split_evenly(stages, n_layers) if split is None else split_at(split, n_layers))
        self._uncertified = uncertified
        self._given_directory = Path(directory) if directory is not None else None
        self._startup_timeout = startup_timeout
        self._directory: Path | None = None
        self._children: list[_Child] = []
        self._client: Client | None = None

    @property
    def endpoint(self) -> str:
        """Where stage 0 is, for clients in this and other processes of the same user."""
        return self._endpoint(0)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the stages, in layer order."""
        return tuple(child.process.pid for child in self._children)

    def client(self, *, timeout: float = 30.0) -> Client:
        """A new client of this pipeline, to be closed before it."""
        return Client(self.endpoint, timeout=timeout)

    def generate(self, prompt: str | None = None, **arguments: Any) -> Generation:
        """Client.generate on a client that belongs to the pipeline; for one thread."""
        if self._client is None:
            self._client = self.client()
        return self._client.generate(prompt, **arguments)

    def start(self) -> None:
        """Start all stages and wait until the pipeline is ready."""
        if self._directory is not None:
            raise OptionError(f"pipeline of {self.model}: started already")
        self._directory = self._given_directory or _private_directory(len(self.layers))
        try:
            check_length(self._endpoint(len(self.layers) - 1).removeprefix("ipc://"))
            for index in range(len(self.layers)):
                self._children.append(self._start_stage(index))
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop all stages and remove what was made; may be called twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        for child in self._children:
            child.process.terminate()
        with _watching(self._children) as selector:
            deadline = time.monotonic() + STOP_SECONDS
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for child in _readable(selector, left):
                    if not _read(child):
                        selector.unregister(_output(child))
            for key in list(selector.get_map().values()):
                key.data.process.kill()
        for child in self._children:
            _reap(child.process)
        self._children.clear()
        self.stages = ()
        if self._directory is not None and self._given_directory is None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None

    def failure(self) -> str:
        """What a stage that has ended said last, or "" while all run: the reason behind a StageLostError."""
        deadline = time.monotonic() + _FAILURE_SECONDS
        with _watching(self._children) as selector:
            while (left := deadline - time.monotonic()) > 0:
                for child in _readable(selector, left):
                    if not _read(child):
                        return _last_words(child)
        return ""

    def __enter__(self) -> LocalPipeline:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _endpoint(self, index: int) -> str:
        if self._directory is None:
            raise OptionError(f"pipeline of {self.model}: not started")
        return f"ipc://{self._directory}/s{index}"

    def _start_stage(self, index: int) -> _Child:
        assert self._directory is not None
        layers, last = self.layers[index], len(self.layers) - 1
        command = [sys.executable, "-m", "skippy_zmq.stage", f"--model={self.model}", "--layers", str(layers)]
        command += ["--bind", self._endpoint(index)]
        if index < last:
            command += ["--next", self._endpoint(index + 1)]
        elif index > 0:
            command += ["--first", self._endpoint(0)]
        command += ["--exit-with-stdin", "--no-progress", "--log-level", "warning"]
        command += ["--drain-seconds", str(DRAIN_SECONDS), *to_arguments(self.options)]
        if self.options.groups is None and self.options.threads * len(self.layers) > available_cores():
            command += ["--groups", "1"]  # stages that share their cores gain nothing from computing at once
        if self._uncertified:
            command.append("--uncertified")
        log = self._directory / f"s{index}.log"
        with log.open("wb") as errors:
            # A process group of its own: Ctrl-C at the terminal is for the program that owns the pipeline.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0
            )
        return _Child(layers, log, process)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._startup_timeout
        with _watching(self._children) as selector:
            while not self.stages:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(f"pipeline of {self.model}: not ready within {self._startup_timeout:g} s")
                for child in _readable(selector, left):
                    if not _read(child):
                        raise _exit_error(child)
                    if child is self._children[0] and child.output.endswith(b"\n"):
                        self.stages = _ready_stages(child.output)


@contextlib.contextmanager
def _watching(children: Sequence[_Child]) -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(_output(child), selectors.EVENT_READ, child)
        yield selector


def _readable(selector: selectors.BaseSelector, timeout: float) -> list[_Child]:
    return [key.data for key, _ in selector.select(timeout)]


def _output(child: _Child) -> int:
    assert child.process.stdout is not None
    return child.process.stdout.fileno()


def _read(child: _Child) -> bytes:
    """What the stage has written; nothing when it has ended."""
    data = os.read(_output(child), 65536)
    child.output += data
    return data


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _ready_stages(output: bytes) -> tuple[StageFacts, ...]:
    line = output.decode("utf-8", "replace")
    try:
        if not line.startswith("READY "):
            raise ValueError
        facts = json.loads(line.removeprefix("READY "))
        return tuple(StageFacts(**stage) for stage in facts["stages"])
    except (ValueError, KeyError, TypeError):
        raise SkippyError(f"stage 0: wanted a line READY {{json}}, got {line[:200]!r}") from None


def _exit_error(child: _Child) -> SkippyError:
    """The error of a stage that ended before it was ready, of the class that its exit code says."""
    status = child.process.wait()
    kinds: dict[int, type[SkippyError]] = {kind.exit_code: kind for kind in (UserError, RetryableError)}
    return kinds.get(status, SkippyError)(_last_words(child))


def _last_words(child: _Child) -> str:
    status = child.process.wait()
    with child.log.open("rb") as log:
        log.seek(max(0, child.log.stat().st_size - _LOG_TAIL_BYTES))
        lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    said = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"stage of layers {child.layers} {ended}: {said}"


def _private_directory(n_stages: int) -> Path:
    """A fresh directory of mode 0700 whose path leaves room for the names of sockets."""
    for parent in (None, _SOCKET_DIRECTORY):
        directory = Path(tempfile.mkdtemp(prefix="skz-", dir=parent))
        try:
            check_length(f"{directory}/s{n_stages}")
        except UserError:
            directory.rmdir()
            if parent is not None:
                raise
            continue
        return directory
    raise AssertionError("unreachable")
