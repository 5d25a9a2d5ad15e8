"""Stages opened from a checkpoint give the logits of the reference files, bit for bit, and those of transformers."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import CASES, GOLDEN, edited, write_case
from pipeline_helpers import FLOAT32
from quantize_oracle import as_gguf, bytes_in, llama_quantize

from skippy_zmq import LocalPipeline
from skippy_zmq.certify.compare import first_difference
from skippy_zmq.certify.reference import Unsplit
from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.certify.workload import DEFAULTS, PLAIN, Logits, Settings, Step, context_size, script, stage_options
from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.references import locate
from skippy_zmq.topology import split_evenly

pytest_plugins = ("transport_fixtures",)

MOSTLY_BF16 = 32  # LLAMA_FTYPE_MOSTLY_BF16
NAMES = sorted(folder.name for folder in GOLDEN.iterdir())


@functools.cache
def unsplit(path: Path, settings: Settings) -> tuple[tuple[Step, ...], Logits]:
    n_ctx = context_size(open_model(path))
    with Unsplit(path, settings, n_ctx) as whole:
        steps = script(n_ctx, can_trim=whole.can_trim)
        return steps, whole.run(steps, whole=False)


def staged(source: GgufModel, boundaries: tuple[int, ...], settings: Settings) -> StagedModel:
    return StagedModel(source, boundaries, stage_options(settings, context_size(source)))


def opened(folder: Path, quant: str = "preserve") -> GgufModel:
    return open_with_options(locate(folder), StageOptions(quant=quant, threads=1))


@pytest.mark.parametrize("settings", [PLAIN, DEFAULTS], ids=["plain", "defaults"])
@pytest.mark.parametrize("name", NAMES)
def test_f32_at_every_boundary_equals_the_reference_file(name: str, settings: Settings) -> None:
    steps, wanted = unsplit(GOLDEN / name / "reference-f32.gguf", settings)
    source = opened(GOLDEN / name, "F32")
    for boundaries in [(), *((layer,) for layer in range(1, source.n_layers))]:
        assert first_difference(steps, wanted, staged(source, boundaries, settings).run(steps)) is None, boundaries


@pytest.mark.parametrize("settings", [PLAIN, DEFAULTS], ids=["plain", "defaults"])
@pytest.mark.parametrize("name", NAMES)
def test_preserve_at_every_boundary_equals_the_reference_file(name: str, settings: Settings, tmp_path: Path) -> None:
    """llama.cpp's quantizer narrows the F32 reference to the tensors of reference-bf16.gguf, which is not kept here."""
    reference = llama_quantize(GOLDEN / name / "reference-f32.gguf", tmp_path / "whole.gguf", MOSTLY_BF16)
    listed = json.loads((GOLDEN / name / "reference-bf16.json").read_text())["tensors"]
    hashes = {tensor: hashlib.sha256(data).hexdigest() for tensor, data in bytes_in(reference).items()}
    assert hashes == {tensor: digest for tensor, (_, _, digest) in listed.items()}
    steps, wanted = unsplit(reference, settings)
    source = opened(GOLDEN / name)
    for boundaries in [(), *((layer,) for layer in range(1, source.n_layers))]:
        assert first_difference(steps, wanted, staged(source, boundaries, settings).run(steps)) is None, boundaries


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_f32_stages_answer_as_transformers_does(name: str, n_stages: int) -> None:
    folder = GOLDEN / name
    expected = json.loads((folder / "expected.json").read_text())
    wanted = np.load(folder / "logits.npy")
    prompt: list[int] = expected["prompt_ids"]
    source = opened(folder, "F32")
    boundaries = [layers.start for layers in split_evenly(n_stages, source.n_layers)][1:]
    model = StagedModel(source, boundaries, stage_options(PLAIN, 128))
    logits = model.decode([(0, 0, len(prompt))], np.array(prompt, np.int32), range(len(prompt)))
    tolerance = 1e-3 if name == "gemma3_text" else 1e-5  # llama.cpp's table of Gemma's activation is f16
    assert np.abs(np.stack(logits) - wanted).max() <= tolerance * np.abs(wanted).max()
    assert all(row.argmax() == other.argmax() for row, other in zip(logits, wanted, strict=True))


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_family_runs_split(name: str, tmp_path: Path) -> None:
    folder = write_case(CASES[name], tmp_path / "model")
    steps, wanted = unsplit(as_gguf(folder, tmp_path / "whole.gguf"), DEFAULTS)
    source = opened(folder)
    for boundaries in [(), (1,)]:
        assert first_difference(steps, wanted, staged(source, boundaries, DEFAULTS).run(steps)) is None, boundaries


