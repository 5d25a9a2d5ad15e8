"""Stage processes of a pipeline on this machine: started, watched, started again when they die, ended."""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skippy_zmq.errors import RetryableError, SkippyError, UserError
from skippy_zmq.topology import LayerRange
from skippy_zmq.wire.messages import StageFacts

log = logging.getLogger("skippy_zmq.local")

# How long stages may take to leave before they are killed; nothing of ours runs on them by then.
STOP_SECONDS = 5.0
# A stage that ends more often than its limit within this time ends the pipeline.
RESTART_WINDOW_SECONDS = 60.0
# Before the second restart within the window, doubled for each further one; the first is not delayed.
RESTART_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 8.0
_LOG_TAIL_BYTES = 4096
_MAX_LINE_BYTES = 1 << 20  # of what a stage prints; its READY has some hundred bytes a stage


@dataclass(frozen=True, slots=True)
class StageCommand:
    """How to run the stage of ``layers``. ``log``: the file for its standard error."""

    layers: LayerRange
    arguments: tuple[str, ...]
    log: Path


class _Process:
    """A running stage. Its standard output ends when it does, which is how its end is noticed without polling."""

    def __init__(self, command: StageCommand, *, again: bool) -> None:
        self.layers = command.layers
        # Held open: its last lines must be readable whatever becomes of the path.
        self._log = command.log.open("a+b")
        if not again:
            self._log.truncate(0)
        self._log_start = self._log.seek(0, os.SEEK_END)
        try:
            # A process group of its own: Ctrl-C at the terminal is for the program that owns the pipeline.
            self._popen = subprocess.Popen(
                command.arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, process_group=0
            )
        except BaseException:
            self._log.close()
            raise
        self.pid = self._popen.pid
        self._line = b""

    def fileno(self) -> int:
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def read(self) -> list[bytes] | None:
        """The lines that are complete now; None when the stage has ended. Raises SkippyError for an endless one."""
        data = os.read(self.fileno(), 65536)
        if not data:
            return None
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _MAX_LINE_BYTES:
            self._line = b""
            raise SkippyError(f"stage of layers {self.layers}: printed a line of more than {_MAX_LINE_BYTES} bytes")
        return lines

    def end(self) -> tuple[int, str]:
        """Status (negative: the signal) and last words of a stage that has ended.

        It is not collected yet: until ``close`` its number can be no other process.
        """
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        except ChildProcessError:  # collected when it was to be terminated, or by the system where SIGCHLD is ignored
            status = self._popen.wait()
        log_end = os.fstat(self._log.fileno()).st_size
        said = os.pread(self._log.fileno(), _LOG_TAIL_BYTES, max(self._log_start, log_end - _LOG_TAIL_BYTES))
        lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
        words = lines[-1].removeprefix("error: ") if lines else "it said nothing"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return status, f"stage of layers {self.layers} {how}: {words}"

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        self._popen.kill()

    def close(self) -> None:
        """Collect the process, which must have ended or be about to."""
        try:
            self._popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        for file in (self._popen.stdin, self._popen.stdout, self._log):
            if file is not None:
                file.close()


@dataclass(slots=True)
class _Stage:
    """``ready``: what its process announced last. ``down``: last words of one that ended, until it is well again."""

    command: StageCommand
    process: _Process
    ready: tuple[StageFacts, ...] = ()
    down: str = ""
    restart_at: float | None = None  # monotonic seconds
    ends: deque[float] = field(default_factory=deque)  # within the window


