"""Which decoding lanes step together.

A stage works on one batch at a time, so S stages are all busy only while S groups of lanes are under way. A longer ring
(links with delay) needs more of them; larger groups compute more cheaply per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

# What beginning a micro-batch costs, in rows of decoding; about right for models that are bound by memory.
MICRO_BATCH_COST = 1
_NEW_SHARE = 0.2  # of the latest step in the running times
_MARGIN = 0.25  # beyond half a group, by which the number has to be off before it changes


def micro_batches(lanes: Sequence[int]) -> int:
    """How many llama.cpp makes of one step of ``lanes`` (rising): one per run of neighbours."""
    return 1 + sum(b != a + 1 for a, b in itertools.pairwise(lanes))


def cost(lanes: Sequence[int]) -> int:
    """Of one step of ``lanes`` (rising), in rows."""
    return len(lanes) + MICRO_BATCH_COST * micro_batches(lanes)


def spread(lanes: Sequence[int], n_groups: int, max_rows: int) -> list[tuple[int, ...]]:
    """Cut ``lanes`` (rising) into groups of neighbours so that the costliest is as cheap as possible.

    At most ``n_groups`` of them, more only where ``max_rows`` lanes per group demand it.
    """
    if not lanes:
        return []
    wanted = max(min(n_groups, len(lanes)), -(-len(lanes) // max_rows))
    low, high = 1 + MICRO_BATCH_COST, cost(lanes)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(lanes, middle, max_rows)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return _cut(lanes, low, max_rows)


def _cut(lanes: Sequence[int], limit: int, max_rows: int) -> list[tuple[int, ...]]:
    """As few groups as possible of at most ``limit`` cost and ``max_rows`` lanes, filled from the front."""
    groups: list[tuple[int, ...]] = []
    start, spent = 0, 0
    for index, lane in enumerate(lanes):
        begins = index == start or lane != lanes[index - 1] + 1
        more = 1 + (MICRO_BATCH_COST if begins else 0)
        if index > start and (spent + more > limit or index - start >= max_rows):
            groups.append(tuple(lanes[start:index]))
            start, spent, more = index, 0, 1 + MICRO_BATCH_COST
        spent += more
    groups.append(tuple(lanes[start:]))
    return groups


@dataclass(slots=True)
class GroupCount:
    """How many groups keep every stage busy: one per stage, and one more per step time that the ring's links take.

    What a step seems to spend between stages also holds its waits for busy ones, which more groups would only lengthen;
    therefore the least that was ever seen counts as the links' part.
    """

    n_stages: int
    least_travel_us: int | None = field(init=False, default=None)  # of one batch, around the whole ring
    count: int = field(init=False, default=0)
    _step_us: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.count = self.n_stages

    def observe(self, travel_us: int, slowest_us: int) -> None:
        """A decode step spent ``travel_us`` outside of stages and ``slowest_us`` computing at the slowest one."""
        travel_us = max(0, travel_us)
        if self.least_travel_us is None or travel_us < self.least_travel_us:
            self.least_travel_us = travel_us
        share = _NEW_SHARE if self._step_us else 1.0
        self._step_us += share * (max(1, slowest_us) - self._step_us)
        wanted = self.n_stages + self.least_travel_us / self._step_us
        if abs(wanted - self.count) > 0.5 + _MARGIN:
            self.count = max(self.n_stages, round(wanted))
