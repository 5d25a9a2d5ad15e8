"""Parse the header of one GGUF file strictly: key-value pairs, tensor table, and the exact size the file must have.

Every rule here is one that llama.cpp's reader relies on. Only the header is read, in growing steps, and nothing is
allocated by a size the file merely announces. Format: ggml/docs/gguf.md; versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.ggml_types import REMOVED_TYPES, TENSOR_TYPES, type_name
from skippy_zmq.sources.gguf_values import (
    ARRAY,
    SCALAR_BYTES,
    STRING,
    U32,
    U64,
    UINT32,
    VALUE_TYPES,
    Value,
    decode_array,
    decode_scalar,
    shown,
)

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 128 * 1024 * 1024  # the largest vocabularies need about 20 MiB
MAX_KEYS = 65_536
MAX_TENSORS = 65_536  # llama.cpp looks each tensor up in the whole table: more would take it minutes
MAX_STRINGS = 4 * 1024 * 1024  # elements of one string array
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with the closing NUL
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 32  # llama.cpp aborts when it maps weights at another boundary
MAX_ALIGNMENT = 1024 * 1024

_FIRST_READ = 1024 * 1024
_INT64_MAX = 2**63 - 1
_FIXED_HEADER_BYTES = 24


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape``: elements per dimension, innermost first; ``offset``: bytes from the start of the file ``path``."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """``raw``: the file's bytes up to ``data_start``. ``data_end``: end of the last tensor. ``size``: of the file."""

    path: Path
    version: int
    alignment: int
    values: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    raw: bytes
    data_start: int
    data_end: int
    size: int

    def scalar(self, key: str) -> int | float | bool | str | None:
        """The value of ``key``; None when it is absent or an array."""
        value = self.values.get(key)
        return None if value is None or value.type == ARRAY else decode_scalar(self.raw, value)

    def array(self, key: str) -> list[int] | list[float] | list[bool] | list[str]:
        """The elements of array ``key``; raise KeyError when it is absent or a scalar."""
        value = self.values[key]
        if value.type != ARRAY:
            raise KeyError(key)
        return decode_array(self.raw, value)


class _Reader:
    """A cursor over the start of a file that reads on when a field needs it, up to the limit of a header."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.size = size
        self.buffer = bytearray()
        self.position = 0
        self._descriptor = descriptor
        self._extend(min(size, _FIRST_READ))

    def fail(self, text: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {text}")

    def _extend(self, end: int) -> None:
        while len(self.buffer) < end:
            block = os.pread(self._descriptor, end - len(self.buffer), len(self.buffer))
            if not block:
                raise self.fail(f"file became shorter while it was read: wanted {end} bytes, got {len(self.buffer)}")
            self.buffer += block

    def require(self, end: int, what: str) -> None:
        """Make the bytes up to ``end`` available."""
        if end <= len(self.buffer):
            return
        if end > self.size:
            raise self.fail(f"truncated inside {what}: needs at least {end} bytes, has {self.size}")
        if end > MAX_HEADER_BYTES:
            raise self.fail(f"{what} would end at byte {end}: wanted a header of at most {MAX_HEADER_BYTES} bytes")
        self._extend(min(self.size, MAX_HEADER_BYTES, max(end, 2 * len(self.buffer))))

    def tensors_end(self, end: int) -> None:
        """The table is read: by it the file ends at ``end``. A real file has a size of its own to compare."""

    def u32(self, what: str) -> int:
        end = self.position + 4
        self.require(end, what)
        (value,) = U32.unpack_from(self.buffer, self.position)
        self.position = end
        return int(value)

    def u64(self, what: str) -> int:
        end = self.position + 8
        self.require(end, what)
        (value,) = U64.unpack_from(self.buffer, self.position)
        self.position = end
        return int(value)

    def name(self, what: str, limit: int) -> str:
        """A string that names something: 1 to ``limit`` bytes of UTF-8 without NUL."""
        length = self.u64(f"length of the {what}")
        if not 1 <= length <= limit:
            raise self.fail(f"{what}: wanted 1 to {limit} bytes, got {length}")
        end = self.position + length
        self.require(end, what)
        raw = bytes(self.buffer[self.position : end])
        self.position = end
        # C code stops at NUL, so two names could look the same to it
        if b"\0" in raw:
            raise self.fail(f"{what} {shown(raw)}: wanted no NUL byte")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} {shown(raw)}: wanted UTF-8") from None

    def skip(self, count: int, what: str) -> None:
        end = self.position + count
        self.require(end, what)
        self.position = end

    def skip_strings(self, count: int, what: str) -> None:
        if count > MAX_STRINGS:
            raise self.fail(f"{what}: wanted at most {MAX_STRINGS} strings, got {count}")
        if self.position + 8 * count > self.size:
            needed = self.position + 8 * count
            raise self.fail(f"truncated inside {what}: needs at least {needed} bytes, has {self.size}")
        unpack, buffer, position = U64.unpack_from, self.buffer, self.position
        steps = itertools.repeat(None, count)
        while True:
            # most of the time to open a model goes into this loop: unpack itself notices the end of the buffer
            try:
                for _ in steps:
                    position += 8 + unpack(buffer, position)[0]
                break
            except (struct.error, OverflowError):
                self.require(position + 8, what)
                position += 8 + unpack(buffer, position)[0]  # the step that was taken in vain
        self.require(position, what)
        self.position = position


class _BytesReader(_Reader):
    """All that there is of the file is at hand."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.path = path
        self.size = len(header)
        self.buffer = bytearray(header)
        self.position = 0

    def tensors_end(self, end: int) -> None:
        self.size = end


