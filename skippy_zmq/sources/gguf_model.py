"""A model in GGUF files (one, or shards): opened, checked and described as one virtual file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.sources import architectures
from skippy_zmq.sources.gguf_header import GgufHeader, TensorInfo, parse_header_bytes
from skippy_zmq.sources.gguf_hyperparameters import check_hyperparameters
from skippy_zmq.sources.gguf_shards import open_shards
from skippy_zmq.sources.gguf_tensors import check_tensors
from skippy_zmq.sources.gguf_values import ARRAY, STRING, U32, U64, shown, type_text
from skippy_zmq.sources.gguf_vocabulary import check_vocabulary
from skippy_zmq.sources.stage_files import StageFiles
from skippy_zmq.topology import LayerRange

# In a file that `package compose --layers` made: whose bytes it holds, and the identity of the whole model.
HELD_LAYERS_KEY = "skippy_zmq.stage.layers"
WHOLE_IDENTITY_KEY = "skippy_zmq.stage.identity"

_SAMPLE_BYTES = 256
_BLOCK_BYTES = 4 * 1024 * 1024
_IDENTITY_FORMAT = b"skippy-zmq model identity 1\0"
_FULL_FORMAT = b"skippy-zmq model full hash 1\0"

RowBytes = bytes | bytearray | memoryview | npt.NDArray[Any]
# (tensor, first row, number of rows) -> the bytes of those rows in the tensor's type, little-endian, C order. A row
# runs along the innermost dimension; those of all experts follow each other.
RowSource = Callable[[TensorInfo, int, int], RowBytes]


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model is quantized: the name of the recipe, and the SHA-256 of the importance matrix's file or nothing."""

    recipe: str
    imatrix_sha256: str


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A checked model. ``path`` is the file that was opened; ``files`` are all of its files, in shard order.

    A model that is made while it loads has no files: ``rows`` makes its tensors, and ``content`` (a hash of what they
    are made from) stands for their bytes in the identity. ``origins``: by tensor name, the files that its rows are read
    from; None where that is not known. ``quantization``: None where tensors keep the types of their source.

    ``metadata`` holds the scalars; ``array`` decodes an array. ``n_blocks`` counts all blocks, ``n_layers`` those a
    pipeline runs (without the blocks that only predict further tokens). ``n_positions``: the positions of a learned
    position table, None without one; running past it aborts llama.cpp. ``held_layers``: the only layers whose bytes the
    file holds, None where it holds all.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, int | float | bool | str]
    tensors: tuple[TensorInfo, ...]
    architecture: str
    n_blocks: int
    n_layers: int
    n_vocab: int
    embedding_length: int
    context_length: int
    n_positions: int | None
    tied_output: bool
    chat_template: str | None
    held_layers: LayerRange | None
    _first: GgufHeader
    rows: RowSource | None
    content: str | None
    origins: Mapping[str, tuple[Path, ...]] | None
    quantization: Quantization | None

    @property
    def header(self) -> GgufHeader:
        """The header of the only or first file."""
        return self._first

    @property
    def alignment(self) -> int:
        """Of the tensors in a file that holds the whole model."""
        return self._first.alignment

    def array(self, key: str) -> list[int] | list[float] | list[bool] | list[str]:
        """The elements of the metadata array ``key``; raise KeyError when it is absent or a scalar."""
        return self._first.array(key)

    def identity(self) -> str:
        """Hex SHA-256 of metadata, tensor table and sampled bytes of every tensor; equal for a file and its shards.

        Reads 768 bytes per tensor, whatever the size of the model. A file that holds a stage only states it.
        """
        if self.held_layers is not None:
            return str(self.metadata[WHOLE_IDENTITY_KEY])
        return self.sampled_identity()

    def sampled_identity(self) -> str:
        """``identity``, always computed from the bytes."""
        digest = self._table_digest(_IDENTITY_FORMAT)
        if self.content is not None:
            digest.update(self.content.encode())
            return digest.hexdigest()
        for descriptor, tensor in self._open_tensors():
            for start, length in _samples(tensor.nbytes):
                digest.update(_read(descriptor, tensor, start, length))
        return digest.hexdigest()

    def full_hash(self) -> str:
        """Hex SHA-256 of metadata, tensor table and every byte of every tensor; equal for a file and its shards.

        The identity itself where the model is made while it loads: that already covers all that it is made from.
        Raises ModelFileError where bytes are not there.
        """
        if self.held_layers is not None:
            raise ModelFileError(f"{self.path}: holds layers {self.held_layers} only; wanted the whole model")
        if self.content is not None:
            return self.identity()
        digest = self._table_digest(_FULL_FORMAT)
        for descriptor, tensor in self._open_tensors():
            for start in range(0, tensor.nbytes, _BLOCK_BYTES):
                digest.update(_read(descriptor, tensor, start, min(_BLOCK_BYTES, tensor.nbytes - start)))
        return digest.hexdigest()

    @contextlib.contextmanager
    def stage_files(
        self, layers: LayerRange, progress: Callable[[float], object] | None = None
    ) -> Iterator[StageFiles]:
        """The files that llama.cpp is to open for a stage; valid within the context.

        Raises OptionError where this source does not hold ``layers``. ``progress``: called with 0.0 to 1.0 where
        something has to be read before.
        """
        held = self.held_layers
        if held is not None and not held.start <= layers.start < layers.end <= held.end:
            raise OptionError(
                f"layers {layers}: {self.path} holds the bytes of layers {held} only; compose a file for {layers}, "
                "or give the package itself"
            )
        yield StageFiles(tuple(map(str, self.files)))

    def _table_digest(self, format_name: bytes) -> hashlib._Hash:
        digest = hashlib.sha256(format_name)
        raw = memoryview(self._first.raw)
        for key in sorted(self._first.values):
            value = self._first.values[key]
            if not key.startswith("split."):
                name = key.encode()
                digest.update(U64.pack(len(name)) + name + U64.pack(value.end - value.type_start))
                digest.update(raw[value.type_start : value.end])
        for tensor in _by_name(self.tensors):
            name = tensor.name.encode()
            shape = b"".join(map(U64.pack, tensor.shape))
            digest.update(U64.pack(len(name)) + name + U32.pack(tensor.type) + U32.pack(len(tensor.shape)) + shape)
        return digest

    def _open_tensors(self) -> Iterator[tuple[int, TensorInfo]]:
        descriptors: dict[Path, int] = {}
        try:
            for tensor in _by_name(self.tensors):
                if tensor.path not in descriptors:
                    descriptors[tensor.path] = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
                yield descriptors[tensor.path], tensor
        except OSError as error:
            raise ModelFileError(f"{error.filename or self.path}: cannot read model file: {error.strerror}") from None
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)


