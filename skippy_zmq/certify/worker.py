"""The parent's side of ``forker``: hand it one job after the other and read what became of each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_KEPT_BYTES = 4096  # of what a child printed
_CLOSE_SECONDS = 10.0


class Worker:
    """One forker process; use it from one thread at a time. ``folder`` takes its files; a ``with`` block ends it."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._seconds = seconds
        self._files = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
        self._closed = False
        self._process = self._start()

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "GGML_NO_BACKTRACE": "1",  # an abort would start a debugger
        }
        environment.setdefault("GOMP_SPINCOUNT", "1000")  # idle OpenMP threads steal the cores of other jobs
        return subprocess.Popen(
            [sys.executable, "-m", "skippy_zmq.certify.forker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is for the parent, which ends this process
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process that forks the jobs."""
        return self._process.pid

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """The job's result; ``{"crashed": reason}`` where its process ended without one."""
        if self._process.poll() is not None and not self._closed:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        result, stderr = self._files / "result.json", self._files / "stderr.txt"
        result.unlink(missing_ok=True)
        stderr.unlink(missing_ok=True)
        request = {"job": job, "result": str(result), "stderr": str(stderr), "seconds": self._seconds}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):  # ended, or closed by ``close``
            answer = b""
        if not answer:
            return {"crashed": f"the process that forks them {_ending(self._process.wait())}"}
        code = json.loads(answer)["exit"]
        if code is None:
            return {"crashed": f"stopped after {self._seconds:g} s"}
        if code != 0:
            return {"crashed": _ending(code) + _last_words(stderr)}
        value: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return value

    def close(self) -> None:
        """End the process and the job that it is running; may be called while another thread waits in ``run``."""
        self._closed = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def _ending(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _last_words(stderr: Path) -> str:
    with contextlib.suppress(OSError):
        text = stderr.read_bytes()[-_KEPT_BYTES:].decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines:
            return f": {lines[-1]}"
    return ""
