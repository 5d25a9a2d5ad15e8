"""Which part a tensor belongs into, and which tensors a stage uses. The second rule is that of ``StageModel::owns``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skippy_zmq.topology import LayerRange

SHARED, EMBEDDINGS, LAYER, OUTPUT, PROJECTOR = "shared", "embeddings", "layer", "output", "mmproj"

# Tables that feed the first layer. The first two are also the output matrix and the output norm of models that have
# none of their own.
_TABLES = ("token_embd", "token_embd_norm", "token_types", "position_embd", "per_layer_token_embd")
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


def part_of(tensor: str) -> tuple[str, int | None]:
    """Kind of the part for a tensor, and the layer where the kind is LAYER."""
    block = _BLOCK.match(tensor)
    if block:
        return LAYER, int(block[1])
    if tensor.startswith("output"):
        return OUTPUT, None
    if tensor.split(".", 1)[0] in _TABLES and "." in tensor:
        return EMBEDDINGS, None
    return SHARED, None


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which tensors of a model the stage with ``layers`` reads."""

    layers: LayerRange
    n_layers: int
    tied_output: bool
    tied_norm: bool

    def owns(self, tensor: str) -> bool:
        first, last = self.layers.start == 0, self.layers.end == self.n_layers
        kind, layer = part_of(tensor)
        if layer is not None:
            return layer >= self.layers.start and (layer < self.layers.end or last)
        if kind == EMBEDDINGS:
            table = tensor.split(".", 1)[0]
            at_the_end = (self.tied_output and table == _TABLES[0]) or (self.tied_norm and table == _TABLES[1])
            return first or (last and at_the_end)
        return kind == SHARED or last