class Supervisor:
    """Runs one process per command, in layer order, with a thread that waits for what they print and for their ends.

    A stage that ends after the pipeline was ready once is started again with the same command, but not after a mistake
    of the user (exit code 2), nor more than ``restart_limit`` times within RESTART_WINDOW_SECONDS: then the pipeline
    has failed, and the other stages are told to end. With a limit of 0 ends are only noted. Any thread may call.
    """

    def __init__(self, commands: Sequence[StageCommand], *, restart_limit: int) -> None:
        """Start every stage; raises OSError where the system cannot."""
        self._restart_limit = restart_limit
        # Guards everything below; the thread alone changes stages until it has been joined.
        self._changed = threading.Condition()
        self._stages: list[_Stage] = []
        self._restarts = 0
        self._was_ready = False
        self._closing = False
        self._failure: tuple[type[SkippyError], str] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="stage-supervisor", daemon=True)
        try:
            self._selector.register(self._wake_read, selectors.EVENT_READ, None)
            for command in commands:
                stage = _Stage(command, _Process(command, again=False))
                self._stages.append(stage)
                self._selector.register(stage.process, selectors.EVENT_READ, stage)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the stages, in layer order; one that has ended keeps its number until it is started again."""
        with self._changed:
            return tuple(stage.process.pid for stage in self._stages)

    @property
    def stages(self) -> tuple[StageFacts, ...]:
        """What stage 0 announced last; () until it has."""
        with self._changed:
            return self._stages[0].ready if self._stages else ()

    @property
    def restarts(self) -> int:
        """How often a stage was started again."""
        with self._changed:
            return self._restarts

    def check(self) -> None:
        """Raise the error that has ended the pipeline, where one has."""
        with self._changed:
            self._check()

    def wait_until_ready(self, seconds: float) -> bool:
        """Whether all stages run and belong together within ``seconds``; raises the error that ends the pipeline."""
        with self._changed:
            ready = self._changed.wait_for(lambda: self._ready or self._closing or self._failure, seconds)
            self._check()
            if self._closing:
                raise SkippyError("the pipeline was closed before it was ready")
            return bool(ready)

    def last_words(self, seconds: float) -> str:
        """Why the pipeline has failed, or what a stage that ended since it was ready said last; "" for neither.

        Waits for one of them, ``seconds`` at most.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._why or self._closing, seconds)
            return self._why

    def close(self) -> None:
        """End all stages, by force after STOP_SECONDS; may be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        os.write(self._wake_write, b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        for stage in self._stages:
            stage.process.terminate()
        self._selector.unregister(self._wake_read)
        deadline = time.monotonic() + STOP_SECONDS
        while self._selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if not os.read(key.fd, 65536):
                    self._selector.unregister(key.fileobj)
        for key in list(self._selector.get_map().values()):
            key.data.process.kill()
        self._selector.close()
        for stage in self._stages:
            stage.process.close()
        with self._changed:
            self._stages.clear()
        os.close(self._wake_read)
        os.close(self._wake_write)

    @property
    def _ready(self) -> bool:
        """Whether stage 0 speaks of the very processes that run now, each of which has announced itself."""
        alive = [stage.ready[0].stage if stage.ready else "" for stage in self._stages]
        return all(alive) and [facts.stage for facts in self._stages[0].ready] == alive

    @property
    def _why(self) -> str:
        if self._failure is not None:
            return self._failure[1]
        return next((stage.down for stage in self._stages if stage.down), "")

    def _check(self) -> None:
        if self._failure is not None:
            kind, words = self._failure
            raise kind(words)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._timeout()):
                    if key.data is not None:
                        self._take(key.data)
                self._restart_due()
        except Exception as error:  # a bug of ours: nobody looks after the stages any more, and that has to be known
            log.exception("the thread that looks after the stages has ended")
            self._fail(SkippyError, f"the stages are not looked after any more: {error}")

    def _timeout(self) -> float | None:
        due = [stage.restart_at for stage in self._stages if stage.restart_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _take(self, stage: _Stage) -> None:
        try:
            lines = stage.process.read()
            if lines is None:
                self._selector.unregister(stage.process)
                self._ended(stage, *stage.process.end())
                return
            for line in lines:
                facts = _announced(stage.process.layers, line)
                with self._changed:
                    stage.ready = facts
                    if self._ready:
                        self._was_ready = True
                        for one in self._stages:
                            one.down = ""
                    self._changed.notify_all()
        except SkippyError as error:
            self._fail(type(error), str(error))

    def _ended(self, stage: _Stage, status: int, words: str) -> None:
        with self._changed:
            stage.ready, stage.down = (), words
            over = self._closing or self._failure is not None
            self._changed.notify_all()
        if over:
            return
        if not self._was_ready or (status == UserError.exit_code and self._restart_limit):
            kinds: dict[int, type[SkippyError]] = {kind.exit_code: kind for kind in (UserError, RetryableError)}
            self._fail(kinds.get(status, SkippyError), words)
        elif self._restart_limit:
            self._plan_restart(stage, words)

    def _plan_restart(self, stage: _Stage, words: str) -> None:
        now = time.monotonic()
        stage.ends.append(now)
        while stage.ends[0] < now - RESTART_WINDOW_SECONDS:
            stage.ends.popleft()
        times = len(stage.ends)
        if times > self._restart_limit:
            self._fail(SkippyError, f"{words} ({times} ends within {RESTART_WINDOW_SECONDS:g} s: not started again)")
            return
        delay = min(MAX_DELAY_SECONDS, RESTART_DELAY_SECONDS * 2.0 ** (times - 2)) if times > 1 else 0.0
        stage.restart_at = now + delay
        log.warning("%s; starting it again%s", words, f" in {delay:g} s" if delay else "")

    def _restart_due(self) -> None:
        now = time.monotonic()
        for stage in self._stages:
            if self._closing or self._failure is not None:
                return
            if stage.restart_at is None or stage.restart_at > now:
                continue
            stage.restart_at = None
            try:
                process = _Process(stage.command, again=True)
            except OSError as error:
                words = f"stage of layers {stage.command.layers} could not be started: {error.strerror}"
                with self._changed:
                    stage.down = words
                self._plan_restart(stage, words)
                continue
            stage.process.close()
            self._selector.register(process, selectors.EVENT_READ, stage)
            with self._changed:
                stage.process = process
                self._restarts += 1
                self._changed.notify_all()

    def _fail(self, kind: type[SkippyError], words: str) -> None:
        """Nothing will bring the pipeline back: its stages have nothing to wait for."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = kind, words
            self._changed.notify_all()
        if self._was_ready:
            log.error("%s", words)
        for stage in self._stages:
            stage.process.terminate()


def _announced(layers: LayerRange, line: bytes) -> tuple[StageFacts, ...]:
    text = line.decode("utf-8", "replace")
    try:
        if not text.startswith("READY "):
            raise ValueError
        facts = json.loads(text.removeprefix("READY "))
        return tuple(StageFacts(**stage) for stage in facts["stages"])
    except (ValueError, KeyError, TypeError):
        raise SkippyError(f"stage of layers {layers}: wanted a line READY {{json}}, got {text[:200]!r}") from None
