"""Continuous batching at stage 0: which rows of which sessions form the next batch.

A batch is either one decode step of every session that is ready for one, or one prefill chunk of one session; the two
take turns, so that neither a long prompt nor busy decoding holds up the other. A chunk's size therefore depends on its
own prompt alone, not on neighbours. Chunks of one prompt follow each other on the ring without waiting.

With several stages, decoding lanes are spread over as many **groups** of neighbouring lanes, each with a step of its
own under way, so that all stages compute at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from skippy_zmq.schedule.lanes import LaneTable


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """``n_rows`` rows of ``session`` from ``position`` on. ``sample``: a token follows; ``opens``: its first rows."""

    session: str
    lane: int
    position: int
    n_rows: int
    sample: bool
    opens: bool


@dataclass(frozen=True, slots=True)
class Batch:
    number: int
    phase: str  # "prefill" | "decode"
    rows: tuple[ScheduledRows, ...]
    tokens: tuple[int, ...]


@dataclass(slots=True)
class _Session:
    name: str
    lane: int
    pending: deque[int]  # tokens not yet sent down the ring
    position: int = 0  # of the first pending token
    opened: bool = False
    prefilling: bool = True
    last_step: int = -1  # number of the batch that ran it last


@dataclass(slots=True)
class Scheduler:
    """``max_rows``: largest chunk and decode batch. ``max_in_flight``: batches on the ring at once (credit).

    ``n_groups``: decode steps under way at once; usually the number of stages.
    """

    n_lanes: int
    max_rows: int
    max_in_flight: int
    n_groups: int = 1
    lanes: LaneTable = field(init=False)
    _sessions: dict[str, _Session] = field(init=False, default_factory=dict)
    _prefills: deque[str] = field(init=False, default_factory=deque)
    _in_flight: dict[int, str] = field(init=False, default_factory=dict)  # number -> phase
    _next_number: int = field(init=False, default=0)
    _prefill_turn: bool = field(init=False, default=True)
    credit_waits: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.lanes = LaneTable(self.n_lanes)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def start(self, session: str, prompt: Sequence[int]) -> int | None:
        """Give ``session`` a lane and queue its prompt; None where no lane is free."""
        if session in self._sessions or not prompt:
            raise ValueError(f"session {session} is known already or has an empty prompt")
        lane = self.lanes.take()
        if lane is None:
            return None
        self._sessions[session] = _Session(session, lane, deque(prompt))
        self._prefills.append(session)
        return lane

    def feed(self, session: str, position: int, token: int) -> bool:
        """A token was sampled for ``session`` and is to be run at ``position``; False where the session is gone."""
        found = self._sessions.get(session)
        if found is None:
            return False
        if found.pending or found.position != position:
            raise ValueError(f"session {session}: token for position {position}, wanted {found.position}")
        found.pending.append(token)
        return True

    def finish(self, session: str) -> int | None:
        """Forget ``session`` and free its lane; return the lane, or None where it is unknown."""
        found = self._sessions.pop(session, None)
        if found is None:
            return None
        if session in self._prefills:
            self._prefills.remove(session)
        self.lanes.give_back(found.lane)
        return found.lane

    def batch_done(self, number: int) -> bool:
        """The last stage has finished a batch; False where it is not in flight."""
        if number not in self._in_flight:
            return False
        del self._in_flight[number]
        return True

    def reset(self) -> list[str]:
        """The ring broke: forget everything in flight; return the sessions that were lost."""
        lost = list(self._sessions)
        for session in lost:
            self.finish(session)
        self._in_flight.clear()
        return lost

    @property
    def has_work(self) -> bool:
        """Whether ``next_batch`` would give one."""
        if len(self._in_flight) >= self.max_in_flight:
            return False
        return bool(self._prefills) or bool(self._next_group())

    def next_batch(self) -> Batch | None:
        """The next batch, or None where nothing is ready or the credit is used up."""
        group = self._next_group()
        if not group and not self._prefills:
            return None
        if len(self._in_flight) >= self.max_in_flight:
            self.credit_waits += 1
            return None
        prefill = bool(self._prefills) and (self._prefill_turn or not group)
        self._prefill_turn = not prefill
        return self._prefill_chunk() if prefill else self._decode_step(group)

    def _next_group(self) -> list[_Session]:
        """The sessions of the next decode step, by lane: those of the group that has waited longest which are ready."""
        if sum(phase == "decode" for phase in self._in_flight.values()) >= self.n_groups:
            return []
        decoding = sorted((s for s in self._sessions.values() if not s.prefilling), key=lambda s: s.lane)
        size = min(-(-len(decoding) // self.n_groups), self.max_rows) or 1
        groups = ([s for s in decoding[i : i + size] if s.pending] for i in range(0, len(decoding), size))
        return min((g for g in groups if g), key=lambda g: min(s.last_step for s in g), default=[])

    def _decode_step(self, group: Sequence[_Session]) -> Batch:
        rows, tokens = [], []
        for session in group:
            session.last_step = self._next_number
            rows.append(ScheduledRows(session.name, session.lane, session.position, 1, sample=True, opens=False))
            tokens.append(session.pending.popleft())
            session.position += 1
        return self._number("decode", rows, tokens)

    def _prefill_chunk(self) -> Batch:
        session = self._sessions[self._prefills.popleft()]
        n_rows = min(len(session.pending), self.max_rows)
        tokens = [session.pending.popleft() for _ in range(n_rows)]
        last = not session.pending
        rows = ScheduledRows(session.name, session.lane, session.position, n_rows, last, not session.opened)
        session.position += n_rows
        session.opened = True
        session.prefilling = not last
        if not last:
            self._prefills.append(session.name)  # prompts take turns chunk by chunk
        return self._number("prefill", [rows], tokens)

    def _number(self, phase: str, rows: Sequence[ScheduledRows], tokens: Sequence[int]) -> Batch:
        batch = Batch(self._next_number, phase, tuple(rows), tuple(tokens))
        self._next_number += 1
        self._in_flight[batch.number] = phase
        return batch
