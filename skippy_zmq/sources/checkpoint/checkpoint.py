"""A checkpoint as a model: header, tensors whose rows are read when they are asked for, and what it is known by."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.config import read_config
from skippy_zmq.sources.checkpoint.families import family_of
from skippy_zmq.sources.checkpoint.family import describe
from skippy_zmq.sources.checkpoint.folder import find_files, read_tables
from skippy_zmq.sources.checkpoint.metadata import Entry, Metadata, text, u32
from skippy_zmq.sources.checkpoint.rope import read_rope, require_whole_heads
from skippy_zmq.sources.checkpoint.rows import Rows, read_rows, sample
from skippy_zmq.sources.checkpoint.tensors import CheckpointTensor, plan_tensors
from skippy_zmq.sources.checkpoint.tokenizer import tokenizer_metadata
from skippy_zmq.sources.gguf_header import TensorInfo
from skippy_zmq.sources.gguf_model import GgufModel, open_header
from skippy_zmq.sources.gguf_values import ARRAY, U64
from skippy_zmq.sources.gguf_vocabulary import MAX_TOKENS
from skippy_zmq.sources.gguf_writer import encoded, encoded_array, header_bytes

# Part of what a checkpoint is known by: another number where the same files give other tensors.
_FORMAT = b"skippy-zmq checkpoint 1\0"
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # llama.cpp's LLAMA_FTYPE of a model in mostly this type


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``path`` is what was opened, ``files`` hold the weights. ``tensors`` are those of the whole GGUF model."""

    path: Path
    files: tuple[Path, ...]
    metadata: Mapping[str, Entry]
    tensors: Mapping[str, CheckpointTensor]

    def header(self, types: Mapping[str, int] = MappingProxyType({})) -> bytes:
        """A GGUF header up to the first tensor's data; ``types``: of tensors that are not to have their own.

        Raise ModelFileError for a value that GGUF cannot hold.
        """
        values = {key: self._encoded(key, entry) for key, entry in self.metadata.items()}
        table = [(tensor.name, types.get(tensor.name, tensor.type), tensor.shape) for tensor in self.tensors.values()]
        return header_bytes(values, table)

    def _encoded(self, key: str, entry: Entry) -> bytes:
        try:
            if entry.type == ARRAY:
                return encoded_array(entry.element_type, entry.value)  # type: ignore[arg-type]
            return encoded(entry.type, entry.value)  # type: ignore[arg-type]
        except (struct.error, OverflowError) as error:
            raise ModelFileError(f"{self.path}: {key}: does not fit its GGUF type: {error}") from None

    def rows(self, name: str, first_row: int, n_rows: int) -> Rows:
        """Rows of a tensor in its own type: [n_rows, row length]; raise ModelFileError."""
        return read_rows(self.tensors[name], first_row, n_rows)

    def content(self) -> str:
        """Hex SHA-256 of names, types, shapes and sampled bytes of the source tensors, however they are sharded."""
        digest = hashlib.sha256(_FORMAT)
        sources = {
            segment.source.name: segment.source for tensor in self.tensors.values() for segment in tensor.segments
        }
        for name in sorted(sources):
            source = sources[name]
            for part in (name.encode(), source.dtype.encode(), b"".join(map(U64.pack, source.shape))):
                digest.update(U64.pack(len(part)) + part)
            for start, length in source.samples:
                digest.update(sample(source.path, source.offset + start, length))
        for tensor in self.tensors.values():
            if tensor.values is not None:
                digest.update(tensor.name.encode() + tensor.values.tobytes())
        return digest.hexdigest()

    def model(self) -> GgufModel:
        """The checkpoint as a model whose tensors are made while it loads; raise ModelFileError as open_model does."""

        def rows(tensor: TensorInfo, first_row: int, n_rows: int) -> Rows:
            return self.rows(tensor.name, first_row, n_rows)

        origins = {
            tensor.name: tuple(sorted({segment.source.path for segment in tensor.segments}))
            for tensor in self.tensors.values()
        }
        return open_header(self.path, self.header(), rows, self.content(), origins=origins)


def open_checkpoint(path: str | Path, outlines: Mapping[str, Path] = MappingProxyType({})) -> Checkpoint:
    """Open a folder with config.json and safetensors files, one such file, or an index of them; read no weights.

    ``outlines``: files in place of those that the index lists under these names, with the same table and samples, but
    none of their weights. Raise ModelFileError with one line that names the file, the thing, what was wanted and what
    was got.
    """
    path = Path(path).absolute()  # a model is called by the last part of its path
    files = find_files(path, outlines)
    family, config = family_of(read_config(files.folder))
    sources = read_tables(files)
    rope = read_rope(config, family.scalings, per_layer_type=family.per_layer_rope)
    if not family.partial_rope:
        require_whole_heads(rope)
    tensors = plan_tensors(family, config, rope, sources)
    embedding = next((tensor for tensor in tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{path}: wanted a matrix of token embeddings, got none")
    n_rows = embedding.shape[1]
    if n_rows > MAX_TOKENS:
        raise ModelFileError(f"{path}: wanted at most {MAX_TOKENS} rows of embeddings, got {n_rows}")
    if config.count("vocab_size") != n_rows:
        raise config.fail("vocab_size", f"wanted {n_rows}, the rows of embeddings, got {config.count('vocab_size')}")
    metadata: Metadata = {
        "general.architecture": text(family.architecture),
        "general.type": text("model"),
        **describe(family, config, rope),
        "general.file_type": u32(_file_type(tensors)),
        "general.quantization_version": u32(_QUANTIZATION_VERSION),
        **tokenizer_metadata(files.folder, family, config, n_rows),
    }
    return Checkpoint(path, files.weights, metadata, {tensor.name: tensor for tensor in tensors})


def _file_type(tensors: tuple[CheckpointTensor, ...]) -> int:
    """That of the first matrix, as llama.cpp's converter guesses it."""
    for tensor in tensors:
        if tensor.segments and len(tensor.segments[0].source.shape) > 1:
            return _FILE_TYPES[tensor.segments[0].source.dtype]
    return _FILE_TYPES["F32"]
