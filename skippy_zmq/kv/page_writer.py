"""A thread that writes and deletes page files, so that the thread that serves never waits for a disk."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from skippy_zmq.kv.limits import MAX_QUEUED_WRITES
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.page_folder import PageFolder


@dataclass(frozen=True, slots=True)
class _Write:
    ticket: int
    page: KvPage


@dataclass(frozen=True, slots=True)
class _Delete:
    link_before: bytes
    link_after: bytes


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write: ``error`` is None where the page's file is there."""

    ticket: int
    link_after: bytes
    error: OSError | None


class PageWriter:
    """Jobs run in the order in which they came. After an error no write is tried, those queued included, until
    ``resume``: so a page's file is never there without its parent's, whose write was queued before.

    The store bounds deletes by deleting only what was written.
    """

    def __init__(self, folder: PageFolder, max_queued_bytes: int) -> None:
        self._folder = folder
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition()
        self._jobs: deque[_Write | _Delete] = deque()
        self._written: list[Written] = []
        self._n_queued = 0
        self._queued_bytes = 0
        self._error: OSError | None = None
        self._closing = self._abandoned = False
        # A daemon: a write that hangs in the kernel must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name="kv-page-writer", daemon=True)
        self.thread.start()

    @property
    def error(self) -> OSError | None:
        """Why nothing is written now."""
        return self._error

    def room_for(self, page: KvPage) -> bool:
        """Whether ``write`` would take the page now: the queue is empty or stays within its limits."""
        with self._changed:
            return self._room_for(page)

    def write(self, ticket: int, page: KvPage) -> bool:
        """Queue a page; False, and nothing done, where there is no room or an error stands."""
        with self._changed:
            if not self._room_for(page):
                return False
            self._jobs.append(_Write(ticket, page))
            self._n_queued += 1
            self._queued_bytes += page.descriptor.payload_bytes
            self._changed.notify_all()
            return True

    def delete(self, link_before: bytes, link_after: bytes) -> None:
        with self._changed:
            self._jobs.append(_Delete(link_before, link_after))
            self._changed.notify_all()

    def resume(self) -> None:
        """Try to write again."""
        with self._changed:
            self._error = None

    def take_written(self) -> tuple[list[Written], OSError | None]:
        """Writes that ended since the last call, in their order; and, once all have, the error that stands."""
        with self._changed:
            written, self._written = self._written, []
            return written, self._error if self._n_queued == 0 else None

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until all jobs that are queued have ended; whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, seconds)

    def close(self, seconds: float) -> bool:
        """End the thread: at most ``seconds`` for what is queued, then the rest is left. Whether all was done."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._jobs, seconds)
            self._abandoned = True
        if done:
            self.thread.join()
        return done

    def _room_for(self, page: KvPage) -> bool:
        if self._error is not None or self._closing:
            return False
        nbytes = page.descriptor.payload_bytes
        return self._n_queued == 0 or (
            self._n_queued < MAX_QUEUED_WRITES and self._queued_bytes + nbytes <= self._max_queued_bytes
        )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if self._abandoned or not self._jobs:
                    return
                job = self._jobs[0]  # stays first while it runs: the queue is empty only when all is done
                error = self._error
            if error is None or isinstance(job, _Delete):
                error = self._do(job)
            with self._changed:
                self._jobs.popleft()
                if isinstance(job, _Write):
                    self._n_queued -= 1
                    self._queued_bytes -= job.page.descriptor.payload_bytes
                    self._written.append(Written(job.ticket, job.page.descriptor.link_after, error))
                if error is not None:
                    self._error = error
                self._changed.notify_all()

    def _do(self, job: _Write | _Delete) -> OSError | None:
        try:
            if isinstance(job, _Write):
                self._folder.write(job.page)
            else:
                self._folder.delete(job.link_before, job.link_after)
        except OSError as error:
            return error
        return None
