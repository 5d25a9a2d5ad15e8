"""Safetensors files and indexes that lie are refused before a tensor is read; good ones open (T01, G04, P01)."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from checkpoint_files import CASES, edited, safetensors_bytes, write_case
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint
from skippy_zmq.sources.checkpoint.safetensors_table import read_table

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(8)
INDEX = "model.safetensors.index.json"


def file_of(header: bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def table_of(entries: Any, data: bytes = DATA) -> bytes:
    return file_of(json.dumps(entries).encode(), data)


def entry(**changes: Any) -> bytes:
    return table_of({"a": {**ENTRY, **changes}})


def pair(first: list[int], second: list[int], data: bytes = bytes(16)) -> bytes:
    return table_of({"a": {**ENTRY, "data_offsets": first}, "b": {**ENTRY, "data_offsets": second}}, data)


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "truncated: wanted at least 8 bytes, got 0"),
    "five bytes": (b"\x02\0\0\0\0", "truncated: wanted at least 8 bytes, got 5"),
    "length 0": (file_of(b"", length=0), "header length: wanted 2 to"),
    "length 2**63": (file_of(b"{}", length=2**63), "header length: wanted 2 to"),
    "length beyond the file": (file_of(b"{}", length=99), "truncated inside the header: needs 107 bytes, has 18"),
    "length that cuts the header": (file_of(b'{"a":{}}', length=7), "header: not valid JSON"),
    "not UTF-8": (file_of(b'{"\xff":{}}'), "header: wanted UTF-8"),
    "not JSON": (file_of(b"{nonsense}"), "header: not valid JSON"),
    "a list": (table_of([]), "header: wanted it to start with"),
    "leading space": (file_of(b" {}", b""), "header: wanted it to start with"),
    "deep nesting": (file_of(b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"), "header: JSON is nested too deeply"),
    "a name twice": (
        file_of(b'{"a":' + json.dumps(ENTRY).encode() + b',"a":' + json.dumps(ENTRY).encode() + b"}"),
        "key 'a' appears twice",
    ),
    "NaN in the header": (file_of(b'{"a":NaN}'), "NaN is no JSON number"),
    "metadata that is no text": (table_of({"__metadata__": {"n": 1}}, b""), "__metadata__: wanted a map of strings"),
    "metadata that is a list": (table_of({"__metadata__": []}, b""), "__metadata__: wanted a map of strings"),
    "an entry that is no object": (table_of({"a": 3}), "tensor 'a': wanted a JSON object"),
    "unknown dtype": (entry(dtype="F33"), "tensor 'a': wanted a known dtype, got 'F33'"),
    "no dtype": (table_of({"a": {"shape": [2], "data_offsets": [0, 8]}}), "tensor 'a': wanted a known dtype"),
    "negative extent": (entry(shape=[-2]), "tensor 'a': shape: wanted a list of numbers from 0"),
    "extent that is a float": (entry(shape=[2.0]), "tensor 'a': shape: wanted a list of numbers from 0"),
    "extent that is true": (entry(shape=[True, 2]), "tensor 'a': shape: wanted a list of numbers from 0"),
    "shape that wraps around": (
        entry(shape=[2**40, 2**40]),
        "tensor 'a': shape .* needs .* bytes, data_offsets give 8",
    ),
    "seventeen dimensions": (entry(shape=[1] * 17), "tensor 'a': shape: wanted at most 16 dimensions, got 17"),
    "reversed offsets": (entry(data_offsets=[8, 0]), "tensor 'a': data_offsets: wanted them rising"),
    "offsets beyond the end": (
        entry(data_offsets=[8, 16]),
        "tensor 'a': data_offsets: wanted them rising and at most 8",
    ),
    "negative offsets": (entry(data_offsets=[-8, 0]), "tensor 'a': data_offsets: wanted two numbers"),
    "three offsets": (entry(data_offsets=[0, 4, 8]), "tensor 'a': data_offsets: wanted two numbers"),
    "offsets that are floats": (entry(data_offsets=[0.0, 8.0]), "tensor 'a': data_offsets: wanted two numbers"),
    "offsets of 2**64": (entry(data_offsets=[2**64, 2**64 + 8]), "tensor 'a': data_offsets: wanted two numbers"),
    "bytes that are not those of the shape": (entry(shape=[3]), r"tensor 'a': shape \[3\] of F32 needs 12 bytes"),
    "half a byte": (
        table_of({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"\0"),
        "tensor 'a': shape .* needs 1.5 bytes",
    ),
    "overlapping tensors": (pair([0, 8], [4, 12]), "tensor 'b' overlaps tensor 'a': wanted offset 8, got 4"),
    "the same bytes twice": (pair([0, 8], [0, 8]), "tensor 'b' overlaps tensor 'a': wanted offset 8, got 0"),
    "a gap": (pair([0, 8], [12, 20], bytes(20)), "tensor 'b' leaves a gap after tensor 'a': wanted offset 8, got 12"),
    "a gap after the header": (entry(data_offsets=[4, 12]) + bytes(4), "tensor 'a' leaves a gap after the header"),
    "trailing bytes": (table_of({"a": ENTRY}, bytes(9)), "bytes after tensor 'a'"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_headers_are_refused_by_name_without_memory_for_what_they_announce(name: str, tmp_path: Path) -> None:
    data, complaint = BAD[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(ModelFileError, match=complaint) as refused:
        read_table(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert peak < 8 << 20


GOOD: dict[str, tuple[bytes, dict[str, tuple[int, ...]]]] = {
    "an empty tensor": (
        table_of({"a": ENTRY, "e": {"dtype": "F32", "shape": [0], "data_offsets": [8, 8]}}),
        {"a": (2,), "e": (0,)},
    ),
    "a scalar": (table_of({"s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4)), {"s": ()}),
    "an empty map of metadata": (table_of({"__metadata__": {}, "a": ENTRY}), {"a": (2,)}),
    "padding": (file_of(json.dumps({"a": ENTRY}).encode() + b" " * 37), {"a": (2,)}),
    "tensors in any order": (
        table_of({"b": {**ENTRY, "data_offsets": [8, 16]}, "a": ENTRY}, bytes(16)),
        {"a": (2,), "b": (2,)},
    ),
    "no tensors": (file_of(b"{}", b""), {}),
}


@pytest.mark.parametrize("name", GOOD)
def test_legal_files_that_look_odd_are_read(name: str, tmp_path: Path) -> None:
    data, shapes = GOOD[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert {tensor.name: tensor.shape for tensor in read_table(path)} == shapes
    with safetensors.safe_open(path, framework="numpy") as library:
        assert set(library.keys()) == set(shapes)


@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_damage_is_refused_or_leaves_a_file_that_the_library_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes, at: int
) -> None:
    path = tmp_path_factory.mktemp("damage") / "model.safetensors"
    safetensors.numpy.save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(4, np.int8)}, path)
    data = bytearray(path.read_bytes())
    data[at : at + len(damage)] = damage
    path.write_bytes(data)
    try:
        found = {tensor.name: tensor.shape for tensor in read_table(path)}
    except ModelFileError:
        return
    with safetensors.safe_open(path, framework="numpy") as library:
        names = list(library.keys())
        assert {name: tuple(library.get_slice(name).get_shape()) for name in names} == found


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.safetensors: wanted a regular file"):
        open_checkpoint(folder)


def _sharded(tmp_path: Path) -> Path:
    return write_case(CASES["granite"], tmp_path / "model", shards=2)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("../outside.safetensors", id="parent"),
        pytest.param("a/../../outside.safetensors", id="parent inside"),
        pytest.param("{folder}/outside.safetensors", id="absolute"),
        pytest.param("..\\outside.safetensors", id="backslash"),
        pytest.param("", id="empty"),
        pytest.param(".", id="dot"),
        pytest.param("x\0.safetensors", id="NUL"),
        pytest.param("x" * 5000, id="long"),
        pytest.param("model.safetensors/", id="trailing slash"),
        pytest.param("link.safetensors", id="link to outside"),
        pytest.param("fifo.safetensors", id="FIFO"),
        pytest.param("/dev/zero", id="device"),
        pytest.param("sub", id="directory"),
        pytest.param("missing.safetensors", id="missing"),
        pytest.param(7, id="number"),
    ],
)
def test_an_index_cannot_name_a_file_outside_its_folder(name: str | int, tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    (folder / "link.safetensors").symlink_to(outside)
    os.mkfifo(folder / "fifo.safetensors")
    (folder / "sub").mkdir()
    shown = name.format(folder=tmp_path) if isinstance(name, str) and "\0" not in name else name
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {
        tensor: shown if part.startswith("model-00001") else part for tensor, part in index["weight_map"].items()
    }
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"index\.json: (file|weight_map)") as refused:
        open_checkpoint(folder)
    if isinstance(shown, str) and len(shown) < 60 and "\0" not in shown:
        assert repr(shown) in str(refused.value)


@pytest.mark.parametrize("spelling", ["./{}", "sub/{}"])
def test_an_index_may_name_files_at_and_below_its_folder(spelling: str, tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    whole = open_checkpoint(folder).content()
    (folder / "sub").mkdir()
    index = json.loads((folder / INDEX).read_text())
    for part in set(index["weight_map"].values()):
        (folder / part).rename(folder / spelling.format(part))
    index["weight_map"] = {tensor: spelling.format(part) for tensor, part in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    assert open_checkpoint(folder).content() == whole


def test_links_of_a_hub_cache_lead_to_its_blobs(tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "models--a--b" / "snapshots" / "0123", shards=2)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for part in folder.glob("*.safetensors"):
        part.rename(blobs / part.name)
        part.symlink_to(Path("../../blobs") / part.name)
    assert open_checkpoint(folder).model().n_layers == 2


def test_one_name_in_two_shards_is_refused_with_both_files(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    tensors = CASES["granite"].tensors()
    names = list(tensors)
    first, second = (folder / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    second.write_bytes(safetensors_bytes({name: tensors[name] for name in [*names[1::2], names[0]]}))
    with pytest.raises(ModelFileError, match=f"{second}: tensor '{names[0]}' is also in {first}"):
        open_checkpoint(folder)


def test_a_single_file_beside_an_index_must_be_named(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    single = folder / "model.safetensors"
    tensors = CASES["granite"].tensors()
    single.write_bytes(safetensors_bytes(tensors))
    with pytest.raises(ModelFileError, match=r"both model\.safetensors and model\.safetensors\.index\.json"):
        open_checkpoint(folder)
    assert open_checkpoint(single).files == (single,)
    assert len(open_checkpoint(folder / INDEX).files) == 2
    shard = folder / "model-00001-of-00002.safetensors"
    assert len(open_checkpoint(shard).files) == 2  # what belongs together is opened together


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    folder = _sharded(tmp_path)
    index = json.loads((folder / INDEX).read_text())
    (name, part), *_ = index["weight_map"].items()
    edited(folder, {"weight_map": {**index["weight_map"], "model.extra.weight": part}}, INDEX)
    with pytest.raises(ModelFileError, match=r"'model\.extra\.weight': wanted it in .*, found it in none of its files"):
        open_checkpoint(folder)
    del index["weight_map"][name]
    edited(folder, {"weight_map": index["weight_map"]}, INDEX)
    with pytest.raises(ModelFileError, match=f"tensor '{name}' of .* is not listed"):
        open_checkpoint(folder)
    edited(folder, {"weight_map": []}, INDEX)
    with pytest.raises(ModelFileError, match="weight_map: wanted a map"):
        open_checkpoint(folder)


def test_two_names_for_one_tensor_of_the_model_are_refused(tmp_path: Path) -> None:
    case = CASES["granite"]
    tensors = case.tensors()
    tensors["transformer.wte.weight"] = tensors["model.embed_tokens.weight"]
    folder = write_case(case, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(
        ModelFileError, match=r"'transformer\.wte\.weight' and 'model\.embed_tokens\.weight' .* are both"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_its_files_says_which_are_missing(missing: str, tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    (folder / missing).unlink()
    with pytest.raises(ModelFileError, match=missing):
        open_checkpoint(folder)
