"""The oracle: llama.cpp with the whole model, run through llama-cpp-python with its own placement of devices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp
import numpy as np
import numpy.typing as npt

from skippy_zmq.certify.workload import LANES, N_UBATCH, LaneRows, Logits, Settings, Step, micro_batches
from skippy_zmq.errors import NativeError
from skippy_zmq.runtime.repacking import may_repack
from skippy_zmq.sources.gguf_model import open_model

_STREAM_CELLS = 256  # a lane's cells are a multiple of this, in a stage as well
_LEVEL_ERROR = 4
_FLASH_ATTN = {"on": 1, "off": 0}

_errors: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _remember_errors(level: int, text: bytes, _user_data: object) -> None:
    if level == _LEVEL_ERROR:
        _errors.append(text.decode(errors="replace").strip())


class Unsplit:
    """A model with ``LANES`` lanes of ``n_ctx`` tokens. Raises NativeError with llama.cpp's words where it refuses."""

    def __init__(self, path: Path, settings: Settings, n_ctx: int) -> None:
        self._model: Any = None
        self._context: Any = None
        self._settings, self._n_ctx = settings, n_ctx
        llama_cpp.llama_log_set(_remember_errors, ctypes.c_void_p())
        loading = llama_cpp.llama_model_default_params()
        loading.use_extra_bufts = may_repack(open_model(path))  # as a stage does
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
        if not self._model:
            raise NativeError(f"unsplit: {_refusal('llama.cpp could not load the model')}")
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        recurrent = llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        self.can_trim = not recurrent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._free_context()
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None

    def run(self, steps: Sequence[Step], *, whole: bool) -> Logits:
        """Logits of all steps in a fresh context.

        ``whole``: one llama_decode per batch; otherwise one per micro-batch of a stage, where llama.cpp would divide
        lanes of unequal rows in its own way and so select other kernels.
        """
        self._open_context()
        result = np.empty((sum(len(step.outputs) for step in steps), self.n_vocab), np.float32)
        done = 0
        for number, step in enumerate(steps):
            if step.forget is not None:
                self._forget(*step.forget)
            tokens = step.tokens(number, self.n_vocab)
            first = 0
            for group in [step.rows] if whole else micro_batches(step.rows):
                n_rows = sum(count for _, _, count in group)
                outputs = [row - first for row in step.outputs if first <= row < first + n_rows]
                self._decode(group, tokens[first : first + n_rows], outputs, result[done : done + len(outputs)])
                first, done = first + n_rows, done + len(outputs)
        return result

    def _open_context(self) -> None:
        self._free_context()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = -(-self._n_ctx // _STREAM_CELLS) * _STREAM_CELLS * LANES
        params.n_batch = params.n_ubatch = N_UBATCH
        params.n_seq_max = LANES
        params.n_threads = params.n_threads_batch = self._settings.threads
        params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{self._settings.cache_type.upper()}")
        params.flash_attn_type = _FLASH_ATTN[self._settings.flash_attn]
        params.swa_full = True
        params.kv_unified = False
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise NativeError(f"unsplit: {_refusal('llama.cpp could not create the context')}")

    def _free_context(self) -> None:
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None

    def _forget(self, lane: int, position: int) -> None:
        start = position if position else -1
        if not llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._context), lane, start, -1):
            raise NativeError(f"unsplit: llama.cpp could not trim lane {lane} to {position}")

    def _decode(
        self, rows: Sequence[LaneRows], tokens: npt.NDArray[np.int32], outputs: Sequence[int], logits: Logits
    ) -> None:
        batch: Any = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            places = [(lane, position + i) for lane, position, count in rows for i in range(count)]
            batch.n_tokens = len(tokens)
            for i, (lane, position) in enumerate(places):
                batch.token[i] = int(tokens[i])
                batch.pos[i] = position
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = lane
                batch.logits[i] = i in outputs
            status = llama_cpp.llama_decode(self._context, batch)
            if status != 0:
                raise NativeError(f"unsplit: {_refusal(f'llama_decode failed with status {status}')}")
            for place, row in enumerate(outputs):
                values: Any = llama_cpp.llama_get_logits_ith(self._context, row)
                logits[place] = np.ctypeslib.as_array(values, (self.n_vocab,))
        finally:
            llama_cpp.llama_batch_free(batch)


def _refusal(otherwise: str) -> str:
    return "; ".join(line for line in _errors if line) or otherwise