def open_model(path: str | Path) -> GgufModel:
    """Open a GGUF file, or the first shard of a model, and check everything that could hurt native code.

    Raise ModelFileError with one line that names the file, the thing, what was wanted and what was got.
    """
    path = Path(path)
    headers = open_shards(path)
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    return GgufModel(**model_fields(path, tuple(header.path for header in headers), headers[0], tensors))


def open_header(
    path: Path,
    header: bytes,
    rows: RowSource,
    content: str,
    *,
    origins: Mapping[str, tuple[Path, ...]] | None = None,
    quantization: Quantization | None = None,
) -> GgufModel:
    """A model of which only the header exists; ``rows`` makes the tensors of a stage while it loads.

    ``path`` names its origin; ``content``: a hash of what the tensors are made from. Checks and raises as open_model.
    """
    first = parse_header_bytes(path, header)
    made = {"rows": rows, "content": content, "origins": origins, "quantization": quantization}
    return GgufModel(**model_fields(path, (), first, first.tensors) | made)


def model_fields(
    path: Path, files: tuple[Path, ...], first: GgufHeader, tensors: tuple[TensorInfo, ...]
) -> dict[str, Any]:
    """The fields of a GgufModel in files, with this metadata and tensor table, all checked; raise ModelFileError."""
    architecture = check_architecture(first)
    hyperparameters = check_hyperparameters(first, architecture)
    check_tensors(path, tensors, architecture, hyperparameters.n_blocks, hyperparameters.n_layers)
    n_vocab = check_vocabulary(first)
    by_name = {tensor.name: tensor for tensor in tensors}
    positions = by_name.get("position_embd.weight")
    return {
        "path": path,
        "files": files,
        "metadata": MappingProxyType(_scalars(first)),
        "tensors": tensors,
        "architecture": architecture,
        "n_blocks": hyperparameters.n_blocks,
        "n_layers": hyperparameters.n_layers,
        "n_vocab": n_vocab,
        "embedding_length": hyperparameters.embedding_length,
        "context_length": hyperparameters.context_length,
        "n_positions": None if positions is None or len(positions.shape) < 2 else positions.shape[1],
        "tied_output": "output.weight" not in by_name,
        "chat_template": _chat_template(first),
        "held_layers": _held_layers(first, hyperparameters.n_layers),
        "_first": first,
        "rows": None,
        "content": None,
        "origins": None,
        "quantization": None,
    }


