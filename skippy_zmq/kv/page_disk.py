"""The disk under a store: a folder, the thread that writes it, and what happens when it fails: never an exception."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.descriptor import PageFacts
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.page_folder import FoundPage, PageFolder
from skippy_zmq.kv.page_writer import PageWriter, Written

WRITE_PAUSE_SECONDS = 60.0  # after an error, before a page is written again


class PageDisk:
    """``report`` gets one line where writing fails for the first time, for each damaged file, and at a failed opening.

    ``found``: the files that were there. Without a folder (it cannot be made or another process has it) nothing is ever
    read or written.
    """

    def __init__(
        self,
        directory: Path,
        facts: PageFacts,
        settings: str,
        max_queued_bytes: int,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.found: Sequence[FoundPage] = ()
        self._report = report
        self._clock = clock
        self._writer: PageWriter | None = None
        self._n_tickets = 0
        self._paused_until: float | None = None
        self._warned = False
        folder = None
        try:
            folder = PageFolder(directory, facts, settings, report)
            self.found = folder.scan()
        except (OSError, KvPageError) as error:
            if folder is not None:
                folder.close()
            report(f"KV pages are kept in memory only: {error}")
            return
        self._folder = folder
        self._writer = PageWriter(folder, max_queued_bytes)

    def may_write(self, page: KvPage) -> bool:
        """Whether ``write`` would take the page now. All that was written has to be settled before."""
        if self._writer is None:
            return False
        if self._writer.error is not None:
            if self._paused_until is None or self._clock() < self._paused_until:
                return False
            self._paused_until = None
            self._writer.resume()
        return self._writer.room_for(page)

    def write(self, page: KvPage) -> int | None:
        """Queue a page; the ticket that its ``Written`` will have, or None where it was not taken."""
        self._n_tickets += 1
        if self._writer is None or not self._writer.write(self._n_tickets, page):
            return None
        return self._n_tickets

    def delete(self, link_before: bytes, link_after: bytes) -> None:
        """Delete a page's file, after the writes that are queued."""
        if self._writer is not None:
            self._writer.delete(link_before, link_after)

    def settle(self) -> list[Written]:
        """What became of writes since the last call."""
        if self._writer is None:
            return []
        written, error = self._writer.take_written()
        if any(one.error is None for one in written):
            self._warned = False
        if error is not None and self._paused_until is None:
            self._paused_until = self._clock() + WRITE_PAUSE_SECONDS
            if not self._warned:
                self._warned = True
                self._report(f"KV pages are kept in memory only until their folder can be written: {error}")
        return written

    def read(self, link_before: bytes, link_after: bytes) -> KvPage | None:
        """The page, verified; None where it is damaged or cannot be read: then its file is out of the way."""
        if self._writer is None:
            return None
        try:
            return self._folder.read(link_before, link_after)
        except KvPageError as error:
            self._folder.set_aside(link_before, link_after, str(error))
        except OSError as error:
            self._report(f"a KV page cannot be read: {error}")
        return None

    def flush(self, seconds: float) -> bool:
        return self._writer is None or self._writer.wait_until_idle(seconds)

    def close(self, seconds: float) -> bool:
        """Write what is queued, for at most ``seconds``, and leave the folder to others; whether all was written."""
        if self._writer is None:
            return True
        done = self._writer.close(seconds)
        self._folder.close()
        self._writer = None
        return done
