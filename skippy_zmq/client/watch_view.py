"""What ``--watch`` shows: a frame for a terminal, or a line per interval for anything else. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippy_zmq.client.cells import NOTHING, aligned, bar, count, duration, number, printable, share, shortened
from skippy_zmq.client.history import PipelineChange, StageChange
from skippy_zmq.client.stats import RingStats, StageStats
from skippy_zmq.client.stats_view import errors, failures, in_flight, lanes, model, state

LINE_HEADINGS = "    time  tokens/s  rows/s  running  queued  lanes  in flight  busy(bubble) by stage"
_LEAST_BAR, _WIDEST_BAR = 8, 42


@dataclass(frozen=True, slots=True)
class Line:
    """``style``: "", "bold", "dim" or "bad"."""

    text: str
    style: str = ""


def frame(change: PipelineChange, *, clock: str, seconds: float, width: int) -> list[Line]:
    """Lines of ``width`` characters at most; rates and shares are of the last interval of ``seconds``."""
    stats = change.stats
    lines = [Line(_title(change, clock, seconds, width), "bold"), Line(_totals(change)), Line("")]
    lines += _stage_table(change, width)
    if change.ring is not None:
        lines += [Line(""), *(Line(text) for text in _ring(change.ring, change.stats[0]))]
    bad = [*failures(stats, width), *errors(((i, s) for i, s in enumerate(stats) if s.failure is None), width)]
    if bad:
        lines += [Line(""), *(Line(text, "bad") for text in bad)]
    return [Line(printable(line.text)[:width], line.style) for line in lines]


def interval_line(change: PipelineChange, clock: str) -> str:
    """One line under LINE_HEADINGS."""
    ring = change.ring
    first = change.stats[0]
    values = (
        clock.rjust(8),
        number(change.tokens_per_s).rjust(8),
        count(change.rows_per_s).rjust(6),
        (count(ring.requests_running) if ring else NOTHING).rjust(7),
        (count(ring.requests_queued) if ring else NOTHING).rjust(6),
        (lanes(first) if first.failure is None else NOTHING).rjust(5),
        (count(ring.batches_in_flight) if ring else NOTHING).rjust(9),
        *(_busy_and_bubble(stage) for stage in change.stages),
        *(f"no-stage-for-{layers}" for layers in change.stats.missing_layers),
    )
    return "  ".join(values)


def _busy_and_bubble(stage: StageChange) -> str:
    if not _is_there(stage):
        return "lost"
    return NOTHING if stage.change is None else f"{share(stage.busy_share)}({share(stage.bubble_share)})"


def _title(change: PipelineChange, clock: str, seconds: float, width: int) -> str:
    right = f"  {state(change.stats)}  every {seconds:g} s  {clock}"
    name = model(change.stats)
    left = f"{name} at {change.stats.endpoint}"
    return shortened(left, width - len(right)).ljust(width - len(right)) + right


def _totals(change: PipelineChange) -> str:
    parts = [f"tokens/s {number(change.tokens_per_s)}", f"rows/s {count(change.rows_per_s)}"]
    if (ring := change.ring) is not None:
        parts += [f"requests {count(ring.requests_running)} running, {count(ring.requests_queued)} queued"]
    return "   ".join(parts)


def _stage_table(change: PipelineChange, width: int) -> list[Line]:
    headings = ("stage", "layers", "busy", "", "bubble", "rows/s", "/batch", "wait", "lanes", "KV")
    plain = _lines(headings, change, 0)
    bar_width = min(_WIDEST_BAR, max(_LEAST_BAR, width - max(map(len, plain)) + len("busy")))
    rows = _lines(headings, change, bar_width)
    styles = ["dim", *("" if _is_there(stage) else "bad" for stage in change.stages)]
    return [Line(text, style) for text, style in zip(rows, styles, strict=True)]


def _lines(headings: Sequence[str], change: PipelineChange, bar_width: int) -> list[str]:
    rows = [_row(index, stage, bar_width) for index, stage in enumerate(change.stages)]
    return aligned(headings, rows, left=("layers", "busy"))


def _row(index: int, stage: StageChange, bar_width: int) -> list[str]:
    begin = [str(index), stage.stage.layers]
    if not _is_there(stage):
        return [*begin, "lost", *[NOTHING] * 7]
    change = stage.change
    return [
        *begin,
        bar(stage.busy_share, bar_width) if bar_width else "",
        share(stage.busy_share),
        share(stage.bubble_share),
        count(stage.per_second("rows")),
        number(change.rows_per_batch) if change else NOTHING,
        duration(change.queue_us_per_batch) if change else NOTHING,
        lanes(stage.stage),
        share(stage.stage.kv_cells / stage.stage.kv_cells_total),
    ]


def _ring(ring: RingStats, first: StageStats) -> list[str]:
    trip = f"ring  round trip {duration(ring.round_trip_us)}: model {duration(ring.compute_us)}, "
    trip += f"waiting {duration(ring.waiting_us)}"
    if ring.hops and ring.hop_us:
        trip += f", {ring.hops} hops of {duration(ring.hop_us)}"
    more = f"      in flight {in_flight(first)}; credit waits {count(ring.credit_waits)}"
    more += f", chunks of {count(ring.chunk_rows)} rows" if ring.chunk_rows else ""
    more += f", {count(ring.groups)} group{'s' if ring.groups != 1 else ''}" if ring.groups else ""
    return [trip, more]


def _is_there(stage: StageChange) -> bool:
    return stage.stage.failure is None
