"""llama.cpp unsplit, through llama-cpp-python: its logits, and its own saved state of a lane taken apart."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from skippy_zmq.runtime.options import StageOptions

_STREAM_CELLS = 256  # a lane's cells are a multiple of this, in a stage as well
_FLASH_ATTN = {"on": 1, "off": 0}
_GGML_TYPE_BF16 = 30  # not among the names of llama-cpp-python


def _cache_type(name: str) -> int:
    return _GGML_TYPE_BF16 if name == "bf16" else int(getattr(llama_cpp, f"GGML_TYPE_{name.upper()}"))


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    return None


@dataclass(frozen=True, slots=True)
class SavedRows:
    """K or V of a layer: uint8 [tokens, bytes of a row], of the tokens at ``positions``."""

    part: str  # "k" | "v"
    positions: tuple[int, ...]
    rows: NDArray[np.uint8]


class Unsplit:
    """A model with the lanes, context and kernels of a stage with the same options."""

    def __init__(self, path: Path, options: StageOptions, *, keys_only: bool = False) -> None:
        self._keys_only = keys_only
        llama_cpp.llama_log_set(_silent, None)
        parameters = llama_cpp.llama_model_default_params()
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        params = llama_cpp.llama_context_default_params()
        self.lanes = options.lanes
        params.n_ctx = -(-options.ctx_size // _STREAM_CELLS) * _STREAM_CELLS * options.lanes
        params.n_batch, params.n_ubatch = options.batch_size, options.ubatch_size
        params.n_seq_max = options.lanes
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k = _cache_type(options.cache_type_k)
        params.type_v = _cache_type(options.cache_type_v)
        params.flash_attn_type = _FLASH_ATTN[options.flash_attn]
        params.swa_full = True
        params.kv_unified = False
        self._context: Any = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context
        self._memory = llama_cpp.llama_get_memory(self._context)
        rope = llama_cpp.llama_model_rope_type(self._model)
        self._coordinates = rope in (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _t: TracebackType | None
    ) -> None:
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def run(self, lane: int, position: int, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """The logits after the last of ``tokens``, float32 [n_vocab]."""
        batch: Any = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = int(token), position + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, lane
                batch.logits[i] = i == len(tokens) - 1
            assert llama_cpp.llama_decode(self._context, batch) == 0
            values: Any = llama_cpp.llama_get_logits_ith(self._context, len(tokens) - 1)
            return np.ctypeslib.as_array(values, (self.n_vocab,)).copy()
        finally:
            llama_cpp.llama_batch_free(batch)

    def trim(self, lane: int, position: int) -> None:
        assert llama_cpp.llama_memory_seq_rm(self._memory, lane, position or -1, -1)

    def saved(self, lane: int) -> list[SavedRows]:
        """What llama.cpp saves of a lane, of each cache first K and then V of its layers, by rising number.

        The layers of a sliding-window model are in two caches; that of the windows leaves out tokens behind them.
        """
        size = llama_cpp.llama_state_seq_get_size(self._context, lane)
        data = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(self._context, data, size, lane) == size
        return self._parse(bytes(data))

    def _parse(self, data: bytes) -> list[SavedRows]:
        cursor = _Cursor(data)
        cursor.take("I"), cursor.take("i")  # magic, lane
        result: list[SavedRows] = []
        while cursor.at < len(data):
            assert cursor.take("I") == self.lanes
            for _ in range(self.lanes):
                if count := cursor.take("I"):
                    result += self._parse_rows(cursor, count)
        return result

    def _parse_rows(self, cursor: _Cursor, count: int) -> list[SavedRows]:
        positions: list[int] = []
        for _ in range(count):
            positions.append(cursor.take("i"))
            assert cursor.take("I") == 1
            cursor.at += 12 * self._coordinates
            cursor.take("i")
        transposed, n_layers = cursor.take("I"), cursor.take("I")
        result: list[SavedRows] = []
        for part in "k" * n_layers + "v" * n_layers * (not self._keys_only):
            cursor.take("i")
            if part == "v" and transposed:
                element, n_elements = cursor.take("I"), cursor.take("I")
                columns = cursor.rows(n_elements, count * element).reshape(n_elements, count, element)
                rows = columns.swapaxes(0, 1).reshape(count, n_elements * element)
            else:
                rows = cursor.rows(count, cursor.take("Q"))
            result.append(SavedRows(part, tuple(positions), rows))
        return result


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return int(value)

    def rows(self, count: int, size: int) -> NDArray[np.uint8]:
        rows = np.frombuffer(self.data, np.uint8, count * size, self.at).reshape(count, size)
        self.at += count * size
        return rows
