"""One stage's tensors in a file: what identifies them, what the file must look like, and whether it does."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import TensorInfo
from skippy_zmq.sources.gguf_layout import Layout, TensorEntry, lay_out, pairs_of, text_pair
from skippy_zmq.sources.gguf_model import GgufModel
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.package.layout import Ownership
from skippy_zmq.sources.package.manifest import part_layout, split_pairs
from skippy_zmq.sources.package.parts import stand_ins
from skippy_zmq.sources.stage_files import StageFiles
from skippy_zmq.sources.stage_tensors import has_tied_norm
from skippy_zmq.topology import LayerRange

CHECKSUMS_KEY = "skippy_zmq.weights.xxh3"
_FORMAT = 1  # of the file, and of what identifies it
_CHECKSUM_DIGITS = 16
_BLOCK_BYTES = 1 << 20
_MOST_AT_ONCE = 8

FileState = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """``own``: the stage's tensors, as the source has them. ``layout``: of the file, its checksums all zero.

    ``absent``: the other stages' tensors, as the second shard of the model; None where there are none. ``states``: of
    ``files``, which the stage's tensors are made from, when it was ``seen_ns`` (nanoseconds since the epoch).
    """

    key: str
    source: GgufModel
    own: tuple[TensorInfo, ...]
    others: tuple[TensorInfo, ...]
    layout: Layout
    absent: Layout | None
    files: tuple[Path, ...]
    states: tuple[FileState, ...]
    seen_ns: int

    @property
    def size(self) -> int:
        return self.layout.size

    def header(self, checksums: Sequence[str]) -> bytes:
        """The bytes of the file before the first tensor. ``checksums``: of ``own``, in hex."""
        text = "".join(checksums).encode()
        start = _CHECKSUMS_START
        return self.layout.header[:start] + text + self.layout.header[start + len(text) :]

    def checksums(self, header: bytes) -> tuple[str, ...]:
        text = header[_CHECKSUMS_START:][: len(self.own) * _CHECKSUM_DIGITS].decode("ascii", "replace")
        return tuple(text[i : i + _CHECKSUM_DIGITS] for i in range(0, len(text), _CHECKSUM_DIGITS))

    def problem(self, descriptor: int, progress: Callable[[float], object] | None = None) -> str:
        """What is wrong with the open file, or nothing; every byte is looked at. Raises OSError."""
        size = os.fstat(descriptor).st_size
        if size != self.size:
            return f"wanted {self.size} bytes, got {size}"
        header = os.pread(descriptor, len(self.layout.header), 0)
        checksums = self.checksums(header)
        if header != self.header(checksums):
            return "its header is not that of these tensors"
        done, total = 0, max(1, sum(tensor.nbytes for tensor in self.own))
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
            tensors, offsets = self.own, self.layout.offsets
            found = pool.map(lambda tensor, offset: _checksum(descriptor, offset, tensor.nbytes), tensors, offsets)
            try:
                for tensor, wanted, checksum in zip(self.own, checksums, found, strict=True):
                    if checksum != wanted:
                        return f"tensor {shown(tensor.name)}: wanted checksum {shown(wanted)}, got {checksum}"
                    done += tensor.nbytes
                    if progress is not None:
                        progress(done / total)
            finally:
                pool.shutdown(cancel_futures=True)
        return ""


_CHECKSUMS_START = len(lay_out([text_pair(CHECKSUMS_KEY, "")], (), 1).header)  # that pair comes first


def planned_entry(source: GgufModel, layers: LayerRange, build: str) -> Entry | None:
    """The entry for ``layers`` of a model that is made while it loads; None where it is not known what it is made from.

    ``build``: of llama.cpp, which quantizes. Reads samples of the source (its identity). Raises ModelFileError.
    """
    if source.origins is None:
        return None
    ownership = Ownership(layers, source.n_layers, source.tied_output, has_tied_norm(t.name for t in source.tensors))
    own = tuple(tensor for tensor in source.tensors if ownership.owns(tensor.name))
    others = tuple(tensor for tensor in source.tensors if not ownership.owns(tensor.name))
    pairs = [text_pair(CHECKSUMS_KEY, "0" * (_CHECKSUM_DIGITS * len(own))), *pairs_of(source.header)]
    absent = None
    if others:
        pairs += split_pairs(0, 2, len(source.tensors))
        absent = part_layout(1, 2, len(source.tensors), _entries(others))
    files = tuple(sorted({path for tensor in own for path in source.origins[tensor.name]}))
    seen_ns = time.time_ns()
    states = file_states(files)
    identity = {
        "format": _FORMAT,
        "model": source.identity(),  # with the recipe, and the hash of the importance matrix
        "layers": str(layers),
        "files": states,
        "build": build,
        "machine": platform.machine(),  # rounding may be another
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    layout = lay_out(pairs, _entries(own), source.alignment)
    return Entry(key, source, own, others, layout, absent, files, states, seen_ns)


def file_states(files: Sequence[Path]) -> tuple[FileState, ...]:
    """Equal for as long as nobody writes the files: the kernel sets the last of these times, and it cannot be set back.

    Not the device: its number may be another after the machine was started again. Raises ModelFileError.
    """
    try:
        found = [path.stat() for path in files]
    except OSError as error:
        raise ModelFileError(f"{error.filename}: cannot be reached: {error.strerror}") from None
    return tuple((status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns) for status in found)


@dataclass(frozen=True, slots=True)
class CachedModel(GgufModel):
    """The model of an entry in an open file that was checked; the tensors of other stages are holes."""

    entry: Entry
    descriptor: int

    @contextlib.contextmanager
    def stage_files(
        self, layers: LayerRange, progress: Callable[[float], object] | None = None
    ) -> Iterator[StageFiles]:
        """The open file itself, and a stand-in for all other tensors. Raises ModelFileError where it is written."""
        before = _written(self.descriptor)
        with stand_ins({1: self.entry.absent} if self.entry.absent else {}) as others:
            descriptors = (self.descriptor, *others.values())
            yield StageFiles(
                paths=tuple(f"/proc/self/fd/{descriptor}" for descriptor in descriptors),
                names=tuple(map(str, self.files)),
                own_bytes=sum(tensor.nbytes for tensor in self.entry.own),
            )
        if _written(self.descriptor) != before:
            raise ModelFileError(f"{self.files[0]}: changed while the stage was loading; start it again")


def cached_model(entry: Entry, path: Path, descriptor: int) -> CachedModel:
    """``path``: of the entry's file, which ``descriptor`` has open for as long as this model is opened."""
    absent = path.with_suffix(".others")  # a name for messages
    tensors = _placed(entry.own, entry.layout, path)
    if entry.absent is not None:
        tensors += _placed(entry.others, entry.absent, absent)
    values = {field.name: getattr(entry.source, field.name) for field in dataclasses.fields(GgufModel)}
    values |= {"files": (path, absent) if entry.absent else (path,), "tensors": tensors, "rows": None}
    return CachedModel(**values, entry=entry, descriptor=descriptor)


def _placed(tensors: Sequence[TensorInfo], layout: Layout, path: Path) -> tuple[TensorInfo, ...]:
    return tuple(
        dataclasses.replace(tensor, offset=offset, path=path)
        for tensor, offset in zip(tensors, layout.offsets, strict=True)
    )


def _entries(tensors: Sequence[TensorInfo]) -> list[TensorEntry]:
    return [TensorEntry(tensor.name, tensor.type, tensor.shape, tensor.nbytes) for tensor in tensors]


def _written(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _checksum(descriptor: int, offset: int, nbytes: int) -> str:
    digest, block, done = xxhash.xxh3_64(), memoryview(bytearray(min(_BLOCK_BYTES, nbytes))), 0
    while done < nbytes:
        count = os.preadv(descriptor, [block[: nbytes - done]], offset + done)
        if not count:
            break  # it became shorter: the checksum will be another
        digest.update(block[:count])
        done += count
    return digest.hexdigest()
