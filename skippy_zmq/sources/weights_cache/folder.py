"""The folder of entries: find one, make room for one, set damaged ones aside.

Names: ``KEY.gguf``, ``KEY.damaged``, and ``.KEY.*.partial`` while one is written. Whoever uses or writes a file holds a
lock on it; what has no lock may be removed. Files of other names are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skippy_zmq.sources.weights_cache.entry import Entry
from skippy_zmq.sources.weights_cache.writing import EntryWriter

log = logging.getLogger("skippy_zmq.weights")

SETTLED_NS = 2_000_000_000  # a second write may bear the time of the first that long
_KEPT = re.compile(r"[0-9a-f]{64}\.(gguf|damaged)\Z")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\..*\.partial\Z")
_MARGIN_BYTES = 16 << 20  # left free for others


class OpenEntry:
    """An open file that was checked, kept from being removed for as long as this object lives."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        self._finalizer()


@dataclass(frozen=True, slots=True)
class _Kept:
    path: Path
    used: int
    nbytes: int


class WeightsCache:
    """The cache in ``folder``, which need not exist; ``limit``: most bytes of files in it.

    Nothing here raises for what is wrong with the folder: it is logged, and the stage goes on without.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit

    def find(self, entry: Entry, progress: Callable[[float], object] | None = None) -> OpenEntry | None:
        """The entry's file, every byte checked; None where there is none. A damaged one is set aside."""
        path = self.folder / f"{entry.key}.gguf"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._set_aside(path, "wanted a regular file, got a link")
            else:
                log.warning("%s: cannot be opened: %s; its weights are made again", path, error.strerror)
            return None
        found = OpenEntry(path, descriptor)
        problem = "wanted a regular file"
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                _lock(descriptor, fcntl.LOCK_SH)
                problem = entry.problem(descriptor, progress)
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except BaseException:
            found.close()
            raise
        if problem:
            found.close()
            self._set_aside(path, problem)
            return None
        with contextlib.suppress(OSError):  # in a folder that cannot be written nothing is removed either
            os.utime(descriptor, ns=(time.time_ns(), os.fstat(descriptor).st_mtime_ns))
        self.make_room(0)
        log.info("weights mapped from %s", path)
        return found

    def writer(self, entry: Entry) -> EntryWriter | None:
        """What makes the tensors of the entry and keeps them; None where that cannot be."""
        newest = max((changed for *_, changed in entry.states), default=0)
        if entry.seen_ns - newest <= SETTLED_NS:
            log.warning(
                "weights are not kept in %s: their source was written only now; the next start can", self.folder
            )
            return None
        if entry.size > self.limit:
            log.warning(
                "weights are not kept in %s: they have %d bytes, more than weights_cache_bytes, which is %d",
                self.folder,
                entry.size,
                self.limit,
            )
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_orphans()
            left = self.make_room(entry.size)
            if left + entry.size > self.limit:
                raise OSError(errno.ENOSPC, f"{left} bytes in use there, weights_cache_bytes is {self.limit}")
            free = shutil.disk_usage(self.folder).free
            if free < entry.size + _MARGIN_BYTES:
                raise OSError(errno.ENOSPC, f"wanted {entry.size + _MARGIN_BYTES} bytes of space, {free} are free")
            descriptor, name = tempfile.mkstemp(prefix=f".{entry.key}.", suffix=".partial", dir=self.folder)
        except OSError as error:
            log.warning("weights are not kept in %s: %s", self.folder, error.strerror)
            return None
        _lock(descriptor, fcntl.LOCK_EX)
        return EntryWriter(entry, descriptor, Path(name), self.folder / f"{entry.key}.gguf")

    def make_room(self, wanted: int) -> int:
        """Remove what was not used for longest, until ``wanted`` more bytes fit; return the bytes that are left.

        What some process uses stays.
        """
        kept = sorted(self._kept(), key=lambda file: (file.path.suffix == ".gguf", file.used))
        total = sum(file.nbytes for file in kept)
        for file in kept:
            if total + wanted <= self.limit:
                break
            if _removed(file.path):
                log.info("%s was removed: not used for longest", file.path)
                total -= file.nbytes
        return total

    def _kept(self) -> Iterator[_Kept]:
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for item in entries:
                if not _KEPT.match(item.name) and not _PARTIAL.match(item.name):
                    continue
                with contextlib.suppress(OSError):
                    status = item.stat(follow_symlinks=False)
                    yield _Kept(Path(item.path), status.st_atime_ns, status.st_size)

    def _remove_orphans(self) -> None:
        """What writers left that ended before they were done."""
        for file in list(self._kept()):
            if _PARTIAL.match(file.path.name) and _removed(file.path):
                log.info("%s was removed: it was never finished", file.path)

    def _set_aside(self, path: Path, problem: str) -> None:
        aside = path.with_suffix(".damaged")
        try:
            path.replace(aside)
            log.warning("%s: %s; it was set aside as %s, and its weights are made again", path, problem, aside.name)
        except OSError as error:
            log.warning("%s: %s; its weights are made again. It cannot be renamed: %s", path, problem, error.strerror)


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the lock was had at once. Where the file system knows no locks nothing is, and nothing is removed."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _removed(path: Path) -> bool:
    """Remove the file unless somebody holds a lock on it."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # nothing of ours: set aside
            return False
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            return False
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
