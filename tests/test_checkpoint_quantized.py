"""A safetensors folder quantized as it opens: types, bytes and logits of llama.cpp's quantizer, in bounded memory."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from checkpoint_files import CASES, Case, write_case
from numpy.typing import NDArray
from quantize_oracle import as_gguf, bytes_in, llama_quantize, made, types_in

from skippy_zmq.certify.compare import first_difference
from skippy_zmq.certify.reference import Unsplit
from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.certify.workload import DEFAULTS, context_size, script, stage_options
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.recipes import recipe_named
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.references import locate

HEADS, KV_HEADS, VOCABULARY = 4, 2, 512


def llama(hidden: int, ffn: int, *, n_layers: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Case:
    """A Llama whose rows may be long enough for every type."""
    case = CASES["llama-old-spelling"]
    kv = hidden // heads * kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (VOCABULARY, hidden),
        "model.embed_tokens.weight": (VOCABULARY, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(n_layers):
        for kind, shape in (
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (ffn, hidden)),
            ("mlp.up_proj", (ffn, hidden)),
            ("mlp.down_proj", (hidden, ffn)),
        ):
            shapes[f"model.layers.{layer}.{kind}.weight"] = shape
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": n_layers}
    config = {**case.config, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = {key: value for key, value in config.items() if key not in ("rope_scaling", "head_dim")}
    return replace(case, config=config, shapes=shapes, dtype="BF16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(llama(256, 512, n_layers=4), tmp_path_factory.mktemp("quantized") / "model", shards=2)


@pytest.fixture(scope="module")
def converted(folder: Path) -> Path:
    return as_gguf(folder, folder.with_name("converted.gguf"))


def importances(path: Path, source: GgufModel) -> dict[str, NDArray[np.float32]]:
    """Write an importance matrix in the legacy format; what is in it."""
    random = np.random.default_rng(3)
    entries = {
        tensor.name: random.uniform(0.1, 4.0, tensor.shape[0]).astype(np.float32)
        for tensor in source.tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    }
    out = struct.pack("<i", len(entries))
    for name, values in entries.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, values.size) + values.tobytes()
    path.write_bytes(out)
    return entries


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K_M", "Q5_K_M", "Q2_K", "IQ4_XS", "IQ2_XXS", "Q4_K_M weighed"])
def test_a_folder_opens_with_the_bytes_and_logits_of_llama_cpps_quantizer(
    name: str, folder: Path, converted: Path, tmp_path: Path
) -> None:
    recipe = recipe_named(name.split()[0])
    assert recipe is not None
    weighed = name.startswith("IQ2") or "weighed" in name
    options = StageOptions(quant=recipe.name, imatrix=str(tmp_path / "im.dat") if weighed else "", threads=2)
    plain = open_with_options(locate(folder), StageOptions())
    entries = importances(tmp_path / "im.dat", plain) if weighed else None
    wanted = llama_quantize(converted, tmp_path / "wanted.gguf", recipe.file_type, imatrix=entries)
    source = open_with_options(locate(folder), options)
    assert {tensor.name: tensor.type for tensor in source.tensors} == types_in(wanted)
    contents = bytes_in(wanted)
    assert [tensor.name for tensor in source.tensors if made(source, tensor) != contents[tensor.name]] == []
    n_ctx = context_size(source)
    with Unsplit(wanted, DEFAULTS, n_ctx) as whole:
        steps = script(n_ctx, can_trim=whole.can_trim)
        logits = whole.run(steps, whole=False)
    staged = StagedModel(source, (1,), stage_options(DEFAULTS, n_ctx))
    assert first_difference(steps, logits, staged.run(steps)) is None


# T05: rows of hidden and ffn that fit blocks of 32, of 256 one way round, and of nothing
@pytest.mark.parametrize(("hidden", "ffn"), [(64, 192), (96, 352), (288, 512), (40, 104)])
@pytest.mark.parametrize("name", ["Q4_K_M", "Q8_0", "IQ4_XS"])
def test_rows_that_do_not_fit_run_split_as_llama_cpp_runs_them(
    hidden: int, ffn: int, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_case(llama(hidden, ffn, n_layers=2), tmp_path / "model")
    recipe = recipe_named(name)
    assert recipe is not None
    wanted = llama_quantize(as_gguf(folder, tmp_path / "f.gguf"), tmp_path / "q.gguf", recipe.file_type)
    source = open_with_options(locate(folder), StageOptions(quant=name, threads=1))
    fits = name == "Q8_0" and hidden % 32 == ffn % 32 == 0
    assert (" tensors have rows that do not fit, such as '" in caplog.text) != fits
    n_ctx = context_size(source)
    with Unsplit(wanted, DEFAULTS, n_ctx) as whole:
        steps = script(n_ctx, can_trim=whole.can_trim)
        logits = whole.run(steps, whole=False)
    for boundaries in [(), (1,)]:
        staged = StagedModel(source, boundaries, stage_options(DEFAULTS, n_ctx))
        assert first_difference(steps, logits, staged.run(steps)) is None, boundaries


def holes(case: Case, folder: Path) -> Path:
    """The checkpoint with zeros for weights, which take no place on the disk."""
    write_case(replace(case, shapes={}), folder)
    table, offset = {}, 0
    for name, shape in case.shapes.items():
        end = offset + 2 * math.prod(shape)
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All matrices of the layers have 32 MiB; heads are long, so that their rows change places within much of it."""
    case = llama(4096, 4096, n_layers=2, heads=8, kv_heads=8)
    return holes(case, tmp_path_factory.mktemp("large") / "model")


_LOAD = """
    import sys
    from pathlib import Path
    from skippy_zmq.runtime.opening import open_with_options
    from skippy_zmq.runtime.options import StageOptions
    from skippy_zmq.runtime.stage_model import StageModel
    from skippy_zmq.runtime import quantize
    from skippy_zmq.sources.references import locate
    from skippy_zmq.topology import LayerRange

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    peak = 0
    def progress(done):
        global peak
        peak = max(peak, status("VmHWM"))
    located = locate(sys.argv[1])
    options = StageOptions(
        quant=sys.argv[2], lanes=1, threads=2, ctx_size=64, batch_size=8, ubatch_size=8, kv_cache_bytes=0
    )
    before = status("VmRSS")
    source = open_with_options(located, options)
    stage = StageModel(source, LayerRange(0, 1), options, progress=progress)
    print(peak - before, stage.native_model.own_bytes)
"""


@pytest.mark.parametrize("recipe", ["preserve", "F32", "Q4_K_M"])
def test_opening_and_loading_a_folder_takes_the_weights_and_three_times_the_largest_tensor(
    recipe: str, large: Path
) -> None:
    command = [sys.executable, "-c", dedent(_LOAD), str(large), recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, weights = map(int, done.stdout.split())
    largest = 2 * 4096 * 4096
    assert weights > 2 * largest
    assert weights < peak <= weights + 3 * largest
