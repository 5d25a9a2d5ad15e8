"""A checkpoint opens as the model that llama.cpp's converter writes: names, types, shapes, bytes, metadata."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_files import CASES, CHECKPOINTS, GOLDEN, edited, safetensors_bytes, write_case

from skippy_zmq.sources.checkpoint.checkpoint import Checkpoint, open_checkpoint
from skippy_zmq.sources.checkpoint.rows import as_float32, read_rows
from skippy_zmq.sources.checkpoint.safetensors_table import read_table
from skippy_zmq.sources.checkpoint.tensors import CheckpointTensor, Segment
from skippy_zmq.sources.ggml_types import TENSOR_TYPES
from skippy_zmq.sources.gguf_values import ARRAY, VALUE_TYPES

NAMES = sorted(folder.name for folder in GOLDEN.iterdir())

# Left out of a checkpoint's header: they describe the model to people, and some come from the name of its folder, which
# must not be part of what a model is known by.
FOR_PEOPLE = {
    "general.name",
    "general.basename",
    "general.size_label",
    "general.finetune",
    "general.version",
    "general.organization",
    # what a fixed system of sampling suggests, not what the model is
    "general.sampling.temp",
}
# Said here where the converter is silent: llama.cpp would add a first token to every text by its own idea of the
# pre-tokenizer, the checkpoint's own tokenizer adds none.
SAID_HERE = {"tokenizer.ggml.add_bos_token"}
# transformers gives every Qwen2 tokenizer an <|endoftext|> that is not in its file, under an id of its own choice.
_VOCABULARY = {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type"}
INVENTED = {"qwen2": _VOCABULARY, "qwen2-yarn": _VOCABULARY}


def _tensors(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    return {
        name: [
            TENSOR_TYPES[tensor.type].name,
            list(tensor.shape),
            hashlib.sha256(checkpoint.rows(name, 0, tensor.n_rows).tobytes()).hexdigest(),
        ]
        for name, tensor in checkpoint.tensors.items()
    }


def _metadata(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """As tests/data/*/*.json have it: type names and value, long lists as hashes."""
    names = {number: gguf.GGUFValueType(number).name for number in VALUE_TYPES}
    found: dict[str, list[Any]] = {}
    for key, entry in checkpoint.metadata.items():
        if entry.type != ARRAY:
            value = float(np.float32(entry.value)) if isinstance(entry.value, float) else entry.value
            found[key] = [[names[entry.type]], value]
            continue
        assert isinstance(entry.value, tuple)
        values = [
            value.decode()
            if isinstance(value, bytes)
            else float(np.float32(value))
            if isinstance(value, float)
            else value
            for value in entry.value
        ]
        shown = hashlib.sha256(json.dumps(values).encode()).hexdigest() if len(values) > 64 else values
        found[key] = [[names[ARRAY], names[entry.element_type]], shown]
    return found


def _check(checkpoint: Checkpoint, expected: dict[str, Any], invented: set[str]) -> None:
    assert _tensors(checkpoint) == expected["tensors"]
    wanted = {key: value for key, value in expected["metadata"].items() if key not in FOR_PEOPLE | invented}
    found = {key: value for key, value in _metadata(checkpoint).items() if key not in invented}
    for key in SAID_HERE - set(wanted):
        assert found.pop(key, [["BOOL"], False]) == [["BOOL"], False]
    assert found == wanted


@pytest.mark.parametrize("name", NAMES)
def test_golden_checkpoints_are_their_bf16_reference_files(name: str) -> None:
    expected = json.loads((GOLDEN / name / "reference-bf16.json").read_text())
    _check(open_checkpoint(GOLDEN / name), expected, INVENTED.get(name, set()))


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_family_is_converted_as_llama_cpp_does_it(name: str, tmp_path: Path) -> None:
    expected = json.loads((CHECKPOINTS / f"{name}.json").read_text())
    _check(open_checkpoint(write_case(CASES[name], tmp_path / "model")), expected, INVENTED.get(name, set()))


@pytest.mark.parametrize("name", NAMES)
def test_golden_checkpoints_widened_are_their_f32_reference_files(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    reference = {tensor.name: tensor for tensor in gguf.GGUFReader(GOLDEN / name / "reference-f32.gguf").tensors}
    assert set(checkpoint.tensors) == set(reference)
    for tensor in checkpoint.tensors.values():
        rows = checkpoint.rows(tensor.name, 0, tensor.n_rows)
        wide = rows if rows.dtype == np.float32 else as_float32("BF16", rows)
        assert wide.tobytes() == np.ascontiguousarray(reference[tensor.name].data).tobytes(), tensor.name


@pytest.mark.parametrize("name", ["llama-old-spelling", "mixtral", "qwen3-moe-stacked", "llama-f16-tied-biases"])
@pytest.mark.parametrize("slab", [1, 3, 7])
def test_rows_read_in_slabs_are_those_read_at_once(name: str, slab: int, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_case(CASES[name], tmp_path / "model"))
    for tensor in checkpoint.tensors.values():
        whole = checkpoint.rows(tensor.name, 0, tensor.n_rows)
        parts = [
            checkpoint.rows(tensor.name, first, min(slab, tensor.n_rows - first))
            for first in range(0, tensor.n_rows, slab)
        ]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), tensor.name


def test_shards_and_a_single_file_are_the_same_model(tmp_path: Path) -> None:
    case = CASES["mixtral"]
    single = open_checkpoint(write_case(case, tmp_path / "single"))
    sharded = open_checkpoint(write_case(case, tmp_path / "sharded", shards=3))
    assert len(sharded.files) == 3
    assert _tensors(sharded) == _tensors(single)
    assert sharded.model().identity() == single.model().identity()


def test_other_weights_or_settings_are_another_model(tmp_path: Path) -> None:
    case = CASES["granite"]
    first = open_checkpoint(write_case(case, tmp_path / "first")).model().identity()
    second = write_case(case, tmp_path / "second")
    edited(second, {"logits_scaling": 4.0})
    assert open_checkpoint(second).model().identity() != first
    third = write_case(case, tmp_path / "third")
    data = bytearray((third / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (third / "model.safetensors").write_bytes(data)
    assert open_checkpoint(third).model().identity() != first


def test_rows_of_stacked_experts_take_memory_for_themselves_only(tmp_path: Path) -> None:
    n_experts, n_rows, width = 16, 256, 1024
    path = tmp_path / "model.safetensors"
    shape = (n_experts, n_rows, width)
    path.write_bytes(safetensors_bytes({"experts": ("BF16", shape, bytes(2 * n_experts * n_rows * width))}))
    (source,) = read_table(path)
    segments = tuple(Segment(source, expert * n_rows, n_rows) for expert in range(n_experts))
    tensor = CheckpointTensor("experts.weight", 30, (width, n_rows, n_experts), segments)
    tracemalloc.start()
    rows = read_rows(tensor, n_rows // 2, n_rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.nbytes == 2 * n_rows * width
    assert peak <= 3 * rows.nbytes
    assert tensor.nbytes == n_experts * rows.nbytes