@pytest.mark.parametrize("name", NAMES)
def test_texts_become_the_tokens_that_transformers_makes_of_them(name: str) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())["tokenized"]
    source = opened(GOLDEN / name)
    (stage,) = staged(source, (), DEFAULTS).stages
    assert {text: stage.tokenize(text) for text in expected} == expected


@pytest.mark.parametrize("quant", ["preserve", "F32", "Q8_0"])
def test_processes_opened_from_a_folder_generate_and_agree_on_what_they_are(quant: str, leak_check: None) -> None:
    folder = GOLDEN / "llama"
    expected = json.loads((folder / "expected.json").read_text())
    options = {**FLOAT32, "ctx_size": 256, "lanes": 1, "threads": 1, "quant": quant}
    with LocalPipeline(folder, split=(2,), **options) as pipeline:
        assert len({stage.model for stage in pipeline.stages}) == 1
        found = pipeline.generate(token_ids=expected["prompt_ids"], max_tokens=len(expected["greedy_ids"]))
    if quant == "F32":
        assert list(found.token_ids) == expected["greedy_ids"]
    assert len(found.token_ids) == len(expected["greedy_ids"])


def test_recipes_are_different_models() -> None:
    identities = {opened(GOLDEN / "llama", quant).identity() for quant in ("preserve", "F32", "F16", "Q8_0")}
    assert len(identities) == 4


def test_recipes_are_for_checkpoints_only() -> None:
    with pytest.raises(OptionError, match=r"quant Q8_0: .*reference-f32\.gguf is no checkpoint"):
        opened(GOLDEN / "llama" / "reference-f32.gguf", "Q8_0")


def test_an_importance_matrix_without_a_recipe_is_refused() -> None:
    with pytest.raises(OptionError, match="imatrix: wanted a recipe"):
        open_with_options(locate(GOLDEN / "llama"), StageOptions(imatrix="im.dat"))


def _importances(path: Path, entries: dict[str, int]) -> None:
    """An importance matrix in the legacy format: ones for each column."""
    out = struct.pack("<i", len(entries))
    for name, length in entries.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, length)
        out += np.ones(length, "<f4").tobytes()
    path.write_bytes(out)


def test_a_relative_importance_matrix_lies_beside_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    options = StageOptions(quant="Q4_0", imatrix="im.dat", threads=1)
    with pytest.raises(ModelFileError, match=r"model/im\.dat: wanted an importance matrix"):
        open_with_options(locate(folder), options)
    _importances(folder / "im.dat", {"blk.0.attn_q.weight": 32})
    with caplog.at_level(logging.INFO):
        found = open_with_options(locate(folder), options)
    assert hashlib.sha256((folder / "im.dat").read_bytes()).hexdigest() in caplog.text
    assert open_with_options(locate(folder / "model.safetensors"), options).identity() == found.identity()
    absolute = StageOptions(quant="Q4_0", imatrix=str(folder / "im.dat"), threads=1)
    assert open_with_options(locate(folder), absolute).identity() == found.identity()
    without = StageOptions(quant="Q4_0", threads=1)
    assert open_with_options(locate(folder), without).identity() != found.identity()


@pytest.mark.parametrize("boundaries", [(), (1,)], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tie_word_embeddings": True}, id="true"),
        pytest.param({"tie_word_embeddings": None, "text_config": {"tie_word_embeddings": True}}, id="nested"),
    ],
)
def test_tied_embeddings_are_the_output_matrix_of_the_last_stage(
    change: dict[str, object], boundaries: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_case(CASES["llama-f16-tied-biases"], tmp_path / "model")
    edited(folder, change)
    source = opened(folder)
    assert source.tied_output
    steps, wanted = unsplit(as_gguf(folder, tmp_path / "whole.gguf"), DEFAULTS)
    assert first_difference(steps, wanted, staged(source, boundaries, DEFAULTS).run(steps)) is None


def test_tied_embeddings_of_another_type_are_the_output_matrix_too(tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    one, two = (staged(opened(folder, "Q8_0"), boundaries, DEFAULTS) for boundaries in ((), (1,)))
    steps = script(256, can_trim=True)
    assert first_difference(steps, one.run(steps), two.run(steps)) is None


def test_a_checkpoint_cut_short_while_open_is_an_error_and_no_crash(tmp_path: Path) -> None:
    folder = write_case(CASES["llama-old-spelling"], tmp_path / "model")
    source = opened(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: truncated while open: tensor"):
        staged(source, (), DEFAULTS)
