"""``python -m skippy_zmq.certify.forker``: runs each job of certification in a forked child of its own.

JSON lines. In: ``{"job", "result", "stderr", "seconds"}``: what to do, the file for its result, the file for what it
and llama.cpp print, its time limit. Out: ``{"exit": code}`` (negative: the signal; null: the time ran out). Forking
after the slow imports makes a child cost a few milliseconds. Ends when stdin does, together with a running child.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from skippy_zmq.certify.job import run_job
from skippy_zmq.stage import handshake  # noqa: F401  # imported here, used in the children


def _child(request: dict[str, Any]) -> None:
    code = 1
    try:
        log = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for source, target in ((nothing, 0), (nothing, 1), (log, 2)):
            os.dup2(source, target)
        Path(request["result"]).write_text(json.dumps(run_job(request["job"])), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # the parent's buffers and exit handlers are not the child's


def _wait(pid: int, seconds: float) -> int | None:
    """The child's exit code, None where it was killed because time ran out; SystemExit where stdin ended meanwhile."""
    handle = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        waiting.register(0, select.POLLIN)  # the next request comes only after this answer: readable means ended
        ready = {descriptor for descriptor, _ in waiting.poll(seconds * 1000)}
        if handle not in ready:
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)
    if handle in ready:
        return code
    if 0 in ready:
        raise SystemExit(0)
    return None


def main() -> None:
    for line in sys.stdin.buffer:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(request)
        print(json.dumps({"exit": _wait(pid, request["seconds"])}), flush=True)


if __name__ == "__main__":
    main()
