"""How many pages may be under way between a client and the stages at once: bounded for each stage and in all. Pure."""

from __future__ import annotations

# At one stage: enough to keep it at work while the next questions are on their way.
PAGES_UNDER_WAY = 16
BYTES_UNDER_WAY = 64 << 20
# At all stages together, which is what a client holds in memory.
ALL_BYTES_UNDER_WAY = 256 << 20


class PageWindow:
    """Stages take turns. A page alone at its stage may be of any size, as long as it is within the limit for all.

    A stage that has as many as may be gets more when half of them are back: several at once wake both sides only once.
    """

    def __init__(self, n_stages: int) -> None:
        self._pages = [0] * n_stages
        self._bytes = [0] * n_stages
        self._sizes: list[int | None] = [None] * n_stages  # of a page; None: not known yet
        self._finished = [False] * n_stages
        self._full = [False] * n_stages
        self._resume_at = [0] * n_stages
        self._turn = 0

    def next(self) -> int | None:
        """The stage to which one more page may go; None where one has to come back first, or all have finished."""
        for offset in range(len(self._pages)):
            index = (self._turn + offset) % len(self._pages)
            if self._finished[index] or self._full[index]:
                continue
            if self._fits(index):
                self._turn = index + 1
                return index
            if self._pages[index]:
                self._full[index], self._resume_at[index] = True, self._pages[index] // 2
        return None

    def add(self, index: int, size: int | None = None) -> None:
        """One more page is under way at a stage, of ``size`` bytes or, where nobody knows, as large as the last one."""
        if size is not None:
            self._sizes[index] = size
        self._pages[index] += 1
        self._bytes[index] = self._pages[index] * self._size(index)

    def remove(self, index: int, size: int | None = None) -> None:
        """A page has come back, of ``size`` bytes."""
        if size is not None:
            self._sizes[index] = size
        self._pages[index] -= 1
        if self._pages[index] <= self._resume_at[index]:
            self._full[index] = False
        self._bytes[index] = self._pages[index] * self._size(index)

    def finish(self, index: int) -> None:
        """A stage has no more pages."""
        self._finished[index] = True

    def _fits(self, index: int) -> bool:
        size = self._size(index)
        all_bytes = sum(self._bytes)
        if all_bytes and all_bytes + size > ALL_BYTES_UNDER_WAY:
            return False
        pages = self._pages[index]
        return pages == 0 or (pages < PAGES_UNDER_WAY and (pages + 1) * size <= BYTES_UNDER_WAY)

    def _size(self, index: int) -> int:
        size = self._sizes[index]
        return BYTES_UNDER_WAY if size is None else size
