"""Write a package, part by part. A build that was stopped goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.sources.gguf_layout import Layout, TensorEntry, lay_out
from skippy_zmq.sources.package.hashes import sha256_of
from skippy_zmq.sources.package.layout import EMBEDDINGS, LAYER, OUTPUT, PROJECTOR, SHARED, part_of
from skippy_zmq.sources.package.manifest import MANIFEST_NAME, Manifest, Part, ProjectorFacts, part_layout, split_pairs
from skippy_zmq.sources.package.opening import describe
from skippy_zmq.sources.package.parts import PackageParts
from skippy_zmq.sources.package.projectors import read_projector
from skippy_zmq.sources.package.reading import package_error
from skippy_zmq.sources.package.weight_source import BLOCK_BYTES, WeightSource
from skippy_zmq.sources.relative_names import name_problem

JOURNAL_NAME = ".build-journal.jsonl"
_MARGIN_BYTES = 16 << 20  # for the manifest and what a file system needs besides

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class _Job:
    """A part to be written. ``key`` is equal only for the same bytes."""

    part: Part
    key: str
    blocks: Callable[[], Iterator[bytes]]


def build_package(
    source: WeightSource,
    folder: Path,
    projectors: Sequence[Path] = (),
    *,
    begin: Callable[[int], object] = lambda _total: None,
    progress: Progress = lambda _bytes: None,
) -> Manifest:
    """Write the package of ``source`` into ``folder``, made if need be; the manifest comes last.

    Complete parts of an earlier build of the same source are checked by SHA-256 and kept, those of another are removed;
    files that no build wrote are never replaced. ``begin`` is told the bytes of all parts, ``progress`` those that were
    written or checked since. Raises OptionError for a folder that cannot take the package, ModelFileError where a
    source is no good.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise OptionError(f"{folder}: is a file, wanted a folder for the package")
        if os.path.lexists(folder / MANIFEST_NAME):
            raise OptionError(
                f"{folder}: holds a finished package; check it with `python -m skippy_zmq.package verify {folder}`, "
                "or give another folder"
            )
        fingerprint = source.fingerprint()
        jobs, tensors, part_index = _jobs(source, fingerprint, projectors)
        _check_own(folder, jobs)
        folder.mkdir(parents=True, exist_ok=True)
        with _Journal(folder) as journal:
            begin(sum(job.part.size for job in jobs))
            _check_space(folder, jobs)
            parts = tuple(_write_part(folder, job, journal, progress) for job in jobs)
            if source.fingerprint() != fingerprint:
                raise ModelFileError(f"{source.name}: was written while its package was built; build again")
            unnamed = Manifest(
                source.name,
                source.architecture,
                source.n_layers,
                "",
                parts,
                tensors,
                part_index,
                source.quantization,
            )
            manifest = replace(unnamed, identity=_identity(folder, unnamed))
            journal.remove_others({job.part.path for job in jobs})
            text = manifest.text().encode()
            _write_file(folder / MANIFEST_NAME, lambda: iter((text,)), lambda _n: None)
            journal.remove()
        return manifest
    except OSError as error:
        raise OptionError(f"{error.filename or folder}: the package cannot be written: {error.strerror}") from None


def _jobs(
    source: WeightSource, fingerprint: str, projectors: Sequence[Path]
) -> tuple[list[_Job], tuple[TensorEntry, ...], tuple[int, ...]]:
    """What to write, the tensors of the model, and the index of each one's part."""
    groups: dict[tuple[str, int | None], list[TensorEntry]] = {(SHARED, None): [], (EMBEDDINGS, None): []}
    places = [part_of(tensor.name) for tensor in source.tensors]
    n_blocks = max(source.n_layers, *(layer + 1 for _, layer in places if layer is not None), 0)
    groups |= {(LAYER, layer): [] for layer in range(n_blocks)} | {(OUTPUT, None): []}
    for tensor, place in zip(source.tensors, places, strict=True):
        groups[place].append(tensor)
    # layers that only predict further tokens may have been left out of the source
    groups = {place: own for place, own in groups.items() if own or (place[1] or 0) < source.n_layers}
    order = {place: index for index, place in enumerate(groups)}
    n_parts, n_tensors = len(groups), len(source.tensors)
    jobs = []
    for (kind, layer), own in groups.items():
        index = order[kind, layer]
        if kind == SHARED:
            pairs = [*source.pairs, *split_pairs(0, n_parts, n_tensors)]
            layout = lay_out(pairs, own, source.alignment)
        else:
            layout = part_layout(index, n_parts, n_tensors, own)
        path = f"{kind}.gguf" if layer is None else f"layers/{layer:05d}.gguf"
        part = Part(kind=kind, path=path, layer=layer, size=layout.size, tensor_count=len(own), sha256="0" * 64)
        key = hashlib.sha256(fingerprint.encode() + layout.header).hexdigest()
        jobs.append(_Job(part, key, partial(_part_blocks, source, layout, own)))
    jobs += _projector_jobs(projectors)
    return jobs, tuple(source.tensors), tuple(order[place] for place in places)


