"""GGUF metadata values: their types, where they lie in a header, and how they are decoded. No checks of meaning."""

from __future__ import annotations

import struct
from dataclasses import dataclass

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)

VALUE_TYPES: dict[int, str] = {
    UINT8: "u8",
    INT8: "i8",
    UINT16: "u16",
    INT16: "i16",
    UINT32: "u32",
    INT32: "i32",
    FLOAT32: "f32",
    BOOL: "bool",
    STRING: "string",
    ARRAY: "array",
    UINT64: "u64",
    INT64: "i64",
    FLOAT64: "f64",
}

SCALAR_CODES: dict[int, str] = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}
SCALAR_BYTES: dict[int, int] = {number: struct.calcsize("<" + code) for number, code in SCALAR_CODES.items()}

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

_ARRAY_PREFIX_BYTES = 16  # type, element type, count
_LONGEST_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Value:
    """Where a key-value pair lies: ``start`` (its key), ``type_start`` (its value type), ``end``."""

    type: int
    element_type: int  # of an array, else 0
    count: int  # elements of an array, else 0
    start: int
    type_start: int
    end: int


def shown(text: str | bytes) -> str:
    """``text`` from a file, quoted for a one-line message: no control characters, bounded length."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return ascii(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...")


def type_text(value: Value) -> str:
    """The type of a value, for messages."""
    return f"array of {VALUE_TYPES[value.element_type]}" if value.type == ARRAY else VALUE_TYPES[value.type]


def decode_scalar(raw: bytes | bytearray, value: Value) -> int | float | bool | str:
    """Decode a value that is no array. Bytes that are not UTF-8 become U+FFFD, as only people read such strings."""
    if value.type == STRING:
        return bytes(raw[value.type_start + 12 : value.end]).decode(errors="replace")
    decoded: int | float | bool = struct.unpack_from("<" + SCALAR_CODES[value.type], raw, value.type_start + 4)[0]
    return decoded


def decode_array(raw: bytes, value: Value) -> list[int] | list[float] | list[bool] | list[str]:
    if value.element_type == STRING:
        return [text.decode(errors="replace") for text in string_array(raw, value)]
    code = SCALAR_CODES[value.element_type]
    return list(struct.unpack_from(f"<{value.count}{code}", raw, value.type_start + _ARRAY_PREFIX_BYTES))


def string_array(raw: bytes, value: Value) -> list[bytes]:
    """The elements of a string array as bytes."""
    unpack = U64.unpack_from
    position = value.type_start + _ARRAY_PREFIX_BYTES
    strings = []
    for _ in range(value.count):
        start = position + 8
        position = start + unpack(raw, position)[0]
        strings.append(raw[start:position])
    return strings
