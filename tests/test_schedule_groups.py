"""Groups of lanes: how they are cut, and how many of them make the most of a ring."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.schedule.groups import GroupCount, cost, micro_batches, spread

LANES = st.sets(st.integers(0, 13), min_size=1, max_size=9).map(sorted)


def _costliest(lanes: Sequence[int], n_groups: int, max_rows: int) -> int:
    """The least that the costliest of ``n_groups`` can cost, by trying every way to cut."""
    return min(
        max(map(cost, groups))
        for cuts in itertools.combinations(range(1, len(lanes)), n_groups - 1)
        if (groups := [lanes[a:b] for a, b in itertools.pairwise((0, *cuts, len(lanes)))])
        and max(map(len, groups)) <= max_rows
    )


@given(LANES, st.integers(1, 10), st.integers(1, 10))
def test_lanes_are_cut_into_as_many_groups_as_wanted_of_which_the_costliest_is_cheap(
    lanes: list[int], n_groups: int, max_rows: int
) -> None:
    groups = spread(lanes, n_groups, max_rows)
    wanted = max(min(n_groups, len(lanes)), -(-len(lanes) // max_rows))
    assert [lane for group in groups for lane in group] == lanes
    assert len(groups) == wanted
    assert all(1 <= len(group) <= max_rows for group in groups)
    assert max(map(cost, groups)) == _costliest(lanes, wanted, max_rows)


def test_no_lanes_make_no_groups() -> None:
    assert spread((), 4, 8) == []


@given(st.integers(1, 40), st.integers(1, 12))
def test_groups_of_lanes_without_holes_differ_by_one_at_most(n_lanes: int, n_groups: int) -> None:
    sizes = [len(group) for group in spread(range(n_lanes), n_groups, n_lanes)]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(2, 5), st.integers(1, 6))
def test_groups_are_cut_at_holes(n_runs: int, size: int) -> None:
    runs = [tuple(range(first, first + size)) for first in range(0, n_runs * (size + 2), size + 2)]
    assert spread([lane for run in runs for lane in run], n_runs, 99) == runs


def test_a_hole_is_the_better_place_where_the_costliest_group_stays_the_same() -> None:
    assert spread((0, 1, 3, 4, 5, 6), 2, 99) == [(0, 1), (3, 4, 5, 6)]


@given(LANES)
def test_each_run_of_neighbours_is_a_micro_batch(lanes: list[int]) -> None:
    runs = [len(list(run)) for _, run in itertools.groupby(enumerate(lanes), key=lambda item: item[1] - item[0])]
    assert micro_batches(lanes) == len(runs)
    assert sum(runs) <= cost(lanes) == len(lanes) + len(runs)


# ---- how many


class Steps:
    """Decode steps that cost ``begin_us`` and ``row_us`` at the slowest stage."""

    def __init__(self, n_stages: int, travel_us: int, begin_us: int, row_us: int, max_rows: int = 99) -> None:
        self.count = GroupCount(n_stages)
        self.travel_us, self.begin_us, self.row_us, self.max_rows = travel_us, begin_us, row_us, max_rows
        self.current = 0
        self.random = random.Random(0)

    def settle(self, n_lanes: int, *, rounds: int = 30, waits: bool = False, noise: float = 0.0) -> list[int]:
        """The number of groups after each round of steps of all of them."""
        seen = []
        self.current = self.count.best(n_lanes, self.max_rows)
        for _ in range(rounds):
            for group in spread(range(n_lanes), self.current, self.max_rows):
                us = self.begin_us + self.row_us * len(group)
                us = round(us * self.random.uniform(1 - noise, 1 + noise))
                wait_us = self.random.randrange(self.current * us) if waits else 0  # up to a whole round
                self.count.observe(len(group), self.travel_us + wait_us, us)
            self.current = self.count.best(n_lanes, self.max_rows, self.current)
            seen.append(self.current)
        return seen

    def round_us(self, n_lanes: int, n_groups: int) -> int:
        """Of a round: the slowest stage's work on all groups, or the largest group's way around."""
        largest_us = self.begin_us + self.row_us * -(-n_lanes // n_groups)
        work_us = n_groups * self.begin_us + n_lanes * self.row_us
        return max(work_us, self.count.n_stages * largest_us + self.travel_us)


@pytest.mark.parametrize(("begin_us", "row_us"), [(1000, 1000), (4000, 100), (0, 1000)])
@given(st.integers(1, 8), st.integers(1, 8))
def test_without_delay_there_are_as_many_groups_as_stages(
    begin_us: int, row_us: int, n_stages: int, per_stage: int
) -> None:
    steps = Steps(n_stages, 0, begin_us, row_us)
    assert steps.count.best(n_stages * per_stage, 99) == n_stages  # before anything was measured
    assert steps.settle(n_stages * per_stage)[-1] == n_stages


@given(st.integers(2, 6), st.integers(0, 20), st.integers(2, 6))
def test_links_hold_as_many_more_groups_as_steps_fit_into_their_time(
    n_stages: int, n_steps: int, lanes_per_group: int
) -> None:
    n_groups = n_stages + n_steps
    steps = Steps(n_stages, n_steps * (1000 + 1000 * lanes_per_group), 1000, 1000)
    for n_lanes in (1, 2, 3, n_groups, n_groups * lanes_per_group):  # as they come
        settled = steps.settle(n_lanes)[-1]
    assert settled == pytest.approx(n_groups, abs=2)
    assert steps.round_us(n_lanes, settled) <= 1.05 * steps.round_us(n_lanes, n_groups)


@given(
    st.integers(1, 8),
    st.integers(0, 60_000),
    st.integers(0, 5000),
    st.integers(50, 2000),
    st.lists(st.integers(1, 24), min_size=1, max_size=4),
)
def test_a_round_is_nearly_as_short_as_any_number_of_groups_makes_it(
    n_stages: int, travel_us: int, begin_us: int, row_us: int, lanes: list[int]
) -> None:
    steps = Steps(n_stages, travel_us, begin_us, row_us)
    for n_lanes in (1, 2, 3, 5, *lanes):
        settled = steps.settle(n_lanes)[-1]
    shortest = min(steps.round_us(n_lanes, count) for count in range(1, n_lanes + 1))
    assert steps.round_us(n_lanes, settled) <= 1.15 * shortest


def test_waits_for_busy_stages_make_no_more_groups() -> None:
    """Each more would make them longer."""
    seen = Steps(3, 0, 1000, 1000).settle(48, rounds=300, waits=True)
    assert all(b <= a for a, b in itertools.pairwise(seen[3:]))
    assert seen[-1] <= 5


@given(st.integers(2, 6), st.integers(0, 20_000), st.integers(1, 32))
def test_noise_does_not_make_it_flap(n_stages: int, travel_us: int, n_lanes: int) -> None:
    steps = Steps(n_stages, travel_us, 5000, 5000)
    seen = steps.settle(n_lanes, rounds=150, noise=0.1)[50:]
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    assert changes <= 4


def test_a_slow_stage_wants_fewer_groups() -> None:
    even, uneven = GroupCount(4), GroupCount(4)
    even.observe(2, 0, 1000, 4000)
    uneven.observe(2, 0, 1000, 2000)  # the other three are idle for most of the time
    assert even.best(16, 99) == 4
    assert uneven.best(16, 99) == 2


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8))
def test_groups_are_never_larger_than_a_batch(n_lanes: int, max_rows: int, n_stages: int) -> None:
    count = GroupCount(n_stages)
    for current in (None, 1):
        assert -(-n_lanes // max_rows) <= count.best(n_lanes, max_rows, current) <= n_lanes


def test_clocks_that_disagree_do_no_harm() -> None:
    count = GroupCount(2)
    count.observe(4, -500, 0, 0)
    assert count.least_travel_us == 0
    assert 1 <= count.best(8, 99) <= 8