def parse_header(path: Path) -> GgufHeader:
    """Read and check the header of ``path``; raise ModelFileError (one line: file, thing, wanted, got)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot open model file: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: wanted a regular file")
        return parse_open_header(descriptor, path)
    finally:
        os.close(descriptor)


def parse_open_header(descriptor: int, path: Path) -> GgufHeader:
    """``parse_header`` for a regular file that is open already; ``path`` is what messages call it."""
    try:
        return _parse(_Reader(path, descriptor, os.fstat(descriptor).st_size))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read model file: {error.strerror}") from None


def parse_header_bytes(path: Path, header: bytes) -> GgufHeader:
    """Check a header, complete up to the first tensor's data, whose tensors lie in no file.

    ``path`` names it in errors. The size is what the tensor table asks for. Raise ModelFileError as parse_header does.
    """
    return _parse(_BytesReader(path, header))


def _parse(reader: _Reader) -> GgufHeader:
    version, n_tensors, n_keys = _read_fixed_header(reader)
    values: dict[str, Value] = {}
    for _ in range(n_keys):
        _read_key_value(reader, values)
    alignment = _alignment(reader, values)
    tensors, table_end = _read_tensor_table(reader, n_tensors)
    data_start = -(-table_end // alignment) * alignment if n_tensors else table_end
    reader.require(data_start, "padding before the tensor data")
    reader.tensors_end(data_start + sum(-(-tensor.nbytes // alignment) * alignment for tensor in tensors.values()))
    placed, data_end = _place_tensors(reader, tensors, data_start, alignment)
    return GgufHeader(
        path=reader.path,
        version=version,
        alignment=alignment,
        values=values,
        tensors=placed,
        raw=bytes(memoryview(reader.buffer)[:data_start]),
        data_start=data_start,
        data_end=data_end,
        size=reader.size,
    )


def _read_fixed_header(reader: _Reader) -> tuple[int, int, int]:
    if reader.size < _FIXED_HEADER_BYTES:
        raise reader.fail(f"truncated GGUF file: needs at least {_FIXED_HEADER_BYTES} bytes, has {reader.size}")
    magic = bytes(reader.buffer[:4])
    if magic != MAGIC:
        raise reader.fail(f"not a GGUF file: wanted it to start with {MAGIC!r}, got {magic!r}")
    reader.position = 4
    version = reader.u32("version")
    if version not in (2, 3):
        reason = " (a big-endian file)" if version and version & 0xFFFF == 0 else ""
        raise reader.fail(f"GGUF version: wanted 2 or 3, got {version}{reason}")
    n_tensors, n_keys = reader.u64("tensor count"), reader.u64("key count")
    for thing, count, limit in (("tensors", n_tensors, MAX_TENSORS), ("keys", n_keys, MAX_KEYS)):
        if count > limit:
            raise reader.fail(f"number of {thing}: wanted at most {limit}, got {count}")
    return version, n_tensors, n_keys


def _read_key_value(reader: _Reader, values: dict[str, Value]) -> None:
    start = reader.position
    key = reader.name("metadata key", MAX_KEY_BYTES)
    if key in values:
        raise reader.fail(f"metadata key {shown(key)} appears twice")
    what = f"metadata key {shown(key)}"
    type_start = reader.position
    value_type = reader.u32(what)
    element_type = count = 0
    if value_type == ARRAY:
        element_type, count = reader.u32(what), reader.u64(what)
        if element_type not in VALUE_TYPES or element_type == ARRAY:
            raise reader.fail(f"{what}: wanted a known array element type, got {element_type}")
        if element_type == STRING:
            reader.skip_strings(count, what)
        else:
            reader.skip(count * SCALAR_BYTES[element_type], what)
    elif value_type == STRING:
        reader.skip(reader.u64(what), what)
    elif value_type in VALUE_TYPES:
        reader.skip(SCALAR_BYTES[value_type], what)
    else:
        raise reader.fail(f"{what}: wanted a known value type, got {value_type}")
    values[key] = Value(value_type, element_type, count, start, type_start, reader.position)


def _alignment(reader: _Reader, values: Mapping[str, Value]) -> int:
    value = values.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    if value.type != UINT32:
        raise reader.fail(f"general.alignment: wanted a u32, got {VALUE_TYPES[value.type]}")
    alignment = int(decode_scalar(reader.buffer, value))
    if alignment < 1 or alignment & (alignment - 1) or not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT:
        raise reader.fail(
            f"general.alignment: wanted a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, got {alignment}"
        )
    return alignment


class _Tensor(NamedTuple):
    type: int
    shape: tuple[int, ...]
    nbytes: int
    relative_offset: int


def _read_tensor_table(reader: _Reader, n_tensors: int) -> tuple[dict[str, _Tensor], int]:
    tensors: dict[str, _Tensor] = {}
    for _ in range(n_tensors):
        name = reader.name("tensor name", MAX_TENSOR_NAME_BYTES)
        what = f"tensor {shown(name)}"
        if name in tensors:
            raise reader.fail(f"{what} appears twice in {reader.path}")
        n_dimensions = reader.u32(what)
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise reader.fail(f"{what}: wanted 1 to {MAX_DIMENSIONS} dimensions, got {n_dimensions}")
        shape = tuple(reader.u64(what) for _ in range(n_dimensions))
        number = reader.u32(what)
        nbytes = tensor_bytes(reader.fail, what, number, shape)
        tensors[name] = _Tensor(number, shape, nbytes, reader.u64(what))
    return tensors, reader.position


def tensor_bytes(fail: Callable[[str], ModelFileError], what: str, number: int, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of type ``number``; raises what ``fail`` makes of a message where none can be so."""
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise fail(f"{what}: wanted 1 to {MAX_DIMENSIONS} dimensions, got {len(shape)}")
    n_elements = 1
    for extent in shape:
        if not 1 <= extent <= _INT64_MAX:
            raise fail(f"{what}: wanted dimensions of 1 to {_INT64_MAX}, got {extent}")
        n_elements *= extent
    if n_elements > _INT64_MAX:
        raise fail(f"{what}: shape {list(shape)} has {n_elements} elements, wanted at most {_INT64_MAX}")
    if number in REMOVED_TYPES:
        raise fail(f"{what}: wanted a tensor type still in use, got the removed {REMOVED_TYPES[number]}")
    known = TENSOR_TYPES.get(number)
    if known is None:
        raise fail(f"{what}: wanted a known tensor type, got {number}")
    if shape[0] % known.block:
        raise fail(
            f"{what}: rows of type {type_name(number)} must be a multiple of {known.block} elements, got {shape[0]}"
        )
    return known.row_bytes(n_elements)


