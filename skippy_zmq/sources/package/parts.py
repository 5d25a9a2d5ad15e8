"""The files of parts: opened, and checked against the manifest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import GgufHeader, parse_open_header
from skippy_zmq.sources.gguf_layout import Layout, TensorEntry
from skippy_zmq.sources.gguf_values import U64
from skippy_zmq.sources.package.hash_checks import HashChecks, hash_problem
from skippy_zmq.sources.package.hashes import written_state
from skippy_zmq.sources.package.manifest import Manifest, Part, split_pairs
from skippy_zmq.sources.package.part_paths import open_inside


class PackageParts:
    """The parts of one package. Files that are opened stay open until ``close``."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._stack = contextlib.ExitStack()
        self._opened: list[tuple[str, int, tuple[int, ...]]] = []  # path, descriptor, written state

    def __enter__(self) -> PackageParts:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def open(self, indices: Iterable[int]) -> tuple[dict[int, int], list[str]]:
        """Open these of ``manifest.parts`` and check their sizes and headers, but not yet their hashes.

        Returns their descriptors, and what is wrong with those that are no good.
        """
        descriptors, problems = {}, []
        for index in indices:
            try:
                descriptors[index] = self._open(self.manifest.parts[index], index)
            except ModelFileError as error:
                problems.append(str(error))
        return descriptors, problems

    def hash_checks(self, descriptors: Mapping[int, int], *, remember: bool = True) -> HashChecks:
        """Checks of these opened parts, which begin now."""
        parts = {index: (descriptor, self.manifest.parts[index]) for index, descriptor in descriptors.items()}
        return HashChecks(parts, remember=remember)

    def open_checked(
        self, indices: Iterable[int], progress: Callable[[int], object] | None = None, *, remember: bool = True
    ) -> tuple[dict[int, int], list[str]]:
        """``open``, and their hashes, too. ``progress`` is told the bytes that were checked."""
        descriptors, problems = self.open(indices)
        with self.hash_checks(descriptors, remember=remember) as checks:
            wrong = checks.wait(progress)
        good = {index: descriptor for index, descriptor in descriptors.items() if index not in wrong}
        return good, problems + list(wrong.values())

    def _open(self, part: Part, index: int) -> int:
        descriptor = open_inside(self.folder, part.path)
        self._stack.callback(os.close, descriptor)
        self._opened.append((part.path, descriptor, written_state(descriptor)))
        size = os.fstat(descriptor).st_size
        if size != part.size:
            raise ModelFileError(f"{part.path}: wanted {part.size} bytes, has {size}; fetch it again")
        if index in self.manifest.layouts:
            header = self.manifest.layouts[index].header
            if os.pread(descriptor, len(header), 0) != header:
                if wrong := hash_problem(descriptor, part, remember=False):  # says more
                    raise ModelFileError(wrong)
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
        if found != list(self.manifest.tensors_by_part[0]):
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
