"""The files of parts: opened and checked against the manifest, several at once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import GgufHeader, parse_open_header
from skippy_zmq.sources.gguf_layout import Layout, TensorEntry
from skippy_zmq.sources.gguf_values import U64
from skippy_zmq.sources.package.hashes import sha256_of, written_state
from skippy_zmq.sources.package.layout import SHARED
from skippy_zmq.sources.package.manifest import Manifest, Part, part_layout, split_pairs
from skippy_zmq.sources.package.part_paths import open_inside

_MOST_AT_ONCE = 8


class PackageParts:
    """The parts of one package. Files that are opened stay open until ``close``."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._tensors = manifest.tensors_by_part()
        self._stack = contextlib.ExitStack()
        self._opened: list[tuple[str, int, tuple[int, ...]]] = []  # path, descriptor, written state

    def __enter__(self) -> PackageParts:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def layout(self, index: int) -> Layout:
        """The file of a part other than the shared one."""
        n_parts = len(self.manifest.model_parts)
        return part_layout(index, n_parts, len(self.manifest.tensors), self._tensors[index])

    def open_checked(
        self, indices: Iterable[int], progress: Callable[[int], object] | None = None, *, remember: bool = True
    ) -> tuple[dict[int, int], list[str]]:
        """Open these of ``manifest.parts``; return their descriptors, and what is wrong with those that are no good.

        ``progress`` is told the bytes that were checked. ``remember``: trust what is known of unchanged files.
        """
        lock = threading.Lock()

        def report(n_bytes: int) -> None:
            with lock:
                if progress is not None:
                    progress(n_bytes)

        def checked(index: int) -> int | ModelFileError:
            try:
                return self._open(self.manifest.parts[index], index, report, remember)
            except ModelFileError as error:
                return error

        order = list(indices)
        pool = ThreadPoolExecutor(min(_MOST_AT_ONCE, len(os.sched_getaffinity(0))))
        try:
            results = dict(zip(order, pool.map(checked, order), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)
        return (
            {index: result for index, result in results.items() if isinstance(result, int)},
            [str(result) for result in results.values() if isinstance(result, ModelFileError)],
        )

    def _open(self, part: Part, index: int, report: Callable[[int], object], remember: bool) -> int:
        descriptor = open_inside(self.folder, part.path)
        self._stack.callback(os.close, descriptor)
        self._opened.append((part.path, descriptor, written_state(descriptor)))
        size = os.fstat(descriptor).st_size
        if size != part.size:
            raise ModelFileError(f"{part.path}: wanted {part.size} bytes, has {size}; fetch it again")
        try:
            digest = sha256_of(descriptor, remember=remember, progress=report)
        except ModelFileError as error:
            raise ModelFileError(f"{part.path}: {error}") from None
        if digest != part.sha256:
            raise ModelFileError(f"{part.path}: wanted sha256 {part.sha256}, has {digest}; fetch it again")
        if part.kind != SHARED and index < len(self.manifest.model_parts):
            header = self.layout(index).header
            if os.pread(descriptor, len(header), 0) != header:
                raise ModelFileError(
                    f"{part.path}: its header is not that of split {index} with the tensors that the manifest lists; "
                    "build the package again"
                )
        return descriptor

    def changed(self) -> list[str]:
        """The parts that have been written since they were opened."""
        return [path for path, descriptor, state in self._opened if written_state(descriptor) != state]

    def shared_header(self, descriptor: int) -> GgufHeader:
        """The metadata of the model from its opened shared part; raise ModelFileError where it does not fit."""
        part = self.manifest.model_parts[0]
        header = parse_open_header(descriptor, self.folder / part.path)
        pairs = split_pairs(0, len(self.manifest.model_parts), len(self.manifest.tensors))
        for pair in pairs:
            key = pair[U64.size : U64.size + U64.unpack_from(pair)[0]].decode()
            value = header.values.get(key)
            if value is None or header.raw[value.start : value.end] != pair:
                raise ModelFileError(f"{header.path}: {key}: does not fit the manifest; build the package again")
        found = [TensorEntry(t.name, t.type, t.shape, t.nbytes) for t in header.tensors]
        if found != self._tensors[0]:
            raise ModelFileError(f"{header.path}: its tensors are not those of the manifest; build the package again")
        return header


@contextlib.contextmanager
def stand_ins(layouts: Mapping[int, Layout]) -> Iterator[dict[int, int]]:
    """Files in memory in place of absent parts: their headers, and holes for their tensors that take no memory."""
    with contextlib.ExitStack() as stack:
        descriptors = {}
        for index, layout in layouts.items():
            descriptor = os.memfd_create(f"part-{index}", os.MFD_CLOEXEC)
            stack.callback(os.close, descriptor)
            os.pwrite(descriptor, layout.header, 0)
            os.ftruncate(descriptor, layout.size)
            descriptors[index] = descriptor
        yield descriptors
