"""Numbers of a pipeline and of an answer, for people."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.client.results import Generation, StageStats

_HEADINGS = ("stage", "layers", "weights", "KV cache", "compute", "busy", "batches", "rows")


def stage_table(stats: Sequence[StageStats]) -> str:
    """One aligned line per stage: layers, memory, time spent computing, batches and rows so far."""
    rows = [_HEADINGS]
    for index, stage in enumerate(stats):
        facts, counters = stage.facts, stage.counters
        rows.append(
            (
                str(index),
                f"{facts.layer_start}:{facts.layer_end}",
                _mib(facts.weights_bytes),
                _mib(facts.kv_bytes),
                _mib(facts.compute_bytes),
                f"{counters.get('compute_us', 0) / 1e6:.2f} s",
                str(counters.get("batches", 0)),
                str(counters.get("rows", 0)),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines)


def answer_line(generation: Generation) -> str:
    """Sizes, speed and the time to the first token, in one line."""
    timings = generation.timings
    parts = [
        f"{len(generation.prompt_token_ids)} prompt tokens",
        f"{len(generation.token_ids)} generated ({generation.finish_reason})",
        f"first token after {timings.ttft_ms:.0f} ms",
    ]
    if timings.prefill_tokens_per_s is not None:
        parts.append(f"prefill {timings.prefill_tokens_per_s:.1f} tokens/s")
    if timings.decode_tokens_per_s is not None:
        parts.append(f"decode {timings.decode_tokens_per_s:.1f} tokens/s")
    return ", ".join(parts)


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"
