"""Opens a model, whatever it lies in."""

from __future__ import annotations

from pathlib import Path

from skippy_zmq.sources import gguf_model
from skippy_zmq.sources.checkpoint.folder import is_checkpoint
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.package.opening import open_package
from skippy_zmq.sources.package.reading import is_package


def open_model(path: str | Path) -> GgufModel:
    """Open a GGUF file, the first of a model's shards, a layer package (its folder or manifest) or a checkpoint (its
    folder, a safetensors file or an index).

    Everything that could hurt native code is checked. Raises ModelFileError with one line that names the file, the
    thing, what was wanted and what was got.
    """
    path = Path(path)
    if is_package(path):
        return open_package(path)
    if is_checkpoint(path):
        from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint  # numpy and gguf, which files need not

        return open_checkpoint(path).model()
    return gguf_model.open_model(path)
