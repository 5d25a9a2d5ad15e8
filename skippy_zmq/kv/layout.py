"""How the bytes of a page lie: by layer, then K before V, then by token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The attention state that one layer keeps of one token.

    In a page of n tokens the layer has a K block of n * ``k_row_bytes`` bytes, tokens in order, and then a V block of
    n * ``v_row_bytes`` bytes: rows of tokens in order too or, where ``v_transposed``, for each element of a row the n
    values of all tokens. ``k_type`` and ``v_type`` are ggml's names; a layer without V of its own has 0 bytes of it.
    """

    layer: int  # absolute
    k_type: str
    v_type: str
    k_row_bytes: int
    v_row_bytes: int
    v_transposed: bool = False

    @property
    def token_bytes(self) -> int:
        return self.k_row_bytes + self.v_row_bytes
