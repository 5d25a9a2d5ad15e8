"""Do two stages fit together? Pure comparisons of what each says of itself; every refusal names both sides."""

from __future__ import annotations

import itertools

from skippy_zmq.errors import HandshakeError
from skippy_zmq.sources.references import revision_conflict
from skippy_zmq.wire.messages import CrossingSpec, StageFacts

# What must be equal on every stage of a pipeline, with the name an operator knows it by.
_MODEL = (("model", "model identity"), ("n_layers", "layers of the model"), ("build", "llama.cpp build"))
_SETTINGS = (
    ("lanes", "--lanes"),
    ("n_ctx", "--ctx-size"),
    ("n_batch", "--batch-size"),
    ("n_ubatch", "--ubatch-size"),
    ("cache_type_k", "--cache-type-k"),
    ("cache_type_v", "--cache-type-v"),
    ("flash_attn", "--flash-attn"),
    ("swa_full", "--swa-full"),
    ("reproducible", "--reproducible"),
)


def _name(facts: StageFacts) -> str:
    return f"stage {facts.layer_start}:{facts.layer_end} ({facts.stage})"


def _check_equal(one: StageFacts, other: StageFacts) -> None:
    conflict = revision_conflict(one.revision, other.revision)
    if conflict:  # said before the contents are compared, of which it is the likely reason
        raise HandshakeError(f"{_name(one)} and {_name(other)}: {conflict}", code="model_mismatch")
    for code, fields in (("model_mismatch", _MODEL), ("settings_mismatch", _SETTINGS)):
        for field, label in fields:
            ours, theirs = getattr(one, field), getattr(other, field)
            if ours != theirs:
                raise HandshakeError(
                    f"{label} differs: {ours} on {_name(one)} ({one.model_name}), "
                    f"{theirs} on {_name(other)} ({other.model_name})",
                    code=code,
                )


def check_neighbours(upstream: StageFacts, downstream: StageFacts) -> None:
    """Raise HandshakeError unless ``downstream`` continues ``upstream`` with the same model and settings."""
    _check_equal(upstream, downstream)
    if upstream.layer_end != downstream.layer_start:
        kind = "leave a gap" if upstream.layer_end < downstream.layer_start else "overlap"
        raise HandshakeError(
            f"layer ranges {upstream.layer_start}:{upstream.layer_end} and "
            f"{downstream.layer_start}:{downstream.layer_end} {kind}: {_name(downstream)} would have to begin at layer "
            f"{upstream.layer_end}",
            code="layer_mismatch",
        )


def check_crossing(upstream: StageFacts, downstream: StageFacts) -> None:
    """Raise HandshakeError unless upstream offers exactly every tensor that downstream wants.

    Names need not be unique; then occurrences could be mistaken for one another unless both sides see equally many.
    """
    offered = {(spec.name, spec.occurrence): spec for spec in upstream.offered}
    for spec in downstream.wanted:
        given = offered.get((spec.name, spec.occurrence))
        if given != spec:
            raise HandshakeError(
                f"{_name(downstream)} wants {_tensor(spec)} from {_name(upstream)}, which offers "
                f"{_tensor(given) if given else 'no tensor of that name'}: the model cannot be cut at layer "
                f"{downstream.layer_start}",
                code="crossing_mismatch",
            )
        wanted_count = sum(other.name == spec.name for other in downstream.wanted)
        offered_count = sum(other.name == spec.name for other in upstream.offered)
        if max(wanted_count, offered_count) > 1 and wanted_count != offered_count:
            raise HandshakeError(
                f"{_name(downstream)} wants {wanted_count} tensors named '{spec.name}' and {_name(upstream)} offers "
                f"{offered_count}: which is which cannot be told",
                code="crossing_mismatch",
            )


def _tensor(spec: CrossingSpec) -> str:
    size = f"{spec.row_bytes} bytes a row" + (f" + {spec.fixed_bytes}" if spec.fixed_bytes else "")
    return f"tensor '{spec.name}' #{spec.occurrence} ({spec.dtype}, {size})"


def check_ring(first: StageFacts, last: StageFacts) -> None:
    """Raise HandshakeError unless ``last`` may close the ring at ``first``."""
    _check_equal(first, last)
    if first.layer_start != 0:
        raise HandshakeError(
            f"--first of {_name(last)} must be the stage that begins at layer 0, not {_name(first)}",
            code="layer_mismatch",
        )
    if last.layer_end != last.n_layers:
        raise HandshakeError(
            f"{_name(last)} cannot close the ring: it ends at layer {last.layer_end} of {last.n_layers}",
            code="layer_mismatch",
        )


def check_pipeline(stages: tuple[StageFacts, ...]) -> None:
    """Raise HandshakeError unless ``stages`` tile the model from layer 0 on."""
    for one, other in itertools.pairwise(stages):
        check_neighbours(one, other)
    if stages[0].layer_start != 0 or stages[-1].layer_end != stages[-1].n_layers:
        ranges = ", ".join(f"{s.layer_start}:{s.layer_end}" for s in stages)
        raise HandshakeError(
            f"layer ranges {ranges} do not cover layers 0:{stages[-1].n_layers}", code="layer_mismatch"
        )
