"""llama.cpp itself, unsplit, through llama-cpp-python: what our stages are measured against.

Needs nothing but llama_cpp and numpy, so that it also runs in the environment whose llama.cpp has the RPC back end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    return None


def silence() -> None:
    """No log lines of llama.cpp's from here on."""
    llama_cpp.llama_log_set(_silent, None)


class WholeModel:
    """An unsplit model and context with the settings that stages have by default; ``lanes`` sequences.

    ``n_ctx``: of each sequence. ``devices``: handles of ggml devices that hold all layers, shared out in the
    proportions ``split``; without them the CPU does.
    """

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int,
        threads: int,
        lanes: int = 1,
        n_ubatch: int = 512,
        devices: Sequence[int] = (),
        split: Sequence[float] = (),
    ) -> None:
        silence()
        loading = llama_cpp.llama_model_default_params()
        if devices:
            self._devices = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
            self._split = (ctypes.c_float * llama_cpp.llama_max_devices())(*split)
            loading.devices = ctypes.cast(self._devices, ctypes.c_void_p)
            loading.tensor_split = ctypes.cast(self._split, ctypes.POINTER(ctypes.c_float))
            loading.n_gpu_layers = 1000
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
        if not self.model:
            raise RuntimeError(f"{path}: llama.cpp could not open it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx * lanes
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, n_ubatch, lanes
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.swa_full = True
        params.kv_unified = False
        self.n_batch = int(params.n_batch)
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"{path}: llama.cpp could not make a context of {lanes} times {n_ctx} tokens")
        self.memory = llama_cpp.llama_get_memory(self.context)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.ends = [token for token in range(self.n_vocab) if llama_cpp.llama_vocab_is_eog(vocabulary, token)]

    def run(self, tokens: list[int], position: int) -> npt.NDArray[np.float32]:
        """Run ``tokens`` from ``position`` on in sequence 0; the logits after the last one, float32 [n_vocab]."""
        batch = Batch([(0, position, tokens)])
        self.decode(batch)
        batch.free()
        return self.logits(1)[0].copy()

    def decode(self, batch: Batch) -> None:
        status = llama_cpp.llama_decode(self.context, batch.native)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """Those of the last batch, float32 [n_outputs, n_vocab]: llama.cpp's own memory."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (n_outputs, self.n_vocab))

    def likeliest(self, n_outputs: int) -> npt.NDArray[np.int64]:
        """The likeliest token after each output row of the last batch, the end of a text apart."""
        logits = self.logits(n_outputs)
        logits[:, self.ends] = -np.inf
        return logits.argmax(axis=1)

    def trim(self, position: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, 0, position, -1)

    def clear(self) -> None:
        """Forget every sequence."""
        llama_cpp.llama_memory_clear(self.memory, False)

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


class Batch:
    """A batch of (sequence, first position, tokens); the last token of each has its logits computed."""

    def __init__(self, rows: Sequence[tuple[int, int, Sequence[int]]], *, outputs: bool = True) -> None:
        size = sum(len(tokens) for _, _, tokens in rows)
        self.native: Any = llama_cpp.llama_batch_init(size, 0, 1)
        self.native.n_tokens = size
        self.tokens = np.ctypeslib.as_array(self.native.token, (size,))
        self.positions = np.ctypeslib.as_array(self.native.pos, (size,))
        wanted = np.ctypeslib.as_array(self.native.logits, (size,))
        wanted[:] = 0
        at = 0
        for sequence, position, tokens in rows:
            for index, token in enumerate(tokens):
                self.tokens[at], self.positions[at] = token, position + index
                self.native.n_seq_id[at], self.native.seq_id[at][0] = 1, sequence
                at += 1
            wanted[at - 1] = outputs

    def free(self) -> None:
        llama_cpp.llama_batch_free(self.native)
