"""A ring of stages without a model: costs instead of computing, a virtual clock, and the real Scheduler.

Each stage runs what arrives in its order, one batch at a time. The last stage's answers, like new sessions, wait until
stage 0 is between two batches; it then forms its next batch, as the program's loop does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skippy_zmq.schedule.groups import micro_batches
from skippy_zmq.schedule.scheduler import Batch, Scheduler


@dataclass(frozen=True, slots=True)
class StageCost:
    """Microseconds of a stage, or of a whole model: to begin a micro-batch, per row of decode, per row of prefill."""

    micro_batch_us: int
    row_us: int
    prefill_row_us: int

    def of(self, batch: Batch) -> int:
        """Microseconds that ``batch`` takes, at least 1."""
        if batch.phase == "prefill":
            return max(1, self.prefill_row_us * len(batch.tokens))
        lanes = [rows.lane for rows in batch.rows]
        return max(1, self.micro_batch_us * micro_batches(lanes) + self.row_us * len(lanes))

    def split(self, shares: Sequence[float]) -> tuple[StageCost, ...]:
        """Stages that together cost as much as this one; ``shares`` say in which proportion."""
        total = sum(shares)
        parts = (self.micro_batch_us, self.row_us, self.prefill_row_us)
        return tuple(StageCost(*(round(part * share / total) for part in parts)) for share in shares)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A session that comes at ``at_us`` with ``n_prompt`` tokens and is over after ``n_tokens`` more."""

    session: str
    at_us: int
    n_prompt: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was measured. ``bubbles``: share of ``alive_us``, the time with a session alive, in which a stage was idle.

    Gaps are between two tokens of a session, as the last stage samples them. ``batches``: how many, by phase and rows.
    """

    alive_us: int
    bubbles: tuple[float, ...]
    tokens: int
    token_us: Mapping[str, tuple[int, ...]]
    first_token_us: Mapping[str, int]  # since the session came
    batches: Mapping[tuple[str, int], int]
    peak_in_flight: int

    @property
    def bubble(self) -> float:
        """Mean over stages."""
        return sum(self.bubbles) / len(self.bubbles)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens * 1e6 / max(1, self.alive_us)

    @property
    def worst_gap_us(self) -> int:
        return max(self._gaps(), default=0)

    @property
    def mean_gap_us(self) -> float:
        gaps = self._gaps()
        return sum(gaps) / max(1, len(gaps))

    def gaps_us(self, session: str) -> list[int]:
        return [later - sooner for sooner, later in itertools.pairwise(self.token_us.get(session, ()))]

    def _gaps(self) -> list[int]:
        return [gap for session in self.token_us for gap in self.gaps_us(session)]


@dataclass(slots=True)
class _Session:
    arrival: Arrival
    token_us: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    """A batch on the ring."""

    batch: Batch
    formed_us: int
    taken_us: int = 0  # by the stage that has it now
    spent_us: int = 0
    compute_us: int = 0
    slowest_us: int = 0


@dataclass(slots=True)
class _Stage:
    cost: StageCost
    queue: deque[_Flight] = field(default_factory=deque)
    running: _Flight | None = None
    begun_us: int = 0
    ends_us: int = 0
    busy_us: int = 0


class Simulation:
    """``scheduler`` at the head of a ring of ``stages``; a message takes ``hop_us`` from one to the next."""

    def __init__(self, scheduler: Scheduler, stages: Sequence[StageCost], hop_us: int = 0) -> None:
        if len(stages) != scheduler.n_stages:
            raise ValueError(f"{len(stages)} stages for a scheduler of {scheduler.n_stages}")
        self.scheduler = scheduler
        self.now_us = 0
        self._stages = [_Stage(cost) for cost in stages]
        self._hop_us = hop_us if len(stages) > 1 else 0
        self._order = itertools.count()
        self._events: list[tuple[int, int, _Event]] = []
        self._waiting: deque[str] = deque()  # sessions that have no lane yet
        self._answers: list[_Flight] = []  # come back, not yet looked at
        self._sessions: dict[str, _Session] = {}
        self._over: dict[str, _Session] = {}
        self._alive = 0
        self._from_us = 0
        self._alive_us = 0
        self._tokens = 0
        self._batches: Counter[tuple[str, int]] = Counter()
        self._peak = 0

    @property
    def fewest_tokens(self) -> int:
        """That any of the sessions now alive has got."""
        return min((len(session.token_us) for session in self._sessions.values()), default=0)

    def add(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            if arrival.at_us < self.now_us or arrival.n_tokens < 1:
                raise ValueError(f"session {arrival.session} comes too late or wants no token")
            self._at(arrival.at_us, arrival)

    def measure(self) -> None:
        """Forget what was measured so far."""
        self._from_us, self._alive_us, self._tokens, self._peak = self.now_us, 0, 0, self.scheduler.in_flight
        self._batches.clear()
        for stage in self._stages:
            stage.busy_us = 0

    def run(self, *, until_us: int | None = None, n_tokens: int | None = None) -> None:
        """Until that time, until so many more tokens are sampled, or until all sessions are over.

        Raises RuntimeError where sessions are left and nothing happens any more.
        """
        wanted = None if n_tokens is None else self._tokens + n_tokens
        while self._events and (wanted is None or self._tokens < wanted):
            at_us = self._events[0][0]
            if until_us is not None and at_us > until_us:
                self._advance(until_us)
                return
            self._advance(at_us)
            while self._events and self._events[0][0] == at_us:
                self._happen(heapq.heappop(self._events)[2])
            self._begin_work()
        if self._alive and not self._events:
            raise RuntimeError(f"{self._alive} sessions are left and nothing happens any more")

    def outcome(self) -> Outcome:
        busy = [stage.busy_us + (self._busy_now(stage) if stage.running else 0) for stage in self._stages]
        sessions = {**self._over, **self._sessions}
        return Outcome(
            self._alive_us,
            tuple(1 - spent / max(1, self._alive_us) for spent in busy),
            self._tokens,
            {name: tuple(us for us in found.token_us if us > self._from_us) for name, found in sessions.items()},
            {name: found.token_us[0] - found.arrival.at_us for name, found in sessions.items() if found.token_us},
            dict(self._batches),
            self._peak,
        )

    # ---- events

    def _at(self, at_us: int, event: _Event) -> None:
        heapq.heappush(self._events, (at_us, next(self._order), event))

    def _advance(self, to_us: int) -> None:
        if self._alive:
            self._alive_us += to_us - self.now_us
        self.now_us = to_us

    def _happen(self, event: _Event) -> None:
        if isinstance(event, Arrival):
            self._sessions[event.session] = _Session(event)
            self._waiting.append(event.session)
            self._alive += 1
        elif isinstance(event, _Flight):
            self._answers.append(event)
        elif isinstance(event, int):
            self._finish_batch(event)
        else:
            flight, index = event
            stage = self._stages[index]
            # A busy stage takes what arrived when it is between two batches.
            flight.taken_us = stage.ends_us if stage.running else self.now_us
            stage.queue.append(flight)

    def _finish_batch(self, index: int) -> None:
        stage = self._stages[index]
        flight = stage.running
        assert flight is not None
        stage.running = None
        stage.busy_us += self._busy_now(stage)
        flight.spent_us += self.now_us - flight.taken_us
        flight.compute_us += self.now_us - stage.begun_us
        flight.slowest_us = max(flight.slowest_us, self.now_us - stage.begun_us)
        if index + 1 < len(self._stages):
            self._at(self.now_us + self._hop_us, (flight, index + 1))
            return
        for rows in flight.batch.rows:
            if rows.sample:
                session = self._sessions[rows.session]
                session.token_us.append(self.now_us)
                self._tokens += 1
                self._alive -= len(session.token_us) == session.arrival.n_tokens
        self._at(self.now_us + self._hop_us, flight)

    def _busy_now(self, stage: _Stage) -> int:
        return self.now_us - max(stage.begun_us, self._from_us)

    # ---- work

    def _begin_work(self) -> None:
        first = self._stages[0]
        if first.running is None:
            self._look_around()
            batch = self.scheduler.next_batch()
            if batch is not None:
                self._peak = max(self._peak, self.scheduler.in_flight)
                self._batches[batch.phase, len(batch.tokens)] += 1
                first.queue.append(_Flight(batch, self.now_us, self.now_us))
        for index, stage in enumerate(self._stages):
            if stage.running is None and stage.queue:
                stage.running = stage.queue.popleft()
                stage.begun_us = self.now_us
                stage.ends_us = self.now_us + stage.cost.of(stage.running.batch)
                self._at(stage.ends_us, index)

    def _look_around(self) -> None:
        """Stage 0 between two batches: what came back, then who may start."""
        for flight in self._answers:
            travel_us = self.now_us - flight.formed_us - flight.spent_us
            self.scheduler.batch_done(flight.batch.number, travel_us, flight.slowest_us, flight.compute_us)
            self.scheduler.learn()
            for rows in flight.batch.rows:
                if rows.sample:
                    self._take_token(rows.session, rows.position + rows.n_rows)
        self._answers.clear()
        while self._waiting:
            arrival = self._sessions[self._waiting[0]].arrival
            if self.scheduler.start(arrival.session, range(arrival.n_prompt)) is None:
                break
            self._waiting.popleft()

    def _take_token(self, name: str, position: int) -> None:
        session = self._sessions[name]
        if len(session.token_us) < session.arrival.n_tokens:
            self.scheduler.feed(name, position, 0)
        else:
            self.scheduler.finish(name)
            self._over[name] = self._sessions.pop(name)


# A session that comes, a stage that has run its batch, a batch that reaches a stage, a batch that comes back.
_Event = Arrival | int | tuple[_Flight, int] | _Flight
