"""Opens a model, whatever it lies in."""

from __future__ import annotations

from pathlib import Path

from skippy_zmq.sources import gguf_model
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.package.opening import open_package
from skippy_zmq.sources.package.reading import is_package


def open_model(path: str | Path) -> GgufModel:
    """Open a GGUF file, the first of a model's shards, or a layer package (its folder or manifest).

    Everything that could hurt native code is checked. Raises ModelFileError with one line that names the file, the
    thing, what was wanted and what was got.
    """
    path = Path(path)
    return open_package(path) if is_package(path) else gguf_model.open_model(path)
