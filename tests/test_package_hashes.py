"""Remembered hashes of parts: they save time and never hide damage (case P03)."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from model_files import tiny
from package_helpers import check_stage, copied, flip, package_of, refusal_of

from skippy_zmq.sources.package import hashes


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return package_of(tiny(folder / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1), folder / "package")


@pytest.fixture
def old_package(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that nobody has written for a while, as far as remembered hashes know, and an empty memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = copied(sound, tmp_path / "package")
    monkeypatch.setattr(hashes, "_SETTLED_NS", -(2**62))
    return folder


def _hashed_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many parts are read whole by a check."""
    count = 0
    read = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal count
        count += offset == 0
        return read(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(hashes.os, "preadv", counting)
        check_stage(folder)
    return count


def test_a_part_that_did_not_change_is_hashed_once(old_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _hashed_parts(old_package, monkeypatch) == 7  # the shared part is used twice
    assert _hashed_parts(old_package, monkeypatch) == 0
    records = list(hashes.record_directory().glob("*.json"))
    assert len(records) == 7
    assert all(record.stat().st_mode & 0o077 == 0 for record in records)
    for record, text in zip(records, ("", "[]", "{", "7", '{"format": 1}', "x" * 9000, "null"), strict=True):
        record.write_text(text)
    assert _hashed_parts(old_package, monkeypatch) == 7
    for record in records:  # what others could have written counts for nothing
        record.chmod(0o666)
    assert _hashed_parts(old_package, monkeypatch) >= 7


def test_what_was_remembered_never_hides_damage(old_package: Path) -> None:
    """Case P03: not even where size and time of writing were set back, or a part was exchanged for another."""
    check_stage(old_package)
    part = old_package / "layers/00001.gguf"
    before = part.stat()
    good = part.read_bytes()
    flip(part)
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (part.stat().st_size, part.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert "layers/00001.gguf: wanted sha256" in refusal_of(old_package)
    part.write_bytes(good)
    check_stage(old_package)
    other = old_package / "layers/00002.gguf"
    part.rename(old_package / "x")
    other.rename(part)
    (old_package / "x").rename(other)
    assert "2 problems: layers/00001.gguf: wanted sha256" in refusal_of(old_package)


def test_a_file_written_just_now_is_not_remembered(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hashes, "_SETTLED_NS", 3600 * 10**9)
    folder = copied(sound, tmp_path / "package")
    check_stage(folder)
    assert not hashes.record_directory().exists()
    assert time.time_ns() - (folder / "output.gguf").stat().st_mtime_ns < 3600 * 10**9


def test_the_number_of_records_is_bounded(old_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "MOST_RECORDS", 3)
    check_stage(old_package)
    assert len(list(hashes.record_directory().glob("*"))) == 3
