"""A scheduler under everything that can happen to it: sessions that come and go, answers, a ring that breaks."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy_zmq.schedule.chunks import ScheduledChunks
from skippy_zmq.schedule.groups import spread
from skippy_zmq.schedule.scheduler import Batch, Scheduler

LANES, MAX_ROWS, ROW_BYTES, MAX_BYTES = 5, 3, 10, 65
CHUNKS = (2, 3)
WINDOW = 2


class Ring(RuleBasedStateMachine):
    """A last stage that answers batches in order, and sessions that come and go at any time."""

    STAGES = 1
    GROUPS: int | None = 1

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            LANES, MAX_ROWS, ScheduledChunks(CHUNKS), self.STAGES, self.GROUPS, ROW_BYTES, MAX_BYTES, WINDOW
        )
        self.under_way: list[Batch] = []
        self.expected: dict[str, list[int]] = {}  # every token of a live session, in order
        self.ran: dict[str, list[int]] = defaultdict(list)
        self.lane: dict[str, int] = {}
        self.n_prompt: dict[str, int] = {}
        self.n_given: dict[str, int] = {}  # prompt and what is known of the answer
        self.waiting: dict[str, int] = {}  # session -> batches since it had something to run
        self.chunks_since: dict[str, int] = {}  # decoding session -> chunks since its last step
        self.started = 0
        self.last_number = -1

    @rule(n_tokens=st.integers(1, 11), n_known=st.sampled_from([0, 0, 1, 2, 5]))
    def start(self, n_tokens: int, n_known: int) -> None:
        name = f"s{self.started}"
        self.started += 1
        prompt = [self.started * 100 + i for i in range(n_tokens)]
        known = [self.started * 100 + 50 + i for i in range(n_known)]
        lane = self.scheduler.start(name, prompt, known=known)
        if len(self.lane) == LANES:
            assert lane is None
            return
        assert lane == min(set(range(LANES)) - set(self.lane.values()))
        self.lane[name] = lane
        self.expected[name] = prompt + known
        self.n_prompt[name], self.n_given[name] = len(prompt), len(prompt + known)
        self.waiting[name] = 0

    @rule()
    def next(self) -> None:
        had_work = self.scheduler.has_work
        groups = self._groups()
        credit = self.scheduler.credit.max_batches
        batch = self.scheduler.next_batch()
        assert (batch is not None) == had_work
        if batch is None:
            return
        assert batch.number == self.last_number + 1
        self.last_number = batch.number
        assert 1 <= len(batch.tokens) == sum(rows.n_rows for rows in batch.rows) <= MAX_ROWS
        n_bytes = ROW_BYTES * (len(batch.tokens) + sum(len(other.tokens) for other in self.under_way))
        assert not self.under_way or (len(self.under_way) < credit and n_bytes <= MAX_BYTES)
        if batch.phase == "decode":
            self._check_step(batch, groups)
        else:
            self._check_chunk(batch, groups)
        self._check_tokens(batch)
        self.under_way.append(batch)

    def _check_step(self, batch: Batch, groups: list[set[str]]) -> None:
        names = [rows.session for rows in batch.rows]
        assert set(names) in groups  # whole
        assert [rows.lane for rows in batch.rows] == sorted(self.lane[name] for name in names)
        for rows in batch.rows:
            assert (rows.n_rows, rows.sample, rows.opens) == (1, True, False)
            self.chunks_since[rows.session] = 0

    def _check_chunk(self, batch: Batch, groups: list[set[str]]) -> None:
        (rows,) = batch.rows
        if batch.phase == "replay":
            assert rows.position >= self.n_prompt[rows.session]
            assert rows.n_rows == min(WINDOW, self.n_given[rows.session] - rows.position)
        else:
            ends = [0, CHUNKS[0]] + [CHUNKS[0] + CHUNKS[1] * i for i in range(1, 9)]
            assert rows.position in ends  # whatever else was running
            assert rows.n_rows == min(ends[ends.index(rows.position) + 1], self.n_prompt[rows.session]) - rows.position
        pending = self._pending()
        ready = [group for group in groups if group <= pending]
        decoding = set().union(*groups)
        assert not ready or any(all(not self.chunks_since[name] for name in group) for group in ready)
        for name in decoding:
            self.chunks_since[name] += 1
            assert self.chunks_since[name] <= max(1, self.STAGES - 1)

    def _check_tokens(self, batch: Batch) -> None:
        tokens = iter(batch.tokens)
        pending = self._pending()
        for rows in batch.rows:
            assert rows.lane == self.lane[rows.session]
            ran = self.ran[rows.session]
            assert rows.position == len(ran)
            assert rows.opens == (not ran)
            ran += [next(tokens) for _ in range(rows.n_rows)]
            assert ran == self.expected[rows.session][: len(ran)]
            in_answer = batch.phase != "prefill" or len(ran) == self.n_prompt[rows.session]
            assert rows.sample == in_answer
            self.waiting[rows.session] = 0
        for name in pending - {rows.session for rows in batch.rows}:
            self.waiting[name] += 1
            assert self.waiting[name] <= 4 * LANES + 2 * self.STAGES

    @precondition(lambda self: self.under_way)
    @rule(
        more=st.booleans(),
        travel_us=st.sampled_from([0, 50, 1000]) | st.integers(-9, 10**7),
        slowest_us=st.sampled_from([0, 100]) | st.integers(0, 10**6),
        learns=st.booleans(),
    )
    def done(self, more: bool, travel_us: int = 0, slowest_us: int = 0, learns: bool = True) -> None:
        batch = self.under_way.pop(0)
        if batch.phase != "decode":
            travel_us = 0  # links that hold chunks have tests of their own
        assert self.scheduler.batch_done(batch.number, travel_us, slowest_us, 2 * slowest_us)
        if learns:
            self.scheduler.learn()
        assert not self.scheduler.batch_done(batch.number)
        for rows in batch.rows:
            if rows.sample:
                position = rows.position + rows.n_rows
                known = rows.session in self.lane
                if known and not more:
                    self._finish(rows.session)
                elif not known or position >= self.n_given[rows.session]:  # else what comes is known, and under way
                    assert self.scheduler.feed(rows.session, position, batch.number) == known
                    if known:
                        self.expected[rows.session].append(batch.number)
                        self.chunks_since.setdefault(rows.session, 0)

    @precondition(lambda self: len(self.lane) == LANES)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self._finish(data.draw(st.sampled_from(sorted(self.lane))))

    @precondition(lambda self: self.last_number % 20 == 19)
    @rule(joins=st.booleans())
    def break_ring(self, joins: bool) -> None:
        assert sorted(self.scheduler.reset()) == sorted(self.lane)
        if joins:
            self.scheduler.join_ring(self.STAGES)
        for name in list(self.lane):
            self._forget(name)
        for batch in self.under_way:
            assert not self.scheduler.batch_done(batch.number)
        self.under_way.clear()

    def _finish(self, name: str) -> None:
        assert self.scheduler.finish(name) == self.lane[name]
        self._forget(name)

    def _forget(self, name: str) -> None:
        for table in (
            self.lane,
            self.expected,
            self.ran,
            self.waiting,
            self.n_prompt,
            self.n_given,
            self.chunks_since,
        ):
            table.pop(name, None)

    def _pending(self) -> set[str]:
        return {name for name, tokens in self.expected.items() if len(self.ran[name]) < len(tokens)}

    def _groups(self) -> list[set[str]]:
        """Of the decoding sessions."""
        by_lane = {self.lane[name]: name for name in self.chunks_since}
        slices = spread(sorted(by_lane), self.GROUPS or self.scheduler.groups, MAX_ROWS)
        return [{by_lane[lane] for lane in lanes} for lanes in slices]

    @invariant()
    def counts_agree(self) -> None:
        scheduler = self.scheduler
        assert scheduler.in_flight == len(self.under_way)
        assert scheduler.credit.bytes == ROW_BYTES * sum(len(batch.tokens) for batch in self.under_way)
        assert scheduler.sessions == scheduler.lanes.busy == len(self.lane)
        assert scheduler.groups == len(self._groups())
        if not self._pending():
            assert not scheduler.has_work
        elif not self.under_way:
            assert scheduler.has_work

    def teardown(self) -> None:
        """Whatever is left runs to its end."""
        while self._pending() or self.under_way:
            before = len(self.under_way)
            self.next()
            if len(self.under_way) == before:
                self.done(more=False)


class RingOfTwo(Ring):
    STAGES = 2
    GROUPS = 2


class RingOfFour(Ring):
    STAGES = 4
    GROUPS = None


TestRing = Ring.TestCase
TestRingOfTwo = RingOfTwo.TestCase
TestRingOfFour = RingOfFour.TestCase
