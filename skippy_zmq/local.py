"""A whole pipeline on this machine: every stage a child process, joined over ipc."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from skippy_zmq.client import Client, Generation
from skippy_zmq.errors import DeadlineError, OptionError, UserError
from skippy_zmq.plan.planner import balanced_split
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import StageOptions, available_cores, check_options, to_arguments
from skippy_zmq.sources.references import locate
from skippy_zmq.supervision import StageCommand, Supervisor
from skippy_zmq.topology import split_at
from skippy_zmq.transport.ipc_path import check_length
from skippy_zmq.wire.messages import StageFacts

DEFAULT_STARTUP_SECONDS = 600.0
# Of one stage within a minute (supervision.RESTART_WINDOW_SECONDS).
DEFAULT_RESTART_LIMIT = 5
DRAIN_SECONDS = 1.0
# A connection is lost a moment before the process behind it has ended.
_FAILURE_SECONDS = 1.0
_SOCKET_DIRECTORY = "/tmp"  # where the usual place for temporary files has too long a path for sockets


class LocalPipeline:
    """Runs ``model`` as ``stages`` processes; use it with ``with``.

    ``model``: a GGUF file, the first of its shards, a layer package, a checkpoint folder, or
    ``hf://owner/name[@revision][/file]``, which is fetched here.
    ``split``: layer numbers to cut at, in place of a cut into stages that take equally long. ``options``, and single
    ones by keyword
    (``ctx_size=512``), are those of ``python -m skippy_zmq.stage``. ``uncertified``: run an architecture that
    docs/architectures.md does not list. ``directory``: an existing one for sockets and logs;
    without it a private one is made and removed. Stages end with this process, however it ends.

    ``restart``: a stage that dies once the pipeline was ready is started again, up to ``restart_limit`` times within a
    minute; beyond that, and where it cannot be done (exit code 2), the pipeline has failed and all of it ends. What the
    dead stage said last is logged (logger ``skippy_zmq.local``). Without ``restart`` requests fail when a stage dies.

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
        restart: bool = True,
        restart_limit: int = DEFAULT_RESTART_LIMIT,
        **overrides: Any,
    ) -> None:
        given = options.model_dump(exclude_unset=True) if options is not None else {}
        self.options = check_options({**given, **overrides}, "options")
        self.model = str(model)
        located = locate(model, beside=self.options.imatrix)
        self._reference = located.reference
        source = open_with_options(located, self.options)
        if split is None:
            self.layers = tuple(balanced_split(source, stages, self.options))
        else:
            self.layers = tuple(split_at(split, source.n_layers))
        self._uncertified = uncertified
        self._given_directory = Path(directory) if directory is not None else None
        self._startup_timeout = startup_timeout
        if restart_limit < 1:
            raise OptionError(f"restart_limit: wanted at least 1, got {restart_limit}")
        self._restart_limit = restart_limit if restart else 0
        self._directory: Path | None = None
        self._lock = threading.Lock()  # of the supervisor and the directory, which come and go together
        self._supervisor: Supervisor | None = None
        self._client: Client | None = None

    @property
    def endpoint(self) -> str:
        """Where stage 0 is, for clients in this and other processes of the same user."""
        return self._endpoint(0)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the stages, in layer order; one that has ended keeps its number until it is started again."""
        supervisor = self._supervisor
        return supervisor.process_ids if supervisor is not None else ()

    @property
    def stages(self) -> tuple[StageFacts, ...]:
        """What the stages are, as stage 0 announced them last; () while it has not."""
        supervisor = self._supervisor
        return supervisor.stages if supervisor is not None else ()

    @property
    def restarts(self) -> int:
        """How often a stage was started again since ``start``."""
        supervisor = self._supervisor
        return supervisor.restarts if supervisor is not None else 0

    def client(self, *, timeout: float = 30.0) -> Client:
        """A new client of this pipeline, to be closed before it. Raises SkippyError where the pipeline has failed."""
        self._running().check()
        return Client(self.endpoint, timeout=timeout)

    def generate(self, prompt: str | None = None, **arguments: Any) -> Generation:
        """Client.generate on a client that belongs to the pipeline; for one thread."""
        if self._client is None:
            self._client = self.client()
        self._running().check()
        return self._client.generate(prompt, **arguments)

    def start(self) -> None:
        """Start all stages and wait until the pipeline is ready."""
        with self._lock:
            if self._supervisor is not None:
                raise OptionError(f"pipeline of {self.model}: started already")
            self._directory = self._given_directory or _private_directory(len(self.layers))
            try:
                check_length(self._endpoint(len(self.layers) - 1).removeprefix("ipc://"))
                commands = [self._command(index) for index in range(len(self.layers))]
                self._supervisor = Supervisor(commands, restart_limit=self._restart_limit)
            except BaseException:
                self._remove_directory()
                raise
        try:
            self.wait_until_ready(self._startup_timeout)
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until all stages run and have found each other, as they do again after a restart.

        Raises DeadlineError after ``timeout`` seconds, SkippyError with a stage's own words where the pipeline has
        failed.
        """
        if not self._running().wait_until_ready(timeout):
            raise DeadlineError(f"pipeline of {self.model}: not ready within {timeout:g} s")

    def close(self) -> None:
        """Stop all stages and remove what was made; may be called twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        with self._lock:
            if self._supervisor is not None:
                self._supervisor.close()
                self._supervisor = None
            self._remove_directory()

    def failure(self) -> str:
        """Why the pipeline has failed, or what a stage said last whose place is not taken yet; "" while all is well.

        The reason behind a StageLostError.
        """
        supervisor = self._supervisor
        return supervisor.last_words(_FAILURE_SECONDS) if supervisor is not None else ""

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

    def _command(self, index: int) -> StageCommand:
        assert self._directory is not None
        layers, last = self.layers[index], len(self.layers) - 1
        command = [sys.executable, "-m", "skippy_zmq.stage", f"--model={self._reference}", "--layers", str(layers)]
        command += ["--bind", self._endpoint(index)]
        if index < last:
            command += ["--next", self._endpoint(index + 1)]
        elif index > 0:
            command += ["--first", self._endpoint(0)]
        command += ["--exit-with-stdin", "--no-progress", "--log-level", "warning"]
        command += ["--drain-seconds", str(DRAIN_SECONDS), *to_arguments(self.options)]
        if self.options.groups is None and self.options.threads * len(self.layers) > available_cores():
            command += ["--groups", "1"]  # stages that share their cores gain nothing from computing at once
        if not self._restart_limit and "recover_seconds" not in self.options.model_fields_set:
            command += ["--recover-seconds", "0"]  # there is nothing to wait for
        if self._uncertified:
            command.append("--uncertified")
        return StageCommand(layers, tuple(command), self._directory / f"s{index}.log")

    def _running(self) -> Supervisor:
        supervisor = self._supervisor
        if supervisor is None:
            raise OptionError(f"pipeline of {self.model}: not started")
        return supervisor

    def _remove_directory(self) -> None:
        if self._directory is not None and self._given_directory is None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None


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
