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
_NEW_SHARE = 0.2  # of the latest step in the running means
_FORGOTTEN = 0.1  # of what steps of several sizes told about the cost of a row, at each that tells more
_ALIKE = 0.05  # times the square of their size: steps that differ by less than that, squared, tell little
# Taken for granted until steps of several sizes were seen: what beginning a step costs, in rows. Rather much: that
# makes few groups, of unequal sizes, from which the truth is learned; groups of one lane each would tell nothing.
_BEGINNING_ROWS = 4.0
_MARGIN = 0.04  # of a round, by which another number of groups has to be better


def micro_batches(lanes: Sequence[int]) -> int:
    """How many llama.cpp makes of one step of ``lanes`` (rising): one per run of neighbours."""
    return 1 + sum(b != a + 1 for a, b in itertools.pairwise(lanes))


def cost(lanes: Sequence[int]) -> int:
    """Of one step of ``lanes`` (rising), in rows."""
    return len(lanes) + MICRO_BATCH_COST * micro_batches(lanes)


def spread(lanes: Sequence[int], n_groups: int, max_rows: int) -> list[tuple[int, ...]]:
    """Cut ``lanes`` (rising) into groups of neighbours so that the costliest is as cheap as possible.

    Into ``n_groups`` wherever there are as many lanes; into more only where ``max_rows`` lanes per group demand it.
    Holes between lanes are the better places to cut.
    """
    rest = tuple(lanes)
    n_left = max(min(n_groups, len(rest)), -(-len(rest) // max_rows))
    groups: list[tuple[int, ...]] = []
    while n_left > 1 and n_left < len(rest):  # else: all in one, or each on its own
        size = _first_size(rest, n_left, max_rows)
        groups.append(rest[:size])
        rest = rest[size:]
        n_left -= 1
    return groups + ([rest] if n_left == 1 else [(lane,) for lane in rest])


def _first_size(lanes: Sequence[int], n_groups: int, max_rows: int) -> int:
    """How many lanes the first of ``n_groups`` takes; the others, taken likewise, come out as even as can be."""
    low, high = -(-cost(lanes) // n_groups), cost(lanes)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(lanes, middle, max_rows)) <= n_groups:
            high = middle
        else:
            low = middle + 1
    largest = min(_cut(lanes, low, max_rows)[0], len(lanes) - n_groups + 1)
    for size in range(largest, 0, -1):
        at_hole = lanes[size] != lanes[size - 1] + 1
        if at_hole and len(_cut(lanes[size:], low, max_rows)) < n_groups:
            return size
    return largest


def _cut(lanes: Sequence[int], limit: int, max_rows: int) -> list[int]:
    """Sizes of as few groups as possible of at most ``limit`` cost and ``max_rows`` lanes, filled from the front."""
    sizes: list[int] = []
    size, spent = 0, 0
    for index, lane in enumerate(lanes):
        more = 1 if size and lane == lanes[index - 1] + 1 else 1 + MICRO_BATCH_COST
        if size and (spent + more > limit or size >= max_rows):
            sizes.append(size)
            size, spent, more = 0, 0, 1 + MICRO_BATCH_COST
        size += 1
        spent += more
    return [*sizes, size]


@dataclass(slots=True)
class GroupCount:
    """How many groups make the most of the ring, from what decode steps have cost.

    In a round every group steps once. It takes as long as the slowest stage works on all of them, or as the largest
    group needs for its way around, whichever is longer; more groups lengthen the one, larger ones the other.

    What a step seems to spend between stages also holds its waits for busy ones, which more groups would only lengthen;
    therefore the least that was ever seen counts as the links' part.
    """

    n_stages: int
    least_travel_us: int | None = field(init=False, default=None)  # of one batch, around the whole ring
    # Running means over steps: rows, time at the slowest stage, in how many such times a step is around.
    _rows: float = field(init=False, default=0.0)
    _us: float = field(init=False, default=0.0)
    _depth: float = field(init=False, default=0.0)
    # By least squares: time of one row more, and how much is known of it. What is left of a step is its beginning.
    _row_us: float = field(init=False, default=0.0)
    _told: float = field(init=False, default=0.0)

    def observe(self, n_rows: int, travel_us: int, slowest_us: int, compute_us: int = 0) -> None:
        """A decode step spent ``travel_us`` outside of stages, ``slowest_us`` computing at the slowest of them.

        ``compute_us``: at all of them; 0: all were as slow.
        """
        travel_us = max(0, travel_us)
        if self.least_travel_us is None or travel_us < self.least_travel_us:
            self.least_travel_us = travel_us
        slowest_us = max(1, slowest_us)
        depth = min(self.n_stages, max(1.0, compute_us / slowest_us)) if compute_us else self.n_stages
        if not self._us:
            self._rows, self._us, self._depth = n_rows, slowest_us, depth
            self._row_us = slowest_us / (n_rows + _BEGINNING_ROWS)
            return
        more_rows, more_us = n_rows - self._rows, slowest_us - self._us
        told, little = more_rows * more_rows, _ALIKE * self._rows * self._rows
        self._told = told + self._told * (1 - _FORGOTTEN * told / (told + little))
        self._row_us += more_rows * (more_us - more_rows * self._row_us) / (self._told + little)
        self._rows += _NEW_SHARE * more_rows
        self._us += _NEW_SHARE * more_us
        self._depth += _NEW_SHARE * (depth - self._depth)

    def best(self, n_lanes: int, max_rows: int, current: int | None = None) -> int:
        """How many groups, of at most ``max_rows``, for ``n_lanes``; ``current`` unless another is clearly better."""
        fewest = max(1, -(-n_lanes // max_rows))
        best, shortest = fewest, self._round_us(n_lanes, fewest)
        for count in range(fewest + 1, n_lanes + 1):
            round_us = self._round_us(n_lanes, count)
            if round_us > shortest:
                break  # from here on, it is the work of all groups that counts, and more of them is more work
            if round_us < shortest:
                best, shortest = count, round_us
        if current is not None and fewest <= current and self._round_us(n_lanes, current) <= shortest * (1 + _MARGIN):
            return current
        return best

    def _round_us(self, n_lanes: int, n_groups: int) -> float:
        row_us = min(max(self._row_us, 0.0), self._us / self._rows) if self._us else 1.0
        begin_us = self._us - self._rows * row_us if self._us else _BEGINNING_ROWS
        largest_us = begin_us + row_us * -(-n_lanes // n_groups)
        around_us = (self._depth or self.n_stages) * largest_us + (self.least_travel_us or 0)
        return max(n_groups * begin_us + n_lanes * row_us, around_us)
