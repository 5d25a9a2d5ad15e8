"""Stages in one process whose lanes are filled, exported and imported, whatever the split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.sources.gguf_model import open_model

Bytes = NDArray[np.uint8]
Blocks = dict[int, Bytes]  # K and V of a page, by absolute layer

PAGE = 16


def tokens_of(lane: int, n: int, n_vocab: int) -> NDArray[np.int32]:
    return np.array([(37 * i + 101 * lane + 11) % n_vocab for i in range(n)], np.int32)


class Stages:
    """A model cut at ``boundaries``; all stages run every batch."""

    def __init__(self, path: Path, boundaries: Sequence[int], options: StageOptions) -> None:
        self.model = StagedModel(open_model(path), boundaries, options)
        self.stages = self.model.stages

    @property
    def layers(self) -> tuple[LayerRows, ...]:
        return tuple(rows for stage in self.stages for rows in stage.kv_layers)

    def run(self, lane: int, position: int, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """The logits after the last of ``tokens``."""
        (logits,) = self.model.decode([(lane, position, len(tokens))], tokens, [len(tokens) - 1])
        return logits

    def trim(self, lane: int, position: int) -> None:
        self.model.trim(lane, position)

    def export(self, lane: int, first: int, end: int) -> Blocks:
        blocks: Blocks = {}
        for stage in self.stages:
            payload = stage.export_kv(lane, first, end)
            at = 0
            for rows in stage.kv_layers:
                size = rows.token_bytes * (end - first)
                blocks[rows.layer] = payload[at : at + size]
                at += size
            assert at == len(payload)
        return blocks

    def pages(self, lane: int, n_tokens: int) -> list[tuple[Blocks, int]]:
        """All of a lane, page by page, with the number of tokens of each."""
        starts = range(0, n_tokens, PAGE)
        return [(self.export(lane, s, min(s + PAGE, n_tokens)), min(PAGE, n_tokens - s)) for s in starts]

    def restore(self, lane: int, pages: Sequence[tuple[Blocks, int]]) -> None:
        for stage in self.stages:
            payloads = [
                np.concatenate([blocks[rows.layer] for rows in stage.kv_layers] or [np.empty(0, np.uint8)])
                for blocks, _ in pages
            ]
            stage.import_kv(lane, payloads, [n for _, n in pages])


def rows_of(blocks: Blocks, rows: LayerRows, n_tokens: int, element_bytes: int) -> tuple[Bytes, Bytes]:
    """K and V of a layer as uint8 [tokens, bytes of a row]."""
    block = blocks[rows.layer]
    split = rows.k_row_bytes * n_tokens
    k, v = block[:split].reshape(n_tokens, rows.k_row_bytes), block[split:]
    if rows.v_transposed:
        columns = v.reshape(rows.v_row_bytes // element_bytes, n_tokens, element_bytes)
        return k, columns.swapaxes(0, 1).reshape(n_tokens, rows.v_row_bytes)
    return k, v.reshape(n_tokens, rows.v_row_bytes)
