"""Continuous batching at stage 0: which rows of which sessions form the next batch.

A batch is either one decode step of a **group** of neighbouring lanes, or one prefill chunk of one session. A chunk
therefore depends on its own prompt alone, and a decode row has the same neighbours in kind: what a session gets never
depends on others. After a chunk, every decoding lane makes a step before the next chunk may go, so that neither a long
prompt nor busy decoding holds up the other. Chunks of one prompt follow each other on the ring without waiting.

What is known of an answer that begins anew follows its prompt in the same way, in **windows** of so few rows that each
gets the bits of a decode step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from skippy_zmq.schedule.chunks import ChunkPolicy, next_chunk
from skippy_zmq.schedule.credit import Credit, OnLinks
from skippy_zmq.schedule.groups import GroupCount, spread
from skippy_zmq.schedule.lanes import LaneTable

DEFAULT_MAX_BYTES = 256 << 20
MAX_BATCHES = 256  # under way at once, however long the links


class ScheduledRows(msgspec.Struct, frozen=True):
    """``n_rows`` rows of ``session`` from ``position`` on.

    ``sample``: a token follows, in a replay one each row; ``opens``: its first rows.
    """

    session: str
    lane: int
    position: int
    n_rows: int
    sample: bool
    opens: bool


class Batch(msgspec.Struct, frozen=True):
    number: int
    phase: str  # "prefill" | "decode" | "replay"
    rows: tuple[ScheduledRows, ...]
    tokens: tuple[int, ...]


class _Reading(msgspec.Struct, frozen=True):
    """What a batch has cost: ``n_rows`` from ``position`` on, times in microseconds; see ``Scheduler.batch_done``."""

    is_step: bool
    position: int
    n_rows: int
    travel_us: int
    slowest_us: int
    compute_us: int


@dataclass(slots=True)
class _Session:
    name: str
    lane: int
    pending: deque[int]  # tokens not yet sent down the ring
    known: tuple[int, ...] = ()  # tokens of its answer, to be run when its prompt has been
    replaying: bool = False  # the prompt has been, and what is pending was known
    position: int = 0  # of the first pending token
    opened: bool = False
    prefilling: bool = True  # chunks or windows are left
    held: bool = False  # its lane is taken, and what it begins with is being looked for
    last_step: int = -1  # number of the batch that ran it last
    chunks_seen: int = 0  # chunks of anybody that had gone by then


@dataclass(slots=True)
class Scheduler:
    """Batches for a ring of ``n_stages``.

    ``max_rows``: of one decode step. ``chunks``: sizes of prefill chunks. ``row_bytes``: activations of one row at the
    widest boundary. ``n_groups``: decode steps under way at once; None: as many as keep every stage busy. ``window``:
    most rows of a replay, as far as so many are sure to get the bits of a decode step.
    """

    n_lanes: int
    max_rows: int
    chunks: ChunkPolicy
    n_stages: int = 1
    n_groups: int | None = None
    row_bytes: int = 0
    max_bytes: int = DEFAULT_MAX_BYTES
    window: int = 1
    lanes: LaneTable = field(init=False)
    credit: Credit = field(init=False)
    group_count: GroupCount = field(init=False)
    chunks_on_links: OnLinks = field(init=False)
    _sessions: dict[str, _Session] = field(init=False, default_factory=dict)
    _prefills: deque[str] = field(init=False, default_factory=deque)
    _decoding: dict[str, int] = field(init=False, default_factory=dict)  # session -> lane
    _groups: list[tuple[str, ...]] | None = field(init=False, default=None)  # None: to be formed anew
    _steps: dict[int, int] = field(init=False, default_factory=dict)  # decode steps under way: lanes still waiting
    _windows: set[int] = field(init=False, default_factory=set)  # replays under way
    _rows: dict[int, tuple[int, int]] = field(init=False, default_factory=dict)  # of batches under way: position, count
    _readings: deque[_Reading] = field(init=False, default_factory=lambda: deque(maxlen=MAX_BATCHES))
    _chunks: int = field(init=False, default=0)  # that have gone so far
    _next_number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.lanes = LaneTable(self.n_lanes)
        self.credit = Credit(1, self.max_bytes)
        self.join_ring(self.n_stages)

    def join_ring(self, n_stages: int) -> None:
        """The ring is a new one, of ``n_stages``: nothing is under way, nothing is known of its times."""
        self.n_stages = n_stages
        self.group_count = GroupCount(n_stages)
        self.chunks_on_links = OnLinks()
        self._forget_batches()
        self._groups = None
        self.credit.max_batches = self._batches_wanted()

    @property
    def in_flight(self) -> int:
        return self.credit.batches

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def groups(self) -> int:
        """Of decoding lanes now."""
        return len(self._formed_groups())

    def _batches_wanted(self) -> int:
        """Two per stage: one that it works on, one that waits; and those that travel."""
        travelling = max(self.chunks_on_links.count, len(self._groups or ()) - self.n_stages, 0)
        return min(MAX_BATCHES, 2 * self.n_stages + travelling)

    # ---- sessions

    def start(
        self, session: str, prompt: Sequence[int], *, hold: bool = False, known: Sequence[int] = ()
    ) -> int | None:
        """Give ``session`` a lane and queue its prompt; None where no lane is free. ``hold``: until ``release``.

        ``known``: how its answer begins. These tokens run in windows, and ``feed`` takes only those that follow them.
        """
        if session in self._sessions or not prompt:
            raise ValueError(f"session {session} is known already or has an empty prompt")
        lane = self.lanes.take()
        if lane is None:
            return None
        self._sessions[session] = _Session(session, lane, deque(prompt), tuple(known), held=hold)
        if not hold:
            self._prefills.append(session)
        return lane

    def release(self, session: str, position: int) -> None:
        """Go on with a session that was held: the first ``position`` tokens of its prompt need not run."""
        found = self._sessions[session]
        if not found.held or not 0 <= position < len(found.pending):
            raise ValueError(f"session {session}: not held, or no token left after the first {position}")
        found.held = False
        found.position = position
        for _ in range(position):
            found.pending.popleft()
        self._prefills.append(session)

    def feed(self, session: str, position: int, token: int) -> bool:
        """A token was sampled for ``session`` and is to be run at ``position``; False where the session is gone."""
        found = self._sessions.get(session)
        if found is None:
            return False
        if found.pending or found.position != position:
            raise ValueError(f"session {session}: token for position {position}, wanted {found.position}")
        found.pending.append(token)
        if session not in self._decoding:  # its first token: groups did not have to wait for it
            self._decoding[session] = found.lane
            self._groups = None
        return True

    def finish(self, session: str) -> int | None:
        """Forget ``session`` and free its lane; return the lane, or None where it is unknown."""
        found = self._sessions.pop(session, None)
        if found is None:
            return None
        if found.prefilling and not found.held:
            self._prefills.remove(session)
        if self._decoding.pop(session, None) is not None:
            self._groups = None
        if found.last_step in self._steps:  # nobody waits for its token: it must not keep others from stepping
            self._steps[found.last_step] -= 1
        self.lanes.give_back(found.lane)
        return found.lane

    def reset(self) -> list[str]:
        """The ring broke: forget everything in flight; return the sessions that were lost."""
        lost = list(self._sessions)
        for session in lost:
            self.finish(session)
        self._forget_batches()
        return lost

    def _forget_batches(self) -> None:
        self.credit.reset()
        self._steps.clear()
        self._windows.clear()
        self._rows.clear()
        self._readings.clear()

    # ---- batches

    def batch_done(self, number: int, travel_us: int = 0, slowest_us: int = 0, compute_us: int = 0) -> bool:
        """The last stage has finished a batch; False where it is not in flight.

        ``travel_us``: what it spent outside of stages; ``slowest_us``: computing, at the slowest stage; 0 for one that
        did not run. What these tell is taken in by ``learn``.
        """
        if not self.credit.give_back(number):
            return False
        position, n_rows = self._rows.pop(number)
        is_step, is_window = self._steps.pop(number, None) is not None, number in self._windows
        self._windows.discard(number)
        if slowest_us > 0 and not is_window:  # which would tell less of chunks and steps than these do themselves
            self._readings.append(_Reading(is_step, position, n_rows, travel_us, slowest_us, compute_us))
        return True

    def learn(self) -> None:
        """Take in what batches have cost since the last call. No batch that could go should have to wait for it."""
        while self._readings:
            reading = self._readings.popleft()
            if reading.is_step:
                self.group_count.observe(reading.n_rows, reading.travel_us, reading.slowest_us, reading.compute_us)
                self._count_groups()
            else:
                self.chunks.observe(reading.n_rows, reading.slowest_us, reading.position)
                self.chunks_on_links.observe(reading.travel_us, reading.slowest_us)
            self.credit.max_batches = self._batches_wanted()

    @property
    def has_work(self) -> bool:
        """Whether ``next_batch`` would give one."""
        return self._choose() is not None

    def next_batch(self) -> Batch | None:
        """The next batch, or None where nothing is ready or the credit is used up."""
        chosen = self._choose(count_waits=True)
        if chosen is None:
            return None
        return self._prefill_chunk(chosen) if isinstance(chosen, _Session) else self._decode_step(chosen)

    def _choose(self, *, count_waits: bool = False) -> _Session | list[_Session] | None:
        """What goes next: a session whose chunk is due, a group that steps, or None."""
        choice: _Session | list[_Session] | None = None
        n_rows = 0
        group = self._ready_group()
        if self._prefills and self._chunk_is_due(group):
            choice = self._sessions[self._prefills[0]]
            n_rows = self._chunk_rows(choice)
        elif group:
            choice, n_rows = group, len(group)
        if choice is None or self.credit.allows(n_rows * self.row_bytes):
            return choice
        self.credit.waits += count_waits
        return None

    def _chunk_is_due(self, ready: Sequence[_Session]) -> bool:
        """Whether a chunk may go before ``ready``, and none of the decoding lanes is behind by too many.

        A lane that is ready makes a step between two chunks. A step that is around follows a chunk from stage to stage;
        meanwhile as many more can go as there are stages and links to fill behind it, without holding it up any longer.
        """
        if any(session.chunks_seen < self._chunks for session in ready):
            return False
        most = max(1, self.n_stages - 1 + self.chunks_on_links.count)
        return all(self._chunks - self._sessions[session].chunks_seen < most for session in self._decoding)

    def _chunk_rows(self, session: _Session) -> int:
        if session.replaying:
            return min(self.window, len(session.pending))
        # Beside decoding lanes no stage is idle while a ring of chunks fills and drains.
        n_stages = 1 if self._decoding else self.n_stages
        prompts = [self._sessions[name] for name in self._prefills]
        n_prompt = sum(prompt.position + len(prompt.pending) for prompt in prompts)
        return next_chunk(self.chunks, session.position, len(session.pending), n_prompt, n_stages)

    def _ready_group(self) -> list[_Session]:
        """The group that has waited longest, of those whose lanes are all ready: a step is never torn apart."""
        groups = self._formed_groups()
        if sum(lanes > 0 for lanes in self._steps.values()) >= len(groups):
            return []
        ready: list[_Session] = []
        for names in groups:
            group = [self._sessions[name] for name in names]
            if all(session.pending for session in group) and (
                not ready or min(s.last_step for s in group) < min(s.last_step for s in ready)
            ):
                ready = group
        return ready

    def _count_groups(self) -> None:
        if self._groups and self.n_groups is None:
            best = self.group_count.best(len(self._decoding), self.max_rows, len(self._groups))
            if best != len(self._groups):
                self._groups = None

    def _formed_groups(self) -> list[tuple[str, ...]]:
        if self._groups is None:
            by_lane = {lane: session for session, lane in self._decoding.items()}
            count = self.n_groups or self.group_count.best(len(by_lane), self.max_rows)
            slices = spread(sorted(by_lane), count, self.max_rows)
            self._groups = [tuple(by_lane[lane] for lane in lanes) for lanes in slices]
            self.credit.max_batches = self._batches_wanted()
        return self._groups

    def _decode_step(self, group: Sequence[_Session]) -> Batch:
        rows, tokens = [], []
        for session in group:
            session.last_step = self._next_number
            session.chunks_seen = self._chunks
            rows.append(ScheduledRows(session.name, session.lane, session.position, 1, sample=True, opens=False))
            tokens.append(session.pending.popleft())
            session.position += 1
        self._steps[self._next_number] = len(group)
        return self._number("decode", rows, tokens)

    def _prefill_chunk(self, session: _Session) -> Batch:
        n_rows = self._chunk_rows(session)
        self._prefills.popleft()
        tokens = [session.pending.popleft() for _ in range(n_rows)]
        phase = "replay" if session.replaying else "prefill"
        sample = session.replaying or not session.pending
        rows = ScheduledRows(session.name, session.lane, session.position, n_rows, sample, not session.opened)
        session.position += n_rows
        session.opened = True
        if not session.pending and not session.replaying:
            session.pending.extend(session.known)
            session.replaying = True
        last = not session.pending
        session.prefilling = not last
        self._chunks += 1
        session.last_step = self._next_number
        session.chunks_seen = self._chunks
        if not last:
            self._prefills.append(session.name)  # prompts take turns chunk by chunk
        if phase == "replay":
            self._windows.add(self._next_number)
        return self._number(phase, [rows], tokens)

    def _number(self, phase: str, rows: Sequence[ScheduledRows], tokens: Sequence[int]) -> Batch:
        batch = Batch(self._next_number, phase, tuple(rows), tuple(tokens))
        self._next_number += 1
        self._rows[batch.number] = rows[0].position, len(tokens)
        self.credit.take(batch.number, len(tokens) * self.row_bytes)
        return batch
