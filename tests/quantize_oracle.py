"""llama.cpp's own quantizer, called through llama-cpp-python; model files as checkpoints, and checkpoints as files."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint
from skippy_zmq.sources.gguf_header import TensorInfo, parse_header
from skippy_zmq.sources.gguf_model import GgufModel, open_header

Matrix = Mapping[str, NDArray[np.float32]]


def llama_quantize(
    source: Path, target: Path, file_type: int, *, imatrix: Matrix | None = None, threads: int = 2
) -> Path:
    """Raise ValueError where llama.cpp refuses."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, threads
    if imatrix is not None:
        rows = [
            llama_cpp.llama_model_imatrix_data(
                name.encode(), values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), values.size
            )
            for name, values in imatrix.items()
        ]
        params.imatrix = (llama_cpp.llama_model_imatrix_data * (len(rows) + 1))(*rows)
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise ValueError(f"llama.cpp refused to quantize {source.name} to {file_type}")
    return target


def types_in(path: Path) -> dict[str, int]:
    return {tensor.name: tensor.type for tensor in parse_header(path).tensors}


def bytes_in(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    return {t.name: data[t.offset : t.offset + t.nbytes] for t in parse_header(path).tensors}


@dataclass(slots=True)
class FileRows:
    """Rows of a model file; ``asked``: the names of the tensors that were asked for, in order."""

    path: Path
    asked: list[str] = field(default_factory=list)

    def __call__(self, tensor: TensorInfo, first_row: int, n_rows: int) -> bytes:
        if tensor.name not in self.asked[-1:]:
            self.asked.append(tensor.name)
        row_bytes = tensor.nbytes // int(np.prod(tensor.shape[1:]))
        with self.path.open("rb") as file:
            file.seek(tensor.offset + first_row * row_bytes)
            return file.read(n_rows * row_bytes)


def as_checkpoint(path: Path, rows: FileRows | None = None) -> GgufModel:
    """The model of a file as one that is made while it loads."""
    return open_header(path, parse_header(path).raw, rows or FileRows(path), content="a" * 64)


def as_gguf(folder: Path, path: Path) -> Path:
    """The checkpoint in one GGUF file; test_checkpoint_conversion compares its parts with the converter's."""
    checkpoint = open_checkpoint(folder)
    out = bytearray(checkpoint.header())
    for tensor in checkpoint.model().tensors:
        out += bytes(tensor.offset - len(out))
        out += checkpoint.rows(tensor.name, 0, checkpoint.tensors[tensor.name].n_rows).tobytes()
    path.write_bytes(out.ljust(-(-len(out) // 32) * 32, b"\0"))
    return path


def made(model: GgufModel, tensor: TensorInfo, *, at_a_time: int = 1 << 30) -> bytes:
    """All bytes of a tensor of a model that is made while it loads."""
    assert model.rows is not None
    n_rows = int(np.prod(tensor.shape[1:]))
    firsts = range(0, n_rows, at_a_time)
    return b"".join(bytes(memoryview(model.rows(tensor, n, min(at_a_time, n_rows - n)))) for n in firsts)


def random_importances(model: GgufModel, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """An entry for every matrix of the layers."""
    random = np.random.default_rng(seed)
    return {
        tensor.name: random.uniform(0.1, 4.0, tensor.shape[0] * (tensor.shape[2:] or (1,))[0]).astype(np.float32)
        for tensor in model.tensors
        if len(tensor.shape) > 1 and tensor.name.startswith("blk.") and "gate_inp" not in tensor.name
    }
