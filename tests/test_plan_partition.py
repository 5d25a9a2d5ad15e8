"""The best partition is the best of all, tried one by one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skippy_zmq.plan.partition import best_partition, longest_reach


def every_split(n_layers: int, n_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, n_layers), n_stages - 1):
        yield (0, *inner, n_layers)


def times_of(edges: Sequence[int], times: Sequence[float], head: float, speeds: Sequence[float]) -> list[float]:
    found = [sum(times[low:high]) / speed for (low, high), speed in zip(itertools.pairwise(edges), speeds, strict=True)]
    found[-1] += head / speeds[-1]
    return found


layer_times = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=9)
stage_speeds = st.lists(st.sampled_from([0.5, 1.0, 1.5, 3.0]), min_size=1, max_size=4)


@given(layer_times, st.floats(0.0, 30.0), stage_speeds, st.lists(st.integers(0, 60), min_size=4, max_size=4), st.data())
def test_nothing_is_better(
    times: list[float], head: float, speeds: list[float], limits: list[int], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=len(times), max_size=len(times)))

    def fits(stage: int, start: int, end: int) -> bool:
        return sum(sizes[start:end]) <= limits[stage]

    candidates = [
        edges
        for edges in every_split(len(times), len(speeds))
        if all(fits(stage, *pair) for stage, pair in enumerate(itertools.pairwise(edges)))
    ]
    found = best_partition(times, head, speeds, fits)
    if not candidates:
        assert found is None
        return
    assert found is not None
    edges = (0, *found, len(times))
    assert edges in candidates
    best = min(max(times_of(edges, times, head, speeds)) for edges in candidates)
    chosen = times_of(edges, times, head, speeds)
    assert math.isclose(max(chosen), best, rel_tol=1e-6)
    evenest = min(
        sum(seconds**2 for seconds in times_of(edges, times, head, speeds))
        for edges in candidates
        if max(times_of(edges, times, head, speeds)) <= best * (1 + 1e-12)
    )
    assert sum(seconds**2 for seconds in chosen) <= evenest * (1 + 1e-6)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.lists(st.integers(0, 60), min_size=1, max_size=4))
@example(sizes=[1, 1, 2, 1], limits=[2, 1, 3])  # the first must not take all that it could
def test_what_is_left_over_is_left_over_in_every_way(sizes: list[int], limits: list[int]) -> None:
    def fits(stage: int, start: int, end: int) -> bool:
        return sum(sizes[start:end]) <= limits[stage]

    reach = longest_reach(len(sizes), len(limits), fits)
    found = best_partition([1.0] * len(sizes), 0.0, [1.0] * len(limits), fits)
    assert (reach == len(sizes)) == (found is not None)


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "head", "speeds", "boundaries"),
    [
        (30, 2, 0.0, [1, 1], [15]),
        (30, 2, 8.0, [1, 1], [19]),
        (30, 3, 6.0, [1, 1, 1], [12, 24]),
        (30, 2, 0.0, [1, 2], [10]),
        (7, 2, 0.0, [1, 1], [3]),
        (3, 3, 100.0, [1, 1, 1], [1, 2]),
        (3, 1, 1.0, [1], []),
    ],
)
def test_known_cuts(n_layers: int, n_stages: int, head: float, speeds: list[float], boundaries: list[int]) -> None:
    assert len(speeds) == n_stages
    assert best_partition([1.0] * n_layers, head, speeds, lambda *_range: True) == boundaries


def test_more_stages_than_layers_have_no_partition() -> None:
    assert best_partition([1.0, 1.0], 0.0, [1.0, 1.0, 1.0], lambda *_range: True) is None
