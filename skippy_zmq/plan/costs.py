"""What each layer of a model costs: bytes to hold, and work for a token."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skippy_zmq.plan.kv_cache import CacheSettings, cache_bytes
from skippy_zmq.plan.outline import Counts, Outline
from skippy_zmq.sources.ggml_types import TENSOR_TYPES
from skippy_zmq.sources.stage_tensors import Holder, has_tied_norm, holder

_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """``weights``, ``cache``: bytes. ``decode``: bytes of weights read for one token. ``prefill``: weight elements
    multiplied for one token. The same for the ends: ``first`` and ``last`` are bytes that only these stages hold,
    ``both`` what the first and the last hold, ``every`` what each stage holds; ``head``: ``decode`` of the output head,
    which prefill does not run."""

    weights: tuple[int, ...]
    cache: tuple[int, ...]
    decode: tuple[float, ...]
    prefill: tuple[float, ...]
    first: int
    last: int
    both: int
    every: int
    head: float

    @property
    def n_layers(self) -> int:
        return len(self.weights)

    def weights_bytes(self, start: int, end: int) -> int:
        """Weights of the stage that runs layers ``start:end``."""
        is_first, is_last = start == 0, end == self.n_layers
        ends = self.first * is_first + self.last * is_last + self.both * (is_first or is_last)
        return sum(self.weights[start:end]) + ends + self.every

    def cache_bytes(self, start: int, end: int) -> int:
        """KV caches and recurrent states of the stage that runs layers ``start:end``, over all lanes."""
        return sum(self.cache[start:end])

    def times(self, decode_share: float) -> tuple[tuple[float, ...], float]:
        """For each layer, and for the output head, the part of a whole model's time.

        ``decode_share``: how much of the time of an undivided model goes to decoding, 0.0 to 1.0.
        """
        decode_total = (sum(self.decode) + self.head) or 1.0
        prefill_total = sum(self.prefill) or 1.0
        layers = tuple(
            decode_share * decode / decode_total + (1.0 - decode_share) * prefill / prefill_total
            for decode, prefill in zip(self.decode, self.prefill, strict=True)
        )
        return layers, decode_share * self.head / decode_total


def layer_costs(outline: Outline, settings: CacheSettings) -> LayerCosts:
    """Costs of a model as it would be run with ``settings``."""
    n = outline.n_layers
    weights, decode, prefill = [0] * n, [0.0] * n, [0.0] * n
    ends: dict[Holder, int] = dict.fromkeys(("first", "last", "both", "every"), 0)
    head = 0.0
    tied_norm = has_tied_norm(tensor.name for tensor in outline.tensors)
    active = _active_experts(outline)
    for tensor in outline.tensors:
        block = _BLOCK.match(tensor.name)
        layer = int(block[1]) if block else n
        if block and layer < n:
            share = active[layer] if "_exps." in tensor.name else 1.0
            weights[layer] += tensor.nbytes
            decode[layer] += share * tensor.nbytes
            if len(tensor.shape) > 1:
                kind = TENSOR_TYPES[tensor.type]
                prefill[layer] += share * tensor.nbytes / kind.block_bytes * kind.block
            continue
        ends[holder(tensor.name, tied_output=outline.tied_output, tied_norm=tied_norm)] += tensor.nbytes
        if tensor.name == ("token_embd.weight" if outline.tied_output else "output.weight"):
            head = float(tensor.nbytes)
    return LayerCosts(
        tuple(weights),
        cache_bytes(outline, settings),
        tuple(decode),
        tuple(prefill),
        ends["first"],
        ends["last"],
        ends["both"],
        ends["every"],
        head,
    )


def _active_experts(outline: Outline) -> list[float]:
    """For each block, the part of its experts that a token goes through."""
    counts = Counts(outline)
    n_experts = counts.count("expert_count")
    used = counts.per_layer("expert_used_count")
    return [number / n_experts if n_experts else 1.0 for number in used]
