"""A session's attention state as plain arrays, and pages cut from it the slow, obvious way."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from skippy_zmq.kv.chain import TokenLinks
from skippy_zmq.kv.descriptor import PageFacts
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.page import KvPage, seal

MODEL, BUILD = "ab" * 32, "llama.cpp 0.5.0"
BLOCK_BYTES = {"f32": 4, "f16": 2, "q8_0": 34, "q4_0": 18}


def plain_layers(start: int, end: int, *, row_bytes: int = 8) -> tuple[LayerRows, ...]:
    return tuple(LayerRows(layer, "f16", "f16", row_bytes, row_bytes) for layer in range(start, end))


@dataclass
class State:
    """All layers' K and V of a session, one row of bytes for each token; they depend on it and on those before it."""

    layers: tuple[LayerRows, ...]
    tokens: tuple[int, ...]
    page_tokens: int = 4
    seed: int = 0
    k: dict[int, np.ndarray] = field(init=False)
    v: dict[int, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.k = {rows.layer: self._rows(f"k{rows.layer}", rows.k_row_bytes) for rows in self.layers}
        self.v = {rows.layer: self._rows(f"v{rows.layer}", rows.v_row_bytes) for rows in self.layers}
        self.links = TokenLinks(self.tokens, self.page_tokens)

    def _rows(self, name: str, row_bytes: int) -> np.ndarray:
        running = hashlib.shake_128(f"{self.seed} {name}".encode())
        rows = []
        for token in self.tokens:
            running.update(token.to_bytes(4, "little"))
            rows.append(np.frombuffer(running.digest(row_bytes), np.uint8))
        return np.stack(rows)

    def payload(self, layers: tuple[LayerRows, ...], first: int, end: int) -> bytes:
        parts = []
        for rows in layers:
            parts.append(self.k[rows.layer][first:end].tobytes())
            v = self.v[rows.layer][first:end]
            if rows.v_transposed:
                v = v.reshape(end - first, -1, BLOCK_BYTES[rows.v_type]).transpose(1, 0, 2)
            parts.append(v.tobytes())
        return b"".join(parts)

    def page(self, first: int, end: int, layers: tuple[LayerRows, ...] | None = None) -> KvPage:
        layers = self.layers if layers is None else layers
        facts = PageFacts(MODEL, BUILD, layers)
        return seal(facts, first, end, self.links.at(first), self.links.at(end), self.payload(layers, first, end))

    def pages(self, layers: tuple[LayerRows, ...] | None = None, step: int | None = None) -> list[KvPage]:
        step = step or self.page_tokens
        n = len(self.tokens)
        return [self.page(first, min(first + step, n), layers) for first in range(0, n, step)]


@st.composite
def layer_rows(draw: st.DrawFn, layer: int) -> LayerRows:
    k_type = draw(st.sampled_from(sorted(BLOCK_BYTES)))
    transposed = draw(st.booleans())
    v_type = draw(st.sampled_from(["f16", "f32"] if transposed else sorted(BLOCK_BYTES)))
    return LayerRows(
        layer,
        k_type,
        v_type,
        BLOCK_BYTES[k_type] * draw(st.integers(1, 3)),
        BLOCK_BYTES[v_type] * draw(st.integers(0, 3)),
        transposed,
    )


@st.composite
def states(draw: st.DrawFn, max_tokens: int = 20) -> State:
    numbers = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=5)))
    layers = tuple(draw(layer_rows(number)) for number in numbers)
    tokens = tuple(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=max_tokens)))
    return State(layers, tokens, draw(st.integers(1, 6)), draw(st.integers(0, 1000)))


@st.composite
def tiles(draw: st.DrawFn, length: int) -> list[tuple[int, int]]:
    """Ranges that tile 0 to ``length``."""
    edges = draw(st.sets(st.integers(1, length - 1), max_size=3)) if length > 1 else set()
    points = [0, *sorted(edges), length]
    return list(itertools.pairwise(points))
