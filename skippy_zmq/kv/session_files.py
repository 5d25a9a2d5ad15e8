"""Saved sessions: a directory of page files and a manifest, written page by page and read in any split.

What makes a directory a saved session is its manifest, renamed into place last, when all files are on the disk: a save
that was cut short leaves the session that was there before, or none. Files of a save have names of their own, so saving
over a session touches nothing of it until then.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.checks import check_integer, shown
from skippy_zmq.kv.descriptor import PageFacts, check_fits
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.limits import MAX_MANIFEST_BYTES, MAX_PAGE_TOKENS, MAX_SESSION_FILES
from skippy_zmq.kv.page import KvPage, join
from skippy_zmq.kv.page_file import open_regular, read_page, write_page
from skippy_zmq.kv.session_chain import SessionLinks
from skippy_zmq.kv.session_manifest import (
    FILE_NAME,
    MANIFEST,
    OPENING,
    SessionFacts,
    SessionFile,
    SessionManifest,
    decode_manifest,
    encode_manifest,
)
from skippy_zmq.topology import LayerRange

_UNFINISHED = f".new-{MANIFEST}"
_MOST_SPLITS_KNOWN = 64


class SessionWriter:
    """Saves one session: ``add`` its pages in any order and split, then ``commit``. A context manager that undoes what
    was not committed.

    Raises KvPageError where ``directory`` is something else than a saved session or an empty directory, where another
    save into it is under way, where a page is not of this session, and where the disk refuses.
    """

    def __init__(self, directory: Path, facts: SessionFacts) -> None:
        self.directory = directory
        self.facts = facts
        self._links = SessionLinks(facts.tokens, facts.page_tokens, facts.n_prompt)
        self._nonce = secrets.token_hex(4)
        self._layers: dict[int, LayerRows] = {}
        self._files: list[SessionFile] = []
        self._names: dict[str, int] = {}  # files of this save, and how many layers are in each
        self._open = True
        with _named(directory):
            self._made = not directory.exists()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _check_replaceable(directory)
            except BlockingIOError:
                os.close(self._handle)
                raise KvPageError("another save into it is under way") from None
            except BaseException:
                os.close(self._handle)
                raise

    def __enter__(self) -> SessionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def n_pages(self) -> int:
        """Pages so far."""
        return len(self._files)

    def add(self, page: KvPage) -> None:
        """Write one page of the session; its payload is not needed afterwards."""
        with _named(self.directory):
            descriptor = page.descriptor
            facts = PageFacts(self.facts.model, self.facts.build, descriptor.layers)
            check_fits(descriptor, facts, n_ctx=min(self.facts.n_ctx, len(self.facts.tokens)))
            first, end = self._links.at(descriptor.first), self._links.at(descriptor.end)
            check_fits(descriptor, facts, link_before=first, link_after=end)
            for rows in descriptor.layers:
                if self._layers.setdefault(rows.layer, rows) != rows:
                    raise KvPageError(f"{descriptor}: wanted {self._layers[rows.layer]}, got {rows}")
            if len(self._names) == MAX_SESSION_FILES:
                raise KvPageError(f"wanted at most {MAX_SESSION_FILES} pages")
            layers = LayerRange(descriptor.layers[0].layer, descriptor.layers[-1].layer + 1)
            name = (
                f"layers-{layers.start:04}-{layers.end:04}.tokens-{descriptor.first:010}-{descriptor.end:010}"
                f".{self._nonce}.safetensors"
            )
            if name in self._names:
                raise KvPageError(f"{descriptor}: added twice")
            self._names[name] = len(descriptor.layers)
            digest = hashlib.sha256()
            with _created(self.directory / name) as file:
                file_bytes = write_page(file, page, digest.update)
            self._files.append(SessionFile(name, file_bytes, digest.digest(), layers, descriptor.first, descriptor.end))

    def commit(self) -> SessionManifest:
        """Make what was added the saved session, in place of the one before; KvPageError where pages are missing."""
        with _named(self.directory):
            layers = tuple(self._layers[layer] for layer in sorted(self._layers))
            if not layers:
                raise KvPageError("no page was added")
            files = tuple(self._files)
            manifest = SessionManifest(self.facts, layers, max(file.end for file in files), files)
            for file in files:
                if sum(file.layers.start <= rows.layer < file.layers.end for rows in layers) != self._names[file.name]:
                    raise KvPageError(f"{file.name}: wanted all of the session's layers in {file.layers}")
            unfinished = self.directory / _UNFINISHED
            unfinished.unlink(missing_ok=True)
            with _created(unfinished) as target:
                target.write(encode_manifest(manifest))
            os.fsync(self._handle)
            unfinished.replace(self.directory / MANIFEST)
            os.fsync(self._handle)
            for path in list(self.directory.iterdir()):
                if FILE_NAME.fullmatch(path.name) and path.name not in self._names:
                    path.unlink(missing_ok=True)  # of the session that was there, or of a save that was cut short
        self._names.clear()
        self._close()
        return manifest

    def abort(self) -> None:
        """Undo what was not committed."""
        if not self._open:
            return
        for name in (*self._names, _UNFINISHED):
            with contextlib.suppress(OSError):
                (self.directory / name).unlink()
        if self._made and not (self.directory / MANIFEST).exists():
            with contextlib.suppress(OSError):  # something else is there by now
                self.directory.rmdir()
        self._close()

    def _close(self) -> None:
        self._open = False
        os.close(self._handle)


class SavedSession:
    """A saved session, opened: its manifest is checked, and that all files are there in their sizes, or KvPageError.

    What is in a file is checked when it is read: by ``pages``, or by ``verify`` for all of them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with _named(directory):
            with open_regular(directory / MANIFEST) as file:
                size = min(os.fstat(file.fileno()).st_size, MAX_MANIFEST_BYTES)
                self.manifest = decode_manifest(file.read(size + 1))
            for entry in self.manifest.files:
                self._open(entry).close()
        facts = self.manifest.facts
        self._links = SessionLinks(facts.tokens, facts.page_tokens, facts.n_prompt)
        self._facts_of: dict[LayerRange, PageFacts] = {}

    @property
    def facts(self) -> SessionFacts:
        return self.manifest.facts

    def layers(self, within: LayerRange) -> tuple[LayerRows, ...]:
        """Of the layers ``within``, those that keep state."""
        return tuple(rows for rows in self.manifest.layers if within.start <= rows.layer < within.end)

    def pages(self, within: LayerRange, page_tokens: int | None = None) -> Iterator[KvPage]:
        """The pages of one stage, first tokens first, each verified before it is handed out.

        ``within``: any layers of the model. ``page_tokens``: tokens of a page; as they were saved unless given. Only
        the files that a page needs are in memory. No page comes where none of the layers keeps state.
        """
        layers = self.layers(within)
        if not layers:
            return
        files = [
            file
            for file in self.manifest.files
            if any(file.layers.start <= rows.layer < file.layers.end for rows in layers)
        ]
        if page_tokens is None:
            ends = sorted({file.end for file in files} | {file.first for file in files if file.first})
        else:
            check_integer("page_tokens", page_tokens, 1, MAX_PAGE_TOKENS)
            ends = [*range(page_tokens, self.manifest.n_cached, page_tokens), self.manifest.n_cached]
        loaded: dict[str, KvPage] = {}
        first = 0
        for end in ends:
            needed = [file for file in files if file.first < end and file.end > first]
            loaded = {file.name: loaded.get(file.name) or self._read(file) for file in needed}
            with _named(self.directory):
                page = join(list(loaded.values()), layers, first, end, (self._links.at(first), self._links.at(end)))
            yield page
            first = end

    def verify(self) -> None:
        """Read all files; KvPageError names the first one that is damaged."""
        for file in self.manifest.files:
            self._read(file)

    def _open(self, entry: SessionFile) -> BinaryIO:
        file = open_regular(self.directory / entry.name)
        size = os.fstat(file.fileno()).st_size
        if size != entry.file_bytes:
            file.close()
            raise KvPageError(f"{entry.name}: wanted {entry.file_bytes} bytes, got {size}")
        return file

    def _read(self, entry: SessionFile) -> KvPage:
        facts = self._facts_of.get(entry.layers)
        if facts is None:
            facts = PageFacts(self.facts.model, self.facts.build, self.layers(entry.layers))
            if len(self._facts_of) == _MOST_SPLITS_KNOWN:
                self._facts_of.clear()
            self._facts_of[entry.layers] = facts
        first, end = self._links.at(entry.first), self._links.at(entry.end)
        with _named(self.directory), self._open(entry) as file:
            try:
                page = read_page(file, entry.sha256)
                check_fits(page.descriptor, facts, first=entry.first, end=entry.end, link_before=first, link_after=end)
            except KvPageError as error:
                raise KvPageError(f"{entry.name}: {error}") from None
            return page


@contextlib.contextmanager
def _named(directory: Path) -> Iterator[None]:
    """Say which session an error is about."""
    try:
        yield
    except KvPageError as error:
        raise KvPageError(f"session {directory}: {error}") from None
    except OSError as error:
        name = f"{Path(error.filename).name}: " if isinstance(error.filename, (str, Path)) else ""
        raise KvPageError(f"session {directory}: {name}{error.strerror or error}") from None


@contextlib.contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    """A new file, on the disk when the block ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _check_replaceable(directory: Path) -> None:
    """Raise KvPageError unless the directory holds a saved session, or nothing but what a save left behind."""
    with os.scandir(directory) as entries:
        for entry in entries:
            ours = entry.name in (MANIFEST, _UNFINISHED) or FILE_NAME.fullmatch(entry.name)
            if not ours or not entry.is_file(follow_symlinks=False):
                raise KvPageError(f"not overwritten: {shown(entry.name)} in it is not of a saved session")
    with contextlib.suppress(FileNotFoundError), open_regular(directory / MANIFEST) as file:
        if file.read(len(OPENING)) != OPENING:
            raise KvPageError(f"not overwritten: its {MANIFEST} is not of a saved session")
