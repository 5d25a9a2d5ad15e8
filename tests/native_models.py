"""Opens a model file by the extension itself, without the runtime around it."""

from __future__ import annotations

from pathlib import Path

from skippy_zmq import _native
from skippy_zmq.sources.gguf_model import open_model


def open_native(path: Path) -> _native.StageModel:
    """All layers of the model, on the CPU."""
    model = open_model(path)
    tensors = [(t.name, t.type, t.nbytes, model.files.index(t.path), t.offset) for t in model.tensors]
    return _native.StageModel(
        (0, model.n_layers, model.n_layers, model.n_blocks),
        tensors,
        [str(file) for file in model.files],
        None,
        devices=[],
        n_gpu_layers=0,
        main_gpu=0,
        split_mode="layer",
        tensor_split=[],
        mmap=True,
        mlock=False,
        direct_io=False,
        repack=True,
        check_tensors=False,
        no_host_buffer=False,
    )
