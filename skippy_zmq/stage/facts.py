"""What a stage says of itself at the handshake and in its READY line."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from typing import Any

from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.row_class import RowClass
from skippy_zmq.runtime.stage_model import LLAMA_CPP_BUILD, StageModel
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.wire.limits import MAX_PAYLOAD_BYTES
from skippy_zmq.wire.messages import StageFacts

ONE_ROW = RowClass()  # of a stage that did not measure


def architecture_name(source: GgufModel) -> str:
    """The name under which docs/architectures.md lists a model: its architecture, and whether it has experts."""
    experts = source.metadata.get(f"{source.architecture}.expert_count", 0)
    return f"{source.architecture}-moe" if experts else source.architecture


def certified_architectures() -> frozenset[str]:
    """Architectures that were proven bit-exact (skippy_zmq/certified.json, written by ``make certify``)."""
    text = resources.files("skippy_zmq").joinpath("certified.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text))


def check_certified(source: GgufModel, *, uncertified: bool) -> None:
    """Raise ModelFileError for an architecture that is not in the table, unless ``uncertified``."""
    name = architecture_name(source)
    if not uncertified and name not in certified_architectures():
        raise ModelFileError(
            f"{source.path}: architecture {name!r} has not been proven exact when split. Prove it with "
            f"`python -m skippy_zmq.certify {source.path}`, or run it as it is with --uncertified"
        )


def check_reproducible(rows: RowClass, options: StageOptions) -> None:
    """Raise OptionError for ``--reproducible`` where a lone row, which cannot be avoided, has bits of its own."""
    if options.reproducible and rows.low > 1:
        raise OptionError(
            f"--reproducible: a row computed alone has other bits here than in a batch of {rows.low} to {rows.high}, "
            "and rows alone cannot be avoided. Wanted a model without f32, f16 and bf16 matrices, which have kernels "
            "of their own for it, or --lanes 1"
        )


def stage_facts(
    model: StageModel,
    identity: str,
    stage: str,
    endpoint: str,
    rows: RowClass = ONE_ROW,
    kv_page_tokens: int = 0,
    revision: str = "",
) -> StageFacts:
    """Facts of an opened model. ``stage``: name and boot nonce; ``endpoint``: how others reach it; ``revision``: as
    ``LocatedModel`` has it."""
    context, options, memory = model.native_context, model.options, model.memory()
    for spec in (*model.wanted, *model.offered):
        if spec.fixed_bytes + spec.row_bytes * context.n_ubatch > MAX_PAYLOAD_BYTES:
            raise OptionError(
                f"ubatch_size {context.n_ubatch}: tensor '{spec.name}' would be larger than {MAX_PAYLOAD_BYTES} bytes; "
                f"wanted at most {(MAX_PAYLOAD_BYTES - spec.fixed_bytes) // max(1, spec.row_bytes)}"
            )
    return StageFacts(
        stage=stage,
        endpoint=endpoint,
        build=LLAMA_CPP_BUILD,
        model=identity,
        model_name=model.source.path.name,
        architecture=architecture_name(model.source),
        layer_start=model.layers.start,
        layer_end=model.layers.end,
        n_layers=model.source.n_layers,
        n_vocab=model.n_vocab,
        lanes=options.lanes,
        n_ctx=model.n_ctx,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        flash_attn=options.flash_attn,
        swa_full=options.swa_full,
        wanted=model.wanted,
        offered=model.offered,
        weights_bytes=memory.weights,
        kv_bytes=memory.kv,
        compute_bytes=memory.compute,
        threads=options.threads,
        row_class_low=rows.low,
        row_class_high=rows.high,
        reproducible=options.reproducible,
        kv_page_tokens=kv_page_tokens,
        window_rows=_window_rows(model, rows),
        kv_page_bytes=kv_page_tokens * sum(rows.token_bytes for rows in model.kv_layers) if kv_page_tokens else 0,
        revision=revision,
    )


def _window_rows(model: StageModel, rows: RowClass) -> int:
    """How many consecutive tokens of a lane get the bits that they would get one by one.

    The row class is about rows of several lanes. With flash attention on ggml's CPU the rows of one lane are computed
    alike, each over its own cells. On other devices nobody measured it; state of other kinds may count differently.
    """
    on_cpu = set(model.native_model.device_names) <= {"CPU"}
    if rows.low > 1 or model.options.flash_attn != "on" or model.kv_refusal or not on_cpu:
        return 1
    return min(rows.high, model.options.lanes)


def brief(facts: StageFacts) -> dict[str, Any]:
    """Facts for people and scripts: everything but the crossing tensors."""
    values = dataclasses.asdict(facts)
    del values["wanted"], values["offered"]
    return values


def ready_line(stages: tuple[StageFacts, ...]) -> str:
    """The line that a ready stage prints on standard output."""
    own = stages[0]
    values = {
        "stage": own.stage,
        "endpoint": own.endpoint,
        "layers": f"{own.layer_start}:{own.layer_end}",
        "model": own.model,
        "stages": [brief(facts) for facts in stages],
    }
    return "READY " + json.dumps(values)
