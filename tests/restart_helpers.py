"""Killing the stages of a pipeline on this machine, and seeing that it knows."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline_helpers import PATIENCE

from skippy_zmq import LocalPipeline


@contextlib.contextmanager
def watched(pids: Sequence[int]) -> Iterator[list[int]]:
    """Descriptors that become readable when these processes end."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def wait_for_ends(handles: Sequence[int]) -> None:
    """Wait until every one of the ``watched`` processes has ended."""
    for handle in handles:
        assert select.select([handle], [], [], PATIENCE)[0] == [handle]


def kill(pipeline: LocalPipeline, *indices: int, number: signal.Signals = signal.SIGKILL) -> str:
    """End these stages at once, and wait until the pipeline knows of one; what it says of it."""
    pids = [pipeline.process_ids[index] for index in indices]
    with watched(pids) as handles:
        for pid in pids:
            os.kill(pid, number)
        wait_for_ends(handles)
    deadline = time.monotonic() + PATIENCE
    while not (words := pipeline.failure()):  # which waits for such words itself
        assert time.monotonic() < deadline
    return words


def wait_for_new_process(pipeline: LocalPipeline, index: int, pid: int) -> int:
    """Wait until the stage runs as another process than ``pid``; its number."""
    deadline = time.monotonic() + PATIENCE
    while (new := pipeline.process_ids[index]) == pid:
        assert time.monotonic() < deadline
        os.sched_yield()
    return new


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
