"""The table of one .safetensors file, checked: names, types, shapes, and bytes that tile the file without a gap.

Format: an 8-byte little-endian header length, a JSON header, the tensors' bytes. The safetensors library is not used to
read: without a deep-learning framework it has no bfloat16, and it maps files, so one cut short while open would end the
process. Its limits are kept, so that both accept the same files.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.json_file import parse_object
from skippy_zmq.sources.gguf_values import shown

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 16
MAX_EXTENT = 2**53
_SAMPLE_BYTES = 256
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"

DTYPE_BITS: dict[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """``shape``: outermost dimension first; ``offset``: bytes from the start of the file ``path``.

    ``fetched``: whether all bytes are there, not only its ``samples``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    path: Path
    fetched: bool = True

    @property
    def rows(self) -> int:
        """Rows of the innermost dimension; a vector is one row."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] * DTYPE_BITS[self.dtype] // 8

    @property
    def samples(self) -> tuple[tuple[int, int], ...]:
        """Offset from its beginning, and length, of the bytes that stand for the tensor in a model's identity."""
        if self.nbytes <= 3 * _SAMPLE_BYTES:
            return ((0, self.nbytes),)
        last = self.nbytes - _SAMPLE_BYTES
        return tuple((start, _SAMPLE_BYTES) for start in (0, last // 2, last))


def read_table(path: Path, *, fetched: bool = True) -> tuple[SourceTensor, ...]:
    """The tensors of ``path`` in the order of their bytes; raise ModelFileError naming the file and the tensor.

    ``fetched``: what they say of themselves.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot open: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: wanted a regular file")
        header = _read_header(path, descriptor, status.st_size)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return _check_header(path, header, status.st_size, fetched)


def read_bytes(descriptor: int, tensor: SourceTensor, start: int, out: memoryview) -> None:
    """Fill ``out`` with bytes of ``tensor`` from ``start`` on; raise ModelFileError where the file became shorter."""
    done = 0
    while done < len(out):
        try:
            count = os.preadv(descriptor, [out[done:]], tensor.offset + start + done)
        except OSError as error:
            raise ModelFileError(f"{tensor.path}: cannot read tensor {shown(tensor.name)}: {error.strerror}") from None
        if count == 0:
            raise ModelFileError(
                f"{tensor.path}: truncated while open: tensor {shown(tensor.name)}: wanted {len(out)} bytes, got {done}"
            )
        done += count


def _read_header(path: Path, descriptor: int, size: int) -> bytes:
    if size < _LENGTH.size:
        raise ModelFileError(f"{path}: truncated: wanted at least {_LENGTH.size} bytes, got {size}")
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise ModelFileError(f"{path}: header length: wanted 2 to {MAX_HEADER_BYTES} bytes, got {length}")
    if _LENGTH.size + length > size:
        raise ModelFileError(f"{path}: truncated inside the header: needs {_LENGTH.size + length} bytes, has {size}")
    header = os.pread(descriptor, length, _LENGTH.size)
    if len(header) != length:
        raise ModelFileError(f"{path}: file became shorter while it was read")
    return header


def _check_header(path: Path, header: bytes, size: int, fetched: bool) -> tuple[SourceTensor, ...]:
    if header[:1] != b"{":
        raise ModelFileError(f"{path}: header: wanted it to start with '{{', got {shown(header[:1])}")
    table = parse_object(path, header, "header")
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelFileError(f"{path}: {_METADATA}: wanted a map of strings")
    data_start = _LENGTH.size + len(header)
    tensors = [_check_entry(path, name, entry, data_start, size, fetched) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end, last = data_start, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            fault = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise ModelFileError(
                f"{path}: tensor {shown(tensor.name)} {fault} {last}: wanted offset {end - data_start}, "
                f"got {tensor.offset - data_start}"
            )
        end, last = end + tensor.nbytes, f"tensor {shown(tensor.name)}"
    if end != size:
        raise ModelFileError(f"{path}: bytes after {last}: wanted a file of {end} bytes, got {size}")
    return tuple(tensors)


def _check_entry(path: Path, name: str, entry: Any, data_start: int, size: int, fetched: bool) -> SourceTensor:
    def fail(text: str) -> ModelFileError:
        return ModelFileError(f"{path}: tensor {shown(name)}: {text}")

    if not isinstance(entry, dict):
        raise fail("wanted a JSON object that describes it")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise fail(f"wanted a known dtype, got {shown(str(dtype))}")
    if not isinstance(shape, list) or not all(_is_count(extent) for extent in shape):
        raise fail("shape: wanted a list of numbers from 0")
    if len(shape) > MAX_DIMENSIONS:
        raise fail(f"shape: wanted at most {MAX_DIMENSIONS} dimensions, got {len(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise fail("data_offsets: wanted two numbers from 0")
    begin, end = offsets
    if begin > end or data_start + end > size:
        raise fail(f"data_offsets: wanted them rising and at most {size - data_start}, got {begin} and {end}")
    n_bits = math.prod(shape) * DTYPE_BITS[dtype]
    if n_bits % 8 or n_bits // 8 != end - begin:
        raise fail(f"shape {shape} of {dtype} needs {n_bits / 8:g} bytes, data_offsets give {end - begin}")
    return SourceTensor(name, dtype, tuple(shape), data_start + begin, end - begin, path, fetched)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_EXTENT
