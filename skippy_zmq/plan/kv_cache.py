"""Bytes of KV cache and recurrent state that each layer keeps, as llama.cpp allocates them.

Which layers attend and which carry a recurrent state is read off the tensors they have. Sources: llama-kv-cache.cpp,
llama-memory-recurrent.cpp and llama-hparams.cpp of the pinned llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skippy_zmq.plan.outline import Counts, Outline
from skippy_zmq.sources.ggml_types import TENSOR_TYPES

CELL_PADDING = 256  # llama.cpp rounds the cells of a lane up to this
_STATE_BYTES = 4  # recurrent states are f32, whatever the cache types
_SHARED_FROM = {"gemma3n": 20}  # layers from here on read the caches of earlier ones
_TENSOR = re.compile(r"blk\.(\d+)\.(.+?)(?:\.weight)?\Z")
_RECURRENT = re.compile(r"(ssm_|time_mix_|shortconv)")
_TYPES = {kind.name.lower(): kind for kind in TENSOR_TYPES.values()}


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """``n_ctx``: tokens of a lane. ``flash_attention``: without it V rows are as wide in all layers as in the widest.
    ``full_window``: layers with a sliding window keep as many tokens as the others."""

    n_ctx: int
    lanes: int
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attention: bool = True
    full_window: bool = True
    n_ubatch: int = 512


def cache_bytes(outline: Outline, settings: CacheSettings) -> tuple[int, ...]:
    """For each layer of the pipeline, the bytes of its caches over all lanes."""
    tensors = _by_layer(outline)
    widths = [_widths(outline, layer, tensors[layer]) for layer in range(outline.n_layers)]
    widest_v = max((v for _, v in widths), default=0)
    windowed = _windowed(outline)
    found = []
    for layer, (k, v) in enumerate(widths):
        cells = _padded(settings.n_ctx)
        if layer in windowed and not settings.full_window:
            window = Counts(outline).count("attention.sliding_window")
            cells = _padded(min(cells, window + settings.n_ubatch))
        if not settings.flash_attention and k:
            v = widest_v
        nbytes = _row(settings.type_k, k) * cells + _row(settings.type_v, v) * cells
        found.append((nbytes + _state(outline, tensors[layer])) * settings.lanes)
    return tuple(found)


def _padded(cells: int) -> int:
    return -(-cells // CELL_PADDING) * CELL_PADDING


def _row(cache_type: str, elements: int) -> int:
    kind = _TYPES[cache_type]
    return -(-elements // kind.block) * kind.block_bytes


def _by_layer(outline: Outline) -> list[dict[str, tuple[int, ...]]]:
    """For each block the shapes of its tensors, by name without ``blk.N.`` and ``.weight``."""
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(outline.n_blocks)]
    for tensor in outline.tensors:
        match = _TENSOR.match(tensor.name)
        if match:
            found[int(match[1])][match[2]] = tensor.shape
    return found


def _widths(outline: Outline, layer: int, tensors: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Elements of a K row and a V row of one token; zeros for a layer without attention of its own."""
    counts = Counts(outline)
    shared = counts.count("attention.shared_kv_layers")
    if layer >= _SHARED_FROM.get(outline.architecture, outline.n_blocks - shared):
        return 0, 0
    recurrent = any(map(_RECURRENT.match, tensors))
    attends = "attn_k" in tensors or "attn_kv_a_mqa" in tensors or ("attn_qkv" in tensors and not recurrent)
    heads_kv = counts.per_layer("attention.head_count_kv", counts.per_layer("attention.head_count")[layer])[layer]
    if not attends or not heads_kv:
        return 0, 0
    key = counts.count("attention.key_length", outline.embedding_length // max(1, _heads(outline)))
    if counts.count("attention.key_length_mla"):  # the latent serves for both
        return key * heads_kv, 0
    value = counts.count("attention.value_length", outline.embedding_length // max(1, _heads(outline)))
    k = _out(tensors, "attn_k", key * heads_kv)
    return k, _out(tensors, "attn_v", k if "attn_k" in tensors else value * heads_kv)


def _heads(outline: Outline) -> int:
    return max(Counts(outline).per_layer("attention.head_count"))


def _out(tensors: Mapping[str, tuple[int, ...]], name: str, default: int) -> int:
    shape = tensors.get(name, ())
    return shape[1] if len(shape) > 1 else default


def _windowed(outline: Outline) -> frozenset[int]:
    """Layers that the file itself says to have a sliding window."""
    if not Counts(outline).count("attention.sliding_window"):
        return frozenset()
    try:
        pattern: Sequence[object] = outline.array(f"{outline.architecture}.attention.sliding_window_pattern")
    except KeyError:
        return frozenset()
    return frozenset(layer for layer, has in enumerate(pattern) if has)


def _state(outline: Outline, tensors: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of the recurrent state of one lane in a layer."""
    if not any(map(_RECURRENT.match, tensors)):
        return 0
    counts, width = Counts(outline), outline.embedding_length
    head = counts.count("wkv.head_size")
    kda = counts.count("kda.head_dim")
    inner, state, groups = (counts.count(f"ssm.{key}") for key in ("inner_size", "state_size", "group_count"))
    convolution = max(0, counts.count("ssm.conv_kernel") - 1)
    if head:
        elements = counts.count("token_shift_count", 2) * width + width * head
    elif counts.count("shortconv.l_cache"):
        elements = width * (counts.count("shortconv.l_cache") - 1) + state * inner
    elif kda:
        elements = 3 * (convolution or 3) * _heads(outline) * kda + kda * kda * _heads(outline)
    else:
        elements = convolution * (inner + 2 * groups * state) + state * inner
    return elements * _STATE_BYTES
