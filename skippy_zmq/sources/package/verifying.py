"""Check a whole package: every byte, whatever is remembered of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from skippy_zmq.errors import ModelFileError, SkippyError
from skippy_zmq.sources.package.hash_checks import hash_problem
from skippy_zmq.sources.package.manifest import MANIFEST_NAME, Manifest, Part
from skippy_zmq.sources.package.opening import describe
from skippy_zmq.sources.package.part_paths import open_inside
from skippy_zmq.sources.package.parts import PackageParts
from skippy_zmq.sources.package.projectors import read_projector
from skippy_zmq.sources.package.reading import package_folder, read_draft


def verify_package(
    path: Path,
    *,
    begin: Callable[[int], object] = lambda _total: None,
    progress: Callable[[int], object] = lambda _bytes: None,
) -> list[str]:
    """All that is wrong with a package; raise ModelFileError where there is no manifest that can be read.

    ``begin`` is told the bytes of all parts, ``progress`` those that were checked since.
    """
    folder = package_folder(path)
    draft = read_draft(folder)
    problems = [f"{MANIFEST_NAME}: {problem}" for problem in draft.problems]
    begin(sum(part.size for part in draft.parts))
    if draft.manifest is None:  # what can be said of the files without knowing how they belong together
        return problems + [problem for part in draft.parts for problem in _file_problems(folder, part, progress)]
    with PackageParts(folder, draft.manifest) as parts:
        opened, wrong = parts.open_checked(range(len(draft.manifest.parts)), progress, remember=False)
        problems += wrong
        try:
            problems += _content_problems(folder, draft.manifest, parts, opened)
        except ModelFileError as error:
            problems.append(str(error))
    return problems


def _file_problems(folder: Path, part: Part, progress: Callable[[int], object]) -> list[str]:
    try:
        descriptor = open_inside(folder, part.path)
    except ModelFileError as error:
        return [str(error)]
    try:
        size = os.fstat(descriptor).st_size
        if size != part.size:
            return [f"{part.path}: wanted {part.size} bytes, has {size}"]
        wrong = hash_problem(descriptor, part, remember=False, progress=progress)
        return [wrong] if wrong else []
    finally:
        os.close(descriptor)


def _content_problems(folder: Path, manifest: Manifest, parts: PackageParts, opened: dict[int, int]) -> list[str]:
    problems = []
    if 0 in opened:
        model = describe(folder, manifest, parts.shared_header(opened[0]))
        if all(index in opened for index in range(len(manifest.model_parts))):
            identity = model.sampled_identity()
            if identity != manifest.identity:
                problems.append(
                    f"{MANIFEST_NAME}: identity: wanted {identity}, that of the parts, got {manifest.identity}"
                )
    for index, part in enumerate(manifest.projectors, len(manifest.model_parts)):
        if index not in opened:
            continue
        try:
            header, facts = read_projector(folder / part.path)
        except SkippyError as error:
            problems.append(str(error))
            continue
        if (len(header.tensors), facts) != (part.tensor_count, part.projector):
            problems.append(
                f"{part.path}: has {len(header.tensors)} tensors and {facts!r}; the manifest says otherwise"
            )
    return problems
