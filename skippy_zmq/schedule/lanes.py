"""Lanes of a pipeline: which are free. Given out lowest first, so that busy lanes stay next to each other."""

from __future__ import annotations

import heapq


class LaneTable:
    def __init__(self, n_lanes: int) -> None:
        self._free = list(range(n_lanes))
        self._total = n_lanes

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def busy(self) -> int:
        return self._total - len(self._free)

    def take(self) -> int | None:
        """The lowest free lane, or None."""
        return heapq.heappop(self._free) if self._free else None

    def give_back(self, lane: int) -> None:
        if lane in self._free or not 0 <= lane < self._total:
            raise ValueError(f"lane {lane} is not in use")
        heapq.heappush(self._free, lane)
