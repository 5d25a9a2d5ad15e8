"""The pages that one stage keeps for prompts that come again: in memory and, where wanted, on disk.

Pages form a tree: a page hangs from the page whose last link is its first. A page is of use only with all pages before
it, so the store holds a page only while it holds its parent, in each of the two places alike:

- memory up to ``budget_bytes`` of payloads. Room is made by dropping payloads that are on disk too, and then leaves of
  the tree, each time the least recently used;
- disk up to ``disk_bytes`` of files (as much again, unless given). Room is made by deleting the least recently used
  leaves of what is on disk.

Pinned pages and pages whose writing is queued stay. One thread owns a store; another writes the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import TracebackType

from skippy_zmq.kv.chain import ROOT
from skippy_zmq.kv.descriptor import PageFacts, check_fits
from skippy_zmq.kv.held_page import HeldPage, OnDisk, kept
from skippy_zmq.kv.limits import MAX_PAGES_HELD
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.page_disk import PageDisk
from skippy_zmq.kv.page_file import page_file_bytes
from skippy_zmq.kv.page_folder import FoundPage
from skippy_zmq.kv.pinned_pages import PinnedPages
from skippy_zmq.kv.recency import LeastRecent

CLOSE_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StoreCounters:
    """What the store holds, and what it did since it was made. Pages, unless a name says bytes."""

    pages: int = 0  # in memory or on disk or both
    memory_pages: int = 0
    memory_bytes: int = 0
    disk_pages: int = 0  # files, those still to be written included
    disk_bytes: int = 0
    hits: int = 0  # handed out
    disk_hits: int = 0  # of them, read from disk
    evictions: int = 0  # lost to make room
    refused: int = 0  # not kept: too large, no room that may be made, or no parent
    unwritten: int = 0  # kept in memory only, as the disk was full, too slow or failed
    damaged: int = 0  # files that were set aside or could not be read


class PageStore:
    """Pages of one stage by the token chain's link after them.

    ``settings``: whatever else must be equal for pages on disk to be used again, say a chunk policy. ``report`` gets
    one line for each thing that an operator should know. A disk that fails or is full makes a store of memory alone,
    never an error; it is tried again after ``page_disk.WRITE_PAUSE_SECONDS``.
    """

    def __init__(
        self,
        facts: PageFacts,
        budget_bytes: int,
        directory: Path | None = None,
        *,
        disk_bytes: int | None = None,
        max_pages: int = MAX_PAGES_HELD,
        settings: str = "",
        report: Callable[[str], None] = log.warning,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.budget_bytes = budget_bytes
        self.disk_bytes = budget_bytes if disk_bytes is None else disk_bytes
        self.max_pages = max_pages
        self._counters = StoreCounters()
        self._held: dict[bytes, HeldPage] = {}
        self._uses = 0
        self._backed = LeastRecent[HeldPage](attrgetter("may_leave_memory"))
        self._leaves = LeastRecent[HeldPage](attrgetter("may_be_dropped"))
        self._disk_leaves = LeastRecent[HeldPage](attrgetter("may_leave_disk"))
        self._disk: PageDisk | None = None
        if directory is not None:
            self._disk = PageDisk(directory, facts, settings, budget_bytes // 2, report, clock)
            self._index(self._disk)

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, link: object) -> bool:
        return link in self._held

    def counters(self) -> StoreCounters:
        """As of now; a copy."""
        self._settle_writes()
        return replace(self._counters, pages=len(self._held))

    def match(self, links: Sequence[bytes]) -> int:
        """How many pages of a prompt, from its first, are held; ``links`` as of ``chain.prompt_links``.

        A file that turns out damaged later can make it fewer: whoever needs to know loads them (``PinnedPages.load``).
        """
        self._settle_writes()
        return len(self._leading(links))

    def pin(self, links: Sequence[bytes]) -> PinnedPages:
        """Keep the leading pages of ``links`` that are held until they are released."""
        self._settle_writes()
        pages = self._leading(links)
        return PinnedPages(pages, self.page, self._release)

    def page(self, link: bytes) -> KvPage | None:
        """The page that ends at ``link``, from memory or read from disk and verified; None where it is not held.

        A damaged file is set aside and reported; its page and all that hang from it are gone.
        """
        self._settle_writes()
        held = self._held.get(link)
        if held is None:
            return None
        self._touch([held])
        page = held.page
        if page is None:
            page = self._read(held)
            if page is None:
                return None
            self._counters.disk_hits += 1
            if self._make_room(page.descriptor.payload_bytes, held):
                self._keep(held, page)
        elif self._disk is not None and held.on_disk is OnDisk.NO:
            self._queue_write(self._disk, held)  # the disk was full or slow when it came
        self._counters.hits += 1
        return page

    def put(self, page: KvPage) -> bool:
        """Keep a page whose parent is held; whether it is held now. KvPageError for a page of another stage.

        The payload is the store's from now on. What is not a whole ``bytes``, ``bytearray`` or numpy array is copied:
        a view would keep all that it is a part of.
        """
        self._settle_writes()
        descriptor = page.descriptor
        check_fits(descriptor, self.facts)
        held = self._held.get(descriptor.link_after)
        if held is not None:
            self._touch([held])
        else:
            parent = self._held.get(descriptor.link_before)
            held = HeldPage(descriptor.link_after, descriptor.link_before, descriptor.payload_bytes, parent)
            orphan = parent is None and descriptor.link_before != ROOT
            if orphan or not (self._make_place(parent) and self._make_room(held.nbytes, parent)):
                self._counters.refused += 1
                return False
            self._touch([held])
            self._add(held)
            self._keep(held, kept(page))
        if self._disk is not None and held.on_disk is OnDisk.NO and not self._queue_write(self._disk, held):
            self._counters.unwritten += 1
        self._offer(held)
        return True

    def flush(self, seconds: float) -> bool:
        """Wait until what is to be written is on disk, at most ``seconds``; whether it is."""
        idle = self._disk is None or self._disk.flush(seconds)
        self._settle_writes()
        return idle

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Write what is queued, at most for ``seconds``, and forget all pages; whether everything was written."""
        done = self._disk is None or self._disk.close(seconds)
        self._disk = None
        self._held.clear()
        self._counters = StoreCounters()
        return done

    # The tree.

    def _leading(self, links: Sequence[bytes]) -> list[HeldPage]:
        pages: list[HeldPage] = []
        for link in links:
            held = self._held.get(link)
            if held is None:
                break
            pages.append(held)
        self._touch(pages)
        return pages

    def _touch(self, pages: Sequence[HeldPage]) -> None:
        self._uses += 1
        for held in pages:
            held.last_used = self._uses

    def _add(self, held: HeldPage) -> None:
        self._held[held.link] = held
        if held.parent is not None:
            held.parent.children.add(held)

    def _forget(self, held: HeldPage) -> None:
        """Drop a page and all that hang from it, wherever they are."""
        doomed = [held]
        for page in doomed:
            doomed.extend(page.children)
        for page in reversed(doomed):
            if page.on_disk is not OnDisk.NO:
                self._delete(page)
            self._leave_memory(page)
            del self._held[page.link]
            if page.parent is not None:
                page.parent.children.discard(page)
                self._offer(page.parent)
            for candidates in (self._backed, self._leaves, self._disk_leaves):
                candidates.discard(page)

    def _offer(self, held: HeldPage) -> None:
        for candidates in (self._backed, self._leaves, self._disk_leaves):
            candidates.offer(held)

    def _release(self, pages: Sequence[HeldPage]) -> None:
        for held in pages:
            held.pins -= 1
            if self._held.get(held.link) is held:
                self._offer(held)

    # Memory.

    def _keep(self, held: HeldPage, page: KvPage) -> None:
        held.page = page
        held.nbytes = page.descriptor.payload_bytes
        self._counters.memory_pages += 1
        self._counters.memory_bytes += held.nbytes
        self._offer(held)

    def _leave_memory(self, held: HeldPage) -> None:
        if held.page is not None:
            held.page = None
            self._counters.memory_pages -= 1
            self._counters.memory_bytes -= held.nbytes

    def _make_room(self, nbytes: int, spared: HeldPage | None) -> bool:
        """Whether ``nbytes`` more fit in memory, after dropping what may go; never ``spared``."""
        if nbytes > self.budget_bytes:
            return False
        with self._sparing(spared):
            while self._counters.memory_bytes + nbytes > self.budget_bytes:
                if (backed := self._backed.take()) is not None:
                    self._leave_memory(backed)
                elif not self._drop_leaf():
                    return False
        return True

    def _make_place(self, spared: HeldPage | None) -> bool:
        """Whether one page more can be held, after losing another; never ``spared`` or one that it hangs from."""
        if len(self._held) < self.max_pages:
            return True
        with ExitStack() as stack:
            while spared is not None:
                stack.enter_context(self._sparing(spared))
                spared = spared.parent
            while len(self._held) >= self.max_pages:
                if not self._drop_leaf() and not self._delete_file():
                    return False
        return True

    @contextmanager
    def _sparing(self, held: HeldPage | None) -> Iterator[None]:
        if held is None:
            yield
            return
        held.pins += 1
        try:
            yield
        finally:
            self._release([held])

    def _drop_leaf(self) -> bool:
        leaf = self._leaves.take()
        if leaf is None:
            return False
        self._forget(leaf)
        self._counters.evictions += 1
        return True

    # Disk.

    def _index(self, disk: PageDisk) -> None:
        """Build the tree of the pages on disk; files that hang from nothing, or are too many, are deleted."""
        found, disk.found = disk.found, ()
        children: dict[bytes, list[FoundPage]] = {}
        used = {id(page): number for number, page in enumerate(sorted(found, key=lambda page: page.modified_ns), 1)}
        for page in found:
            children.setdefault(page.link_before, []).append(page)
        self._uses = len(found)
        reached = [ROOT]
        for link in reached:
            for page in children.pop(link, ()):
                if page.link_after in self._held or page.link_after == ROOT:
                    children.setdefault(link, []).append(page)
                    continue
                held = HeldPage(page.link_after, link, 0, self._held.get(link), last_used=used[id(page)])
                self._add(held)
                self._enter_disk(held, OnDisk.YES, page.file_bytes)
                reached.append(held.link)
        for orphans in children.values():
            for page in orphans:
                disk.delete(page.link_before, page.link_after)
        for held in self._held.values():
            self._offer(held)
        while self._counters.disk_bytes > self.disk_bytes or len(self._held) > self.max_pages:
            if not self._delete_file():
                break

    def _read(self, held: HeldPage) -> KvPage | None:
        page = self._disk.read(held.link_before, held.link) if self._disk is not None else None
        if page is None:
            self._counters.damaged += 1
            self._forget(held)
        return page

    def _queue_write(self, disk: PageDisk, held: HeldPage) -> bool:
        """Queue a page for the disk; False where that is not possible now: it stays in memory only."""
        page, parent = held.page, held.parent
        if page is None or (parent is not None and parent.on_disk is OnDisk.NO) or not disk.may_write(page):
            return False
        file_bytes = page_file_bytes(page.descriptor)
        if file_bytes > self.disk_bytes:
            return False
        with self._sparing(parent):
            while self._counters.disk_bytes + file_bytes > self.disk_bytes:
                if not self._delete_file():
                    return False
        ticket = disk.write(page)
        if ticket is None:
            return False
        held.ticket = ticket
        self._enter_disk(held, OnDisk.QUEUED, file_bytes)
        return True

    def _settle_writes(self) -> None:
        """Take in what was written and what was not."""
        if self._disk is None:
            return
        for written in self._disk.settle():
            held = self._held.get(written.link_after)
            if held is None or held.ticket != written.ticket:
                continue
            if written.error is None:
                held.on_disk = OnDisk.YES
            else:
                self._leave_disk(held)
                self._counters.unwritten += 1
            self._offer(held)

    def _enter_disk(self, held: HeldPage, on_disk: OnDisk, file_bytes: int) -> None:
        held.on_disk, held.file_bytes = on_disk, file_bytes
        self._counters.disk_pages += 1
        self._counters.disk_bytes += file_bytes
        if held.parent is not None:
            held.parent.n_children_on_disk += 1

    def _leave_disk(self, held: HeldPage) -> None:
        held.on_disk = OnDisk.NO
        self._counters.disk_pages -= 1
        self._counters.disk_bytes -= held.file_bytes
        if held.parent is not None:
            held.parent.n_children_on_disk -= 1
            self._offer(held.parent)

    def _delete(self, held: HeldPage) -> None:
        self._leave_disk(held)
        if self._disk is not None:
            self._disk.delete(held.link_before, held.link)

    def _delete_file(self) -> bool:
        """Free the disk of one page: it stays in memory if it is there, or is lost with what hangs from it."""
        leaf = self._disk_leaves.take()
        if leaf is None:
            return False
        if leaf.page is None:
            self._counters.evictions += 1
            self._forget(leaf)
        else:
            self._delete(leaf)
            self._offer(leaf)
        return True