def _part_blocks(source: WeightSource, layout: Layout, tensors: Iterable[TensorEntry]) -> Iterator[bytes]:
    yield layout.header
    position = len(layout.header)
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        yield b"\0" * (offset - position)
        position = offset
        for block in source.blocks(tensor):
            position += len(block)
            yield block
        if position != offset + tensor.nbytes:
            raise ModelFileError(
                f"tensor '{tensor.name}': wanted {tensor.nbytes} bytes from its source, got {position - offset}"
            )


def _projector_jobs(paths: Sequence[Path]) -> Iterator[_Job]:
    names = set()
    for path in paths:
        header, facts = read_projector(path)
        if path.name in names:
            raise OptionError(f"{path}: another projector is named {path.name} too; rename one of them")
        names.add(path.name)
        status = path.stat()
        key = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        part = Part(
            kind=PROJECTOR,
            path=f"projectors/{path.name}",
            size=header.size,
            tensor_count=len(header.tensors),
            sha256="0" * 64,
            projector=ProjectorFacts(type=facts.type, vision=facts.vision, audio=facts.audio),
        )
        yield _Job(part, hashlib.sha256(key.encode()).hexdigest(), partial(_file_blocks, path))


def _file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _write_part(folder: Path, job: _Job, journal: _Journal, progress: Progress) -> Part:
    """The part with its SHA-256, kept or written."""
    path = folder / job.part.path
    known = journal.hashes.get((job.part.path, job.key))
    if known is not None and _has_hash(path, job.part.size, known, progress):
        return job.part.model_copy(update={"sha256": known})
    path.parent.mkdir(exist_ok=True)
    size, digest = _write_file(path, job.blocks, progress)
    if size != job.part.size:
        raise ModelFileError(f"{path}: wanted {job.part.size} bytes, the source gave {size}: it changed; build again")
    journal.add(job.part.path, job.key, digest)
    return job.part.model_copy(update={"sha256": digest})


def _has_hash(path: Path, size: int, digest: str, progress: Progress) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_size != size or sha256_of(descriptor, remember=False) != digest:
            return False
    except ModelFileError:
        return False
    finally:
        os.close(descriptor)
    progress(size)
    return True


def _write_file(path: Path, blocks: Callable[[], Iterator[bytes]], progress: Progress) -> tuple[int, str]:
    """Write beside, then put in place, so that a file of this name is whole; return its size and SHA-256."""
    beside = path.with_name(f".{path.name}.partial")
    digest, size = hashlib.sha256(), 0
    with beside.open("wb") as file:
        for block in blocks():
            file.write(block)
            digest.update(block)
            size += len(block)
            progress(len(block))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return size, digest.hexdigest()


def _identity(folder: Path, manifest: Manifest) -> str:
    """Computed from what was written, so that it says something about it."""
    with PackageParts(folder, manifest) as parts:
        opened, problems = parts.open_checked((0,))
        if problems:
            raise package_error(folder, problems)
        return describe(folder, manifest, parts.shared_header(opened[0])).sampled_identity()


def _check_own(folder: Path, jobs: Sequence[_Job]) -> None:
    if os.path.lexists(folder / JOURNAL_NAME):
        return
    for job in jobs:
        if os.path.lexists(folder / job.part.path):
            raise OptionError(f"{folder / job.part.path}: is there already, and no build wrote it; give another folder")


def _check_space(folder: Path, jobs: Sequence[_Job]) -> None:
    missing = sum(job.part.size for job in jobs if not (folder / job.part.path).exists())
    free = shutil.disk_usage(folder).free
    if missing + _MARGIN_BYTES > free:
        raise OptionError(f"{folder}: the package needs {missing + _MARGIN_BYTES} bytes more, {free} are free there")


class _Journal:
    """What has been written so far, a line per part; the lock on it keeps a second build away."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL_NAME
        self.hashes: dict[tuple[str, str], str] = {}

    def __enter__(self) -> _Journal:
        self._file = self._path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise OptionError(f"{self._path.parent}: another build is writing this package") from None
        self._file.seek(0)
        for line in self._file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a build that was killed
                entry = json.loads(line)
                self.hashes[str(entry["path"]), entry["key"]] = entry["sha256"]
        return self

    def __exit__(self, *_raised: object) -> None:
        self._file.close()

    def add(self, path: str, key: str, digest: str) -> None:
        line = json.dumps({"path": path, "key": key, "sha256": digest})
        self._file.write(f"\n{line}\n".encode())  # on a line of its own, whatever a killed build left
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove_others(self, paths: Container[str]) -> None:
        """Remove the parts that an earlier build of another model left."""
        for path, _ in self.hashes:
            if path not in paths and name_problem(path) is None:
                (self._path.parent / path).unlink(missing_ok=True)

    def remove(self) -> None:
        self._path.unlink()
