"""The best way to cut a row of layers into contiguous stages. Pure arithmetic.

Two passes of dynamic programming over (stage, end): the first finds the least time of the slowest stage, the second, of
all ways with that time, the one whose stages differ least. O(stages * layers^2).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Fits = Callable[[int, int, int], bool]  # stage, first layer, end: does it fit there?
_SAME = 1.0 + 1e-9  # sums of floats in another order


def best_partition(times: Sequence[float], head: float, speeds: Sequence[float], fits: Fits) -> list[int] | None:
    """The inner boundaries of the best way to give ``times`` to ``len(speeds)`` stages; None where none fits.

    ``times``: of each layer at speed 1. ``head``: of the output head, which the last stage runs too. Stage ``i`` takes
    the sum of its times over ``speeds[i]``.
    """
    n_layers, n_stages = len(times), len(speeds)
    if not 1 <= n_stages <= n_layers:
        return None
    sums = list(itertools.accumulate(times, initial=0.0))

    def time(stage: int, start: int, end: int) -> float:
        return (sums[end] - sums[start] + (head if end == n_layers else 0.0)) / speeds[stage]

    possible = [
        [
            [start for start in range(stage, end) if (start == 0) == (stage == 0) and fits(stage, start, end)]
            for end in range(n_layers + 1)
        ]
        for stage in range(n_stages)
    ]
    slowest = _solve(n_layers, n_stages, possible, time, max)
    if slowest is None:
        return None
    limit = slowest[0] * _SAME

    def spread(stage: int, start: int, end: int) -> float:
        seconds = time(stage, start, end)
        return seconds * seconds if seconds <= limit else math.inf

    evenest = _solve(n_layers, n_stages, possible, spread, lambda one, other: one + other)
    return evenest[1] if evenest is not None else slowest[1]


def _solve(
    n_layers: int,
    n_stages: int,
    possible: Sequence[Sequence[Sequence[int]]],
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, list[int]] | None:
    """The least joined cost and its inner boundaries; of equals the one with the earliest last boundary."""
    best = [0.0] + [math.inf] * n_layers  # of the stages before, by where they end
    choices: list[list[int]] = []
    for stage in range(n_stages):
        found, choice = [math.inf] * (n_layers + 1), [0] * (n_layers + 1)
        last = n_layers - (n_stages - 1 - stage)  # later stages need a layer each
        for end in range(stage + 1, last + 1):
            if (end == n_layers) != (stage == n_stages - 1):
                continue
            for start in possible[stage][end]:
                if best[start] < math.inf:
                    joined = join(best[start], cost(stage, start, end))
                    if joined < found[end]:
                        found[end], choice[end] = joined, start
        best = found
        choices.append(choice)
    if best[n_layers] == math.inf:
        return None
    boundaries, end = [], n_layers
    for choice in reversed(choices):
        end = choice[end]
        boundaries.append(end)
    return best[n_layers], boundaries[-2::-1]


def longest_reach(n_layers: int, n_stages: int, fits: Fits) -> int:
    """How many of the first layers the stages can hold, each at least one: ``n_layers`` if all.

    Right where a part of what fits fits too. O(stages * layers): what a stage can reach grows with where it begins.
    """
    reached = [0]  # where the stages so far can end
    for stage in range(n_stages):
        last = n_layers - (n_stages - 1 - stage)
        found: list[int] = []
        end = 0
        for start in reached:
            before = end = max(end, start)
            while end < last and fits(stage, start, end + 1):
                end += 1
            found += range(before + 1, end + 1)
        if not found:
            return reached[-1]
        reached = found
    return reached[-1]
