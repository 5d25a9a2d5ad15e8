"""How many pages may be under way between a client and the stages at once: bounded for each stage and in all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.wire.limits import MAX_PAGES_AT_ONCE

# A message carries as many pages as are worth the wakes of its way, and few enough for the processor's caches.
MESSAGE_BYTES = 4 << 20
# At one stage: one message to work at, one on its way and one to be taken next.
MESSAGES_UNDER_WAY = 3
BYTES_UNDER_WAY = 64 << 20
# At all stages together, which is what a client holds in memory.
ALL_BYTES_UNDER_WAY = 256 << 20


class PageWindow:
    """``sizes``: bytes of a page of each stage. Stages take turns.

    A page alone at its stage may be of any size, as long as it is within the limit for all, or alone there too.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = [max(1, size) for size in sizes]
        self._messages = [0] * len(sizes)
        self._pages = [0] * len(sizes)
        self._finished = [False] * len(sizes)
        self._all_bytes = 0
        self._turn = 0

    def next(self) -> tuple[int, int] | None:
        """The stage to which one more message may go, and of how many pages at most.

        None where one has to come back first, or all have finished.
        """
        for offset in range(len(self._sizes)):
            index = (self._turn + offset) % len(self._sizes)
            if not self._finished[index] and (n_pages := self._room(index)):
                self._turn = index + 1
                return index, n_pages
        return None

    def add(self, index: int, n_pages: int) -> None:
        """One message more is under way at a stage."""
        self._messages[index] += 1
        self._pages[index] += n_pages
        self._all_bytes += n_pages * self._sizes[index]

    def remove(self, index: int, n_pages: int) -> None:
        """A message has come back."""
        self._messages[index] -= 1
        self._pages[index] -= n_pages
        self._all_bytes -= n_pages * self._sizes[index]

    def finish(self, index: int) -> None:
        """A stage has no more pages."""
        self._finished[index] = True

    def _room(self, index: int) -> int:
        """How many pages may go to a stage in one message now."""
        size, under_way = self._sizes[index], self._pages[index] * self._sizes[index]
        if self._messages[index] == MESSAGES_UNDER_WAY:
            return 0
        left = ALL_BYTES_UNDER_WAY - self._all_bytes if self._all_bytes else max(size, ALL_BYTES_UNDER_WAY)
        if under_way:
            left = min(left, BYTES_UNDER_WAY - under_way)
        return 0 if left < size else min(MAX_PAGES_AT_ONCE, max(1, min(MESSAGE_BYTES, left) // size))
