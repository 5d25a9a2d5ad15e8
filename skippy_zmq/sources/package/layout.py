"""Which part a tensor belongs into, and which tensors a stage uses."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skippy_zmq.sources.stage_tensors import holder
from skippy_zmq.topology import LayerRange

SHARED, EMBEDDINGS, LAYER, OUTPUT, PROJECTOR = "shared", "embeddings", "layer", "output", "mmproj"

_PARTS = {"first": EMBEDDINGS, "last": OUTPUT, "every": SHARED}
_BLOCK = re.compile(r"blk\.([0-9]{1,9})\.")


def part_of(tensor: str) -> tuple[str, int | None]:
    """Kind of the part for a tensor, and the layer where the kind is LAYER."""
    block = _BLOCK.match(tensor)
    if block:
        return LAYER, int(block[1])
    return _PARTS[holder(tensor, tied_output=False, tied_norm=False)], None


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which tensors of a model the stage with ``layers`` reads."""

    layers: LayerRange
    n_layers: int
    tied_output: bool
    tied_norm: bool

    def owns(self, tensor: str) -> bool:
        first, last = self.layers.start == 0, self.layers.end == self.n_layers
        _, layer = part_of(tensor)
        if layer is not None:
            return layer >= self.layers.start and (layer < self.layers.end or last)
        held_by = holder(tensor, tied_output=self.tied_output, tied_norm=self.tied_norm)
        return {"first": first, "last": last, "both": first or last, "every": True}[held_by]
