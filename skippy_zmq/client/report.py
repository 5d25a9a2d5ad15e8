"""Numbers of a pipeline and of an answer, for people."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.client.cells import aligned, count, data, duration
from skippy_zmq.client.results import Generation
from skippy_zmq.client.stats import StageStats

_HEADINGS = ("stage", "layers", "weights", "KV cache", "compute", "busy", "batches", "rows")


def stage_table(stats: Sequence[StageStats]) -> str:
    """One aligned line per stage: layers, memory, time spent computing, batches and rows so far."""
    rows = []
    for index, stage in enumerate(stats):
        facts = stage.facts
        rows.append(
            (
                str(index),
                stage.layers,
                data(facts.weights_bytes),
                data(facts.kv_bytes),
                data(facts.compute_bytes),
                duration(stage.count("compute_us")),
                count(stage.count("batches")),
                count(stage.count("rows")),
            )
        )
    return "\n".join(aligned(_HEADINGS, rows))


def answer_line(generation: Generation) -> str:
    """Sizes, speed and the time to the first token, in one line."""
    timings = generation.timings
    parts = [
        f"{len(generation.prompt_token_ids)} prompt tokens"
        + (f" ({generation.reused_tokens} reused)" if generation.reused_tokens else ""),
        f"{len(generation.token_ids)} generated ({generation.finish_reason})",
        f"first token after {timings.ttft_ms:.0f} ms",
    ]
    if timings.prefill_tokens_per_s is not None:
        parts.append(f"prefill {timings.prefill_tokens_per_s:.1f} tokens/s")
    if timings.decode_tokens_per_s is not None:
        parts.append(f"decode {timings.decode_tokens_per_s:.1f} tokens/s")
    return ", ".join(parts)
