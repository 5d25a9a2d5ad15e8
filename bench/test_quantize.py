"""Quantizing while a stage loads, against llama.cpp's quantizer on the same weights with the same threads."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.comparison import Comparison, alternate
from bench.whole_model import silence
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.quantize import quantized
from skippy_zmq.runtime.recipes import Recipe, recipe_named
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.ggml_types import F32
from skippy_zmq.sources.gguf_header import TensorInfo, parse_header
from skippy_zmq.sources.gguf_model import GgufModel, open_header, open_model
from skippy_zmq.sources.gguf_values import FLOAT32, INT32, STRING, UINT32
from skippy_zmq.sources.gguf_writer import encoded, encoded_array, header_bytes
from skippy_zmq.topology import LayerRange

HIDDEN, FFN, LAYERS, TOKENS = 1024, 2816, 4, 1024
THREADS = 2
OPTIONS = StageOptions(lanes=1, threads=THREADS, ctx_size=64, batch_size=8, ubatch_size=8)


def _table() -> list[tuple[str, int, tuple[int, ...]]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (HIDDEN, TOKENS)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {block + name: (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {block + name: (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {block + name: (HIDDEN, FFN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {block + "ffn_down": (FFN, HIDDEN)}
    shapes |= {"output_norm": (HIDDEN,), "output": (HIDDEN, TOKENS)}
    return [(f"{name}.weight", F32, shape) for name, shape in shapes.items()]


def _model(path: Path) -> Path:
    """50 million random float32 weights, in a file."""
    numbers = {"block_count": LAYERS, "context_length": 2048, "embedding_length": HIDDEN, "feed_forward_length": FFN}
    values = {f"llama.{key}": encoded(UINT32, value) for key, value in numbers.items()}
    values |= {f"llama.attention.head_count{kv}": encoded(UINT32, 16) for kv in ("", "_kv")}
    values["llama.attention.layer_norm_rms_epsilon"] = encoded(FLOAT32, 1e-5)
    values["general.architecture"] = encoded(STRING, "llama")
    values["tokenizer.ggml.model"] = encoded(STRING, "gpt2")
    values["tokenizer.ggml.pre"] = encoded(STRING, "gpt-2")
    values["tokenizer.ggml.tokens"] = encoded_array(STRING, [chr(0x100 + number) for number in range(TOKENS)])
    values["tokenizer.ggml.token_type"] = encoded_array(INT32, [1] * TOKENS)
    values["tokenizer.ggml.merges"] = encoded_array(STRING, ["\u0120 \u0120"])
    values |= {f"tokenizer.ggml.{end}_token_id": encoded(UINT32, 0) for end in ("bos", "eos")}
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(header_bytes(values, _table()))
        for _, _, shape in _table():
            file.write(random.normal(0.0, shape[0] ** -0.5, shape).astype(np.float32).tobytes())
    return path


class _Mapped:
    """Rows of the file, as views of its mapping."""

    def __init__(self, path: Path) -> None:
        self.data = np.memmap(path, np.uint8, "r")

    def __call__(self, tensor: TensorInfo, first_row: int, n_rows: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        row_bytes = tensor.shape[0] * 4
        start = tensor.offset + first_row * row_bytes
        return self.data[start : start + n_rows * row_bytes]


def _quantize_file(path: Path, target: Path, recipe: Recipe) -> float:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = recipe.file_type, THREADS
    started = time.perf_counter()
    assert llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(params)) == 0
    return time.perf_counter() - started


def _load(source: GgufModel, recipe: Recipe) -> float:
    """Types, header, quantizing, llama.cpp's own loading and a context's dry runs."""
    started = time.perf_counter()
    StageModel(quantized(source, recipe, threads=THREADS), LayerRange(0, LAYERS), OPTIONS)
    return time.perf_counter() - started


def _bytes_of(source: GgufModel, recipe: Recipe) -> dict[str, str]:
    model = quantized(source, recipe, threads=THREADS)
    rows: Callable[..., object] | None = model.rows
    assert rows is not None
    return {
        t.name: hashlib.sha256(bytes(memoryview(rows(t, 0, (*t.shape, 1)[1])))).hexdigest()  # type: ignore[arg-type]
        for t in model.tensors
    }


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "Q2_K"])
def test_quantizing_while_loading(
    name: str, tmp_path: Path, comparison: Comparison, benchmark: BenchmarkFixture
) -> None:
    silence()
    recipe = recipe_named(name)
    assert recipe is not None
    path, target = _model(tmp_path / "source.gguf"), tmp_path / "target.gguf"
    source = open_header(path, parse_header(path).raw, _Mapped(path), content="benchmark")
    calls = {"ours": partial(_load, source, recipe), "llama.cpp": partial(_quantize_file, path, target, recipe)}
    seconds = alternate(benchmark, 5, calls)
    millions = sum(int(np.prod(tensor.shape)) for tensor in source.tensors) / 1e6
    ours, other = (millions / seconds[name] for name in calls)
    comparison.at_least(0.8, f"quantizing to {name} while loading: llama.cpp's quantizer", ours, other, "M weights/s")
    with target.open("rb") as file:
        wanted = {}
        for tensor in open_model(target).tensors:
            file.seek(tensor.offset)
            wanted[tensor.name] = hashlib.sha256(file.read(tensor.nbytes)).hexdigest()
    assert _bytes_of(source, recipe) == wanted
