"""A page as the store knows it, and what may be done with it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from skippy_zmq.kv.page import KvPage


class OnDisk(enum.Enum):
    NO = enum.auto()
    QUEUED = enum.auto()  # its payload must stay in memory until it is written
    YES = enum.auto()


@dataclass(slots=True, eq=False)
class HeldPage:
    """A node of the tree. Without ``page`` it is on disk only, and with neither it is not in the store."""

    link: bytes
    link_before: bytes
    nbytes: int  # of its payload; known once it has been in memory
    parent: HeldPage | None
    page: KvPage | None = None
    on_disk: OnDisk = OnDisk.NO
    file_bytes: int = 0
    ticket: int = 0  # of its last write
    pins: int = 0
    last_used: int = 0
    n_children_on_disk: int = 0  # or queued
    children: set[HeldPage] = field(default_factory=set)

    @property
    def may_leave_memory(self) -> bool:
        """Nothing is lost: it is on disk too."""
        return self.page is not None and self.on_disk is OnDisk.YES and not self.pins

    @property
    def may_be_dropped(self) -> bool:
        return self.page is not None and self.on_disk is OnDisk.NO and not self.children and not self.pins

    @property
    def may_leave_disk(self) -> bool:
        """Pins cover all pages before the pinned one, so nothing pinned hangs from this one."""
        return self.on_disk is OnDisk.YES and not self.n_children_on_disk and not self.pins


def kept(page: KvPage) -> KvPage:
    """The page with a payload that keeps nothing else in memory: itself, where that is all of what it is a view of."""
    whole = page.payload.obj
    owns = not isinstance(whole, np.ndarray) or whole.base is None
    if owns and memoryview(whole).nbytes == page.payload.nbytes:
        return page
    return KvPage(page.descriptor, memoryview(bytes(page.payload)))
