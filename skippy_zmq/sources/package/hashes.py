"""SHA-256 of files, remembered for as long as a file cannot have changed.

A record is of one file: device, inode, size, time of the last write and of the last change of the inode. The latter is
set by the kernel on every write and cannot be set back, so a file that was damaged, exchanged or restored since is
hashed again. A file written within the last two seconds is not recorded: a second write could bear the same time.
Records lie in the user's cache folder, and count only where nobody else can write them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.demo_models import cache_directory

MOST_RECORDS = 8192
BLOCK_BYTES = 1 << 18  # small enough for a processor's cache
_FORMAT = 1
_MOST_RECORD_BYTES = 4096
_SETTLED_NS = 2_000_000_000


def record_directory() -> Path:
    """Where the records are, beside the models that were fetched."""
    return cache_directory().parent / "part-hashes"


def written_state(descriptor: int) -> tuple[int, ...]:
    """Equal for as long as nobody writes the open file; it may be renamed."""
    status = os.fstat(descriptor)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _state(descriptor: int) -> tuple[int, ...]:
    return (*written_state(descriptor), os.fstat(descriptor).st_ctime_ns)


def sha256_of(
    descriptor: int, *, remember: bool = True, progress: Callable[[int], object] = lambda _bytes: None
) -> str:
    """Hex SHA-256 of an open regular file. ``remember``: take a record for the answer, and leave one.

    Raises ModelFileError where the file changes meanwhile. ``progress`` is told the bytes that were done, one call
    after the other.
    """
    state = _state(descriptor)
    path = record_directory() / f"{hashlib.sha256(repr(state[:2]).encode()).hexdigest()[:40]}.json"
    if remember and (known := _read(path, state)) is not None:
        progress(state[2])
        return known
    settled = time.time_ns() - max(state[3:]) > _SETTLED_NS
    digest, position = hashlib.sha256(), 0
    block = memoryview(bytearray(BLOCK_BYTES))
    try:
        while n_bytes := os.preadv(descriptor, [block], position):
            digest.update(block[:n_bytes])
            position += n_bytes
            progress(n_bytes)
    except OSError as error:
        raise ModelFileError(f"cannot be read: {error.strerror}") from None
    if written_state(descriptor) != state[:4] or position != state[2]:
        raise ModelFileError("changed while it was read")
    if remember and settled and _state(descriptor) == state:
        with contextlib.suppress(OSError):  # then the next start hashes again
            _write(path, state, digest.hexdigest())
    return digest.hexdigest()


def _read(path: Path, state: tuple[int, ...]) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
                return None
            record = json.loads(file.read(_MOST_RECORD_BYTES))
        known = record["sha256"] if record["format"] == _FORMAT and record["state"] == list(state) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return known if isinstance(known, str) else None


_write_lock = threading.Lock()


def _write(path: Path, state: tuple[int, ...], digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "state": state, "sha256": digest}, file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    with _write_lock:
        records = [entry for entry in os.scandir(path.parent) if entry.name.endswith(".json")]
        if len(records) > MOST_RECORDS:
            for old in sorted(records, key=lambda entry: entry.stat().st_mtime)[: len(records) - MOST_RECORDS]:
                Path(old.path).unlink(missing_ok=True)
