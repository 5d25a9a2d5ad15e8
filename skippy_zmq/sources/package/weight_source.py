"""What a package can be built from."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import TensorInfo
from skippy_zmq.sources.gguf_layout import TensorEntry, pairs_of
from skippy_zmq.sources.gguf_model import GgufModel, RowSource
from skippy_zmq.sources.package.manifest import QuantizationFacts
from skippy_zmq.sources.package.opening import PackageModel

BLOCK_BYTES = 1 << 20
_MADE_ELEMENTS = 8 << 20  # at a time, as a stage does: enough for all threads that quantize


class WeightSource(Protocol):
    """A model as GGUF would hold it: encoded metadata, a tensor table, and bytes on demand.

    ``pairs``: encoded key-value pairs (see ``gguf_layout``), without ``split.*``; ``alignment``: what they say of it.
    ``n_layers``: those that a pipeline runs. ``quantization``: of what quantizes while it is read.
    """

    @property
    def name(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def pairs(self) -> Sequence[bytes]: ...
    @property
    def tensors(self) -> Sequence[TensorEntry]: ...
    @property
    def quantization(self) -> QuantizationFacts | None: ...

    def fingerprint(self) -> str:
        """Changes whenever bytes of the model may have: a build that was stopped goes on only with an equal one."""

    def blocks(self, tensor: TensorEntry) -> Iterator[bytes]:
        """The ``tensor.nbytes`` bytes of a tensor, in order."""


class GgufWeights:
    """A GGUF file, shards or a checkpoint, also one that is quantized as it is read, as the source of a package.

    Raises ModelFileError for a part of a model.
    """

    def __init__(self, model: GgufModel) -> None:
        if model.held_layers is not None:
            raise ModelFileError(f"{model.path}: holds layers {model.held_layers} only; give the whole model")
        if isinstance(model, PackageModel):
            raise ModelFileError(f"{model.path}: is a package already; compose it first to build another from it")
        self._model = model
        self._places = {tensor.name: tensor for tensor in model.tensors}
        title = model.metadata.get("general.name")
        self.name = (title if isinstance(title, str) and title else model.path.stem)[:256]
        self.architecture = model.architecture
        self.n_layers = model.n_layers
        self.alignment = model.alignment
        self.pairs = pairs_of(model.header)
        self.tensors = [TensorEntry(t.name, t.type, t.shape, t.nbytes) for t in model.tensors]
        how = model.quantization
        self.quantization = (
            None if how is None else QuantizationFacts(recipe=how.recipe, imatrix_sha256=how.imatrix_sha256 or None)
        )

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self._model.identity().encode())
        origins = self._model.origins or {}
        for path in self._model.files or sorted({path for paths in origins.values() for path in paths}):
            status = path.stat()
            # the last of these times is set by the kernel, so nobody can set it back
            state = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
            digest.update(f"{state}\0".encode())
        return digest.hexdigest()

    def blocks(self, tensor: TensorEntry) -> Iterator[bytes]:
        place = self._places[tensor.name]
        if self._model.rows is not None:
            yield from _made_rows(self._model.rows, place)
            return
        descriptor = _open(place.path)
        try:
            for start in range(0, tensor.nbytes, BLOCK_BYTES):
                block = os.pread(descriptor, min(BLOCK_BYTES, tensor.nbytes - start), place.offset + start)
                if len(block) != min(BLOCK_BYTES, tensor.nbytes - start):
                    raise ModelFileError(f"{place.path}: became shorter while it was read; try again")
                yield block
        finally:
            os.close(descriptor)


def _made_rows(rows: RowSource, tensor: TensorInfo) -> Iterator[bytes]:
    n_rows = math.prod(tensor.shape[1:])
    step = max(1, _MADE_ELEMENTS // tensor.shape[0])
    for first in range(0, n_rows, step):
        made = rows(tensor, first, min(step, n_rows - first))
        yield made.tobytes() if isinstance(made, np.ndarray | memoryview) else bytes(made)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot open model file: {error.strerror}") from None
