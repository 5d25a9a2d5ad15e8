"""A plan for people and for programs: a table, command lines, JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from skippy_zmq.plan.arguments import Address, PlanRequest
from skippy_zmq.plan.planner import Plan, amount
from skippy_zmq.runtime.options import to_arguments


def stage_commands(plan: Plan, request: PlanRequest, model: str) -> list[str]:
    """One command line for each stage; ``model``: what they are to open."""
    addresses, last = request.addresses, len(plan.stages) - 1
    commands = []
    for index, stage in enumerate(plan.stages):
        command = ["python", "-m", "skippy_zmq.stage", "--model", model, "--layers", str(stage.layers)]
        command += _endpoints(addresses, index, last)
        commands.append(shlex.join([*command, *to_arguments(request.options)]))
    return commands


def _endpoints(addresses: Sequence[Address], index: int, last: int) -> list[str]:
    own = addresses[index]
    arguments = ["--bind", own.bind]
    if own.reached != own.bind:
        arguments += ["--advertise", own.reached]
    if index < last:
        return [*arguments, "--next", addresses[index + 1].reached]
    return [*arguments, "--first", addresses[0].reached] if index else arguments


def plan_text(plan: Plan, request: PlanRequest, model: str, n_layers: int) -> str:
    """The plan as a table and command lines."""
    slowest = max(stage.time for stage in plan.stages) or 1.0
    rows = [("stage", "layers", "weights", "KV caches", "buffers, about", "in all", "of", "busy")]
    for index, stage in enumerate(plan.stages):
        rows.append(
            (
                str(index),
                str(stage.layers),
                amount(stage.weights),
                amount(stage.kv),
                amount(stage.compute),
                amount(stage.total),
                amount(stage.memory) if stage.memory is not None else "-",
                f"{100 * stage.time / slowest:.0f} %",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    options = request.options
    lines = [
        f"{model}: {n_layers} layers, {options.lanes} lanes of {options.ctx_size or 'as many tokens as trained for'}"
        f"{' tokens' if options.ctx_size else ''}, {100 * plan.decode_share:.0f} % of the time for generating",
        "",
        *table,
        "",
        f"busy: while the slowest stage works; all together {100 * plan.balance:.0f} %",
        "",
        *stage_commands(plan, request, model),
    ]
    if any(address.bind != address.reached for address in request.addresses):
        lines += ["", "# on a public address a stage also wants --curve-key and --curve-allow, or --allow-plaintext"]
    return "\n".join(lines)


def plan_json(plan: Plan, request: PlanRequest, model: str, revision: str) -> str:
    """The plan as one line of JSON; sizes in bytes."""
    stages = [
        {
            "layers": str(stage.layers),
            "weights_bytes": stage.weights,
            "kv_bytes": stage.kv,
            "compute_bytes_estimate": stage.compute,
            "total_bytes": stage.total,
            "memory_bytes": stage.memory,
            "time": stage.time,
            "command": command,
        }
        for stage, command in zip(plan.stages, stage_commands(plan, request, model), strict=True)
    ]
    values = {
        "model": model,
        "revision": revision,
        "split": [stage.layers.start for stage in plan.stages[1:]],
        "decode_share": plan.decode_share,
        "balance": plan.balance,
        "stages": stages,
    }
    return json.dumps(values)
