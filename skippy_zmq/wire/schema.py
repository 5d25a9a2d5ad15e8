"""The rule of every field of every message, and the converters that follow from the dataclasses and these rules.

A field with no rule, and a rule with no field, stop the import.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

import msgspec

from skippy_zmq.wire import messages as m
from skippy_zmq.wire.batch import check_batch, check_opens
from skippy_zmq.wire.fields import (
    Field,
    FieldError,
    Got,
    array_of,
    biases,
    binary,
    boolean,
    field_names,
    integer,
    mapping,
    number,
    one_of,
    optional,
    row_of,
    struct_of,
    text,
    token_bytes,
    token_ids,
)
from skippy_zmq.wire.limits import (
    DTYPE_BYTES,
    ERROR_CODES,
    LINK_BYTES,
    MAX_BATCH_ROWS,
    MAX_CHAT_MESSAGES,
    MAX_COUNTERS,
    MAX_CROSSING_TENSORS,
    MAX_DESCRIPTOR_BYTES,
    MAX_DIMS,
    MAX_ERROR_BYTES,
    MAX_GRAMMAR_BYTES,
    MAX_INT64,
    MAX_LABEL_BYTES,
    MAX_LANES,
    MAX_LAYERS,
    MAX_LOGIT_BIAS,
    MAX_NAME_BYTES,
    MAX_PAGE_TOKENS,
    MAX_PAGES,
    MAX_PAGES_AT_ONCE,
    MAX_PAYLOAD_BYTES,
    MAX_POSITION,
    MAX_PROMPT_TOKENS,
    MAX_ROUTING_ID_BYTES,
    MAX_SEED,
    MAX_STAGES,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    MAX_TIMINGS,
    MAX_TOKEN_ID,
)

_NAME = text(1, MAX_NAME_BYTES)
_LABEL = text(1, MAX_LABEL_BYTES)
_TEXT = text(0, MAX_TEXT_BYTES)
_COUNT = integer(0, MAX_INT64)
_SIGNED = integer(-MAX_POSITION, MAX_POSITION)
_LANE = integer(0, MAX_LANES - 1)
_CODE = one_of(ERROR_CODES, "an error code")
_FINISH = one_of(("", "stop", "length", "cancelled"))

# Rules by "Class.field", else by field name, else by type (_BY_TYPE). Lists and structs: low and high count.
_RULES: Mapping[str, Field] = {
    "architecture": _NAME,
    "batch": _COUNT,
    "build": _LABEL,
    "cache_type_k": _NAME,
    "cache_type_v": _NAME,
    "client": binary(1, MAX_ROUTING_ID_BYTES),
    "code": _CODE,
    "compute_bytes": _COUNT,
    "compute_us": _COUNT,
    "content": _TEXT,
    "counters": mapping(_NAME, integer(-MAX_INT64, MAX_INT64), MAX_COUNTERS),
    "data": binary(0, MAX_TEXT_BYTES),
    "descriptors": array_of(binary(1, MAX_DESCRIPTOR_BYTES), 1, MAX_PAGES_AT_ONCE),
    "dry_allowed_length": _SIGNED,
    "dry_penalty_last_n": _SIGNED,
    "dry_sequence_breakers": array_of(text(1, MAX_STOP_BYTES), 0, MAX_STOP_STRINGS),
    "dtype": one_of(DTYPE_BYTES),
    "endpoint": _LABEL,
    "failed": array_of(row_of(_NAME, _CODE, text(0, MAX_ERROR_BYTES)), 0, MAX_LANES),
    "finish_reason": _FINISH,
    "fixed_bytes": integer(0, MAX_PAYLOAD_BYTES),
    "flash_attn": _NAME,
    "grammar": text(0, MAX_GRAMMAR_BYTES),
    "index": _COUNT,
    "kv_bytes": _COUNT,
    "known": token_bytes(0, MAX_PROMPT_TOKENS),
    "kv_page_bytes": _COUNT,
    "kv_page_tokens": integer(0, MAX_PAGE_TOKENS),
    "lane": _LANE,
    "lanes": integer(1, MAX_LANES),
    "layer_end": integer(1, MAX_LAYERS),
    "layer_start": integer(0, MAX_LAYERS - 1),
    "links": binary(LINK_BYTES, MAX_PAGES * LINK_BYTES),
    "logit_bias": biases(MAX_LOGIT_BIAS),
    "max_tokens": integer(1, MAX_POSITION),
    "message": text(0, MAX_ERROR_BYTES),
    "micro_batch": integer(0, MAX_LANES - 1),
    "mirostat": integer(0, 2),
    "model": _NAME,
    "model_name": _LABEL,
    "n_batch": integer(1, MAX_POSITION),
    "n_ctx": integer(1, MAX_POSITION),
    "n_layers": integer(1, MAX_LAYERS),
    "n_prompt": integer(1, MAX_PROMPT_TOKENS),
    "n_rows": integer(1, MAX_BATCH_ROWS),
    "n_tokens": integer(0, MAX_PROMPT_TOKENS),
    "n_ubatch": integer(1, MAX_BATCH_ROWS),
    "n_vocab": integer(1, MAX_TOKEN_ID),
    "name": _NAME,
    "nbytes": integer(1, MAX_PAYLOAD_BYTES),
    "nonce": _COUNT,
    "occurrence": integer(0, MAX_TENSORS - 1),
    "owner": binary(0, MAX_ROUTING_ID_BYTES),
    "page_tokens": integer(1, MAX_PAGE_TOKENS),
    "pages": integer(0, MAX_PAGES),
    "peer": _NAME,
    "phase": one_of(("prefill", "decode", "replay", "mixed")),
    "plain": integer(0, MAX_PROMPT_TOKENS),
    "prefix": token_bytes(0, MAX_PROMPT_TOKENS),
    "position": integer(0, MAX_POSITION),
    "producer": _NAME,
    "prompt": optional(_TEXT),
    "prompt_token_ids": token_ids(1, MAX_PROMPT_TOKENS),
    "reason": one_of(("done", "cancelled", "error")),
    "received": integer(0, MAX_POSITION),
    "repeat_last_n": _SIGNED,
    "request": _NAME,
    "revision": text(0, MAX_LABEL_BYTES),
    "reused": integer(0, MAX_PROMPT_TOKENS),
    "row_class_high": integer(1, MAX_BATCH_ROWS),
    "row_class_low": integer(1, MAX_BATCH_ROWS),
    "row_bytes": integer(0, MAX_PAYLOAD_BYTES),
    "seed": optional(integer(0, MAX_SEED)),
    "session": _NAME,
    "sessions": array_of(_NAME, 1, MAX_LANES),
    "slowest_us": _COUNT,
    "spent_us": _COUNT,
    "shape": array_of(integer(1, MAX_PAYLOAD_BYTES), 1, MAX_DIMS),
    "stage": _NAME,
    "stop": array_of(text(1, MAX_STOP_BYTES), 0, MAX_STOP_STRINGS),
    "text": _TEXT,
    "threads": integer(0, MAX_POSITION),
    "timeout_ms": _COUNT,
    "timings": mapping(_NAME, _COUNT, MAX_TIMINGS),
    "token": integer(0, MAX_TOKEN_ID),
    "token_ids": token_ids(0, MAX_PROMPT_TOKENS),
    "top_k": _SIGNED,
    "weights_bytes": _COUNT,
    "window_rows": integer(1, MAX_BATCH_ROWS),
    "Activations.tokens": token_bytes(1, MAX_BATCH_ROWS),
    "ChatMessage.role": one_of(("system", "developer", "user", "assistant", "tool")),
    "Error.request": text(0, MAX_NAME_BYTES),
    "Generate.session": text(0, MAX_NAME_BYTES),
    "Generate.token_ids": optional(token_ids(1, MAX_PROMPT_TOKENS)),
    "Kept.session": text(0, MAX_NAME_BYTES),
    "KvAdopt.n_prompt": integer(0, MAX_PROMPT_TOKENS),
    "KvExport.links": binary(LINK_BYTES, MAX_PAGES_AT_ONCE * LINK_BYTES),
    "KvAdopt.token_ids": token_ids(1, MAX_PROMPT_TOKENS),
    "KvSessionReply.n_prompt": integer(0, MAX_PROMPT_TOKENS),
    "Hello.role": one_of(("upstream", "ring", "client")),
}
# How many structs of a class a field may hold.
_STRUCT_COUNTS: Mapping[str, tuple[int, int]] = {
    "Activations.opens": (0, MAX_LANES),
    "Activations.rows": (1, MAX_LANES),
    "Activations.tensors": (0, MAX_TENSORS),
    "BatchDone.tokens": (0, MAX_LANES),
    "BatchFailed.opens": (0, MAX_LANES),
    "Generate.messages": (1, MAX_CHAT_MESSAGES),
    "KvImport.tensors": (1, MAX_PAGES_AT_ONCE),
    "KvPages.tensors": (1, MAX_PAGES_AT_ONCE),
    "Ready.stages": (1, MAX_STAGES),
    "Tokens.tensors": (0, 1),
    "TokensEach.tokens": (2, MAX_LANES),
    "StageFacts.offered": (0, MAX_CROSSING_TENSORS),
    "StageFacts.wanted": (0, MAX_CROSSING_TENSORS),
    "Welcome.stages": (1, MAX_STAGES),
}
_BY_TYPE: Mapping[Any, Field] = {bool: boolean(), float: number()}


def _check_facts(facts: m.StageFacts) -> None:
    if not facts.layer_start < facts.layer_end <= facts.n_layers:
        got = Got(f"{facts.layer_start}:{facts.layer_end} of {facts.n_layers}")
        raise FieldError("layer_start < layer_end <= n_layers", got, ".layer_end")
    if facts.row_class_low > facts.row_class_high:
        raise FieldError(f"at least row_class_low, {facts.row_class_low}", facts.row_class_high, ".row_class_high")


def _check_hello(hello: m.Hello) -> None:
    if (hello.role == "client") != (hello.facts is None):
        raise FieldError("facts of a stage, and of a stage only", Got(f'role "{hello.role}"'), ".facts")


def _check_generate(request: m.Generate) -> None:
    given = [name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None]
    if len(given) != 1:
        raise FieldError("exactly one of prompt, messages and token_ids", Got(" and ".join(given) or "none"))
    if request.messages is not None:
        size = sum(len(message.content.encode("utf-8", "surrogatepass")) for message in request.messages)
        if size > MAX_TEXT_BYTES:
            raise FieldError(f"at most {MAX_TEXT_BYTES} bytes of text in all", size, ".messages")


def _check_match(match: m.KvMatch) -> None:
    if len(match.links) % LINK_BYTES or match.pages > len(match.links) // LINK_BYTES:
        raise FieldError(
            f"whole names of {LINK_BYTES} bytes, for at least {match.pages} pages", len(match.links), ".links"
        )


def _check_export(export: m.KvExport) -> None:
    if len(export.links) % LINK_BYTES:
        raise FieldError(f"whole names of {LINK_BYTES} bytes", len(export.links), ".links")


def _check_pages(pages: m.KvPages | m.KvImport) -> None:
    if len(pages.tensors) != len(pages.descriptors):
        raise FieldError(f"{len(pages.descriptors)}, one per descriptor", len(pages.tensors), ".tensors")


def _check_tokens(of: m.KvAdopt | m.KvSessionReply) -> None:
    if of.n_prompt > len(of.token_ids):
        raise FieldError(f"at most the {len(of.token_ids)} tokens there are", of.n_prompt, ".n_prompt")


_CHECKS: Mapping[type[Any], Callable[[Any], None]] = {
    m.KvAdopt: _check_tokens,
    m.KvExport: _check_export,
    m.KvImport: _check_pages,
    m.KvMatch: _check_match,
    m.KvPages: _check_pages,
    m.KvSessionReply: _check_tokens,
    m.Activations: check_batch,
    m.BatchFailed: check_opens,
    m.Generate: _check_generate,
    m.Hello: _check_hello,
    m.StageFacts: _check_facts,
}


class _Builder:
    """Makes each class's converter once and notes which rules were used."""

    def __init__(self) -> None:
        self.structs: dict[type[Any], Field] = {}
        self.fields: dict[str, Field] = {}
        self.used: set[str] = set()

    def struct(self, cls: type[Any]) -> Field:
        if cls not in self.structs:
            hints = typing.get_type_hints(cls)
            inner = {name: self.field(cls, name, hints[name]) for name in field_names(cls)}
            self.fields.update((f"{cls.__name__}.{name}", converter) for name, converter in inner.items())
            self.structs[cls] = struct_of(cls, inner, _CHECKS.get(cls))
        return self.structs[cls]

    def field(self, cls: type[Any], name: str, hint: Any) -> Field:
        for key in (f"{cls.__name__}.{name}", name):
            if key in _RULES:
                self.used.add(key)
                return _RULES[key]
        if hint in _BY_TYPE:
            return _BY_TYPE[hint]
        return self.structured(f"{cls.__name__}.{name}", hint)

    def structured(self, key: str, hint: Any) -> Field:
        """A field whose type names a message's part: the part, the part or None, or a tuple of them."""
        args = typing.get_args(hint)
        if isinstance(hint, types.UnionType) and len(args) == 2 and args[1] is type(None):
            return optional(self.structured(key, args[0]))
        if typing.get_origin(hint) is tuple and args[1:] == (...,) and key in _STRUCT_COUNTS:
            self.used.add(key)
            return array_of(self.struct(args[0]), *_STRUCT_COUNTS[key])
        if isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, msgspec.Struct)):
            return self.struct(hint)
        raise TypeError(f"{key}: no rule for a field of type {hint}")


_builder = _Builder()
MESSAGE_FIELDS: Mapping[type[Any], Field] = {cls: _builder.struct(cls) for cls in m.MESSAGE_TYPES.values()}
# Every field of every class that travels, by "Class.field", in the order of the classes' parts.
ALL_FIELDS: Mapping[str, Field] = _builder.fields
STRUCTS: tuple[type[Any], ...] = tuple(_builder.structs)

_unused = (_RULES.keys() | _STRUCT_COUNTS.keys()) - _builder.used
if _unused:
    raise TypeError(f"rules without a field: {sorted(_unused)}")
