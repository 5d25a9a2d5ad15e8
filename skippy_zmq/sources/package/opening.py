"""Open a layer package: as a description of the model, then the parts of one stage for llama.cpp."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import GgufHeader, TensorInfo
from skippy_zmq.sources.gguf_model import GgufModel, model_fields
from skippy_zmq.sources.package.layout import Ownership
from skippy_zmq.sources.package.manifest import MANIFEST_NAME, Manifest
from skippy_zmq.sources.package.parts import PackageParts, stand_ins
from skippy_zmq.sources.package.projectors import Projector
from skippy_zmq.sources.package.reading import package_error, package_folder, read_manifest
from skippy_zmq.sources.stage_files import StageFiles
from skippy_zmq.sources.stage_tensors import has_tied_norm
from skippy_zmq.topology import LayerRange

_DESCRIPTORS_PER_PART = 3  # of ours, of the stage's and, while it loads, of llama.cpp's
_OTHER_DESCRIPTORS = 256


@dataclass(frozen=True, slots=True)
class PackageModel(GgufModel):
    """A model whose ``files`` are the parts of a package, which need not all be there. ``path``: the folder."""

    manifest: Manifest
    projectors: tuple[Projector, ...]

    def identity(self) -> str:
        """That of the whole model, as the manifest states it."""
        return self.manifest.identity

    def ownership(self, layers: LayerRange) -> Ownership:
        tied_norm = has_tied_norm(tensor.name for tensor in self.tensors)
        return Ownership(layers, self.n_layers, self.tied_output, tied_norm)

    def used_parts(self, layers: LayerRange) -> tuple[int, ...]:
        """The parts that a stage reads, as indices into ``manifest.parts``; the shared one is among them."""
        owns = self.ownership(layers).owns
        owned = (index for tensor, index in zip(self.tensors, self.manifest.part_of, strict=True) if owns(tensor.name))
        return tuple(sorted({0, *owned}))

    @contextlib.contextmanager
    def stage_files(
        self, layers: LayerRange, progress: Callable[[float], object] | None = None
    ) -> Iterator[StageFiles]:
        """The stage's parts, checked by size and header, and stand-ins for all others.

        Their SHA-256 is computed while llama.cpp reads headers and vocabulary; ``check`` waits for it. What is checked
        is what is opened: llama.cpp gets the open files themselves. Raises ModelFileError with all that is wrong with
        them, also where one is written before the context ends.
        """
        used = self.used_parts(layers)
        owns = self.ownership(layers).owns
        _allow_descriptors(len(self.files) * _DESCRIPTORS_PER_PART + _OTHER_DESCRIPTORS)
        with contextlib.ExitStack() as stack:
            parts = stack.enter_context(PackageParts(self.path, self.manifest))
            own, problems = parts.open(used)
            absent = {index: layout for index, layout in self.manifest.layouts.items() if index not in used}
            descriptors = own | stack.enter_context(stand_ins(absent))
            checks = stack.enter_context(parts.hash_checks(own))
            total = max(1, sum(self.manifest.parts[index].size for index in own))
            done = 0

            def report(n_bytes: int) -> None:
                nonlocal done
                done += n_bytes
                if progress is not None:
                    progress(done / total)

            def check() -> None:
                wrong = [*problems, *checks.wait(report).values()]
                if changed := parts.changed():
                    raise ModelFileError(f"{self.path}: {', '.join(changed)} changed while the stage was loading")
                if wrong:
                    raise package_error(self.path, wrong)

            if problems:
                check()
            yield StageFiles(
                paths=tuple(f"/proc/self/fd/{descriptors[index]}" for index in range(len(self.files))),
                names=tuple(map(str, self.files)),
                own_bytes=sum(tensor.nbytes for tensor in self.tensors if owns(tensor.name)),
                check=check,
            )
            check()

    @contextlib.contextmanager
    def opened(self, indices: tuple[int, ...]) -> Iterator[dict[int, int]]:
        """Descriptors of these parts, checked, by index; raise ModelFileError with all that is wrong with them."""
        with PackageParts(self.path, self.manifest) as parts:
            descriptors, problems = parts.open_checked(indices)
            if problems:
                raise package_error(self.path, problems)
            yield descriptors

    def projector_file(self, projector: Projector) -> Path:
        """The path of a projector's file once its size and SHA-256 have been checked; raise ModelFileError."""
        path = projector.path.relative_to(self.path).as_posix()
        index = next(i for i, part in enumerate(self.manifest.parts) if part.path == path)
        with self.opened((index,)):
            return projector.path


def open_package(path: Path) -> PackageModel:
    """Open the package at ``path``, its folder or its manifest. Of the parts only the shared one is read.

    Raises ModelFileError with all that is wrong with the manifest, or what does not fit it in the shared part.
    """
    folder = package_folder(path)
    manifest = read_manifest(folder)
    with PackageParts(folder, manifest) as parts:
        opened, problems = parts.open_checked((0,))
        if problems:
            raise package_error(folder, problems)
        return describe(folder, manifest, parts.shared_header(opened[0]))


def describe(folder: Path, manifest: Manifest, header: GgufHeader) -> PackageModel:
    """The model of a manifest and the metadata of its shared part; raise ModelFileError where they disagree."""
    files = tuple(folder / part.path for part in manifest.model_parts)
    offsets = {index: iter(layout.offsets) for index, layout in manifest.layouts.items()}
    offsets[0] = iter([tensor.offset for tensor in header.tensors])
    tensors = tuple(
        TensorInfo(tensor.name, tensor.type, tensor.shape, next(offsets[index]), tensor.nbytes, files[index])
        for tensor, index in zip(manifest.tensors, manifest.part_of, strict=True)
    )
    fields = model_fields(folder, files, header, tensors)
    wrong = [
        f"{key} is {stated!r}, but the metadata in {manifest.parts[0].path} says {fields[key]!r}"
        for key, stated in (("architecture", manifest.architecture), ("n_layers", manifest.n_layers))
        if fields[key] != stated
    ]
    if fields["held_layers"] is not None:
        wrong.append("the metadata is that of a file that holds one stage only")
    if wrong:
        raise package_error(folder / MANIFEST_NAME, wrong)
    return PackageModel(**fields, manifest=manifest, projectors=_projectors(folder, manifest))


def _projectors(folder: Path, manifest: Manifest) -> tuple[Projector, ...]:
    found = []
    for part in manifest.projectors:
        facts = part.projector
        found.append(
            Projector(
                folder / part.path,
                part.size,
                part.sha256,
                part.tensor_count,
                facts.type if facts else None,
                facts.vision if facts else False,
                facts.audio if facts else False,
            )
        )
    return tuple(found)


def _allow_descriptors(more: int) -> None:
    """A model of very many layers has more parts than files may usually be open at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = more + len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would hold one more open
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )
