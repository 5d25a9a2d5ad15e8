"""GGUF headers of models that are in no file: metadata values as bytes, and all that comes before the tensors' data."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.ggml_types import TENSOR_TYPES, type_name
from skippy_zmq.sources.gguf_header import DEFAULT_ALIGNMENT, GgufHeader
from skippy_zmq.sources.gguf_layout import TensorEntry, encoded_text, lay_out
from skippy_zmq.sources.gguf_values import ARRAY, SCALAR_CODES, STRING, U32, U64

TableRow = tuple[str, int, tuple[int, ...]]  # name, type, shape innermost first


def encoded(value_type: int, value: int | float | bool | str) -> bytes:
    """Type and payload of a scalar; raise struct.error where the value does not fit the type."""
    payload = encoded_text(value) if isinstance(value, str) else struct.pack("<" + SCALAR_CODES[value_type], value)
    return U32.pack(value_type) + payload


def encoded_array(
    element_type: int, values: Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bytes]
) -> bytes:
    """Type and payload of an array; raise struct.error where a value does not fit the type."""
    if element_type == STRING:
        payload = b"".join(encoded_text(value) for value in values if isinstance(value, str | bytes))
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
    entries = []
    for name, number, shape in tensors:
        kind = TENSOR_TYPES[number]
        if shape[0] % kind.block:
            raise ModelFileError(
                f"tensor {name!r}: rows of {type_name(number)} must be a multiple of {kind.block} elements,"
                f" got {shape[0]}"
            )
        entries.append(TensorEntry(name, number, shape, kind.row_bytes(math.prod(shape))))
    return lay_out([encoded_text(key) + value for key, value in values.items()], entries, alignment).header
