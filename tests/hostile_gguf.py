"""Model files with one poison each: sizes that wrap around, counts that ask for gigabytes, tables that lie."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gguf_bytes import ARRAY, FLOAT32, INT32, STRING, UINT8, UINT32, UINT64, RawGguf, array, read_raw, scalar, string
from model_files import tiny

_COUNTS_AT = 8  # tensor count, then key count, after magic and version
_MATRIX = "blk.1.attn_q.weight"
_MINUS_ONE = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Poison:
    """``data``: the whole file. ``complaint``: a pattern that the refusal must match."""

    name: str
    data: bytes
    complaint: str


def base_model(folder: Path) -> Path:
    """The sound file that every poison is made from."""
    return tiny(folder / "sound.gguf", n_layers=2, hidden=32, ffn=32, heads=2, kv_heads=1)


def poisons(sound: Path) -> Iterator[Poison]:
    """Every poison, made from the sound file ``sound``."""
    yield from _fixed_header(sound.read_bytes())
    yield from _values(sound)
    yield from _tensors(sound)


def _file(raw: RawGguf) -> bytes:
    out = bytearray(raw.header())
    for tensor in raw.tensors.values():
        data = tensor.data or b""
        out += data.ljust(raw.padded(len(data)), b"\0")
    return bytes(out)


def _fixed_header(sound: bytes) -> Iterator[Poison]:
    def patched(offset: int, data: bytes) -> bytes:
        return sound[:offset] + data + sound[offset + len(data) :]

    yield Poison("magic", b"GGML" + sound[4:], "not a GGUF file")
    yield Poison("not a model at all", b"<!DOCTYPE html><html><body>404</body></html>", "not a GGUF file")
    for version in (0, 1, 4, 99):
        yield Poison(f"version {version}", patched(4, struct.pack("<I", version)), f"wanted 2 or 3, got {version}")
    yield Poison("byte-swapped", patched(4, struct.pack(">I", 3)), "big-endian")
    for count in (2**60, 2**63, _MINUS_ONE):
        yield Poison(f"{count} tensors", patched(_COUNTS_AT, struct.pack("<Q", count)), "number of tensors")
        yield Poison(f"{count} keys", patched(_COUNTS_AT + 8, struct.pack("<Q", count)), "number of keys")


def _values(sound: Path) -> Iterator[Poison]:
    def with_value(name: str, key: str, value: bytes, complaint: str) -> Poison:
        raw = read_raw(sound)
        raw.values = {key: value, **{k: v for k, v in raw.values.items() if k != key}}
        return Poison(name, _file(raw), complaint)

    for length in (2**31, 2**40, 2**63, _MINUS_ONE):
        value = struct.pack("<IQ", STRING, length)
        yield with_value(f"string of {length}", "general.note", value, "truncated inside metadata key 'general.note'")
        value = struct.pack("<IIQQ", ARRAY, STRING, 1, length)
        yield with_value(f"array of a string of {length}", "general.note", value, "truncated inside metadata key")
        key = b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, length) + bytes(64)
        yield Poison(f"key of {length}", key, "metadata key: wanted 1 to 65535 bytes")
    for count in (2**24, 2**60, 2**61, _MINUS_ONE):
        for element in (UINT8, UINT32, UINT64, STRING):
            value = struct.pack("<IIQ", ARRAY, element, count)
            yield with_value(f"array of {count} of type {element}", "general.note", value, "general.note")
    yield with_value(
        "array of arrays", "general.note", struct.pack("<IIQ", ARRAY, ARRAY, 1), "array element type, got 9"
    )
    yield with_value(
        "array of type 13", "general.note", struct.pack("<IIQ", ARRAY, 13, 1), "array element type, got 13"
    )
    yield with_value("value of type 77", "general.note", struct.pack("<I", 77), "known value type, got 77")
    for alignment in (0, 1, 3, 8, 33, 2**21, 2**31):
        value = scalar(UINT32, alignment)
        yield with_value(f"alignment {alignment}", "general.alignment", value, f"power of two .* got {alignment}")
    for number, value in ((UINT64, 32), (INT32, 32), (FLOAT32, 32.0)):
        yield with_value(f"alignment of type {number}", "general.alignment", scalar(number, value), "wanted a u32, got")
    yield with_value("alignment array", "general.alignment", array(UINT32, [32]), "wanted a u32, got array")
    for name, key in (("empty key", b""), ("key of 70,000 bytes", b"k" * 70_000)):
        raw = read_raw(sound)
        yield Poison(name, _with_raw_key(raw, key), "metadata key: wanted 1 to 65535 bytes")
    yield Poison("key that is not UTF-8", _with_raw_key(read_raw(sound), b"k\xff\xfe"), "wanted UTF-8")
    yield Poison("key with a NUL", _with_raw_key(read_raw(sound), b"general.name\0x"), "no NUL")
    raw = read_raw(sound)
    raw.values["general.nama"] = raw.values["general.name"]
    doubled = _file(raw).replace(string("general.nama"), string("general.name"))
    yield Poison("key twice", doubled, "'general.name' appears twice")


def _with_raw_key(raw: RawGguf, key: bytes) -> bytes:
    raw.values["general.placeholder"] = scalar(UINT8, 1)
    header = raw.header().rstrip(b"\0")
    header = header.replace(string("general.placeholder"), string(key))
    return header.ljust(len(_file(raw)) + len(key) + 64, b"\0")


def _tensors(sound: Path) -> Iterator[Poison]:
    def with_tensor(name: str, edit: Callable[[RawGguf], None], complaint: str) -> Poison:
        raw = read_raw(sound)
        edit(raw)
        return Poison(name, _file(raw), complaint)

    def shape(*extents: int) -> Callable[[RawGguf], None]:
        def edit(raw: RawGguf) -> None:
            raw.tensors[_MATRIX].shape = extents

        return edit

    yield with_tensor("shape whose padded size wraps to 0", shape(4, 2**30 - 1, 2**30 + 1), "truncated|wanted its data")
    yield with_tensor("2^62 elements", shape(2**62), "truncated|wanted its data")
    yield with_tensor("2^64 elements", shape(2**32, 2**32), "has 18446744073709551616 elements")
    yield with_tensor("product that wraps to 1", shape(2**63 - 1, 2**63 - 1), "elements, wanted at most")
    yield with_tensor("dimension 0", shape(32, 0), "wanted dimensions of 1 to")
    yield with_tensor("dimension -1", shape(32, _MINUS_ONE), "wanted dimensions of 1 to")
    for n_dimensions in (0, 5, 9):
        yield with_tensor(f"{n_dimensions} dimensions", shape(*[1] * n_dimensions), f"got {n_dimensions}")
    header = read_raw(sound).header()
    at = header.index(string(_MATRIX)) + len(string(_MATRIX))
    broken = header[:at] + struct.pack("<I", 2**31) + header[at + 4 :]
    yield Poison("2^31 dimensions", broken + bytes(100_000), "got 2147483648")

    def offset(value: int) -> Callable[[RawGguf], None]:
        def edit(raw: RawGguf) -> None:
            raw.tensors[_MATRIX].offset = value

        return edit

    for value in (0, 1, 33, 32 * 1000, 2**63, 2**64 - 32):
        yield with_tensor(f"offset {value}", offset(value), f"wanted its data at offset .* got {value}")

    def tensor_type(value: int) -> Callable[[RawGguf], None]:
        def edit(raw: RawGguf) -> None:
            raw.tensors[_MATRIX].type = value

        return edit

    for value in (43, 250, 2**31, 2**32 - 1):
        yield with_tensor(f"tensor type {value}", tensor_type(value), f"known tensor type, got {value}")
    for value in (4, 5, 31, 36):
        yield with_tensor(f"removed tensor type {value}", tensor_type(value), "removed Q4_|removed IQ4_NL")
    yield with_tensor("rows that are no whole blocks", tensor_type(12), "multiple of 256")

    def renamed(new: str) -> Callable[[RawGguf], None]:
        def edit(raw: RawGguf) -> None:
            raw.tensors = {new if name == _MATRIX else name: tensor for name, tensor in raw.tensors.items()}

        return edit

    yield with_tensor("empty tensor name", renamed(""), "tensor name: wanted 1 to 63 bytes, got 0")
    yield with_tensor("tensor name of 64 bytes", renamed("n" * 64), "tensor name: wanted 1 to 63 bytes, got 64")
    yield with_tensor("tensor name with a NUL", renamed("blk.1.attn_k\0"), "no NUL")
    doubled = _file(read_raw(sound)).replace(string("blk.1.attn_k.weight"), string(_MATRIX))
    yield Poison("tensor twice", doubled, f"'{_MATRIX}' appears twice")
