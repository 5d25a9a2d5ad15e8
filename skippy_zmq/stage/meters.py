"""What a stage has done and is doing: the counters of STATS_REPLY (docs/protocol.md lists them)."""

from __future__ import annotations

import time
from collections import Counter

from skippy_zmq.wire.messages import BatchTimes


class Meters:
    """Counters that only rise. Times in microseconds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._active_since: int | None = None  # monotonic nanoseconds; None while no session is open

    def error(self, code: str) -> None:
        self.counts[f"errors.{code}"] += 1

    def sessions_open(self, count: int) -> None:
        """To be told at every change: a stage is active while a session is open."""
        now = time.monotonic_ns()
        if self._active_since is not None and not count:
            self.counts["active_us"] += (now - self._active_since) // 1000
            self._active_since = None
        elif self._active_since is None and count:
            self._active_since = now

    def ran(self, phase: str, n_rows: int, queue_us: int, compute_us: int) -> None:
        """A batch went through the model."""
        counts = self.counts
        counts["batches"] += 1
        counts["rows"] += n_rows
        counts["queue_us"] += queue_us
        counts["compute_us"] += compute_us
        counts[f"{phase}_batches"] += 1
        counts[f"{phase}_rows"] += n_rows
        counts[f"batch_rows.{1 << (n_rows.bit_length() - 1)}"] += 1

    def snapshot(self) -> dict[str, int]:
        counts = dict(self.counts)
        if self._active_since is not None:
            running = (time.monotonic_ns() - self._active_since) // 1000
            counts["active_us"] = counts.get("active_us", 0) + running
        return counts


class RingMeter:
    """Stage 0's view of the ring: how long batches are under way, and what of it no stage accounts for."""

    def __init__(self, meters: Meters) -> None:
        self._counts = meters.counts
        self._formed_at: dict[int, int] = {}  # monotonic nanoseconds of the batches under way, by number

    def formed(self, batch: int) -> None:
        self._formed_at[batch] = time.monotonic_ns()

    def done(self, batch: int, times: BatchTimes) -> int:
        """The batch is back; return the microseconds that it spent outside of stages, 0 where that is not known."""
        formed_at = self._formed_at.pop(batch, None)
        if formed_at is None or not times.compute_us:
            return 0
        round_trip_us = (time.monotonic_ns() - formed_at) // 1000
        self._counts["ring.batches"] += 1
        self._counts["ring.round_trip_us"] += round_trip_us
        self._counts["ring.spent_us"] += times.spent_us
        self._counts["ring.compute_us"] += times.compute_us
        return max(0, round_trip_us - times.spent_us)

    def reset(self) -> None:
        """The ring broke: nothing is under way any more."""
        self._formed_at.clear()