def _place_tensors(
    reader: _Reader, tensors: Mapping[str, _Tensor], data_start: int, alignment: int
) -> tuple[tuple[TensorInfo, ...], int]:
    """Demand that tensors follow each other, each at the next aligned byte, and that the file ends after the last one.

    A file that is short is refused even where only layers of other stages miss bytes: a download that stopped early is
    told apart from a whole file in one place, on every machine. Up to ``alignment`` - 1 bytes of padding may follow.
    """
    placed = []
    expected = end = 0
    for name, tensor in tensors.items():
        if tensor.relative_offset != expected:
            raise reader.fail(
                f"tensor {shown(name)}: wanted its data at offset {expected}, right after the tensor before it,"
                f" got {tensor.relative_offset}"
            )
        start = data_start + expected
        placed.append(TensorInfo(name, tensor.type, tensor.shape, start, tensor.nbytes, reader.path))
        end = expected + tensor.nbytes
        expected = -(-end // alignment) * alignment
    needed, longest = data_start + end, data_start + expected
    if reader.size < needed:
        missing = next(t.name for t in placed if t.offset + t.nbytes > reader.size)
        raise reader.fail(f"truncated: needs {needed} bytes, has {reader.size}; data of tensor {shown(missing)} is cut")
    if reader.size > longest:
        raise reader.fail(f"bytes after the last tensor: needs {needed} bytes (up to {longest}), has {reader.size}")
    return tuple(placed), needed
