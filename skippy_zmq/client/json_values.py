"""Answers and statistics as JSON values, for scripts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from skippy_zmq.client.history import PipelineChange, StageChange
from skippy_zmq.client.results import Generation
from skippy_zmq.client.stats import PipelineStats, StageStats
from skippy_zmq.wire.messages import StageFacts


def as_line(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False)


def generation_values(generation: Generation) -> dict[str, Any]:
    return {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "prompt_token_ids": generation.prompt_token_ids,
        "reused_tokens": generation.reused_tokens,
        "session": generation.session,
        "finish_reason": generation.finish_reason,
        "timings": dataclasses.asdict(generation.timings),
        "stages": [_generation_stage(facts) for facts in generation.stages],
    }


def stats_values(stats: PipelineStats) -> dict[str, Any]:
    """``counters`` are as the stages sent them, ``derived`` counted from their start."""
    return {
        "endpoint": stats.endpoint,
        "ready": stats.ready,
        "missing_layers": stats.missing_layers,
        "stages": [_stage(stage, _derived(stage)) for stage in stats],
        "ring": dataclasses.asdict(stats.ring) if stats.ring is not None else None,
    }


def change_values(change: PipelineChange, unix_time: float) -> dict[str, Any]:
    """The same with ``derived`` and ``ring`` of the interval alone, and its rates; null where there is none yet."""
    return {
        **stats_values(change.stats),
        "time": round(unix_time, 3),
        "tokens_per_s": change.tokens_per_s,
        "rows_per_s": change.rows_per_s,
        "stages": [_stage(stage.stage, _interval(stage)) for stage in change.stages],
        "ring": dataclasses.asdict(change.ring) if change.ring is not None else None,
    }


def _interval(stage: StageChange) -> dict[str, Any] | None:
    if stage.change is None:
        return None
    rates = {f"{name}_per_s": stage.per_second(name) for name in ("tokens", "rows", "batches", "bytes_sent")}
    derived = _derived(stage.change) or {}
    return {"interval_s": round(stage.seconds, 3), **rates, "busy_share": stage.busy_share, **derived}


def _stage(stage: StageStats, derived: dict[str, Any] | None) -> dict[str, Any]:
    failure = stage.failure
    return {
        "layers": stage.layers,
        "facts": _brief(stage.facts),
        "error": None if failure is None else {"code": failure.code, "message": str(failure)},
        "counters": dict(stage.counters),
        "derived": derived,
    }


def _derived(stage: StageStats) -> dict[str, Any] | None:
    if stage.failure is not None:
        return None
    return {
        "bubble_share": stage.bubble_share,
        "compute_us_per_batch": stage.compute_us_per_batch,
        "queue_us_per_batch": stage.queue_us_per_batch,
        "rows_per_batch": stage.rows_per_batch,
        "batch_sizes": stage.batch_sizes,
        "lanes_busy": stage.lanes_busy,
        "lanes": stage.facts.lanes,
        "kv_cells": stage.kv_cells,
        "kv_cells_total": stage.kv_cells_total,
        "errors": stage.errors,
    }


def _brief(facts: StageFacts) -> dict[str, Any]:
    """Everything but the crossing tensors."""
    values = dataclasses.asdict(facts)
    del values["wanted"], values["offered"]
    return values


def _generation_stage(facts: StageFacts) -> dict[str, Any]:
    shown = ("stage", "endpoint", "model", "model_name", "architecture", "lanes", "n_ctx", "threads")
    memory = ("weights_bytes", "kv_bytes", "compute_bytes")
    layers = f"{facts.layer_start}:{facts.layer_end}"
    return {"layers": layers, **{name: getattr(facts, name) for name in (*shown, *memory)}}
