"""Read, edit and write GGUF files byte by byte, without any check: what tests build good and bad model files from.

Independent of skippy_zmq, so that a test never confirms the reader with the reader.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gguf

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def scalar(value_type: int, value: int | float | bool | str) -> bytes:
    """Type and payload of a metadata value."""
    payload = string(value) if isinstance(value, str) else struct.pack("<" + _CODES[value_type], value)
    return struct.pack("<I", value_type) + payload


def array(element_type: int, values: Sequence[int] | Sequence[float] | Sequence[bytes] | Sequence[str]) -> bytes:
    if element_type == STRING:
        payload = b"".join(string(v) for v in values if isinstance(v, str | bytes))
    else:
        payload = struct.pack(f"<{len(values)}{_CODES[element_type]}", *values)
    return struct.pack("<IIQ", ARRAY, element_type, len(values)) + payload


@dataclass(slots=True)
class RawTensor:
    """``shape`` innermost first. ``data`` None: ``nbytes`` zeros that a sparse file need not store.

    ``offset``: what the table says instead of where the data is.
    """

    shape: tuple[int, ...]
    type: int
    data: bytes | None
    nbytes: int = 0
    offset: int | None = None

    def __post_init__(self) -> None:
        if self.data is not None:
            self.nbytes = len(self.data)


@dataclass(slots=True)
class RawGguf:
    """``values``: metadata key to type and payload (see ``scalar`` and ``array``)."""

    values: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def header(self) -> bytes:
        """All bytes up to the first tensor."""
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.values))
        out += b"".join(string(key) + value for key, value in self.values.items())
        offset = 0
        for name, tensor in self.tensors.items():
            out += string(name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            out += struct.pack("<IQ", tensor.type, offset if tensor.offset is None else tensor.offset)
            offset += self.padded(tensor.nbytes)
        return out.ljust(self.padded(len(out)), b"\0") if self.tensors else out

    def padded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def write(self, path: Path) -> Path:
        with path.open("wb") as file:
            file.write(self.header())
            end = file.tell()
            for tensor in self.tensors.values():
                if tensor.data is not None:
                    file.seek(end)
                    file.write(tensor.data)
                end += self.padded(tensor.nbytes)
            file.truncate(end)
        return path


class _Cursor:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.raw[self.at - count : self.at]

    def number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value)

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def skip_value(self) -> None:
        value_type, count = self.number("I"), 1
        if value_type == ARRAY:
            value_type, count = self.number("I"), self.number("Q")
        if value_type == STRING:
            for _ in range(count):
                self.take(self.number("Q"))
        else:
            self.take(count * struct.calcsize("<" + _CODES[value_type]))


def read_raw(path: Path) -> RawGguf:
    """Read a well-formed GGUF file whole."""
    cursor = _Cursor(path.read_bytes())
    cursor.take(4)
    raw = RawGguf(version=cursor.number("I"))
    n_tensors, n_values = cursor.number("Q"), cursor.number("Q")
    for _ in range(n_values):
        key, start = cursor.text(), cursor.at
        cursor.skip_value()
        raw.values[key] = cursor.raw[start : cursor.at]
    if "general.alignment" in raw.values:
        raw.alignment = struct.unpack_from("<I", raw.values["general.alignment"], 4)[0]
    rows = []
    for _ in range(n_tensors):
        name = cursor.text()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))
        rows.append((name, shape, cursor.number("I"), cursor.number("Q")))
    start = raw.padded(cursor.at)
    for name, shape, tensor_type, offset in rows:
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor_type)]
        end = start + offset + math.prod(shape) // block * block_bytes
        raw.tensors[name] = RawTensor(shape, tensor_type, cursor.raw[start + offset : end])
    return raw
