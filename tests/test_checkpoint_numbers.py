"""Numbers of a checkpoint arrive as they are, in a wider type, or are refused by name: no infinity appears (T06)."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import CASES, Tensors, safetensors_bytes, write_case

from skippy_zmq.errors import ModelFileError
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint
from skippy_zmq.sources.references import locate
from skippy_zmq.topology import LayerRange

NAME = "model.layers.1.mlp.up_proj.weight"
GGUF_NAME = "blk.1.ffn_up.weight"
NORM = "model.layers.0.input_layernorm.weight"


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def folder_with(tmp_path: Path, value: bytes, *, dtype: str = "BF16", name: str = NAME) -> Path:
    """A small checkpoint whose third value of a tensor has these bytes."""
    case = CASES["granite"]
    folder = write_case(case, tmp_path / "model")
    tensors: Tensors = case.tensors()
    if dtype == "F16":
        tensors = {
            key: ("F16", shape, (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype("<f2").tobytes())
            for key, (_, shape, data) in tensors.items()
        }
    kind, shape, data = tensors[name]
    tensors[name] = (kind, shape, data[:4] + value + data[6:])
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def load(folder: Path, quant: str) -> StageModel:
    options = StageOptions(ctx_size=64, lanes=1, threads=1, quant=quant)
    source = open_with_options(locate(folder), options)
    return StageModel(source, LayerRange(0, source.n_layers), options)


def logits(model: StageModel) -> np.ndarray:
    model.run([(0, 0, 4)], np.array([1, 2, 3, 4], np.int32), [3])
    return model.logits(3)


@pytest.mark.parametrize("quant", ["preserve", "BF16", "Q8_0", "Q4_0"])
def test_a_value_beyond_f16_stays_finite_in_types_that_hold_it(quant: str, tmp_path: Path) -> None:
    assert np.isfinite(logits(load(folder_with(tmp_path, bf16(1e5)), quant))).all()


def test_a_value_beyond_f16_is_refused_as_f16_by_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, bf16(1e5))
    with pytest.raises(ModelFileError, match=GGUF_NAME):
        load(folder, "F16")


@pytest.mark.parametrize("value", [1e5, 1e-40, -1e-40, 3e38])
def test_bf16_values_are_preserved_bit_for_bit(value: float, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder_with(tmp_path, bf16(value)))
    rows = checkpoint.rows(GGUF_NAME, 0, checkpoint.tensors[GGUF_NAME].n_rows)
    assert rows.ravel()[2].tobytes() == bf16(value)


@pytest.mark.parametrize("quant", ["preserve", "F16", "Q8_0"])
def test_norms_are_f32(quant: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, bf16(1.5), name=NORM)
    source = open_with_options(locate(folder), StageOptions(quant=quant))
    vectors = [tensor for tensor in source.tensors if len(tensor.shape) == 1]
    assert len(vectors) == 5
    assert {tensor.type for tensor in vectors} == {0}
    assert np.isfinite(logits(load(folder, quant))).all()


@pytest.mark.parametrize("quant", ["preserve", "F32", "Q8_0"])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        pytest.param("BF16", bf16(float("inf")), id="bf16 infinity"),
        pytest.param("BF16", bf16(float("nan")), id="bf16 NaN"),
        pytest.param("F16", b"\x00\xfc", id="f16 infinity"),
        pytest.param("F16", b"\x01\x7e", id="f16 NaN"),
    ],
)
def test_infinities_and_nans_in_the_source_are_refused_by_name(
    quant: str, dtype: str, value: bytes, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, value, dtype=dtype)
    with pytest.raises(ModelFileError, match=f"'{NAME}': holds values that are infinite or not a number"):
        load(folder, quant)


def test_a_stage_reads_only_its_own_layers(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, bf16(float("nan")))  # in layer 1
    options = StageOptions(ctx_size=64, lanes=1, threads=1)
    source = open_with_options(locate(folder), options)
    assert StageModel(source, LayerRange(0, 1), options).n_vocab == 512
    with pytest.raises(ModelFileError, match=NAME):
        StageModel(source, LayerRange(1, 2), options)
