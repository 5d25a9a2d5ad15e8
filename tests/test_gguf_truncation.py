"""Case G01: a file that is too short or too long is refused with the sizes, wherever the bytes are missing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from gguf_bytes import UINT32, RawGguf, scalar
from model_files import rewrite, sparse, tiny

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_model import open_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("whole") / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1)


def _cut_points(whole: Path) -> dict[str, int]:
    model = open_model(whole)
    size = whole.stat().st_size
    tensor_table = whole.read_bytes().index(b"token_embd.weight")
    return {
        "nothing left": 0,
        "inside the magic": 3,
        "after the version": 8,
        "after the counts": 24,
        "inside the metadata": tensor_table // 2,
        "inside the tensor table": tensor_table + 30,
        "at the start of the data": model.tensors[0].offset,
        "inside the first layer": model.tensors[2].offset + 1,
        "inside the last tensor": size - 40,
        "last byte": size - 1,
    }


def test_cut_file_is_refused_with_the_sizes(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    for where, size in _cut_points(whole).items():
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError) as refusal:
            open_model(path)
        sizes = re.search(r"truncated.*needs (?:at least )?(\d+) bytes, has (\d+)", str(refusal.value))
        assert sizes, where
        assert str(path) in str(refusal.value)
        assert int(sizes[2]) == size
        assert size < int(sizes[1]) <= len(data)


def test_cut_in_a_late_layer_names_the_tensor(whole: Path, tmp_path: Path) -> None:
    model = open_model(whole)
    late = next(t for t in model.tensors if t.name == "blk.3.ffn_up.weight")
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole.read_bytes()[: late.offset + 5])
    with pytest.raises(ModelFileError, match=r"blk\.3\.ffn_up\.weight"):
        open_model(path)


@pytest.mark.parametrize("extra", [1, 32, 5000])
def test_bytes_after_the_last_tensor_are_refused(whole: Path, tmp_path: Path, extra: int) -> None:
    path = tmp_path / "long.gguf"
    path.write_bytes(whole.read_bytes() + bytes(extra))
    size = path.stat().st_size
    with pytest.raises(ModelFileError, match=f"bytes after the last tensor: needs {size - extra} .* has {size}"):
        open_model(path)


def test_padding_after_the_last_tensor_may_be_absent_or_whole(whole: Path, tmp_path: Path) -> None:
    def wider(raw: RawGguf) -> None:
        raw.values["general.alignment"] = scalar(UINT32, 4096)
        raw.alignment = 4096

    padded = rewrite(whole, tmp_path / "padded.gguf", wider)
    model = open_model(padded)
    end = model.tensors[-1].offset + model.tensors[-1].nbytes
    assert end < padded.stat().st_size
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(padded.read_bytes()[:end])
    assert open_model(bare).identity() == model.identity()


def test_missing_directory_and_pipe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="wanted a regular file"):
        open_model(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="wanted a regular file"):
        open_model(tmp_path / "pipe.gguf")


def test_huge_file_is_opened_by_its_header_alone(tmp_path: Path) -> None:
    path = sparse(tmp_path / "sparse.gguf")
    model = open_model(path)
    assert sum(tensor.nbytes for tensor in model.tensors) > 20 * 2**30
    assert model.n_layers == 100
    before = _bytes_read()
    assert open_model(path).identity() == model.identity()
    # 768 bytes per tensor and the header
    assert _bytes_read() - before < 8 * 2**20


def _bytes_read() -> int:
    """Bytes this process has asked the kernel to read so far."""
    counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counters["rchar"])
