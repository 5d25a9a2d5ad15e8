"""Write GGUF headers: metadata and tensor table, up to the first tensor's data.

Format: ggml/docs/gguf.md, version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.ggml_types import TENSOR_TYPES, type_name
from skippy_zmq.sources.gguf_header import DEFAULT_ALIGNMENT, MAGIC, GgufHeader
from skippy_zmq.sources.gguf_values import ARRAY, SCALAR_CODES, STRING, U32, U64

_VERSION = 3

TableRow = tuple[str, int, tuple[int, ...]]  # name, type, shape innermost first


def _text(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return U64.pack(len(raw)) + raw


def encoded(value_type: int, value: int | float | bool | str) -> bytes:
    """Type and payload of a scalar; raise struct.error where the value does not fit the type."""
    payload = _text(value) if isinstance(value, str) else struct.pack("<" + SCALAR_CODES[value_type], value)
    return U32.pack(value_type) + payload


def encoded_array(
    element_type: int, values: Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bytes]
) -> bytes:
    """Type and payload of an array; raise struct.error where a value does not fit the type."""
    if element_type == STRING:
        payload = b"".join(_text(value) for value in values if isinstance(value, str | bytes))
    else:
        payload = struct.pack(f"<{len(values)}{SCALAR_CODES[element_type]}", *values)
    return U32.pack(ARRAY) + U32.pack(element_type) + U64.pack(len(values)) + payload


def encoded_values(header: GgufHeader) -> dict[str, bytes]:
    """The metadata of ``header`` as it stands there, by key."""
    return {key: header.raw[value.type_start : value.end] for key, value in header.values.items()}


def header_bytes(values: Mapping[str, bytes], tensors: Sequence[TableRow], alignment: int = DEFAULT_ALIGNMENT) -> bytes:
    """All bytes before the first tensor's data; the tensors follow each other in the order given.

    ``values``: by key what ``encoded`` and ``encoded_array`` return; ``alignment`` must be what they say it is. Raise
    ModelFileError for rows that are no whole blocks of their type.
    """
    parts = [MAGIC, U32.pack(_VERSION), U64.pack(len(tensors)), U64.pack(len(values))]
    parts += [_text(key) + value for key, value in values.items()]
    offset = 0
    for name, number, shape in tensors:
        kind = TENSOR_TYPES[number]
        if shape[0] % kind.block:
            raise ModelFileError(
                f"tensor {name!r}: rows of {type_name(number)} must be a multiple of {kind.block} elements,"
                f" got {shape[0]}"
            )
        n_elements = 1
        for extent in shape:
            n_elements *= extent
        parts.append(_text(name) + U32.pack(len(shape)) + b"".join(map(U64.pack, shape)))
        parts.append(U32.pack(number) + U64.pack(offset))
        offset += _aligned(kind.row_bytes(n_elements), alignment)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header), alignment), b"\0")


def _aligned(count: int, alignment: int) -> int:
    return -(-count // alignment) * alignment
