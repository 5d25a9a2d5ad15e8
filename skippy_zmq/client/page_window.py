"""How many pages may be under way between a client and the stages at once: bounded for each stage and in all. Pure."""

from __future__ import annotations

from skippy_zmq.wire.limits import MAX_PAGES_AT_ONCE

# A message carries as many pages as are worth the two wakes of its way: fewer bytes are still in the processor's caches
# when the other side looks at them.
MESSAGE_BYTES = 4 << 20
# At one stage: one message to work at, one on its way and one to be taken next.
MESSAGES_UNDER_WAY = 3
BYTES_UNDER_WAY = 64 << 20
# At all stages together, which is what a client holds in memory.
ALL_BYTES_UNDER_WAY = 256 << 20


class PageWindow:
    """Stages take turns. A page alone at its stage may be of any size, as long as it is within the limit for all."""

    def __init__(self, n_stages: int) -> None:
        self._messages = [0] * n_stages
        self._pages = [0] * n_stages
        self._sizes: list[int | None] = [None] * n_stages  # of a page; None: not known yet
        self._finished = [False] * n_stages
        self._turn = 0

    def next(self) -> tuple[int, int] | None:
        """The stage to which one more message may go, and of how many pages at most.

        None where one has to come back first, or all have finished.
        """
        for offset in range(len(self._pages)):
            index = (self._turn + offset) % len(self._pages)
            if self._finished[index]:
                continue
            if n_pages := self._room(index):
                self._turn = index + 1
                return index, n_pages
        return None

    def add(self, index: int, n_pages: int, size: int | None = None) -> None:
        """One message more is under way at a stage; ``size``: bytes of its first page, None where nobody knows."""
        self._learn(index, size)
        self._messages[index] += 1
        self._pages[index] += n_pages

    def remove(self, index: int, n_pages: int, size: int | None = None) -> None:
        """A message has come back."""
        self._learn(index, size)
        self._messages[index] -= 1
        self._pages[index] -= n_pages

    def finish(self, index: int) -> None:
        """A stage has no more pages."""
        self._finished[index] = True

    def _learn(self, index: int, size: int | None) -> None:
        """The pages of a stage are alike, but for the last one, which is smaller."""
        if size is not None:
            self._sizes[index] = max(size, self._sizes[index] or 0)

    def _room(self, index: int) -> int:
        """How many pages may go to a stage in one message now."""
        size = self._size(index)
        under_way = self._pages[index] * size
        all_bytes = sum(pages * self._size(other) for other, pages in enumerate(self._pages))
        if self._messages[index] == MESSAGES_UNDER_WAY or (all_bytes and all_bytes + size > ALL_BYTES_UNDER_WAY):
            return 0
        room = min(MESSAGE_BYTES, BYTES_UNDER_WAY - under_way, ALL_BYTES_UNDER_WAY - all_bytes) // size
        if room < 1:
            return 1 if under_way == 0 or under_way + size <= BYTES_UNDER_WAY else 0
        return min(MAX_PAGES_AT_ONCE, room)

    def _size(self, index: int) -> int:
        """Of a page; one that nobody knows goes alone."""
        size = self._sizes[index]
        return BYTES_UNDER_WAY if size is None else size
