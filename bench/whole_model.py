"""llama.cpp itself, unsplit, through llama-cpp-python: what our stages are measured against."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt


@llama_cpp.llama_log_callback
def _silent(_level: int, _text: bytes, _data: object) -> None:
    return None


class WholeModel:
    """An unsplit model and context with the settings that stages have by default; one lane."""

    def __init__(self, path: Path, *, n_ctx: int, threads: int) -> None:
        llama_cpp.llama_log_set(_silent, None)
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, 1
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.swa_full = True
        params.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, tokens: list[int], position: int) -> npt.NDArray[np.float32]:
        """Run ``tokens`` from ``position`` on; the logits after the last one, float32 [n_vocab]."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index == len(tokens) - 1
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode: {status}")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.n_vocab,)).copy()

    def trim(self, position: int) -> None:
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, position, -1)

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)
