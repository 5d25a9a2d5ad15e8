"""Outlines of weight files that a stage does not need: the table and the samples that say what the whole model is.

An outline is a sparse file as long as the weight file it stands for. It lies in the hub cache beside what else we keep
of the repository, once for each content, and is checked when it is used again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from skippy_zmq.errors import ModelFileError, RetryableError
from skippy_zmq.sources.checkpoint.safetensors_table import MAX_HEADER_BYTES, read_table
from skippy_zmq.sources.hub import Hub, Snapshot

log = logging.getLogger("skippy_zmq.sources")

_FORMAT = 1
_LENGTH_BYTES = 8
_MOST_RECORD_BYTES = 4096
_FIRST_BYTES = 128 << 10  # where the whole header usually is
_GAP_BYTES = 64 << 10  # sooner read than asked around
_REQUEST_BYTES = 128 << 10  # what could be read in the time that a request takes
_MOST_SAMPLED_BYTES = 64 << 20  # they are held in memory
_ATTEMPTS = 2
_LEFT_SECONDS = 86_400

Span = tuple[int, int]  # offset in the file, length


def outline_of(hub: Hub, snapshot: Snapshot, name: str) -> Path | None:
    """The outline of a safetensors file on the hub; None where fetching the file itself is the better way.

    That is so for small files, and where the hub sends whole files only. Raises as ``Hub.fetch``.
    """
    path = hub.outline_path(snapshot, name)
    size = next((file.size for file in snapshot.files if file.name == name), None)
    if path is None or size is None or size < _LENGTH_BYTES:
        return None
    if _is_whole(path, size):
        return path
    if snapshot.offline:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        descriptor, partial = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    except OSError as error:
        log.warning("%s: no outline can be kept: %s", path.parent, error.strerror)
        return None
    written = Path(partial)
    try:
        with os.fdopen(descriptor, "r+b") as file:
            os.ftruncate(descriptor, size)
            if not _write(hub, snapshot, name, descriptor, written, size):
                return None
            file.flush()
            os.fsync(descriptor)
        digest = _digest(written)
        written.replace(path)
        _remember(path, digest)
    except OSError as error:
        log.warning("%s: no outline can be kept: %s", path.parent, error.strerror)
        return None
    finally:
        written.unlink(missing_ok=True)
    return path


def _remove_leftovers(folder: Path) -> None:
    """What processes that were killed left there."""
    for path in folder.glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                path.unlink()


def _write(hub: Hub, snapshot: Snapshot, name: str, descriptor: int, path: Path, size: int) -> bool:
    """Whether that was worth it."""
    where = f"{snapshot}/{name}"
    first = _fetched(hub, snapshot, name, descriptor, [(0, min(size, _FIRST_BYTES))])
    if first is None:
        return False
    n_bytes, most = int.from_bytes(first[0][:_LENGTH_BYTES], "little"), min(size - _LENGTH_BYTES, MAX_HEADER_BYTES)
    if n_bytes > most:
        raise ModelFileError(f"{where}: wanted a header of at most {most} bytes, got {n_bytes}")
    rest = (len(first[0]), _LENGTH_BYTES + n_bytes - len(first[0]))
    if rest[1] > 0 and _fetched(hub, snapshot, name, descriptor, [rest]) is None:
        return False
    spans = _merged(_sampled(path, where))
    sampled = sum(length for _, length in spans)
    if sampled > _MOST_SAMPLED_BYTES or len(spans) * _REQUEST_BYTES + sampled >= size:
        return False
    return _fetched(hub, snapshot, name, descriptor, spans) is not None


def _fetched(hub: Hub, snapshot: Snapshot, name: str, descriptor: int, spans: Sequence[Span]) -> list[bytes] | None:
    for attempt in range(_ATTEMPTS):
        try:
            found = hub.spans(snapshot, name, spans)
            break
        except RetryableError:
            if attempt == _ATTEMPTS - 1:
                raise
    if found is not None:
        for (start, _), data in zip(spans, found, strict=True):
            os.pwrite(descriptor, data, start)
    return found


def _sampled(path: Path, where: str = "") -> list[Span]:
    try:
        table = read_table(path)
    except ModelFileError as error:
        raise ModelFileError(str(error).replace(str(path), where or str(path))) from None
    return [(tensor.offset + start, length) for tensor in table for start, length in tensor.samples if length]


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Spans in rising order, those close to each other in one."""
    merged: list[Span] = []
    for start, length in spans:
        if merged and start - sum(merged[-1]) <= _GAP_BYTES:
            first, _ = merged[-1]
            merged[-1] = (first, start + length - first)
        else:
            merged.append((start, length))
    return merged


def _digest(path: Path) -> str:
    """Of the header and the samples, all that there is."""
    digest = hashlib.sha256()
    spans = _sampled(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        digest.update(file.read(length))
        for start, n_bytes in spans:
            file.seek(start)
            digest.update(file.read(n_bytes))
    return digest.hexdigest()


def _is_whole(path: Path, size: int) -> bool:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError, ModelFileError):
        if path.stat().st_size == size:
            record = json.loads(path.with_suffix(".json").read_bytes()[:_MOST_RECORD_BYTES])
            return bool(record["format"] == _FORMAT and record["sha256"] == _digest(path))
    return False


def _remember(path: Path, digest: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "sha256": digest}, file)
        Path(name).replace(path.with_suffix(".json"))
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
