"""Read rows of the model's tensors from the files of a checkpoint, transformed, in the type the header says."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.safetensors_table import SourceTensor, read_bytes
from skippy_zmq.sources.checkpoint.tensors import CheckpointTensor, Segment
from skippy_zmq.sources.ggml_types import F32
from skippy_zmq.sources.gguf_values import shown

log = logging.getLogger("skippy_zmq.checkpoint")

Rows = npt.NDArray[Any]  # [rows, row length]: float32, float16, or the bits of bfloat16 as uint16

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_EXPONENTS = {"F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}


def read_rows(tensor: CheckpointTensor, first_row: int, n_rows: int) -> Rows:
    """Rows of ``tensor`` in its type; raise ModelFileError where a file is gone, cut short, or holds infinities or NaN.

    Memory: the rows twice, where they change type thrice.
    """
    if tensor.values is not None:
        return tensor.values.reshape(1, -1)[first_row : first_row + n_rows]
    source = tensor.segments[0].source
    out = np.empty((n_rows, tensor.shape[0]), dtype=_DTYPES[source.dtype])
    done, start = 0, 0
    for segment in tensor.segments:
        end = start + segment.n_rows
        begin, stop = max(first_row, start), min(first_row + n_rows, end)
        if begin < stop:
            part = out[done : done + stop - begin]
            _read_segment(segment, begin - start, part, tensor.permuted_heads)
            done += stop - begin
        start = end
    _check_finite(source, out)
    if tensor.permuted_heads and len(tensor.shape) == 1:
        out = _interleaved(out.reshape(-1, 1), tensor.permuted_heads).reshape(1, -1)
    if tensor.type == F32:
        out = as_float32(source.dtype, out)
        if tensor.offset:
            out += np.float32(tensor.offset)
    return out


def as_float32(dtype: str, values: Rows) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    widened: npt.NDArray[np.float32] = values.astype(np.float32, copy=False)
    return widened


def _read_segment(segment: Segment, first_row: int, out: Rows, heads: int) -> None:
    """Fill ``out`` with rows of a segment from ``first_row`` on, counted in the order that they have in the model."""
    if not heads or len(segment.source.shape) == 1:
        _read_source(segment.source, segment.first_row + first_row, out)
        return
    # The two halves of a head take turns: row 2 i + k of a head is row i of its half k. Whole heads are read.
    length = segment.n_rows // heads
    wanted = np.arange(first_row, first_row + len(out))
    head, inside = np.divmod(wanted, length)
    rows = head * length + inside % 2 * (length // 2) + inside // 2
    begin, end = first_row // length * length, -(-(first_row + len(out)) // length) * length
    whole = np.empty((end - begin, out.shape[1]), dtype=out.dtype)
    _read_source(segment.source, segment.first_row + begin, whole)
    np.take(whole, rows - begin, axis=0, out=out)


def _interleaved(rows: Rows, heads: int) -> Rows:
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _read_source(source: SourceTensor, first_row: int, out: Rows) -> None:
    if not source.fetched:
        raise ModelFileError(
            f"{source.path}: tensor {shown(source.name)}: only the outline of this file was fetched, as for a stage "
            "that does not need it"
        )
    try:
        descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ModelFileError(f"{source.path}: cannot open: {error.strerror}") from None
    try:
        read_bytes(descriptor, source, first_row * source.row_bytes, out.data.cast("B"))
    finally:
        os.close(descriptor)


def _check_finite(source: SourceTensor, values: Rows) -> None:
    bits, exponent = _EXPONENTS[source.dtype]
    if bool(((values.view(bits) & exponent) == exponent).any()):
        raise ModelFileError(
            f"{source.path}: tensor {shown(source.name)}: holds values that are infinite or not a number"
        )


def sample(path: Path, offset: int, length: int) -> bytes:
    """``length`` bytes of ``path``; raise ModelFileError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = os.pread(descriptor, length, offset)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot read: {error.strerror}") from None
    if len(data) != length:
        raise ModelFileError(f"{path}: truncated while open: wanted {length} bytes, got {len(data)}")
    return data
