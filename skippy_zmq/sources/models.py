"""Opens a model, whatever it lies in."""

from __future__ import annotations

from pathlib import Path

from skippy_zmq.sources import gguf_model
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.package.opening import open_package
from skippy_zmq.sources.references import LocatedModel, local_model


def open_model(path: str | Path) -> GgufModel:
    """Open what lies at ``path``: a GGUF file, the first of a model's shards, a layer package (its folder or manifest),
    a checkpoint (its folder, a safetensors file or an index), or a folder with one GGUF model.

    Everything that could hurt native code is checked. Raises ModelFileError with one line that names the file, the
    thing, what was wanted and what was got.
    """
    return open_located(local_model(Path(path)))


def open_located(located: LocatedModel) -> GgufModel:
    """``open_model`` for what ``references.locate`` or ``references.outline`` found."""
    if located.kind == "package":
        return open_package(located.path)
    if located.kind == "checkpoint":
        from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint  # numpy and gguf, which files need not

        return open_checkpoint(located.path, located.outlines).model()
    return gguf_model.open_model(located.path)
