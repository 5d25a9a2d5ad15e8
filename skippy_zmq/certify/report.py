"""The reports of a certification: a line per model, JSON, the table of docs/architectures.md, certified.json."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from skippy_zmq.certify.plan import ALL_PAIRS_LAYERS
from skippy_zmq.certify.results import ModelResult, Verdict, exact_names
from skippy_zmq.certify.workload import Settings
from skippy_zmq.runtime.stage_model import LLAMA_CPP_BUILD
from skippy_zmq.wire.messages import CrossingSpec

_INTRODUCTION = f"""# Architectures

Written by `make certify MODELS=FOLDER`; do not edit. Every model below was run by llama.cpp unsplit and as one, two and
three stages, and **all logits were equal bit for bit**: a prompt, a second chunk, decode steps, several lanes at once
with equal and with unequal row counts, after a trim (or, where lanes cannot be trimmed, after clearing one), and on a
lane that was used before. Two stages are tried at every boundary; three stages at every pair of boundaries of a model
of up to {ALL_PAIRS_LAYERS} layers, else at neighbouring ones. Both sides run the same batches; where llama.cpp groups
lanes of unequal row counts in a way of its own, and its other kernels give other bits, the unsplit model runs the
groups of a stage.

A stage runs an architecture that is not in this table only with `--uncertified`; the handshake still refuses what does
not fit together. To try a model of your own, and to see all that was tried in detail:

    python -m skippy_zmq.certify model.gguf --json report.json

A name is the model's `general.architecture`, with `-moe` where the model has experts (`expert_count` above 0). A
boundary is the layer that the next stage begins with. A tensor that crosses has the given bytes per row (token) of a
batch.
"""


def line(result: ModelResult) -> str:
    """One line for people."""
    text = f"{result.file}: {result.architecture or 'unknown architecture'}: {result.verdict}"
    if result.verdict is not Verdict.EXACT:
        return f"{text}: {result.reason}"
    where = f"at {_ranges(result.boundaries)}" if result.boundaries else "(one layer: no boundary)"
    crossing = _crossing_text(result).replace("`", "")
    return f"{text} {where}, {len(result.tries)} tries" + (f"; crosses: {crossing}" if crossing else "")


def summary(results: Sequence[ModelResult]) -> str:
    """The last lines: how many models came out how, and what was compared in another way."""
    counts = Counter(result.verdict for result in results)
    text = f"{len(results)} models: " + ", ".join(f"{counts[v]} {v}" for v in Verdict if counts[v])
    grouped = sum(t.compared == "micro-batches" for result in results for t in result.tries)
    if grouped:
        text += (
            f"\nin {grouped} tries llama.cpp groups lanes of unequal rows in a way of its own that changes bits: there "
            "the unsplit model ran the micro-batches of a stage"
        )
    return text


def as_json(results: Sequence[ModelResult], settings: Sequence[Settings]) -> str:
    """The document that ``skippy_zmq.certify.__main__`` describes."""
    document = {
        "llama_cpp": LLAMA_CPP_BUILD,
        "settings": [dataclasses.asdict(s) for s in settings],
        "exact": exact_names(results),
        "models": [_model_json(result) for result in results],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _model_json(result: ModelResult) -> dict[str, Any]:
    crosses = result.crosses
    return {
        "file": result.file,
        "architecture": result.architecture,
        "n_layers": result.n_layers,
        "can_trim": result.can_trim,
        "verdict": result.verdict,
        "reason": result.reason or None,
        "boundaries": [
            {
                "layer": layer,
                "verdict": verdict,
                "crosses": [dataclasses.asdict(spec) for spec in crosses.get(layer, ())],
            }
            for layer, verdict in result.boundaries.items()
        ],
        "tries": [
            {
                "split": list(t.split),
                "settings": t.settings,
                "verdict": t.verdict,
                "reason": t.reason or None,
                "compared": t.compared or None,
                "difference": None if t.difference is None else dataclasses.asdict(t.difference),
            }
            for t in result.tries
        ],
    }


def names_json(results: Sequence[ModelResult]) -> str:
    """The content of certified.json."""
    return json.dumps(exact_names(results), indent=1) + "\n"


def table(results: Sequence[ModelResult], settings: Sequence[Settings]) -> str:
    """The content of docs/architectures.md: one row per architecture and file name."""
    exact = set(exact_names(results))
    listed = sorted((r for r in results if r.architecture in exact), key=lambda r: (r.architecture, r.file))
    rows = dict.fromkeys(_row(result) for result in listed)
    others = sorted({f"- `{r.file}`: {r.verdict}: {r.reason}\n" for r in results if r.architecture not in exact})
    tried = "; ".join(
        f"{s.cache_type} cache, flash attention {s.flash_attn}, {s.threads} thread{'s' if s.threads > 1 else ''}"
        for s in settings
    )
    parts = [
        _INTRODUCTION,
        f"llama.cpp: {LLAMA_CPP_BUILD}. Each model was tried with: {tried}.\nExact: {len(exact)} architectures.\n",
        "| architecture | file | layers | exact at boundaries | what crosses | lanes can be trimmed |\n"
        "|---|---|---|---|---|---|\n" + "".join(rows),
    ]
    if others:
        parts.append("Not exact everywhere, so not certified:\n\n" + "".join(others))
    return "\n".join(parts)


def _row(result: ModelResult) -> str:
    cells = (
        f"`{result.architecture}`",
        f"`{result.file}`",
        str(result.n_layers),
        _ranges(result.boundaries),
        _crossing_text(result),
        "yes" if result.can_trim else "no",
    )
    return "| " + " | ".join(cells) + " |\n"


def _ranges(numbers: Iterable[int]) -> str:
    """1,2,3,7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _crossing_text(result: ModelResult) -> str:
    """The tensors that cross any boundary, without the layer numbers in their names."""
    specs = [spec for crossing in result.crosses.values() for spec in crossing]
    return ", ".join(dict.fromkeys(_spec_text(spec) for spec in specs))


def _spec_text(spec: CrossingSpec) -> str:
    name = re.sub(r"-\d+\b", "-N", spec.name)
    fixed = f" + {spec.fixed_bytes} bytes" if spec.fixed_bytes else ""
    return f"`{name}` {spec.dtype}, {spec.row_bytes} bytes a row{fixed}"