def _held_layers(first: GgufHeader, n_layers: int) -> LayerRange | None:
    """None where the file does not say that it holds a stage only."""
    if HELD_LAYERS_KEY not in first.values and WHOLE_IDENTITY_KEY not in first.values:
        return None
    layers, identity = first.scalar(HELD_LAYERS_KEY), first.scalar(WHOLE_IDENTITY_KEY)
    if not isinstance(identity, str) or not re.fullmatch("[0-9a-f]{64}", identity):
        raise ModelFileError(f"{first.path}: {WHOLE_IDENTITY_KEY}: wanted the identity of the whole model in hex")
    try:
        return LayerRange.parse(layers if isinstance(layers, str) else "").within(n_layers)
    except OptionError as error:
        raise ModelFileError(f"{first.path}: {HELD_LAYERS_KEY}: {error}") from None


def check_architecture(header: GgufHeader) -> str:
    """The architecture that a header names; raise ModelFileError for one that cannot run in stages."""
    key = "general.architecture"
    value = header.values.get(key)
    if value is None:
        raise ModelFileError(f"{header.path}: {key}: this metadata key is missing")
    if value.type != STRING:
        raise ModelFileError(f"{header.path}: {key}: wanted a string, got {type_text(value)}")
    name = str(header.scalar(key))
    if name in architectures.UNSUPPORTED:
        reason = architectures.UNSUPPORTED[name]
        raise ModelFileError(f"{header.path}: unsupported architecture {shown(name)}: {reason}")
    if name not in architectures.SUPPORTED:
        raise ModelFileError(f"{header.path}: unsupported architecture {shown(name)}: this llama.cpp does not know it")
    return name


def _scalars(header: GgufHeader) -> dict[str, int | float | bool | str]:
    scalars: dict[str, int | float | bool | str] = {}
    for key, value in header.values.items():
        scalar = None if value.type == ARRAY else header.scalar(key)
        if scalar is not None:
            scalars[key] = scalar
    return scalars


def _chat_template(header: GgufHeader) -> str | None:
    value = header.values.get("tokenizer.chat_template")
    return str(header.scalar("tokenizer.chat_template")) if value is not None and value.type == STRING else None


def _by_name(tensors: tuple[TensorInfo, ...]) -> list[TensorInfo]:
    return sorted(tensors, key=lambda tensor: tensor.name)


def _samples(nbytes: int) -> tuple[tuple[int, int], ...]:
    if nbytes <= 3 * _SAMPLE_BYTES:
        return ((0, nbytes),)
    middle = (nbytes - _SAMPLE_BYTES) // 2
    return tuple((start, _SAMPLE_BYTES) for start in (0, middle, nbytes - _SAMPLE_BYTES))


def _read(descriptor: int, tensor: TensorInfo, start: int, length: int) -> bytes:
    data = os.pread(descriptor, length, tensor.offset + start)
    if len(data) != length:
        raise ModelFileError(
            f"{tensor.path}: truncated while open: tensor {shown(tensor.name)}: wanted {length} bytes, got {len(data)}"
        )
    return data
