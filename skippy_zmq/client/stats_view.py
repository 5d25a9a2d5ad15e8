"""The statistics of a pipeline as tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from skippy_zmq.client.cells import NOTHING, aligned, count, data, duration, number, printable, share, shortened
from skippy_zmq.client.stats import PipelineStats, RingStats, StageStats

# What the tables need beside addresses, which are shortened to the width.
LEAST_WIDTH = 80
_LOST = "not reached"


def stats_report(stats: PipelineStats, width: int | None = None) -> str:
    """Everything that is known, in lines of ``width`` characters at most (80 at least); None: of any length."""
    width = width if width is None else max(width, LEAST_WIDTH)
    answered = [(index, stage) for index, stage in enumerate(stats) if stage.failure is None]
    parts = [_heading(stats, width), _identity(stats, width), failures(stats, width)]
    if answered:
        parts += [_work(answered), _now(answered), _batch_sizes(answered, width), _setup(answered)]
        parts += [errors(answered, width)]
    if stats.ring is not None:
        parts.append(_ring(stats.ring))
    return "\n\n".join("\n".join(map(printable, part)) for part in parts if part)


def failures(stats: PipelineStats, width: int | None) -> list[str]:
    """Which stages did not answer and why; which layers have none."""
    lines = []
    for index, stage in enumerate(stats):
        if stage.failure is not None:
            lines += _wrapped(f"stage {index} not reached: {stage.failure}", width)
    for layers in stats.missing_layers:
        lines += _wrapped(f"layers {layers}: no stage known; stage 0 knows only those that are ready behind it", width)
    return lines


def errors(stages: Iterable[tuple[int, StageStats]], width: int | None) -> list[str]:
    """How many errors of which code, a line per stage that has some."""
    lines = []
    for index, stage in stages:
        counts = [f"{code} {count(n)}" for code, n in stage.errors.items()]
        for name, label in (("batches_failed", "failed batches"), ("undelivered", "undelivered answers")):
            counts += [f"{label} {count(n)}"] if (n := stage.count(name)) else []
        if counts:
            lines += _wrapped(f"errors at stage {index}: {', '.join(counts)}", width)
    return lines


def state(stats: PipelineStats) -> str:
    return "ready" if stats.ready else "not ready"


def model(stats: PipelineStats) -> str:
    return printable(stats[0].facts.model_name)


def cells(stage: StageStats) -> str:
    return f"{count(stage.kv_cells)}/{count(stage.kv_cells_total)}"


def lanes(stage: StageStats) -> str:
    return f"{stage.lanes_busy}/{stage.facts.lanes}"


def in_flight(stage: StageStats) -> str:
    n_batches = stage.count("now.batches_in_flight")
    return f"{count(n_batches)} batch{'' if n_batches == 1 else 'es'}, {data(stage.count('now.bytes_in_flight'))}"


def _heading(stats: PipelineStats, width: int | None) -> list[str]:
    facts = stats[0].facts
    stages = "1 stage" if len(stats) == 1 else f"{len(stats)} stages"
    mode = ", reproducible" if facts.reproducible else ""
    return [
        shortened(f"{stages} at {stats.endpoint}: {state(stats)}", width),
        shortened(
            f"{facts.model_name} ({facts.architecture}, {facts.n_layers} layers), "
            f"{facts.lanes} lanes of {count(facts.n_ctx)} cells, micro-batches of {facts.n_ubatch}{mode}",
            width,
        ),
    ]


def _identity(stats: PipelineStats, width: int | None) -> list[str]:
    name_width = None if width is None else 32
    rows = [
        [str(index), stage.layers, shortened(stage.facts.stage, name_width), stage.facts.endpoint]
        for index, stage in enumerate(stats)
    ]
    headings = ("stage", "layers", "name", "endpoint")
    before = len(max(aligned(headings, [[*row[:3], NOTHING] for row in rows]), key=len)) - len(headings[3])
    rows = [[*row[:3], shortened(row[3], None if width is None else width - before)] for row in rows]
    return aligned(headings, rows, left=("layers", "name", "endpoint"))


def _work(stages: Sequence[tuple[int, StageStats]]) -> list[str]:
    headings = ("stage", "batches", "rows", "rows/batch", "tokens", "compute", "per batch", "queue wait", "bubble")
    rows = [
        [
            str(index),
            count(stage.count("batches")),
            count(stage.count("rows")),
            number(stage.rows_per_batch),
            count(stage.count("tokens")) if stage.facts.layer_end == stage.facts.n_layers else NOTHING,
            duration(stage.count("compute_us")),
            duration(stage.compute_us_per_batch),
            duration(stage.queue_us_per_batch),
            share(stage.bubble_share),
        ]
        for index, stage in stages
    ]
    return ["since each stage started (queue wait: mean of a batch)", *aligned(headings, rows)]


def _now(stages: Sequence[tuple[int, StageStats]]) -> list[str]:
    headings = ("stage", "lanes busy", "KV cells used", "share", "queue", "in flight")
    rows = [
        [
            str(index),
            lanes(stage),
            cells(stage),
            share(stage.kv_cells / stage.kv_cells_total),
            count(stage.count("now.queue")),
            in_flight(stage) if "now.batches_in_flight" in stage.counters else NOTHING,
        ]
        for index, stage in stages
    ]
    return ["now", *aligned(headings, rows)]


def _batch_sizes(stages: Sequence[tuple[int, StageStats]], width: int | None) -> list[str]:
    bounds = sorted({bound for _, stage in stages for bound in stage.batch_sizes})
    if not bounds:
        return []
    rows = [[str(index), *(count(stage.batch_sizes.get(bound, 0)) for bound in bounds)] for index, stage in stages]
    title = "batches by rows (each column: from so many rows up to twice as many)"
    table = aligned(("stage", *map(str, bounds)), rows)
    if width is not None and max(map(len, table)) > width:
        table = aligned(("stage", *map(str, bounds)), rows, gap=" ")
    return [title, *table]


def _setup(stages: Sequence[tuple[int, StageStats]]) -> list[str]:
    headings = ("stage", "threads", "row class", "weights", "KV cache", "compute buffers")
    rows = [
        [
            str(index),
            str(stage.facts.threads),
            stage.row_class,
            data(stage.facts.weights_bytes),
            data(stage.facts.kv_bytes),
            data(stage.facts.compute_bytes),
        ]
        for index, stage in stages
    ]
    return ["setup (row class: rows of a decode batch that keep every row's bits)", *aligned(headings, rows)]


def _ring(ring: RingStats) -> list[str]:
    values = [
        ("round trip", duration(ring.round_trip_us), f"mean of {count(ring.batches)} batches"),
        ("in the stages", duration(ring.spent_us), "their queues and the model"),
        ("in the model", duration(ring.compute_us), ""),
        ("waiting", duration(ring.waiting_us), "round trip without model and travel"),
        ("travel", duration(ring.hop_us or None), f"per hop, the least seen; {ring.hops} hops"),
        ("requests", f"{count(ring.requests_running)} running, {count(ring.requests_queued)} queued", ""),
        ("credit waits", count(ring.credit_waits), "times that the ring was full"),
        ("prefill chunk", f"{count(ring.chunk_rows)} rows" if ring.chunk_rows else NOTHING, ""),
        ("groups", count(ring.groups) if ring.groups else NOTHING, ""),
    ]
    return ["ring", *(f"  {name:<13}  {value:<9}  {note}".rstrip() for name, value, note in values)]


def _wrapped(text: str, width: int | None) -> list[str]:
    text = printable(" ".join(text.split()))
    return [text] if width is None else textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
