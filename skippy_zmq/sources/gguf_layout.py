"""Encode the header of a GGUF file: what comes before the bytes of its tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from skippy_zmq.sources.gguf_header import MAGIC, GgufHeader
from skippy_zmq.sources.gguf_values import SCALAR_CODES, STRING, U32, U64

_VERSION = 3


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """``type``: ggml's number; ``shape``: elements per dimension, innermost first."""

    name: str
    type: int
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """``header``: the bytes before the first tensor. ``offsets``: of each tensor in the file. ``size``: of the file."""

    header: bytes
    offsets: tuple[int, ...]
    size: int


def number_pair(key: str, value_type: int, value: int) -> bytes:
    """A key-value pair with a whole number of a GGUF type."""
    return encoded_text(key) + U32.pack(value_type) + struct.pack("<" + SCALAR_CODES[value_type], value)


def text_pair(key: str, value: str) -> bytes:
    return encoded_text(key) + U32.pack(STRING) + encoded_text(value)


def pairs_of(header: GgufHeader) -> list[bytes]:
    """The encoded pairs of a header, those apart that say which shard it is."""
    return [header.raw[v.start : v.end] for key, v in header.values.items() if not key.startswith("split.")]


def lay_out(pairs: Sequence[bytes], tensors: Sequence[TensorEntry], alignment: int) -> Layout:
    """A file of these pairs and tensors; every tensor but the first begins at the aligned byte after the one before.

    The file ends with its last tensor.
    """
    table, relative, end = [], [], 0
    for tensor in tensors:
        start = -(-end // alignment) * alignment
        relative.append(start)
        end = start + tensor.nbytes
        shape = b"".join(map(U64.pack, tensor.shape))
        name = encoded_text(tensor.name)
        table.append(name + U32.pack(len(tensor.shape)) + shape + U32.pack(tensor.type) + U64.pack(start))
    header = MAGIC + U32.pack(_VERSION) + U64.pack(len(tensors)) + U64.pack(len(pairs)) + b"".join([*pairs, *table])
    if tensors:
        header = header.ljust(-(-len(header) // alignment) * alignment, b"\0")
    return Layout(header, tuple(len(header) + start for start in relative), len(header) + end)


def encoded_text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return U64.pack(len(raw)) + raw
