"""Types and bytes of quantized models equal those that llama.cpp's own quantizer writes (T05, T06)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import RawGguf
from model_files import rewrite, tiny
from quantize_oracle import Matrix, as_checkpoint, bytes_in, llama_quantize, made, random_importances, types_in

from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.runtime.quantize import planned_types, quantize_rows, quantized
from skippy_zmq.runtime.recipes import RECIPE_NAMES, Recipe, recipe_named
from skippy_zmq.sources.ggml_types import F32, TENSOR_TYPES, type_name
from skippy_zmq.sources.imatrix import ImportanceMatrix

RECIPES = tuple(name for name in RECIPE_NAMES if name != "preserve")
NEEDY = ("IQ3_XS", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "Q2_K_S")
# Q1_0 is known to llama.cpp, but has no fallback for rows that its blocks of 128 do not fit.
NO_FALLBACK = ("Q1_0",)

# Those of the mixes that depend on layers, heads, experts and importances; the codebooks of the others take minutes.
MIXES = ("F16", "Q8_0", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_0", "IQ4_XS", "IQ4_NL", "Q3_K_M", "Q2_K", "MXFP4_MOE")
WEIGHED_MIXES = (*MIXES, "IQ3_XXS", "IQ2_XXS")
# Models of many weights see those whose types depend on what is special about them.
LARGE = ("deep", "experts", "few experts")
LARGE_MIXES = ("Q4_K_M", "IQ4_XS", "Q3_K_M", "MXFP4_MOE")
LARGE_WEIGHED_MIXES = ("Q4_0", "IQ3_XXS")

MODELS: dict[str, Callable[[Path], Path]] = {
    "grouped": lambda path: tiny(path, n_layers=8, hidden=256, ffn=256, heads=4, kv_heads=1, quant="bf16"),
    # so many layers that the first, early, middle and late ones get different types
    "deep": lambda path: tiny(path, n_layers=16, hidden=256, ffn=256),
    "tied": lambda path: tiny(path, n_layers=3, hidden=256, ffn=512, tied=True, quant="f16"),
    "experts": lambda path: tiny(path, n_layers=8, hidden=256, ffn=256, experts=8, quant="bf16"),
    "few experts": lambda path: tiny(path, n_layers=8, hidden=256, ffn=256, experts=4),
    # T05: rows that fit blocks of 32 only, of 256 in one direction only, and none at all
    "rows of 64": lambda path: tiny(path, n_layers=8, hidden=64, ffn=192),
    "rows of 288": lambda path: tiny(path, n_layers=4, hidden=288, ffn=512, quant="bf16"),
    "rows of 352": lambda path: tiny(path, n_layers=4, hidden=96, ffn=352, tied=True),
    "rows of 40": lambda path: tiny(path, n_layers=4, hidden=40, ffn=104, heads=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


def source_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    return path if path.exists() else MODELS[name](path)


def recipe(name: str) -> Recipe:
    found = recipe_named(name)
    assert found is not None
    return found


def matrix(entries: Matrix) -> ImportanceMatrix:
    return ImportanceMatrix(Path("some.imatrix"), "b" * 64, entries, (), 0)


def assert_as_llama_cpp(path: Path, name: str, importances: Matrix | None, wanted_path: Path) -> None:
    source = as_checkpoint(path)
    wanted = llama_quantize(path, wanted_path, recipe(name).file_type, imatrix=importances)
    ours = quantized(source, recipe(name), imatrix=matrix(importances) if importances else None, threads=2)
    assert {tensor.name: tensor.type for tensor in ours.tensors} == types_in(wanted), name
    contents = bytes_in(wanted)
    for number, tensor in enumerate(ours.tensors):
        # pieces that end inside of experts, and whole tensors
        assert made(ours, tensor, at_a_time=50 if number % 2 else 1 << 30) == contents[tensor.name], tensor.name
    assert ours.metadata["general.file_type"] == recipe(name).file_type


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in NEEDY])
def test_every_recipe_gives_the_types_and_bytes_of_llama_cpp(name: str, folder: Path, tmp_path: Path) -> None:
    assert_as_llama_cpp(source_file(folder, "grouped"), name, None, tmp_path / "wanted.gguf")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_with_importances(name: str, folder: Path, tmp_path: Path) -> None:
    path = source_file(folder, "grouped")
    assert_as_llama_cpp(path, name, random_importances(as_checkpoint(path)), tmp_path / "wanted.gguf")


@pytest.mark.parametrize("model", [model for model in MODELS if model != "grouped"])
def test_mixes_of_other_models(model: str, folder: Path, tmp_path: Path) -> None:
    path = source_file(folder, model)
    importances = random_importances(as_checkpoint(path))
    for name in LARGE_MIXES if model in LARGE else MIXES:
        assert_as_llama_cpp(path, name, None, tmp_path / "wanted.gguf")
    for name in LARGE_WEIGHED_MIXES if model in LARGE else WEIGHED_MIXES:
        assert_as_llama_cpp(path, name, importances, tmp_path / "wanted.gguf")


@pytest.mark.parametrize("name", NO_FALLBACK)
def test_rows_without_a_fallback_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    path = source_file(folder, "rows of 64")
    with pytest.raises(ValueError, match="refused"):
        llama_quantize(path, tmp_path / "wanted.gguf", recipe(name).file_type)
    with pytest.raises(ModelFileError, match=rf"rows of 64.*cannot be quantized to {name}: no tensor type fallback"):
        quantized(as_checkpoint(path), recipe(name), threads=1)


def test_fallbacks_are_reported_and_can_be_refused(folder: Path) -> None:
    source = as_checkpoint(source_file(folder, "rows of 288"))
    fallen = {row.name: row for row in planned_types(source, recipe("Q4_K_M")) if row.fell_back}
    assert all(row.name.endswith("weight") and "ffn_down" not in row.name for row in fallen.values())
    query = fallen["blk.3.attn_q.weight"]
    assert (type_name(query.without_fallback), type_name(query.type)) == ("Q4_K", "Q5_0")
    with pytest.raises(OptionError, match=r"Q4_K_M: \d+ of \d+ tensors have rows that do not fit.*Q"):
        quantized(source, recipe("Q4_K_M"), threads=1, strict=True)
    straight = as_checkpoint(source_file(folder, "grouped"))
    quantized(straight, recipe("Q4_K_M"), threads=1, strict=True)


@pytest.mark.parametrize("name", NEEDY)
def test_recipes_that_need_importances_are_refused_without(name: str, folder: Path) -> None:
    source = as_checkpoint(source_file(folder, "grouped"))
    with pytest.raises(OptionError, match=rf"{name} needs an importance matrix for 'blk\.0\..* more: give one"):
        quantized(source, recipe(name), threads=1)


def test_missing_and_misfit_entries_are_refused(folder: Path) -> None:
    source = as_checkpoint(source_file(folder, "grouped"))
    whole = random_importances(source)
    lacking = {name: values for name, values in whole.items() if name != "blk.5.ffn_up.weight"}
    with pytest.raises(OptionError, match=r"importance matrix for 'blk\.5\.ffn_up\.weight' \(IQ2_XXS\): some\.im"):
        quantized(source, recipe("IQ2_XXS"), imatrix=matrix(lacking), threads=1)
    quantized(source, recipe("Q4_K_M"), imatrix=matrix(lacking), threads=1)  # goes without that one, as llama.cpp does
    short = {**whole, "blk.5.ffn_up.weight": whole["blk.5.ffn_up.weight"][:-1]}
    with pytest.raises(OptionError, match=r"entry 'blk\.5\.ffn_up\.weight': wanted 256 values .* got 255"):
        quantized(source, recipe("Q4_K_M"), imatrix=matrix(short), threads=1)


def test_the_identity_tells_recipes_and_matrices_apart(folder: Path) -> None:
    source = as_checkpoint(source_file(folder, "grouped"))
    importances = matrix(random_importances(source))
    models = [
        source,
        quantized(source, recipe("Q6_K"), threads=1),
        quantized(source, recipe("Q6_K"), imatrix=importances, threads=1),
        quantized(source, recipe("Q5_K_S"), threads=1),
    ]
    assert len({model.identity() for model in models}) == 4
    assert quantized(source, recipe("Q6_K"), threads=2).identity() == models[1].identity()


def edited(path: Path, target: Path, tensor: str, values: dict[int, int]) -> Path:
    """A copy of a bf16 model whose ``tensor`` has the bit patterns ``values`` at some places."""

    def edit(raw: RawGguf) -> None:
        data = raw.tensors[tensor].data
        assert data is not None
        words = np.frombuffer(data, np.uint16).copy()
        for place, bits in values.items():
            words[place] = bits
        raw.tensors[tensor].data = words.tobytes()

    return rewrite(path, target, edit)


BIG, TINY_VALUE, INFINITE, NAN = 0x47C3, 0x0001, 0x7F80, 0x7FC1  # 99840, 9e-41, and no numbers


@pytest.mark.parametrize("name", ["BF16", "F32", "Q8_0", "Q4_0", "Q4_K_M"])
def test_big_and_tiny_bf16_values(name: str, folder: Path, tmp_path: Path) -> None:
    """T06: no infinity appears, and bf16 stays what it is."""
    weight = "blk.2.ffn_up.weight"
    path = edited(source_file(folder, "grouped"), tmp_path / "big.gguf", weight, {5: BIG, 300: TINY_VALUE})
    ours = quantized(as_checkpoint(path), recipe(name), threads=2)
    wanted = bytes_in(llama_quantize(path, tmp_path / "wanted.gguf", recipe(name).file_type))
    tensor = next(tensor for tensor in ours.tensors if tensor.name == weight)
    assert made(ours, tensor) == wanted[weight]
    if name == "BF16":
        assert wanted[weight] == bytes_in(path)[weight]


def test_values_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    weight = "blk.2.ffn_up.weight"
    path = edited(source_file(folder, "grouped"), tmp_path / "big.gguf", weight, {5: BIG})
    ours = quantized(as_checkpoint(path), recipe("F16"), threads=2)
    tensor = next(tensor for tensor in ours.tensors if tensor.name == weight)
    with pytest.raises(ModelFileError, match=r"gguf: tensor 'blk\.2\.ffn_up\.weight' holds values that do not fit f16"):
        made(ours, tensor)


@pytest.mark.parametrize("bits", [INFINITE, NAN])
@pytest.mark.parametrize("name", ["Q8_0", "Q2_K", "IQ4_XS", "TQ1_0", "MXFP4_MOE", "F32"])
def test_values_that_are_no_numbers_are_refused(name: str, bits: int, folder: Path, tmp_path: Path) -> None:
    weight = "blk.2.ffn_up.weight"
    path = edited(source_file(folder, "grouped"), tmp_path / "bad.gguf", weight, {5: bits})
    ours = quantized(as_checkpoint(path), recipe(name), threads=2)
    tensor = next(tensor for tensor in ours.tensors if tensor.name == weight)
    with pytest.raises(ModelFileError, match=r"'blk\.2\.ffn_up\.weight' holds values that are not finite numbers"):
        made(ours, tensor)


@pytest.mark.parametrize("name", ["Q8_0", "Q5_K_M", "Q2_K", "IQ4_XS", "IQ2_XXS", "IQ1_S", "TQ2_0", "MXFP4_MOE", "Q4_0"])
def test_rows_of_zeros_and_of_one_value(name: str, folder: Path) -> None:
    """Nothing that llama.cpp asserts about scales ends the process."""
    source = as_checkpoint(source_file(folder, "grouped"))
    importances = random_importances(source)
    plan = {row.name: row.type for row in planned_types(source, recipe(name), has_imatrix=True)}
    tensor = next(replace(tensor, type=F32) for tensor in source.tensors if tensor.name == "blk.7.ffn_up.weight")
    for value in (0.0, 1.0, -1e-30, 3e4):
        rows = np.full((256, 256), value, np.float32)
        out = quantize_rows(rows, tensor, plan[tensor.name], importances=importances[tensor.name], threads=2)
        assert out.nbytes == TENSOR_TYPES[plan[tensor.name]].row_bytes(rows.size)


def test_rows_of_another_size_are_refused(folder: Path) -> None:
    source = as_checkpoint(source_file(folder, "grouped"))
    tensor = next(replace(tensor, type=F32) for tensor in source.tensors if tensor.name == "blk.7.ffn_up.weight")
    with pytest.raises(ModelFileError, match=r"'blk\.7\.ffn_up\.weight' wanted whole rows of 1024 bytes, got 1000"):
        quantize_rows(bytes(1000), tensor, 8, threads=1)
    with pytest.raises(ModelFileError, match="iq2_xxs needs importances"):
        quantize_rows(bytes(1024), tensor, 16, threads=1)
    with pytest.raises(ModelFileError, match="importances: wanted 256, got 10"):
        quantize_rows(bytes(1024), tensor, 16, importances=np.ones(10, np.float32), threads=1)


class StoppedError(Exception):
    pass


def test_a_signal_stops_it(folder: Path) -> None:
    """128 million weights would take longer than a test may; another thread runs meanwhile and sends the signal."""
    tensor = replace(as_checkpoint(source_file(folder, "grouped")).tensors[0], shape=(256, 1 << 19))
    rows = np.resize(np.random.default_rng(0).normal(size=1 << 20).astype(np.float32).view(np.uint16)[1::2], 1 << 27)

    def stop(_number: int, _frame: object) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGUSR1, stop)
    sender = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        sender.start()
        with pytest.raises(StoppedError):
            quantize_rows(rows, tensor, 17, importances=np.ones(256, np.float32), threads=2)
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_quantized_source_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "q8.gguf", hidden=256, ffn=256, quant="q8_0")
    with pytest.raises(ModelFileError, match=r"'token_embd\.weight' is Q8_0 already: wanted F32, F16 or BF16"):
        quantized(as_checkpoint(path), recipe("Q4_K_M"), threads=1)


def test_recipe_names() -> None:
    assert recipe_named("Preserve") is None
    assert recipe_named("q4_k") == recipe_named("Q4_K_M") == Recipe("Q4_K_M", 15)
    with pytest.raises(OptionError, match=r"quant: wanted one of preserve, F32, .*, got 'q9'"):
        recipe_named("q9")
