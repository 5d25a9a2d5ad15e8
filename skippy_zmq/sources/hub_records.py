"""What we keep beside the hub cache's files of a repository: commits, lists of files, and what was hashed.

Written in one step each, into the folder ``skippy-zmq`` of the repository's folder, so they go when that goes. Nothing
read from them is trusted beyond saving work: names are checked again, and hashes are taken again for a file that
changed. A cache that cannot be written serves without them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.relative_names import checked_name

MAX_FILES = 100_000
MAX_FILE_BYTES = 2**63 - 1  # what a length of a file can be
_FORMAT = 1
_MAX_RECORD_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_SHA1 = re.compile(r"[0-9a-f]{40}\Z")


@dataclass(frozen=True, slots=True)
class HubFile:
    """``size``: None where unknown. ``sha256`` of its bytes, or else ``blob``, its git id; empty where unknown."""

    name: str
    size: int | None
    sha256: str
    blob: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a commit; ``partial``: only those that the cache holds."""

    commit: str
    files: tuple[HubFile, ...]
    partial: bool = False

    def __post_init__(self) -> None:
        if len(self.files) > MAX_FILES:
            raise ModelFileError(f"commit {self.commit}: wanted at most {MAX_FILES} files, got {len(self.files)}")


class Records:
    """Of the repository whose cache is ``folder``, as ``endpoint`` told them."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.snapshots = folder / "snapshots"
        self._refs = folder / "refs"
        self._endpoint = endpoint
        self._own = folder / "skippy-zmq"

    def keep(self, revision: str, listing: Listing) -> None:
        """Remember what ``revision`` is and what it consists of."""
        files = [[file.name, file.size, file.sha256, file.blob] for file in listing.files]
        with contextlib.suppress(OSError):
            _write(self._own / f"{listing.commit}.json", {"files": files})
            _write(self._ref(revision), {"revision": revision, "commit": listing.commit})

    def commit_of(self, revision: str) -> str | None:
        """The commit that ``revision`` was when it was last asked for, by us or by huggingface_hub."""
        own, theirs = self._ref(revision), self._refs / revision
        found: list[tuple[float, str]] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found.append((own.stat().st_mtime, str(_read(own)["commit"])))
        with contextlib.suppress(OSError, ValueError):
            if theirs.resolve().is_relative_to(self._refs.resolve()):
                found.append((theirs.stat().st_mtime, theirs.read_text(encoding="ascii").strip()))
        return next((commit for _, commit in sorted(found, reverse=True) if _SHA1.match(commit)), None)

    def listing(self, commit: str) -> Listing | None:
        """What ``commit`` consists of; None where the hub never told us."""
        try:
            files = []
            for name, size, sha256, blob in _read(self._own / f"{commit}.json")["files"]:
                if not (size is None or (isinstance(size, int) and 0 <= size <= MAX_FILE_BYTES)):
                    return None
                file = HubFile(checked_name(name, commit), size, str(sha256), str(blob))
                files.append(file)
            return Listing(commit, tuple(files))
        except (OSError, ValueError, KeyError, TypeError, ModelFileError):
            return None

    def listing_of_folder(self, commit: str) -> Listing | None:
        """What the cache holds of ``commit``."""
        folder = self.snapshots / commit
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
        if not names:
            return None
        return Listing(commit, tuple(HubFile(checked_name(name, commit), None, "", "") for name in names), partial=True)

    def problem(self, path: Path, file: HubFile, progress: Callable[[int], object], *, fresh: bool = False) -> str:
        """What is wrong with the file at ``path``, or nothing. A file hashed before is not again, unless ``fresh``.

        Where the hub's hash is unknown, the name that huggingface_hub gave the blob is one.
        """
        try:
            with path.open("rb") as opened:
                status = os.fstat(opened.fileno())
                if file.size is not None and status.st_size != file.size:
                    return f"wanted {file.size} bytes, got {status.st_size}"
                wanted = file.sha256 or file.blob or path.resolve().name.lower()
                if not _SHA256.match(wanted) and not _SHA1.match(wanted):
                    return ""
                record = self._own / f"checked-{wanted}.json"
                state = {"size": status.st_size, "time": status.st_mtime_ns, "file": status.st_ino}
                with contextlib.suppress(OSError, ValueError):
                    if not fresh and _read(record) == {"format": _FORMAT, **state}:
                        return ""
                digest = hashlib.sha256()
                if _SHA1.match(wanted):
                    digest = hashlib.sha1(f"blob {status.st_size}\0".encode(), usedforsecurity=False)
                while block := opened.read(_BLOCK_BYTES):
                    digest.update(block)
                    progress(len(block))
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        if digest.hexdigest() != wanted:
            return f"wanted {digest.name} {wanted}, got {digest.hexdigest()}"
        with contextlib.suppress(OSError):
            _write(record, state)
        return ""

    def outline(self, known_by: str) -> Path:
        """Where the outline of a file with this hash belongs."""
        return self._own / "outlines" / f"{hashlib.sha256(known_by.encode()).hexdigest()}.safetensors"

    def _ref(self, revision: str) -> Path:
        key = hashlib.sha256(f"{self._endpoint}\0{revision}".encode()).hexdigest()
        return self._own / f"ref-{key}.json"


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        values = json.loads(file.read(_MAX_RECORD_BYTES))
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise ValueError("another format")
    return values


def _write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, **values}, file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
