"""Rendering a model's chat template in a child process, without ever waiting for it.

A template comes with a model file: it is a stranger's program. It runs in a process of its own, in a sandbox, with
limits on memory, output and time; one that takes too long is killed together with that process, and a new one started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from skippy_zmq.chat.limits import (
    MAX_MESSAGES_BYTES,
    MAX_OUTPUT_BYTES,
    MAX_TEMPLATE_CHARACTERS,
    MAX_WAITING,
    RENDER_SECONDS,
    START_SECONDS,
)
from skippy_zmq.errors import DeadlineError, RequestError, SkippyError
from skippy_zmq.wire.messages import ChatMessage

_MAX_LINE_BYTES = 8 * MAX_OUTPUT_BYTES  # every character escaped
_CODE = "chat_template"


@dataclass(frozen=True, slots=True)
class Rendered:
    request: str
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    """``error``: a RequestError with code "chat_template", or a DeadlineError where the request's own time ran out."""

    request: str
    error: SkippyError


Outcome = Rendered | Failed


@dataclass(frozen=True, slots=True)
class _Job:
    request: str
    line: bytes
    deadline: float | None


class TemplateRenderer:
    """One template and the process that renders it. Not for several threads.

    In an event loop: ``submit``, then ``poll`` whenever ``fileno`` is readable and ``expire`` at ``next_deadline``.
    ``fileno`` stays the same for the renderer's whole life, but what is behind it does not: use it with poll(2)
    (``zmq.Poller``, ``select.poll``), not with an epoll set. Every submitted request ends in exactly one outcome.
    """

    def __init__(
        self,
        template: str,
        bos: str,
        eos: str,
        *,
        render_seconds: float = RENDER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._template = template
        self._setup = json.dumps({"template": template, "bos": bos, "eos": eos}).encode() + b"\n"
        self._render_seconds = render_seconds
        self._clock = clock
        self._waiting: deque[_Job] = deque()
        self._active: _Job | None = None
        self._finished: list[Outcome] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self._limit = 0.0  # when the process must be ready or the active job done
        self._outgoing = b""
        self._incoming = bytearray()
        # Each process's output takes the place of this pipe under the same number. The writing end stays open, so that
        # it is never readable while there is no process.
        self._output, self._idle = os.pipe()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        return self._output

    def start(self) -> None:
        """Start the process now, so that the first request does not wait for it. Raise SkippyError where that fails."""
        if self._process is None and self._usable() is None:
            self._spawn()

    def submit(
        self,
        request: str,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        deadline: float | None = None,
    ) -> None:
        """Render ``messages``; the outcome comes from ``poll`` or ``expire`` under the name ``request``.

        ``deadline``: until when it may wait for its turn, by this renderer's clock (``time.monotonic``).
        Once begun, it has the template's own time limit.
        Raise RequestError at once for a model without a template, and for too much to render.
        """
        unusable = self._usable()
        if unusable is not None:
            raise RequestError(unusable, code=_CODE)
        if len(self._waiting) >= MAX_WAITING:
            raise RequestError(f"chat template: {MAX_WAITING} requests wait to be rendered already", code=_CODE)
        values = [{"role": message.role, "content": message.content} for message in messages]
        line = json.dumps({"messages": values, "add_generation_prompt": add_generation_prompt}).encode() + b"\n"
        if len(line) > MAX_MESSAGES_BYTES:
            raise RequestError(f"messages: {len(line)} bytes, wanted at most {MAX_MESSAGES_BYTES}", code=_CODE)
        if self._process is None:
            self._spawn()
        self._waiting.append(_Job(request, line, deadline))
        self._advance()

    def poll(self) -> list[Outcome]:
        """Take what the process has said; never waits. What is finished, in the order of the submissions."""
        with contextlib.suppress(BlockingIOError):
            while self._process is not None:
                data = os.read(self._output, 1 << 16)
                self._incoming += data
                if not self._take_lines() or not data:
                    self._replace("the process that renders it ended")
        return self._take_finished()

    def next_deadline(self) -> float | None:
        """When ``expire`` must be called next, by this renderer's clock; None: nothing is under way."""
        times = [job.deadline for job in self._waiting if job.deadline is not None]
        if self._process is not None and (self._active is not None or not self._ready):
            times.append(self._limit)
        return min(times, default=None)

    def expire(self, now: float) -> list[Outcome]:
        """End what has run out of time at ``now``; a template that does not end is killed and its process replaced."""
        overdue = [job for job in self._waiting if job.deadline is not None and job.deadline <= now]
        for job in overdue:
            self._waiting.remove(job)
            self._finished.append(
                Failed(job.request, DeadlineError("chat template: no time left before it was rendered"))
            )
        if self._process is not None and now >= self._limit:
            if self._active is not None:
                self._replace(f"not rendered within {self._render_seconds:g} s")
            elif not self._ready:
                self._replace(f"its process did not start within {START_SECONDS:g} s")
        return self._take_finished()

    def render(self, messages: Sequence[ChatMessage], timeout: float = START_SECONDS + RENDER_SECONDS) -> str:
        """Render and wait, for programs without an event loop. Raise RequestError or DeadlineError.

        Not beside requests that were submitted and have no outcome yet (RuntimeError).
        """
        if self._active is not None or self._waiting or self._finished:
            raise RuntimeError("render() beside submitted requests")
        self.submit("", messages, deadline=self._clock() + timeout)
        poller = select.poll()
        poller.register(self._output, select.POLLIN)
        while True:
            limit = self.next_deadline()
            wait = 0.0 if limit is None else max(0.0, limit - self._clock())
            poller.poll(wait * 1000 + 1)
            for outcome in self.poll() or self.expire(self._clock()):
                if isinstance(outcome, Failed):
                    raise outcome.error
                return outcome.text

    def close(self) -> None:
        """Kill the process and free the pipe. Requests without an outcome are dropped. May be called again."""
        self._waiting.clear()
        self._active = None
        self._kill()
        if self._output >= 0:
            os.close(self._output)
            os.close(self._idle)
            self._output = self._idle = -1

    def _usable(self) -> str | None:
        if not self._template:
            return "the model has no chat template: use --prompt"
        if len(self._template) > MAX_TEMPLATE_CHARACTERS:
            return f"chat template: {len(self._template)} characters, wanted at most {MAX_TEMPLATE_CHARACTERS}"
        return None

    def _spawn(self) -> None:
        # A session of its own: a Ctrl-C in the terminal is for the parent. Nothing of the parent's environment but
        # what Python needs to start: a template that broke out would find no tokens and no keys.
        environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "TZ") if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "skippy_zmq.chat.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise SkippyError(f"chat template: cannot start its process: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        os.dup2(process.stdout.fileno(), self._output, inheritable=False)
        process.stdout.close()
        os.set_blocking(self._output, False)
        os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._ready = False
        self._limit = self._clock() + START_SECONDS
        self._incoming.clear()
        self._outgoing = self._setup
        self._write()

    def _advance(self) -> None:
        """Give the next job to a process that has nothing to do."""
        if self._ready and self._active is None and self._waiting:
            self._active = self._waiting.popleft()
            self._limit = self._clock() + self._render_seconds
            self._outgoing = self._active.line
            self._write()

    def _write(self) -> None:
        """Write what the pipe takes; the process asks for more when it has read that."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # an ended process shows on its output
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._process.stdin.fileno(), self._outgoing) :]

    def _take_lines(self) -> bool:
        """False: the process says what it should not."""
        while (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            try:
                message = json.loads(line)
            except ValueError:
                return False
            if not isinstance(message, dict) or not self._handle(message):
                return False
        return len(self._incoming) <= _MAX_LINE_BYTES

    def _handle(self, message: dict[str, Any]) -> bool:
        match message:
            case {"more": True}:
                self._write()
            case {"ready": True} if not self._ready:
                self._ready = True
                self._advance()
            case {"text": str(text)} if self._active is not None:
                self._finished.append(Rendered(self._active.request, text))
                self._active = None
                self._advance()
            case {"error": str(reason), "last": True} if self._active is not None:
                self._fail_active(reason)
                self._restart()
            case {"error": str(reason)} if self._active is not None:
                self._fail_active(reason)
                self._advance()
            case _:
                return False
        return True

    def _fail_active(self, reason: str) -> None:
        assert self._active is not None
        self._finished.append(Failed(self._active.request, RequestError(f"chat template: {reason}", code=_CODE)))
        self._active = None

    def _replace(self, reason: str) -> None:
        """End the process, and with it the active job; where it never got ready, the waiting ones too."""
        if self._active is not None:
            self._fail_active(reason)
        if self._ready:
            self._restart()
        else:
            self._kill()
            self._fail_waiting(reason)

    def _restart(self) -> None:
        self._kill()
        try:
            self._spawn()  # the next request finds it warm
        except SkippyError:
            self._fail_waiting("its process cannot be started")

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self._active = self._waiting.popleft()
            self._fail_active(reason)

    def _kill(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        self._ready = False
        os.dup2(self._idle, self._output, inheritable=False)
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        process.wait()

    def _take_finished(self) -> list[Outcome]:
        finished, self._finished = self._finished, []
        return finished
