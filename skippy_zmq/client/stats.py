"""What a pipeline is doing and has done: counters as the stages send them, and what follows from them. Pure values.

Counters are those of docs/protocol.md; one that a stage does not send counts as 0.
Shares are 0 to 1, times microseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from skippy_zmq.errors import SkippyError
from skippy_zmq.wire.messages import StageFacts

GAUGE_PREFIX = "now."
_BATCH_ROWS = "batch_rows."
_ERRORS = "errors."


@dataclass(frozen=True, slots=True)
class StageStats:
    """A stage and its counters by dotted name; ``failure``: why there are none of them.

    Counted from the start of the stage, or, for what ``since`` returns, from an earlier moment.
    """

    facts: StageFacts
    counters: Mapping[str, int] = field(default_factory=dict)
    failure: SkippyError | None = None
    taken_at: float = 0.0  # time.monotonic() when the counters came

    def count(self, name: str) -> int:
        return self.counters.get(name, 0)

    def since(self, before: StageStats) -> StageStats:
        """What was counted after ``before``; gauges stay. A stage that was started anew counts from its start."""
        if before.facts.stage != self.facts.stage:
            return self
        counters = {
            name: value if name.startswith(GAUGE_PREFIX) else value - before.count(name)
            for name, value in self.counters.items()
        }
        return dataclasses.replace(self, counters=counters)

    @property
    def layers(self) -> str:
        return f"{self.facts.layer_start}:{self.facts.layer_end}"

    @property
    def row_class(self) -> str:
        """How many rows a decode batch may have for every row to keep its bits."""
        low, high = self.facts.row_class_low, self.facts.row_class_high
        return str(low) if low == high else f"{low}..{high}"

    @property
    def compute_us_per_batch(self) -> float | None:
        return per(self.count("compute_us"), self.count("batches"))

    @property
    def queue_us_per_batch(self) -> float | None:
        """From the arrival of a batch until it runs."""
        return per(self.count("queue_us"), self.count("batches"))

    @property
    def bubble_share(self) -> float | None:
        """Share of the time with a session open here in which nothing was computed; None without such time."""
        active_us = self.count("active_us")
        return min(1.0, max(0.0, 1 - self.count("compute_us") / active_us)) if active_us > 0 else None

    @property
    def rows_per_batch(self) -> float | None:
        return per(self.count("rows"), self.count("batches"))

    @property
    def batch_sizes(self) -> dict[int, int]:
        """Batches by rows: lower bound of each power-of-two bucket that is not empty, rising, and how many."""
        bounds = sorted(int(bound) for bound in self._suffixes(_BATCH_ROWS) if bound.isdecimal())
        return {bound: count for bound in bounds if (count := self.count(f"{_BATCH_ROWS}{bound}"))}

    @property
    def lanes_busy(self) -> int:
        """Lanes given out; a stage that gives none out itself counts the sessions that it knows."""
        return self.counters.get("now.lanes_busy", self.count("now.sessions"))

    @property
    def kv_cells(self) -> int:
        return self.count("now.kv_cells")

    @property
    def kv_cells_total(self) -> int:
        return self.facts.lanes * self.facts.n_ctx

    @property
    def errors(self) -> dict[str, int]:
        """How many, by code."""
        return {code: count for code in sorted(self._suffixes(_ERRORS)) if (count := self.counters[_ERRORS + code])}

    def _suffixes(self, prefix: str) -> list[str]:
        return [name.removeprefix(prefix) for name in self.counters if name.startswith(prefix)]


@dataclass(frozen=True, slots=True)
class RingStats:
    """What stage 0 sees of the ring; means per batch are None before the first batch.

    ``waiting_us``: the round trip without the time in the model and without ``hops`` times ``hop_us``, the least travel
    seen.
    """

    batches: int
    hops: int
    round_trip_us: float | None
    spent_us: float | None  # inside stages
    compute_us: float | None  # in the model
    waiting_us: float | None
    hop_us: int
    credit_waits: int
    requests_queued: int
    requests_running: int
    batches_in_flight: int
    bytes_in_flight: int
    chunk_rows: int
    groups: int


@dataclass(frozen=True, slots=True)
class PipelineStats(Sequence[StageStats]):
    """Every stage that is known, in layer order; a sequence of them.

    ``ready``: stage 0 takes requests. ``endpoint``: where it is reached.
    """

    endpoint: str
    ready: bool
    stages: tuple[StageStats, ...]

    @property
    def ring(self) -> RingStats | None:
        """None where stage 0 did not answer."""
        if not self.stages or self.stages[0].failure is not None or self.stages[0].facts.layer_start > 0:
            return None
        return ring_stats(self.stages[0], len(self.stages))

    @property
    def missing_layers(self) -> tuple[str, ...]:
        """Layers ``"start:end"`` of which no stage is known: it has not been ready yet, or stage 0 has lost it."""
        gaps, end = [], 0
        for stage in self.stages:
            if stage.facts.layer_start > end:
                gaps.append(f"{end}:{stage.facts.layer_start}")
            end = max(end, stage.facts.layer_end)
        if self.stages and end < self.stages[0].facts.n_layers:
            gaps.append(f"{end}:{self.stages[0].facts.n_layers}")
        return tuple(gaps)

    @property
    def complete(self) -> bool:
        """Every layer has a stage, all of them answered, and the pipeline is ready."""
        return self.ready and not self.missing_layers and all(stage.failure is None for stage in self.stages)

    @overload
    def __getitem__(self, index: int) -> StageStats: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StageStats, ...]: ...
    def __getitem__(self, index: int | slice) -> StageStats | tuple[StageStats, ...]:
        return self.stages[index]

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[StageStats]:
        return iter(self.stages)


def ring_stats(first: StageStats, n_stages: int) -> RingStats:
    """The ring of ``n_stages``, from the counters of its stage 0."""
    batches, hop_us = first.count("ring.batches"), first.count("now.hop_us")
    hops = n_stages if n_stages > 1 else 0  # a stage alone hands over to nobody
    round_trip_us = per(first.count("ring.round_trip_us"), batches)
    compute_us = per(first.count("ring.compute_us"), batches)
    waiting_us = None
    if round_trip_us is not None and compute_us is not None:
        waiting_us = max(0.0, round_trip_us - compute_us - hops * hop_us)
    return RingStats(
        batches=batches,
        hops=hops,
        round_trip_us=round_trip_us,
        spent_us=per(first.count("ring.spent_us"), batches),
        compute_us=compute_us,
        waiting_us=waiting_us,
        hop_us=hop_us,
        credit_waits=first.count("credit_waits"),
        requests_queued=first.count("now.requests_queued"),
        requests_running=first.count("now.requests_running"),
        batches_in_flight=first.count("now.batches_in_flight"),
        bytes_in_flight=first.count("now.bytes_in_flight"),
        chunk_rows=first.count("now.chunk_rows"),
        groups=first.count("now.groups"),
    )


def per(amount: float, n: float) -> float | None:
    """``amount`` for each of ``n``; None where there is none."""
    return amount / n if n > 0 else None
