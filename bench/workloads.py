"""The prompts of the benchmarks: pieces of the licence's text, so that models answer as they do to people."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import llama_cpp

from bench.whole_model import silence

_TEXT = Path(__file__).resolve().parents[1] / "LICENSE"
_APART = 97  # tokens between the beginnings of two prompts


@cache
def _tokens(path: Path) -> list[int]:
    silence()
    loading = llama_cpp.llama_model_default_params()
    loading.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
    assert model
    text = " ".join(_TEXT.read_text(encoding="utf-8").split()).encode()
    tokens = (llama_cpp.llama_token * len(text))()
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), tokens, len(tokens), False, False)
    llama_cpp.llama_model_free(model)
    return tokens[:count]


def prompts(model: Path, count: int, n_tokens: int) -> list[list[int]]:
    """``count`` different prompts of ``n_tokens`` tokens each."""
    tokens = _tokens(model)
    ring = tokens * (1 + (n_tokens + count * _APART) // len(tokens))
    return [ring[start : start + n_tokens] for start in range(0, count * _APART, _APART)]
