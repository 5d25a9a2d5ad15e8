"""The folder on disk that keeps the pages of one stage: names, locking, writing, reading, setting aside.

``<directory>/layers-<start>-<end>-<hash of the facts>/`` belongs to one process at a time, by a lock that the kernel
frees when that process ends. A page's file is named ``<link before>-<link after>.safetensors``, so that the tree of
pages is known without opening any. Files are written under another name and renamed: what has a page's name is whole,
unless the machine lost power (nothing is fsynced: it is a cache) or somebody changed it, and a checksum finds that.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.descriptor import PageFacts, check_fits
from skippy_zmq.kv.limits import FORMAT, MAX_DAMAGED_FILES, MAX_PAGES_HELD
from skippy_zmq.kv.page import KvPage
from skippy_zmq.kv.page_file import open_regular, read_page, write_page

_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.safetensors")
_UNFINISHED = ".new-"
_LOCK, _FACTS, _DAMAGED = "lock", "facts.json", "damaged"
_MOST_NAMES = 5  # in one report


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A file with a page's name; what is in it is not known yet."""

    link_before: bytes
    link_after: bytes
    file_bytes: int
    modified_ns: int


class PageFolder:
    """Raises OSError where the folder cannot be made or written, KvPageError where another process has it."""

    def __init__(self, directory: Path, facts: PageFacts, settings: str, report: Callable[[str], None]) -> None:
        self.path = directory / folder_name(facts, settings)
        self._facts = facts
        self._report = report
        self._numbers = itertools.count()
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self.path / _DAMAGED).mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_facts(settings)
        except BlockingIOError:
            os.close(self._lock)
            raise KvPageError(f"{self.path}: another process keeps its pages there") from None
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        os.close(self._lock)

    def scan(self) -> list[FoundPage]:
        """All files with names of pages, at most MAX_PAGES_HELD. Others are set aside, unfinished ones deleted."""
        found: list[FoundPage] = []
        foreign: list[str] = []
        with os.scandir(self.path) as entries:
            for entry in itertools.islice(entries, 2 * MAX_PAGES_HELD):
                match = _NAME.fullmatch(entry.name)
                if entry.name.startswith(_UNFINISHED) and not entry.is_dir(follow_symlinks=False):
                    Path(entry.path).unlink(missing_ok=True)  # of a process that was killed: this one has the lock
                elif match and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    before, after = bytes.fromhex(match[1]), bytes.fromhex(match[2])
                    found.append(FoundPage(before, after, status.st_size, status.st_mtime_ns))
                elif entry.name not in (_LOCK, _FACTS, _DAMAGED):
                    foreign.append(entry.name)
        for name in foreign:
            self._move_aside(name)
        if foreign:
            names = ", ".join(map(repr, foreign[:_MOST_NAMES])) + (", ..." if len(foreign) > _MOST_NAMES else "")
            self._report(f"{self.path}: {len(foreign)} files that are no pages were set aside: {names}")
        found.sort(key=lambda page: page.modified_ns, reverse=True)
        return found[:MAX_PAGES_HELD]

    def write(self, page: KvPage) -> None:
        """Write one page; OSError, and no file, where that fails."""
        unfinished = self.path / f"{_UNFINISHED}{os.getpid()}-{next(self._numbers)}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                write_page(file, page)
            unfinished.rename(self._file(page.descriptor.link_before, page.descriptor.link_after))
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, link_before: bytes, link_after: bytes) -> KvPage:
        """The page, verified. OSError, or KvPageError where the file is not that page of this stage."""
        with open_regular(self._file(link_before, link_after)) as file:
            page = read_page(file)
            check_fits(page.descriptor, self._facts, link_before=link_before, link_after=link_after)
            with contextlib.suppress(OSError):
                os.utime(file.fileno())  # files used last stay longest, after a restart too
            return page

    def delete(self, link_before: bytes, link_after: bytes) -> None:
        self._file(link_before, link_after).unlink(missing_ok=True)

    def set_aside(self, link_before: bytes, link_after: bytes, reason: str) -> None:
        """Move a page's file where it is never looked for again, and report why."""
        name = self._file(link_before, link_after).name
        self._move_aside(name)
        self._report(f"{self.path / name}: set aside in {_DAMAGED}: {reason}")

    def _file(self, link_before: bytes, link_after: bytes) -> Path:
        return self.path / f"{link_before.hex()}-{link_after.hex()}.safetensors"

    def _move_aside(self, name: str) -> None:
        damaged = self.path / _DAMAGED
        if (self.path / name).is_dir() and not (self.path / name).is_symlink():
            return  # nothing of ours; it does no harm where it is
        with contextlib.suppress(OSError):
            (self.path / name).rename(damaged / name)
            for old in sorted(_by_age(damaged), reverse=True)[MAX_DAMAGED_FILES:]:
                old[1].unlink(missing_ok=True)

    def _write_facts(self, settings: str) -> None:
        """Say what the folder is for; for people only."""
        facts = {"format": FORMAT, "settings": settings, **asdict(self._facts)}
        unfinished = self.path / f"{_UNFINISHED}{os.getpid()}-{_FACTS}"
        unfinished.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        unfinished.rename(self.path / _FACTS)


def folder_name(facts: PageFacts, settings: str) -> str:
    """Of the pages of a stage; all that must be equal for pages to be shared is in it."""
    text = json.dumps({"format": FORMAT, "settings": settings, **asdict(facts)}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:40]
    return f"layers-{facts.layers[0].layer}-{facts.layers[-1].layer + 1}-{digest}"


def _by_age(directory: Path) -> Iterator[tuple[int, Path]]:
    for path in directory.iterdir():
        if not path.is_dir() or path.is_symlink():
            yield path.lstat().st_ctime_ns, path
