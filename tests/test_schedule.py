"""Lanes and batches: whatever happens in whatever order, every token runs once, at its position, and nobody starves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.schedule.chunks import fixed_chunks
from skippy_zmq.schedule.lanes import LaneTable
from skippy_zmq.schedule.scheduler import Batch, Scheduler


@given(st.integers(1, 9), st.lists(st.integers(-1, 8), max_size=60))
def test_a_lane_belongs_to_one_at_a_time_the_lowest_first(n_lanes: int, steps: list[int]) -> None:
    table = LaneTable(n_lanes)
    used: set[int] = set()
    for step in steps:
        if step < 0:
            lane = table.take()
            assert lane == min(set(range(n_lanes)) - used, default=None)
            used |= {lane} if lane is not None else set()
        elif step in used:
            table.give_back(step)
            used.remove(step)
        else:
            with pytest.raises(ValueError, match=f"lane {step} is not in use"):
                table.give_back(step)
        assert (table.busy, table.free) == (len(used), n_lanes - len(used))


def _done(scheduler: Scheduler, batch: Batch) -> None:
    """The batch is back; its sessions get the token that follows."""
    assert scheduler.batch_done(batch.number)
    for rows in batch.rows:
        if rows.sample:
            scheduler.feed(rows.session, rows.position + rows.n_rows, 7)


def _run(scheduler: Scheduler) -> Batch:
    """The next batch, done at once."""
    batch = scheduler.next_batch()
    assert batch is not None
    _done(scheduler, batch)
    return batch


def _decoding(scheduler: Scheduler, *names: str) -> None:
    """Start sessions and let their prompts run."""
    for name in names:
        scheduler.start(name, (1,))
    to_come = set(names)
    while to_come:
        to_come -= {rows.session for rows in _run(scheduler).rows}


def test_no_lane_is_left() -> None:
    scheduler = Scheduler(2, 8, fixed_chunks(8))
    assert [scheduler.start(name, (1,)) for name in "abc"] == [0, 1, None]
    assert scheduler.finish("a") == 0
    assert scheduler.start("c", (1,)) == 0
    assert scheduler.finish("a") is None
    assert scheduler.sessions == 2


def test_a_session_starts_once_and_with_a_prompt() -> None:
    scheduler = Scheduler(2, 8, fixed_chunks(8))
    scheduler.start("a", (1,))
    with pytest.raises(ValueError, match="session a is known already"):
        scheduler.start("a", (1,))
    with pytest.raises(ValueError, match=r"session b .* empty prompt"):
        scheduler.start("b", ())
    assert scheduler.lanes.busy == 1


def test_a_token_for_another_position_is_refused() -> None:
    scheduler = Scheduler(1, 8, fixed_chunks(8))
    scheduler.start("a", (1, 2, 3))
    with pytest.raises(ValueError, match="session a: token for position 1"):
        scheduler.feed("a", 1, 9)  # its prompt has not run
    scheduler.next_batch()
    with pytest.raises(ValueError, match="session a: token for position 4, wanted 3"):
        scheduler.feed("a", 4, 9)
    assert scheduler.feed("a", 3, 9)
    with pytest.raises(ValueError, match="session a: token for position 3, wanted 3"):
        scheduler.feed("a", 3, 9)
    assert not scheduler.feed("nobody", 0, 9)


@given(st.integers(1, 100), st.integers(1, 20), st.integers(0, 3))
def test_chunks_of_given_sizes_depend_on_the_prompt_alone(n_tokens: int, n_rows: int, n_others: int) -> None:
    scheduler = Scheduler(4, 20, fixed_chunks(n_rows))
    for other in range(n_others):
        scheduler.start(f"other {other}", range(1, 7 * other + 2))
    scheduler.start("mine", range(n_tokens))
    chunks: list[int] = []
    while sum(chunks) < n_tokens:
        chunks += [rows.n_rows for rows in _run(scheduler).rows if rows.session == "mine"]
    whole, rest = divmod(n_tokens, n_rows)
    assert chunks == [n_rows] * whole + [rest] * bool(rest)


def test_decode_and_prefill_take_turns() -> None:
    scheduler = Scheduler(3, 4, fixed_chunks(4))
    _decoding(scheduler, "short")
    scheduler.start("long", range(16))
    assert [_run(scheduler).phase for _ in range(8)] == ["prefill", "decode"] * 4


def test_every_decoding_lane_steps_between_two_chunks() -> None:
    scheduler = Scheduler(4, 4, fixed_chunks(4), n_groups=2)
    _decoding(scheduler, "a", "b", "c")
    scheduler.start("long", range(16))
    between: list[list[str]] = []
    for _ in range(9):
        batch = _run(scheduler)
        if batch.phase == "prefill":
            between.append([])
        elif between:
            between[-1] += [rows.session for rows in batch.rows]
    assert [sorted(names) for names in between[:-1]] == [["a", "b", "c"]] * (len(between) - 1)
    assert len(between) >= 3


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 8])
def test_while_a_step_is_around_as_many_chunks_go_as_there_are_stages_behind(n_stages: int) -> None:
    scheduler = Scheduler(2, 4, fixed_chunks(4), n_stages)
    _decoding(scheduler, "a")
    step = scheduler.next_batch()
    assert step is not None
    scheduler.start("long", range(400))
    chunks = list(iter(scheduler.next_batch, None))
    assert len(chunks) == max(1, n_stages - 1)
    scheduler.batch_done(chunks[0].number)
    _done(scheduler, step)
    again = scheduler.next_batch()
    assert again is not None
    assert again.phase == "decode"
    more = scheduler.next_batch()
    assert more is not None
    assert more.phase == "prefill"


def test_links_hold_further_chunks_while_a_step_is_around() -> None:
    scheduler = Scheduler(2, 4, fixed_chunks(4), 2)
    _decoding(scheduler, "a")
    for number in range(20):
        scheduler.start(f"short {number}", range(4))
        while (batch := scheduler.next_batch()) is not None:
            took_us = 1000 if batch.phase == "prefill" else 0
            scheduler.batch_done(batch.number, travel_us=3 * took_us, slowest_us=took_us)
            scheduler.learn()
            if batch.rows[0].session == "a":
                scheduler.feed("a", batch.rows[0].position + 1, 7)
            else:
                scheduler.finish(batch.rows[0].session)
                break
    while (step := scheduler.next_batch()) is None or step.phase != "decode":
        pass
    scheduler.start("long", range(400))
    assert len(list(iter(scheduler.next_batch, None))) == 1 + 3


def test_prompts_take_turns_chunk_by_chunk() -> None:
    scheduler = Scheduler(3, 4, fixed_chunks(4), n_stages=3)
    scheduler.start("long", range(12))
    scheduler.start("other", range(6))
    batches = [scheduler.next_batch() for _ in range(5)]
    assert [b.rows[0].session for b in batches if b] == ["long", "other", "long", "other", "long"]
    assert scheduler.next_batch() is None


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_more_lanes_than_rows_of_a_batch(max_rows: int) -> None:
    scheduler = Scheduler(4, max_rows, fixed_chunks(4))
    _decoding(scheduler, *"abcd")
    steps = Counter(dict.fromkeys("abcd", 0))
    for _ in range(12):
        batch = _run(scheduler)
        assert len(batch.rows) <= max_rows
        steps.update(rows.session for rows in batch.rows)
    assert max(steps.values()) - min(steps.values()) <= 1


def test_rows_of_a_decode_step_are_in_order_of_their_lanes() -> None:
    scheduler = Scheduler(3, 8, fixed_chunks(8), 2, n_groups=1)
    for name in "abc":
        scheduler.start(name, (1,))
    prompts = [batch for _ in range(3) if (batch := scheduler.next_batch())]
    for batch in reversed(prompts):
        _done(scheduler, batch)
    step = scheduler.next_batch()
    assert step is not None
    assert [(rows.session, rows.lane) for rows in step.rows] == [("a", 0), ("b", 1), ("c", 2)]
    assert [batch.number for batch in prompts] == [0, 1, 2]
    assert step.number == 3


def test_a_broken_ring_leaves_nothing_behind() -> None:
    scheduler = Scheduler(2, 2, fixed_chunks(2))
    scheduler.start("a", range(6))
    scheduler.start("b", range(3))
    before = scheduler.next_batch()
    assert before is not None
    assert sorted(scheduler.reset()) == ["a", "b"]
    assert (scheduler.sessions, scheduler.in_flight, scheduler.lanes.busy, scheduler.groups) == (0, 0, 0, 0)
    assert scheduler.next_batch() is None
    assert not scheduler.batch_done(before.number)
    scheduler.start("a", range(2))
    after = scheduler.next_batch()
    assert after is not None
    assert after.number > before.number
    assert after.rows[0].position == 0
    assert after.rows[0].opens


@pytest.mark.parametrize(("n_lanes", "n_groups"), [(8, 2), (9, 2), (7, 3), (2, 4), (1, 2), (64, 8)])
def test_lanes_settle_into_groups_of_neighbours(n_lanes: int, n_groups: int) -> None:
    """However their prompts ended, decoding lanes come to run in groups of equal size, each of neighbouring lanes."""
    scheduler = Scheduler(n_lanes, n_lanes, fixed_chunks(1), n_groups, n_groups)
    for lane in range(n_lanes):
        scheduler.start(str(lane), (1,) * (1 + lane % 3))
    under_way: list[Batch] = []
    groups: list[list[int]] = []
    for _ in range(60 * n_groups):
        while (batch := scheduler.next_batch()) is not None:
            under_way.append(batch)
            groups.append([rows.lane for rows in batch.rows])
        _done(scheduler, under_way.pop(0))
    settled = sorted(groups[-min(n_groups, n_lanes) :])
    assert [lane for group in settled for lane in group] == list(range(n_lanes))
    assert max(map(len, settled)) - min(map(len, settled)) <= 1
    assert scheduler.groups == len(settled)


def test_a_fixed_number_of_groups_is_kept_to() -> None:
    scheduler = Scheduler(6, 8, fixed_chunks(8), 4, n_groups=2)
    _decoding(scheduler, *"abcdef")
    for _ in range(20):
        batch = scheduler.next_batch()
        assert batch is not None
        scheduler.batch_done(batch.number, travel_us=10**6, slowest_us=10, compute_us=40)
        scheduler.learn()
        for rows in batch.rows:
            scheduler.feed(rows.session, rows.position + 1, 7)
        assert scheduler.groups == 2


def test_groups_become_more_as_the_links_turn_out_long() -> None:
    scheduler = Scheduler(8, 8, fixed_chunks(8), 2)
    _decoding(scheduler, *"abcdefgh")
    assert scheduler.groups == 2
    for _ in range(20):
        batch = scheduler.next_batch()
        assert batch is not None
        scheduler.batch_done(batch.number, travel_us=10_000, slowest_us=1000 + 1000 * len(batch.rows))
        scheduler.learn()
        for rows in batch.rows:
            scheduler.feed(rows.session, rows.position + 1, 7)
    assert scheduler.groups == 4  # 16 ms per round; 20 with two, 18 with three, 16 with eight


def test_a_step_that_nobody_waits_for_any_more_keeps_nobody_from_stepping() -> None:
    scheduler = Scheduler(3, 8, fixed_chunks(8), n_stages=2, n_groups=1)
    _decoding(scheduler, "gone")
    step = scheduler.next_batch()
    assert step is not None
    assert step.phase == "decode"
    scheduler.start("stays", (1,))
    _run(scheduler)  # its prompt
    scheduler.finish("gone")  # while its step is under way
    scheduler.start("prompt", range(64))
    following = [scheduler.next_batch() for _ in range(2)]
    assert [batch and [rows.session for rows in batch.rows] for batch in following] == [["prompt"], ["stays"]]
    assert scheduler.batch_done(step.number)
