"""Arithmetic on payloads: where the block of a layer lies, and how to copy any tokens of it to any place.

A payload of n tokens is, for each layer in order, its K block and then its V block (see ``layout``). Nothing here knows
what a payload belongs to; callers have checked sizes and ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.limits import CACHE_TYPES


@dataclass(frozen=True, slots=True)
class Block:
    """K or V of one layer in a payload of ``n_tokens`` tokens: ``nbytes`` bytes from ``start``.

    ``element_bytes`` is 0 where the block has a row for each token; where V is transposed it is the size of one value.
    """

    layer: int
    part: str  # "k" or "v"
    start: int
    row_bytes: int
    n_tokens: int
    element_bytes: int

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.n_tokens

    @property
    def shape(self) -> tuple[int, int]:
        """As a matrix of bytes: tokens by row, or elements by tokens where transposed."""
        if self.element_bytes:
            return self.row_bytes // self.element_bytes, self.n_tokens * self.element_bytes
        return self.n_tokens, self.row_bytes


def payload_size(layers: Sequence[LayerRows], n_tokens: int) -> int:
    return n_tokens * sum(rows.token_bytes for rows in layers)


def blocks(layers: Sequence[LayerRows], n_tokens: int) -> Iterator[Block]:
    """All blocks of a payload in order; empty ones are left out."""
    start = 0
    for rows in layers:
        element_bytes = CACHE_TYPES[rows.v_type][0] if rows.v_transposed else 0
        for part, row_bytes, element in (("k", rows.k_row_bytes, 0), ("v", rows.v_row_bytes, element_bytes)):
            if row_bytes:
                block = Block(rows.layer, part, start, row_bytes, n_tokens, element)
                yield block
                start += block.nbytes


def copy_tokens(
    source: memoryview, source_block: Block, target: memoryview, target_block: Block, span: tuple[int, int, int]
) -> None:
    """Copy some tokens from a block to the same layer's block of another payload.

    ``span``: the first token in the source, its place in the target (both counted in their payloads), how many.
    """
    first, to, n_tokens = span
    matrix, other = _matrix(source, source_block), _matrix(target, target_block)
    if source_block.element_bytes:
        size = source_block.element_bytes
        other[:, to * size : (to + n_tokens) * size] = matrix[:, first * size : (first + n_tokens) * size]
    else:
        other[to : to + n_tokens] = matrix[first : first + n_tokens]


def _matrix(payload: memoryview, block: Block) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flat = np.frombuffer(payload, dtype=np.uint8, count=block.nbytes, offset=block.start)
    return flat.reshape(block.shape)
