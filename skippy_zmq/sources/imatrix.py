"""Importance matrices: what llama.cpp's ``llama-imatrix`` writes, in its legacy format (``.dat``) and as GGUF.

An entry holds, per input column of a tensor (and per expert), the mean of the squared activations that met it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.ggml_types import F32, type_name
from skippy_zmq.sources.gguf_header import MAGIC, MAX_TENSORS, GgufHeader, TensorInfo, parse_header
from skippy_zmq.sources.gguf_values import ARRAY, STRING, shown

MAX_FILE_BYTES = 4 * 1024**3  # that of a model of 400 layers and 500 experts has 1 GiB
MAX_ENTRIES = MAX_TENSORS
MAX_NAME_BYTES = 1024

_SUMS, _COUNTS = ".in_sum2", ".counts"
_METADATA = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
_I32 = struct.Struct("<i")

Importances = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """``entries``: by tensor name, float32 [experts * row length]; ``sha256``: of the file; ``chunks``: or 0."""

    path: Path
    sha256: str
    entries: Mapping[str, Importances]
    datasets: tuple[str, ...]
    chunks: int


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read either format; raise ModelFileError (one line: file, thing, wanted, got) for anything else."""
    try:
        if not path.exists():
            raise ModelFileError(f"{path}: wanted an importance matrix, there is no such file")
        if not path.is_file():
            raise ModelFileError(f"{path}: wanted an importance matrix, got no regular file")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelFileError(f"{path}: wanted an importance matrix of at most {MAX_FILE_BYTES} bytes, got {size}")
        raw = path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read importance matrix: {error.strerror}") from None
    entries, datasets, chunks = _read_gguf(path, raw) if raw[:4] == MAGIC else _read_legacy(path, raw)
    for name, values in entries.items():
        if not np.isfinite(values).all() or values.min(initial=0.0) < 0.0:  # llama.cpp asserts on what they give
            raise ModelFileError(f"{path}: entry {shown(name)}: wanted finite numbers from 0, as squares are")
    return ImportanceMatrix(path, hashlib.sha256(raw).hexdigest(), MappingProxyType(entries), datasets, chunks)


_Contents = tuple[dict[str, Importances], tuple[str, ...], int]


def _read_gguf(path: Path, raw: bytes) -> _Contents:
    header = parse_header(path)
    for key in _METADATA:
        if key not in header.values:
            raise ModelFileError(f"{path}: wanted an importance matrix, but {key} is missing")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    names = [name.removesuffix(_SUMS) for name in tensors if name.endswith(_SUMS)]
    for name in tensors:
        if name.endswith(_COUNTS) and name.removesuffix(_COUNTS) + _SUMS not in tensors:
            raise ModelFileError(f"{path}: tensor {shown(name)} has no {_SUMS!r} beside it")
    if not names:
        raise ModelFileError(f"{path}: wanted an importance matrix, got no entries")
    entries = {name: _mean_squares(path, raw, name, tensors) for name in names}
    value = header.values["imatrix.datasets"]
    datasets = header.array("imatrix.datasets") if value.type == ARRAY and value.element_type == STRING else []
    return entries, tuple(map(str, datasets)), _chunk_count(header)


def _chunk_count(header: GgufHeader) -> int:
    value = header.scalar("imatrix.chunk_count")
    if not isinstance(value, int):
        raise ModelFileError(f"{header.path}: imatrix.chunk_count: wanted a number")
    return value


def _mean_squares(path: Path, raw: bytes, name: str, tensors: Mapping[str, TensorInfo]) -> Importances:
    counts = tensors.get(name + _COUNTS)
    if counts is None:
        raise ModelFileError(f"{path}: tensor {shown(name + _SUMS)} has no {_COUNTS!r} beside it")
    sums = _values(path, raw, tensors[name + _SUMS])
    times = np.trunc(_values(path, raw, counts) + np.float32(0.5))  # halves away from zero
    if not np.isfinite(times).all() or sums.size % times.size:
        raise ModelFileError(f"{path}: entry {shown(name)}: {sums.size} sums do not fit its {times.size} counts")
    rows = sums.reshape(times.size, -1)
    seen = times > 0
    # an expert that nobody asked weighs all columns alike
    means = np.ones_like(rows)
    means[seen] = rows[seen] / times[seen, np.newaxis]
    return means.reshape(-1)


def _values(path: Path, raw: bytes, tensor: TensorInfo) -> Importances:
    if tensor.type != F32:
        raise ModelFileError(f"{path}: tensor {shown(tensor.name)}: wanted F32, got {type_name(tensor.type)}")
    if tensor.offset + tensor.nbytes > len(raw):
        raise ModelFileError(f"{path}: was written while it was read; try again")
    return np.frombuffer(raw, np.dtype("<f4"), tensor.nbytes // 4, tensor.offset)


class _Cursor:
    def __init__(self, path: Path, raw: bytes) -> None:
        self.path, self.raw, self.position = path, raw, 0

    @property
    def left(self) -> int:
        return len(self.raw) - self.position

    def number(self, what: str) -> int:
        return int(_I32.unpack(self.take(4, what))[0])

    def take(self, count: int, what: str) -> bytes:
        if self.left < count:
            raise ModelFileError(f"{self.path}: truncated inside {what}: wanted {count} bytes, got {self.left}")
        self.position += count
        return self.raw[self.position - count : self.position]

    def counted(self, lowest: int, highest: int, what: str) -> int:
        count = self.number(what)
        if not lowest <= count <= highest:
            raise ModelFileError(f"{self.path}: {what}: wanted {lowest} to {highest}, got {count}")
        return count


def _read_legacy(path: Path, raw: bytes) -> _Contents:
    cursor = _Cursor(path, raw)
    entries: dict[str, Importances] = {}
    for number in range(cursor.counted(1, MAX_ENTRIES, "number of entries (no importance matrix?)")):
        what = f"entry {number}"
        encoded_name = cursor.take(cursor.counted(1, MAX_NAME_BYTES, f"name length of {what}"), f"name of {what}")
        name = encoded_name.decode(errors="replace")
        calls = cursor.number(what)
        n_values = cursor.counted(1, cursor.left // 4, f"number of values of {what}")
        values = np.frombuffer(cursor.take(4 * n_values, what), np.dtype("<f4"))
        if name in entries:
            raise ModelFileError(f"{path}: entry {shown(name)} appears twice")
        entries[name] = values / np.float32(calls) if calls > 0 else values
    if not cursor.left:
        return entries, (), 0
    chunks = cursor.number("chunk count")
    length = cursor.counted(0, cursor.left, "length of the dataset's name") if cursor.left else 0
    dataset = cursor.take(length, "dataset's name").decode(errors="replace")
    if cursor.left:
        raise ModelFileError(f"{path}: wanted the end behind the dataset's name, got {cursor.left} bytes more")
    return entries, (dataset,) if dataset else (), chunks
