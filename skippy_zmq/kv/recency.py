"""Which of many things that may go was used longest ago."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_SPARE_ENTRIES = 64


class Used(Protocol):
    last_used: int  # grows with every use


T = TypeVar("T", bound=Used)


class LeastRecent(Generic[T]):
    """Candidates by last use, the oldest first; a use costs nothing here, as the order is mended when one is taken.

    ``eligible`` says whether a candidate may go *now*. One that became eligible has to be offered again.
    """

    def __init__(self, eligible: Callable[[T], bool]) -> None:
        self._eligible = eligible
        self._heap: list[tuple[int, int, T]] = []
        self._entry: dict[T, int] = {}  # number of the candidate's entry; others of it are stale
        self._n_entries = 0

    def offer(self, candidate: T) -> None:
        if candidate not in self._entry and self._eligible(candidate):
            self._push(candidate)

    def discard(self, candidate: T) -> None:
        """Forget a candidate for good."""
        self._entry.pop(candidate, None)
        if len(self._heap) > 2 * len(self._entry) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def take(self) -> T | None:
        """Remove and return the eligible candidate that was used longest ago; None where there is none."""
        while self._heap:
            used, number, candidate = heapq.heappop(self._heap)
            if self._entry.get(candidate) != number:
                continue
            del self._entry[candidate]
            if not self._eligible(candidate):
                continue
            if candidate.last_used == used:
                return candidate
            self._push(candidate)
        return None

    def _push(self, candidate: T) -> None:
        self._n_entries += 1
        self._entry[candidate] = self._n_entries
        heapq.heappush(self._heap, (candidate.last_used, self._n_entries, candidate))
