"""The identity of a model: by content, the same for a file and its shards, different for different weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_bytes import FLOAT32, STRING, RawGguf, scalar
from model_files import rewrite, shards, tiny

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_model import open_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny(tmp_path / "tiny.gguf")


def test_copies_and_shards_have_one_identity(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another-name.gguf"
    copy.write_bytes(model.read_bytes())
    original = open_model(model)
    for other in (copy, shards(model, 2), shards(model, 5)):
        assert open_model(other).identity() == original.identity()
        assert open_model(other).full_hash() == original.full_hash()
    assert original.identity() != original.full_hash()


def test_equal_shapes_with_other_weights_differ(model: Path, tmp_path: Path) -> None:
    other = open_model(tiny(tmp_path / "other.gguf", seed=1))
    assert other.identity() != open_model(model).identity()
    assert other.full_hash() != open_model(model).full_hash()


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.3.ffn_norm.weight", "output.weight"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_sampled_bytes_of_every_tensor_count(model: Path, tmp_path: Path, tensor: str, where: str) -> None:
    def edit(raw: RawGguf) -> None:
        data = bytearray(raw.tensors[tensor].data or b"")
        data[{"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[where]] ^= 1
        raw.tensors[tensor].data = bytes(data)

    changed = rewrite(model, tmp_path / "changed.gguf", edit)
    assert open_model(changed).identity() != open_model(model).identity()


def test_full_hash_sees_what_no_sample_covers(model: Path, tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        data = bytearray(raw.tensors["token_embd.weight"].data or b"")
        data[5000] ^= 1
        raw.tensors["token_embd.weight"].data = bytes(data)

    changed, original = open_model(rewrite(model, tmp_path / "changed.gguf", edit)), open_model(model)
    assert changed.identity() == original.identity()
    assert changed.full_hash() != original.full_hash()


def test_metadata_counts(model: Path, tmp_path: Path) -> None:
    identities = {open_model(model).identity()}
    for key, value in (
        ("llama.rope.freq_base", scalar(FLOAT32, 500_000.0)),
        ("tokenizer.chat_template", scalar(STRING, "{{ x }}")),
        ("general.name", scalar(STRING, "other")),
    ):

        def edit(raw: RawGguf, key: str = key, value: bytes = value) -> None:
            raw.values[key] = value

        identities.add(open_model(rewrite(model, tmp_path / "edited.gguf", edit)).identity())
    assert len(identities) == 4


def test_order_of_tensors_and_keys_does_not_count(model: Path, tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        raw.values = dict(reversed(raw.values.items()))
        raw.tensors = dict(reversed(raw.tensors.items()))

    turned = rewrite(model, tmp_path / "turned.gguf", edit)
    assert open_model(turned).identity() == open_model(model).identity()


def test_file_that_shrinks_or_goes_after_opening_is_an_error(model: Path) -> None:
    opened = open_model(model)
    with model.open("r+b") as file:
        file.truncate(model.stat().st_size // 2)
    with pytest.raises(ModelFileError, match="truncated while open"):
        opened.identity()
    with pytest.raises(ModelFileError, match="truncated while open"):
        opened.full_hash()
    model.unlink()
    with pytest.raises(ModelFileError, match="cannot read model file: No such file"):
        opened.identity()
