"""Stage 0's scheduler, from the stage's options and the facts of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.schedule.chunks import AdaptiveChunks, ChunkPolicy, ScheduledChunks, fixed_chunks
from skippy_zmq.schedule.scheduler import Scheduler
from skippy_zmq.wire.messages import StageFacts

FIXED_CHUNK = 128  # rows
CHUNK_SCHEDULE = (128, 256, 512)


def new_scheduler(options: StageOptions, facts: StageFacts) -> Scheduler:
    """A scheduler for the lanes of stage 0, to be told of its ring by ``join_ring``."""
    max_rows = _max_rows(facts)
    return Scheduler(
        facts.lanes,
        max_rows,
        _chunk_policy(options, max_rows),
        n_groups=options.groups,
        max_bytes=options.in_flight_mib << 20,
    )


def join_ring(scheduler: Scheduler, stages: Sequence[StageFacts]) -> None:
    """The pipeline is known. Reproducible: no decode step has more rows than every stage computes alike."""
    scheduler.row_bytes = max(sum(spec.row_bytes for spec in facts.wanted) for facts in stages)
    scheduler.max_rows = _max_rows(stages[0])
    if stages[0].reproducible:
        scheduler.max_rows = min(scheduler.max_rows, *(facts.row_class_high for facts in stages))
    scheduler.window = min(scheduler.max_rows, *(facts.window_rows for facts in stages))
    scheduler.join_ring(len(stages))


def scheduler_counters(scheduler: Scheduler, n_stages: int) -> dict[str, int]:
    """What the scheduler has to say in STATS_REPLY."""
    travel_us = scheduler.group_count.least_travel_us or 0
    return {
        "now.lanes_busy": scheduler.lanes.busy,
        "now.batches_in_flight": scheduler.credit.batches,
        "now.bytes_in_flight": scheduler.credit.bytes,
        "now.chunk_rows": scheduler.chunks.rows(0),
        "now.groups": scheduler.groups,
        "now.hop_us": travel_us // n_stages if n_stages > 1 else 0,
        "credit_waits": scheduler.credit.waits,
    }


def _max_rows(facts: StageFacts) -> int:
    return min(facts.n_batch, facts.n_ubatch)


def _chunk_policy(options: StageOptions, max_rows: int) -> ChunkPolicy:
    if options.chunking == "adaptive":
        return AdaptiveChunks(max_rows, options.chunk_target_ms * 1000)
    if options.chunking == "fixed":
        return fixed_chunks(options.chunk_sizes[0] if options.chunk_sizes else min(FIXED_CHUNK, max_rows))
    sizes = options.chunk_sizes or CHUNK_SCHEDULE
    return ScheduledChunks(tuple(min(size, max_rows) for size in sizes))
