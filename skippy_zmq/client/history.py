"""What changed in a pipeline between two looks at it. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from skippy_zmq.client.stats import GAUGE_PREFIX, PipelineStats, RingStats, StageStats, per, ring_stats


@dataclass(frozen=True, slots=True)
class StageChange:
    """``change``: what ``stage`` counted in the last ``seconds``; None where it did not answer or did so first."""

    stage: StageStats
    change: StageStats | None = None
    seconds: float = 0.0

    def per_second(self, name: str) -> float | None:
        return per(self.change.count(name), self.seconds) if self.change is not None else None

    @property
    def busy_share(self) -> float | None:
        """Share of the interval in which the stage computed, 0 to 1; a batch counts where it ends."""
        computed_us = self.per_second("compute_us")
        return None if computed_us is None else min(1.0, max(0.0, computed_us / 1e6))

    @property
    def bubble_share(self) -> float | None:
        return self.change.bubble_share if self.change is not None else None


@dataclass(frozen=True, slots=True)
class PipelineChange:
    stats: PipelineStats
    stages: tuple[StageChange, ...]

    @property
    def ring(self) -> RingStats | None:
        """Means over the interval, gauges as they are; None where stage 0 did not answer."""
        if self.stats.ring is None:
            return None
        first = self.stages[0].change or dataclasses.replace(self.stats[0], counters=_gauges(self.stats[0]))
        return ring_stats(first, len(self.stats))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that the last stage chose."""
        return self.stages[-1].per_second("tokens") if self.stages and not self.stats.missing_layers else None

    @property
    def rows_per_s(self) -> float | None:
        """Rows through the pipeline: those of the first stage that answered."""
        return next((rate for stage in self.stages if (rate := stage.per_second("rows")) is not None), None)


class History:
    """Remembers the last answer of each stage, so that one that was late once is compared with its last answer."""

    def __init__(self) -> None:
        self._last: dict[int, StageStats] = {}  # by first layer

    def add(self, stats: PipelineStats) -> PipelineChange:
        return PipelineChange(stats, tuple(self._compare(stage) for stage in stats))

    def _compare(self, stage: StageStats) -> StageChange:
        if stage.failure is not None:
            return StageChange(stage)
        before = self._last.get(stage.facts.layer_start)
        self._last[stage.facts.layer_start] = stage
        if before is None:
            return StageChange(stage)
        return StageChange(stage, stage.since(before), stage.taken_at - before.taken_at)


def _gauges(stage: StageStats) -> dict[str, int]:
    return {name: value for name, value in stage.counters.items() if name.startswith(GAUGE_PREFIX)}
