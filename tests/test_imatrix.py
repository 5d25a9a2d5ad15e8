"""Importance matrices in both formats, what llama.cpp would make of them, and files that are none."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import RawGguf, RawTensor
from model_files import rewrite
from numpy.typing import NDArray

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources import imatrix
from skippy_zmq.sources.imatrix import read_imatrix

UP, EXPERTS = "blk.0.ffn_up.weight", "blk.1.ffn_down_exps.weight"
SUMS: dict[str, NDArray[np.float32]] = {
    UP: np.linspace(0.5, 9.0, 64, dtype=np.float32),
    EXPERTS: np.linspace(3.0, 7.0, 96, dtype=np.float32),
}


def write_gguf(path: Path) -> Path:
    """Counts of 7 for one entry; 3, 0 and 1 for three experts of the other."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["wiki.txt", "code.txt"])
    writer.add_uint32("imatrix.chunk_count", 5)
    writer.add_uint32("imatrix.chunk_size", 512)
    writer.add_tensor(f"{UP}.in_sum2", SUMS[UP].reshape(1, 64))
    writer.add_tensor(f"{UP}.counts", np.array([[7.0]], np.float32))
    writer.add_tensor(f"{EXPERTS}.in_sum2", SUMS[EXPERTS].reshape(3, 32))
    writer.add_tensor(f"{EXPERTS}.counts", np.array([[3.0], [0.0], [1.0]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def legacy_bytes(calls: int = 4, tail: bytes | None = None) -> bytes:
    out = struct.pack("<i", len(SUMS))
    for name, values in SUMS.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size) + values.tobytes()
    return out + (struct.pack("<ii", 12, 8) + b"wiki.txt" if tail is None else tail)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    read = read_imatrix(path)
    assert (read.path, read.datasets, read.chunks) == (path, ("wiki.txt", "code.txt"), 5)
    assert read.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert set(read.entries) == set(SUMS)
    assert np.array_equal(read.entries[UP], SUMS[UP] / np.float32(7))
    ones = np.ones(32, np.float32)
    wanted = np.concatenate((SUMS[EXPERTS][:32] / np.float32(3), ones, SUMS[EXPERTS][64:]))
    assert np.array_equal(read.entries[EXPERTS], wanted)


@pytest.mark.parametrize("calls", [4, 0, -1])
def test_legacy(calls: int, tmp_path: Path) -> None:
    read = read_imatrix(written(tmp_path / "m.dat", legacy_bytes(calls)))
    assert (read.datasets, read.chunks) == (("wiki.txt",), 12)
    for name, values in SUMS.items():
        assert np.array_equal(read.entries[name], values / np.float32(calls if calls > 0 else 1))


@pytest.mark.parametrize(
    ("tail", "chunks"),
    [(b"", 0), (struct.pack("<i", 9), 9), (struct.pack("<ii", 9, 0), 9)],
    ids=["none", "count", "no name"],
)
def test_legacy_tails(tail: bytes, chunks: int, tmp_path: Path) -> None:
    read = read_imatrix(written(tmp_path / "m.dat", legacy_bytes(tail=tail)))
    assert (read.datasets, read.chunks) == ((), chunks)


@pytest.mark.parametrize("end", [3, 7, 11, 30, 40, 200, -1, -9])
def test_truncated_legacy(end: int, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"m\.dat: .*(wanted|truncated)"):
        read_imatrix(written(tmp_path / "m.dat", legacy_bytes()[:end]))


HUGE = struct.pack("<i", 2**31 - 1)
BAD_LEGACY = {
    "nothing": (b"", "truncated inside number of entries"),
    "text": (b"no importance matrix", "number of entries"),
    "no entries": (struct.pack("<i", 0), "number of entries .*: wanted 1 to 65536, got 0"),
    "negative entries": (struct.pack("<i", -5), "got -5"),
    "many entries": (HUGE, "got 2147483647"),
    "long name": (struct.pack("<i", 1) + HUGE + b"x" * 50, "name length of entry 0: wanted 1 to 1024"),
    "negative name": (struct.pack("<ii", 1, -1), "name length of entry 0"),
    "many values": (struct.pack("<ii", 1, 1) + b"x" + struct.pack("<i", 1) + HUGE + bytes(64), "values of entry 0"),
    "no values": (struct.pack("<ii", 1, 1) + b"x" + struct.pack("<ii", 1, 0), "values of entry 0"),
    "infinite": (struct.pack("<ii1siif", 1, 1, b"x", 1, 1, float("inf")), "entry 'x': wanted finite numbers"),
    "negative": (struct.pack("<ii1siif", 1, 1, b"x", 1, 1, -1.0), "entry 'x': wanted finite numbers from 0"),
    "twice": (struct.pack("<i", 2) + struct.pack("<i1siif", 1, b"x", 1, 1, 2.0) * 2, "entry 'x' appears twice"),
    "more behind": (legacy_bytes() + b"!", "got 1 bytes more"),
    "long dataset": (legacy_bytes(tail=struct.pack("<i", 1) + HUGE), "length of the dataset's name"),
}


@pytest.mark.parametrize("name", BAD_LEGACY)
def test_bad_legacy_files(name: str, tmp_path: Path) -> None:
    data, message = BAD_LEGACY[name]
    with pytest.raises(ModelFileError, match=message) as caught:
        read_imatrix(written(tmp_path / "m.dat", data))
    assert "\n" not in str(caught.value)


def _no_counts(raw: RawGguf) -> None:
    del raw.tensors[f"{UP}.counts"]


def _no_sums(raw: RawGguf) -> None:
    del raw.tensors[f"{UP}.in_sum2"]


def _no_metadata(raw: RawGguf) -> None:
    del raw.values["imatrix.chunk_size"]


def _empty(raw: RawGguf) -> None:
    raw.tensors.clear()


def _halves(raw: RawGguf) -> None:
    raw.tensors[f"{UP}.in_sum2"] = RawTensor((64, 1), 1, bytes(128))


def _misfit(raw: RawGguf) -> None:
    raw.tensors[f"{EXPERTS}.counts"] = RawTensor((1, 7), 0, np.ones(7, np.float32).tobytes())


def _counts(value: float) -> Callable[[RawGguf], None]:
    def edit(raw: RawGguf) -> None:
        raw.tensors[f"{UP}.counts"] = RawTensor((1, 1), 0, np.array([value], np.float32).tobytes())

    return edit


def _nan(raw: RawGguf) -> None:
    raw.tensors[f"{UP}.in_sum2"] = RawTensor((64, 1), 0, np.full(64, np.nan, np.float32).tobytes())


BAD_GGUF: dict[str, tuple[Callable[[RawGguf], None], str]] = {
    "no counts": (_no_counts, rf"'{UP}\.in_sum2' has no '\.counts' beside it"),
    "no sums": (_no_sums, rf"'{UP}\.counts' has no '\.in_sum2' beside it"),
    "no metadata": (_no_metadata, r"imatrix\.chunk_size is missing"),
    "no entries": (_empty, "no entries"),
    "halves": (_halves, "wanted F32, got F16"),
    "misfit": (_misfit, "96 sums do not fit its 7 counts"),
    "infinite count": (_counts(float("inf")), "do not fit its 1 counts"),
    "no number": (_nan, f"entry '{UP}': wanted finite numbers"),
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_bad_gguf_files(name: str, tmp_path: Path) -> None:
    edit, message = BAD_GGUF[name]
    with pytest.raises(ModelFileError, match=message):
        read_imatrix(rewrite(write_gguf(tmp_path / "good.gguf"), tmp_path / "m.gguf", edit))


def test_truncated_gguf(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "good.gguf").read_bytes()
    for end in (4, 20, 100, len(data) // 2, len(data) - 64):
        with pytest.raises(ModelFileError, match=r"m\.gguf: "):
            read_imatrix(written(tmp_path / "m.gguf", data[:end]))


def test_a_count_of_none_weighs_alike(tmp_path: Path) -> None:
    read = read_imatrix(rewrite(write_gguf(tmp_path / "good.gguf"), tmp_path / "m.gguf", _counts(-3.0)))
    assert np.array_equal(read.entries[UP], np.ones(64, np.float32))


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.dat")
    for path, words in (
        (tmp_path, "got no regular file"),
        (tmp_path / "pipe.dat", "got no regular file"),
        (tmp_path / "absent.dat", "there is no such file"),
    ):
        with pytest.raises(ModelFileError, match=f"wanted an importance matrix, {words}"):
            read_imatrix(path)
    monkeypatch.setattr(imatrix, "MAX_FILE_BYTES", 100)
    with pytest.raises(ModelFileError, match="of at most 100 bytes, got"):
        read_imatrix(written(tmp_path / "m.dat", legacy_bytes()))
