"""Lanes and batches: whatever happens in whatever order, every token runs once, at its position, and nobody starves."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy_zmq.schedule.lanes import LaneTable
from skippy_zmq.schedule.scheduler import Batch, Scheduler


@given(st.integers(1, 9), st.lists(st.integers(-1, 8), max_size=60))
def test_a_lane_belongs_to_one_at_a_time(n_lanes: int, steps: list[int]) -> None:
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


def _run(scheduler: Scheduler) -> Batch:
    """The next batch, done at once; its sessions get the token that follows."""
    batch = scheduler.next_batch()
    assert batch is not None
    assert scheduler.batch_done(batch.number)
    for rows in batch.rows:
        if rows.sample:
            scheduler.feed(rows.session, rows.position + rows.n_rows, 7)
    return batch


def test_no_lane_is_left() -> None:
    scheduler = Scheduler(2, 8, 2)
    assert [scheduler.start(name, (1,)) for name in "abc"] == [0, 1, None]
    assert scheduler.finish("a") == 0
    assert scheduler.start("c", (1,)) == 0
    assert scheduler.finish("a") is None
    assert scheduler.sessions == 2


def test_a_session_starts_once_and_with_a_prompt() -> None:
    scheduler = Scheduler(2, 8, 2)
    scheduler.start("a", (1,))
    with pytest.raises(ValueError, match="session a is known already"):
        scheduler.start("a", (1,))
    with pytest.raises(ValueError, match=r"session b .* empty prompt"):
        scheduler.start("b", ())
    assert scheduler.lanes.busy == 1


def test_a_token_for_another_position_is_refused() -> None:
    scheduler = Scheduler(1, 8, 2)
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
def test_chunks_depend_on_the_prompt_alone(n_tokens: int, max_rows: int, n_others: int) -> None:
    scheduler = Scheduler(4, max_rows, 1)
    for other in range(n_others):
        scheduler.start(f"other {other}", range(1, 7 * other + 2))
    scheduler.start("mine", range(n_tokens))
    chunks: list[int] = []
    while sum(chunks) < n_tokens:
        chunks += [rows.n_rows for rows in _run(scheduler).rows if rows.session == "mine"]
    whole, rest = divmod(n_tokens, max_rows)
    assert chunks == [max_rows] * whole + [rest] * bool(rest)


def test_decode_and_prefill_take_turns() -> None:
    scheduler = Scheduler(3, 4, 1)
    scheduler.start("short", (1,))
    assert _run(scheduler).phase == "prefill"
    scheduler.start("long", range(16))
    assert [_run(scheduler).phase for _ in range(9)] == ["decode", "prefill"] * 4 + ["decode"]


def test_prompts_take_turns_chunk_by_chunk() -> None:
    scheduler = Scheduler(3, 4, 99)
    scheduler.start("long", range(12))
    scheduler.start("other", range(6))
    batches = [scheduler.next_batch() for _ in range(5)]
    assert [b.rows[0].session for b in batches if b] == ["long", "other", "long", "other", "long"]
    assert scheduler.next_batch() is None


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_more_lanes_than_rows_of_a_batch(max_rows: int) -> None:
    scheduler = Scheduler(4, max_rows, 1)
    for name in "abcd":
        scheduler.start(name, (1,))
    while [rows.session for rows in _run(scheduler).rows] != ["d"]:  # until the last prompt has run
        pass
    steps = Counter(dict.fromkeys("abcd", 0))
    for _ in range(12):
        steps.update(rows.session for rows in _run(scheduler).rows)
    assert max(steps.values()) - min(steps.values()) <= 1


def test_rows_of_a_decode_step_are_in_order_of_their_lanes() -> None:
    scheduler = Scheduler(3, 8, 9)
    for name in "abc":
        scheduler.start(name, (1,))
    numbers = [batch.number for _ in range(3) if (batch := scheduler.next_batch())]
    for name in "cab":
        scheduler.feed(name, 1, 5)
    for number in numbers:
        scheduler.batch_done(number)
    step = scheduler.next_batch()
    assert step is not None
    assert [(rows.session, rows.lane) for rows in step.rows] == [("a", 0), ("b", 1), ("c", 2)]
    assert numbers == [0, 1, 2]
    assert step.number == 3


def test_credit_that_is_used_up_shows_and_comes_back() -> None:
    scheduler = Scheduler(2, 2, 2)
    scheduler.start("a", range(6))
    first, second = scheduler.next_batch(), scheduler.next_batch()
    assert first is not None
    assert second is not None
    assert not scheduler.has_work
    assert scheduler.next_batch() is None
    assert scheduler.credit_waits == 1
    assert scheduler.batch_done(first.number)
    assert not scheduler.batch_done(first.number)
    assert scheduler.has_work
    assert scheduler.next_batch() is not None


def test_a_broken_ring_leaves_nothing_behind() -> None:
    scheduler = Scheduler(2, 2, 2)
    scheduler.start("a", range(6))
    scheduler.start("b", range(3))
    before = scheduler.next_batch()
    assert before is not None
    assert sorted(scheduler.reset()) == ["a", "b"]
    assert (scheduler.sessions, scheduler.in_flight, scheduler.lanes.busy) == (0, 0, 0)
    assert scheduler.next_batch() is None
    assert not scheduler.batch_done(before.number)
    scheduler.start("a", range(2))
    after = scheduler.next_batch()
    assert after is not None
    assert after.number > before.number
    assert after.rows[0].position == 0
    assert after.rows[0].opens


class Ring(RuleBasedStateMachine):
    """A scheduler, a last stage that answers batches in order, and sessions that come and go at any time."""

    MAX_ROWS, CREDIT, LANES, GROUPS = 3, 3, 4, 1

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.LANES, self.MAX_ROWS, self.CREDIT, self.GROUPS)
        self.under_way: list[Batch] = []
        self.expected: dict[str, list[int]] = {}  # every token of a live session, in order
        self.ran: dict[str, list[int]] = defaultdict(list)
        self.lane: dict[str, int] = {}
        self.n_prompt: dict[str, int] = {}
        self.waiting: dict[str, int] = {}  # session -> batches since it had something to run
        self.started = 0
        self.last_number = -1

    @rule(n_tokens=st.integers(1, 11))
    def start(self, n_tokens: int) -> None:
        name = f"s{self.started}"
        self.started += 1
        prompt = [self.started * 100 + i for i in range(n_tokens)]
        lane = self.scheduler.start(name, prompt)
        if len(self.lane) == self.LANES:
            assert lane is None
            return
        assert lane is not None
        assert lane not in self.lane.values()
        self.lane[name] = lane
        self.expected[name] = prompt
        self.n_prompt[name] = len(prompt)
        self.waiting[name] = 0

    @rule()
    def next(self) -> None:
        had_work = self.scheduler.has_work
        batch = self.scheduler.next_batch()
        assert (batch is not None) == had_work
        if batch is None:
            assert len(self.under_way) == self.CREDIT or not self._runnable()
            return
        assert batch.number == self.last_number + 1
        self.last_number = batch.number
        assert 1 <= len(batch.tokens) == sum(rows.n_rows for rows in batch.rows) <= self.MAX_ROWS
        lanes = [rows.lane for rows in batch.rows]
        assert lanes == sorted(set(lanes))
        assert batch.phase in ("prefill", "decode")
        tokens = iter(batch.tokens)
        for rows in batch.rows:
            assert rows.lane == self.lane[rows.session]
            ran = self.ran[rows.session]
            assert rows.position == len(ran)
            assert rows.opens == (not ran)
            ran += [next(tokens) for _ in range(rows.n_rows)]
            assert ran == self.expected[rows.session][: len(ran)]
            assert rows.sample == (len(ran) == len(self.expected[rows.session]))
            self.waiting[rows.session] = 0
        for name in self._pending() - {rows.session for rows in batch.rows}:
            self.waiting[name] += 1
            # the others once each, decode and prefill in turn
            assert self.waiting[name] <= 2 * self.LANES
        self.under_way.append(batch)

    @precondition(lambda self: self.under_way)
    @rule(more=st.booleans())
    def done(self, more: bool) -> None:
        batch = self.under_way.pop(0)
        assert self.scheduler.batch_done(batch.number)
        for rows in batch.rows:
            if rows.sample:
                position = rows.position + rows.n_rows
                known = rows.session in self.lane
                if known and not more:
                    self._finish(rows.session)
                else:
                    assert self.scheduler.feed(rows.session, position, batch.number) == known
                    if known:
                        self.expected[rows.session].append(batch.number)

    @precondition(lambda self: len(self.lane) == self.LANES)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(sorted(self.lane))))

    @precondition(lambda self: self.last_number % 20 == 19)
    @rule()
    def break_ring(self) -> None:
        assert sorted(self.scheduler.reset()) == sorted(self.lane)
        for name in list(self.lane):
            self._forget(name)
        for batch in self.under_way:
            assert not self.scheduler.batch_done(batch.number)
        self.under_way.clear()

    def _finish(self, name: str) -> None:
        assert self.scheduler.finish(name) == self.lane[name]
        self._forget(name)

    def _forget(self, name: str) -> None:
        for table in (self.lane, self.expected, self.ran, self.waiting):
            table.pop(name, None)

    def _pending(self) -> set[str]:
        return {name for name, tokens in self.expected.items() if len(self.ran[name]) < len(tokens)}

    def _runnable(self) -> set[str]:
        """Those of ``_pending`` that may go on the ring now: a decode step needs a free group."""
        steps = sum(batch.phase == "decode" for batch in self.under_way)
        prefilling = {name for name in self._pending() if len(self.ran[name]) < self.n_prompt[name]}
        return prefilling if steps >= self.GROUPS else self._pending()

    @invariant()
    def counts_agree(self) -> None:
        assert self.scheduler.in_flight == len(self.under_way) <= self.CREDIT
        assert self.scheduler.sessions == self.scheduler.lanes.busy == len(self.lane)
        assert self.scheduler.has_work == (len(self.under_way) < self.CREDIT and bool(self._runnable()))

    def teardown(self) -> None:
        """Whatever is left runs to its end."""
        while self.under_way:
            self.done(more=True)
        while self._pending():
            self.next()
            self.done(more=False)


class RingOfTwo(Ring):
    GROUPS = 2


TestRing = Ring.TestCase
TestRingOfTwo = RingOfTwo.TestCase


@pytest.mark.parametrize(("n_lanes", "n_groups"), [(8, 2), (9, 2), (7, 3), (2, 4), (1, 2), (64, 8)])
def test_lanes_settle_into_groups_of_neighbours(n_lanes: int, n_groups: int) -> None:
    """However their prompts ended, decoding lanes come to run in groups of equal size, each of neighbouring lanes."""
    scheduler = Scheduler(n_lanes, n_lanes, 2 * n_groups, n_groups)
    for lane in range(n_lanes):
        scheduler.start(str(lane), (1,) * (1 + lane % 3))
    under_way: list[Batch] = []
    groups: list[list[int]] = []
    for _ in range(40 * n_groups):
        while (batch := scheduler.next_batch()) is not None:
            under_way.append(batch)
            groups.append([rows.lane for rows in batch.rows])
        done = under_way.pop(0)
        scheduler.batch_done(done.number)
        for rows in done.rows:
            if rows.sample:
                scheduler.feed(rows.session, rows.position + rows.n_rows, 7)
    size = -(-n_lanes // n_groups)
    wanted = [list(range(first, min(first + size, n_lanes))) for first in range(0, n_lanes, size)]
    assert sorted(groups[-len(wanted) :]) == wanted
