"""Shards: the same model as one file; case G04: the same tensor twice is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from gguf_bytes import INT32, STRING, UINT16, UINT32, RawGguf, read_raw, scalar, string
from model_files import rewrite, shards, tiny

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_model import GgufModel, open_model


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny(tmp_path / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1)


def _tensor_bytes(model: GgufModel) -> dict[str, bytes]:
    contents = {path: path.read_bytes() for path in model.files}
    return {t.name: contents[t.path][t.offset : t.offset + t.nbytes] for t in model.tensors}


@pytest.mark.parametrize("n", [2, 3, 7])
def test_shards_hold_the_same_model(single: Path, n: int) -> None:
    first = shards(single, n)
    model, whole = open_model(first), open_model(single)
    assert [path.name for path in model.files] == [f"tiny-{i:05d}-of-{n:05d}.gguf" for i in range(1, n + 1)]
    assert _tensor_bytes(model) == _tensor_bytes(whole)
    assert model.identity() == whole.identity()
    assert {t.name: t.path for t in model.tensors}["output.weight"] == model.files[-1]


def test_first_shard_may_hold_metadata_only(single: Path) -> None:
    first = shards(single, 2)
    names = list(read_raw(single).tensors)
    second = first.with_name("tiny-00002-of-00002.gguf")
    everything = read_raw(single).tensors

    def only_values(raw: RawGguf) -> None:
        raw.tensors = {}

    def all_tensors(raw: RawGguf) -> None:
        raw.tensors = everything

    rewrite(first, first, only_values)
    rewrite(second, second, all_tensors)
    assert [tensor.name for tensor in open_model(first).tensors] == names


def test_a_later_shard_says_which_to_give(single: Path) -> None:
    first = shards(single, 3)
    second = first.with_name("tiny-00002-of-00003.gguf")
    with pytest.raises(ModelFileError, match=r"shard 2 of 3; give tiny-00001-of-00003\.gguf instead"):
        open_model(second)
    disguised = second.rename(second.with_name("other.gguf"))
    with pytest.raises(ModelFileError, match=r"split\.no: wanted 0 in the first shard"):
        open_model(disguised)


def test_missing_shard_is_named(single: Path) -> None:
    first = shards(single, 3)
    first.with_name("tiny-00003-of-00003.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"shard tiny-00003-of-00003\.gguf is missing"):
        open_model(first)


def test_renamed_first_shard_is_refused(single: Path) -> None:
    renamed = shards(single, 2).rename(single.with_name("renamed.gguf"))
    with pytest.raises(ModelFileError, match=r"split\.count is 2, so wanted a name ending in -00001-of-00002\.gguf"):
        open_model(renamed)


@pytest.mark.parametrize(
    ("shard", "key", "value", "complaint"),
    [
        (1, "split.count", scalar(UINT32, 2), r"split\.count: wanted a u16, got u32"),
        (1, "split.tensors.count", scalar(INT32, 5), r"split\.tensors\.count: wanted \d+, the tensors of all"),
        (1, "split.tensors.count", scalar(UINT16, 5), r"split\.tensors\.count: wanted a i32, got u16"),
        (2, "split.no", scalar(UINT16, 0), r"split\.no: wanted 1, got 0"),
        (2, "split.no", scalar(STRING, "1"), r"split\.no: wanted a u16, got string"),
        (2, "split.count", scalar(UINT16, 3), r"split\.count: wanted 2, got 3"),
    ],
)
def test_shards_that_disagree_are_refused(single: Path, shard: int, key: str, value: bytes, complaint: str) -> None:
    first = shards(single, 2)
    edited = first.with_name(f"tiny-0000{shard}-of-00002.gguf")

    def edit(raw: RawGguf) -> None:
        raw.values[key] = value

    rewrite(edited, edited, edit)
    with pytest.raises(ModelFileError, match=complaint):
        open_model(first)


def test_shard_of_another_set_is_refused(single: Path, tmp_path: Path) -> None:
    first = shards(single, 2)
    (tmp_path / "other").mkdir()
    other = shards(tiny(tmp_path / "other" / "tiny.gguf", n_layers=2, hidden=32, ffn=32, heads=2, kv_heads=1), 2)
    other.with_name("tiny-00002-of-00002.gguf").replace(first.with_name("tiny-00002-of-00002.gguf"))
    with pytest.raises(ModelFileError, match=r"split\.tensors\.count|is also in"):
        open_model(first)


def test_tensor_twice_in_one_file_names_tensor_and_file(single: Path, tmp_path: Path) -> None:
    data = single.read_bytes().replace(string("blk.1.attn_k.weight"), string("blk.1.attn_q.weight"))
    doubled = tmp_path / "doubled.gguf"
    doubled.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"'blk\.1\.attn_q\.weight' appears twice") as refusal:
        open_model(doubled)
    assert str(doubled) in str(refusal.value)


def test_tensor_in_two_shards_names_both_files(single: Path) -> None:
    first = shards(single, 2)
    second = first.with_name("tiny-00002-of-00002.gguf")
    copied = read_raw(first).tensors["blk.1.attn_q.weight"]
    copied.data = struct.pack("<f", 1.0) * (len(copied.data or b"") // 4)

    def add(raw: RawGguf) -> None:
        raw.tensors["blk.1.attn_q.weight"] = copied

    rewrite(second, second, add)
    with pytest.raises(ModelFileError, match=r"tensor 'blk\.1\.attn_q\.weight' is also in") as refusal:
        open_model(first)
    assert first.name in str(refusal.value)
    assert second.name in str(refusal.value)
