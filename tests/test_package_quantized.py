"""Packages of a checkpoint that is quantized as they are built hold what a stage would have made of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import GOLDEN, wide, write_case
from package_helpers import contents, edited, refusal_of, sha256
from quantize_oracle import bytes_in, llama_quantize, made
from test_checkpoint_stages import _importances, as_gguf

from skippy_zmq.package.__main__ import main
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.recipes import recipe_named
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.package.weight_source import GgufWeights
from skippy_zmq.sources.references import locate
from skippy_zmq.topology import LayerRange

MATRICES = {
    f"blk.{layer}.{name}.weight": 256
    for layer in range(3)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(wide(256), tmp_path_factory.mktemp("checkpoint") / "model")
    _importances(folder / "im.dat", MATRICES)
    return folder


def tensor_bytes(package: Path) -> dict[str, bytes]:
    model = open_model(package)
    files = {path: path.read_bytes() for path in model.files}
    return {t.name: files[t.path][t.offset : t.offset + t.nbytes] for t in model.tensors}


def opened(folder: Path, quant: str, imatrix: str = "") -> GgufModel:
    return open_with_options(locate(folder), StageOptions(quant=quant, imatrix=imatrix, threads=1))


@pytest.mark.parametrize(("recipe", "imatrix"), [("Q4_K_M", ""), ("Q8_0", ""), ("IQ3_XXS", "im.dat")])
def test_the_bytes_are_those_of_a_stage_and_of_llama_cpp(
    recipe: str, imatrix: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "package"
    flags = ["--imatrix", imatrix] if imatrix else []
    assert main(["build", str(checkpoint), str(package), "--quant", recipe.lower(), *flags, "--no-progress"]) == 0
    found = tensor_bytes(package)
    stage = opened(checkpoint, recipe, imatrix)
    assert found == {tensor.name: made(stage, tensor) for tensor in stage.tensors}
    known = recipe_named(recipe)
    assert known is not None
    matrix = {name: np.ones(length, np.float32) for name, length in MATRICES.items()} if imatrix else None
    whole = as_gguf(checkpoint, tmp_path / "whole.gguf")
    assert found == bytes_in(llama_quantize(whole, tmp_path / "q.gguf", known.file_type, imatrix=matrix))
    wanted = {"recipe": recipe} | ({"imatrix_sha256": sha256(checkpoint / imatrix)} if imatrix else {})
    assert contents(package)["quantization"] == wanted
    assert main(["verify", str(package), "--no-progress"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(package)]) == 0
    line = capsys.readouterr().out.splitlines()[2]
    assert line == f"quantized to {recipe}" + (
        f", importance matrix sha256 {wanted['imatrix_sha256']}" if imatrix else ""
    )
    assert main(["inspect", str(package), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantization"] == wanted
    options = StageOptions(lanes=1, threads=1, ctx_size=64, batch_size=8, ubatch_size=8)
    layers = LayerRange(0, 2)
    sizes = {StageModel(source, layers, options).native_model.own_bytes for source in (open_model(package), stage)}
    assert len(sizes) == 1


def test_without_a_recipe_none_is_recorded(checkpoint: Path, tmp_path: Path) -> None:
    assert main(["build", str(checkpoint), str(tmp_path / "package"), "--no-progress"]) == 0
    assert "quantization" not in contents(tmp_path / "package")


def test_parts_of_another_recipe_or_matrix_are_not_kept(checkpoint: Path) -> None:
    sources = [opened(checkpoint, *how) for how in (("Q8_0",), ("Q4_0",), ("Q4_0", "im.dat"), ("preserve",))]
    assert len({GgufWeights(source).fingerprint() for source in sources}) == 4
    assert GgufWeights(opened(checkpoint, "Q4_0")).fingerprint() == GgufWeights(sources[1]).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--quant", "Q9"], "quant: wanted one of"),
        (["--imatrix", "im.dat"], "imatrix: wanted a recipe beside it"),
        (["--quant", "IQ2_XXS"], "IQ2_XXS needs an importance matrix"),
        (["--quant", "Q8_0", "--imatrix", "none.dat"], "none.dat: wanted an importance matrix"),
    ],
)
def test_what_cannot_be_built_is_said_and_nothing_written(
    arguments: list[str], problem: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(checkpoint), str(tmp_path / "package"), *arguments]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
    assert not (tmp_path / "package").exists()


def test_rows_that_do_not_fit_are_refused_where_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A width of 96 is no multiple of the 256 weights of a K-quant's block."""
    narrow, package = write_case(wide(96), tmp_path / "narrow"), tmp_path / "package"
    build = ["build", str(narrow), str(package), "--quant", "Q4_K_M", "--no-progress"]
    assert main([*build, "--quant-strict"]) == 2
    assert "rows that do not fit" in capsys.readouterr().err
    assert not package.exists()
    assert main(build) == 0


def test_files_are_not_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = GOLDEN / "llama" / "reference-f32.gguf"
    assert main(["build", str(gguf), str(tmp_path / "package"), "--quant", "Q8_0"]) == 2
    assert "is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    "facts", [7, {"recipe": 7}, {}, {"recipe": "Q8_0", "imatrix_sha256": "x"}, {"recipe": "Q8_0\n"}]
)
def test_a_manifest_that_says_nonsense_is_refused(facts: object, checkpoint: Path, tmp_path: Path) -> None:
    package = tmp_path / "package"
    assert main(["build", str(checkpoint), str(package), "--quant", "Q8_0", "--no-progress"]) == 0
    edited(package, lambda content: content.update(quantization=facts))
    assert "quantization" in refusal_of(package, "0:3")
