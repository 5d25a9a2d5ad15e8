"""Credit: so many batches and bytes are under way at most, whatever is asked for and whatever comes back."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.schedule.chunks import fixed_chunks
from skippy_zmq.schedule.credit import Credit, OnLinks
from skippy_zmq.schedule.scheduler import MAX_BATCHES, Batch, Scheduler


@given(st.integers(1, 5), st.integers(0, 100), st.lists(st.tuples(st.booleans(), st.integers(0, 120)), max_size=60))
def test_credit_counts_what_is_under_way(max_batches: int, max_bytes: int, events: list[tuple[bool, int]]) -> None:
    credit = Credit(max_batches, max_bytes)
    under_way: dict[int, int] = {}
    for number, (takes, n_bytes) in enumerate(events):
        total = sum(under_way.values())
        if takes:
            fits = len(under_way) < max_batches and total + n_bytes <= max_bytes
            assert credit.allows(n_bytes) == (fits or not under_way)
            if credit.allows(n_bytes):
                credit.take(number, n_bytes)
                under_way[number] = n_bytes
        else:
            back = min(under_way, default=n_bytes)
            assert credit.give_back(back) == (back in under_way)
            under_way.pop(back, None)
        assert (credit.batches, credit.bytes) == (len(under_way), sum(under_way.values()))
    credit.reset()
    assert (credit.batches, credit.bytes) == (0, 0)
    assert not any(credit.give_back(number) for number in under_way)


def _all(scheduler: Scheduler) -> list[Batch]:
    return list(iter(scheduler.next_batch, None))


def test_credit_that_is_used_up_shows_and_comes_back() -> None:
    scheduler = Scheduler(2, 8, fixed_chunks(2))
    scheduler.start("a", range(6))
    first, second = _all(scheduler)
    assert scheduler.credit.waits == 1
    assert not scheduler.has_work
    assert scheduler.credit.waits == 1  # asking is free
    assert scheduler.batch_done(first.number)
    assert not scheduler.batch_done(first.number)
    assert scheduler.has_work
    (third,) = _all(scheduler)
    assert third.number == second.number + 1


def test_bytes_are_bounded_but_for_a_batch_alone() -> None:
    scheduler = Scheduler(2, 8, fixed_chunks(4), n_stages=8, row_bytes=10, max_bytes=85)
    scheduler.start("a", range(40))
    under_way = _all(scheduler)
    assert [len(batch.tokens) for batch in under_way] == [4, 4]
    assert scheduler.credit.bytes == 80
    tight = Scheduler(2, 8, fixed_chunks(4), n_stages=8, row_bytes=10, max_bytes=5)
    tight.start("a", range(40))
    assert [len(batch.tokens) for batch in _all(tight)] == [4]


def test_a_ring_holds_two_batches_per_stage() -> None:
    for n_stages in range(1, 9):
        scheduler = Scheduler(2, 8, fixed_chunks(1), n_stages)
        scheduler.start("a", range(99))
        assert len(_all(scheduler)) == 2 * n_stages


def test_links_that_hold_batches_get_them() -> None:
    scheduler = Scheduler(2, 8, fixed_chunks(1), 2)
    scheduler.start("a", range(2000))
    for _ in range(40):
        for batch in _all(scheduler):
            scheduler.batch_done(batch.number, travel_us=10_000, slowest_us=1000, compute_us=2000)
            scheduler.learn()
    assert len(_all(scheduler)) == 2 * 2 + 10


def test_even_the_longest_links_do_not_hold_everything() -> None:
    scheduler = Scheduler(2, 8, fixed_chunks(1), 2)
    scheduler.start("a", range(5000))
    for _ in range(3):
        for batch in _all(scheduler):
            scheduler.batch_done(batch.number, travel_us=10**9, slowest_us=1, compute_us=2)
            scheduler.learn()
    assert len(_all(scheduler)) == MAX_BATCHES


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.integers(0, 10**4)), min_size=1))
def test_waits_do_not_count_as_links(times: list[tuple[int, int]]) -> None:
    links = OnLinks()
    assert links.count == 0
    for travel_us, slowest_us in times:
        links.observe(travel_us, slowest_us)
    least = max(0, min(travel_us for travel_us, _ in times))
    slowest = [max(1, slowest_us) for _, slowest_us in times]
    assert least // max(slowest) <= links.count <= least // min(slowest)


def test_a_new_ring_begins_with_all_its_credit() -> None:
    scheduler = Scheduler(2, 8, fixed_chunks(1), 2)
    scheduler.start("a", range(99))
    under_way = _all(scheduler)
    assert scheduler.reset() == ["a"]
    scheduler.join_ring(3)
    assert scheduler.credit.waits == 1  # a counter only rises
    scheduler.start("b", range(99))
    numbers = [batch.number for batch in _all(scheduler)]
    assert len(numbers) == 6
    assert not any(scheduler.batch_done(batch.number) for batch in under_way)
    assert all(b == a + 1 for a, b in itertools.pairwise([batch.number for batch in under_way] + numbers))
