"""Find a package and read its manifest."""

from __future__ import annotations

import os
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.package.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MOST_PROBLEMS_SHOWN,
    Draft,
    Manifest,
    parse_manifest,
)
from skippy_zmq.sources.package.part_paths import open_inside


def package_folder(path: Path) -> Path:
    """The folder of the package at ``path``; raise ModelFileError where there is no manifest."""
    folder = path.parent if path.name == MANIFEST_NAME else path
    if not os.path.lexists(folder):
        raise ModelFileError(f"{path}: no such file or folder")
    if not folder.is_dir():
        raise ModelFileError(f"{path}: is a file, wanted the folder of a package")
    if not os.path.lexists(folder / MANIFEST_NAME):
        raise ModelFileError(
            f"{path}: no {MANIFEST_NAME} there; wanted the folder of a finished package (a build that was stopped goes "
            "on when `python -m skippy_zmq.package build` is run again)"
        )
    return folder


def read_draft(folder: Path) -> Draft:
    """What the manifest says, right or wrong; raise ModelFileError where it cannot be read."""
    try:
        descriptor = open_inside(folder, MANIFEST_NAME)
        with os.fdopen(descriptor, "rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except ModelFileError as error:
        raise ModelFileError(f"{folder}: {error}") from None
    except OSError as error:
        raise ModelFileError(f"{folder / MANIFEST_NAME}: cannot be read: {error.strerror}") from None
    if len(raw) > MAX_MANIFEST_BYTES:
        raise ModelFileError(f"{folder / MANIFEST_NAME}: wanted at most {MAX_MANIFEST_BYTES} bytes")
    return parse_manifest(raw)


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest; raise ModelFileError with all that is wrong with it."""
    draft = read_draft(folder)
    if draft.manifest is None:
        raise package_error(folder / MANIFEST_NAME, draft.problems)
    return draft.manifest


def package_error(path: Path, problems: list[str]) -> ModelFileError:
    """One line with all problems, or the first of very many."""
    shown = "; ".join(problems[:MOST_PROBLEMS_SHOWN])
    if len(problems) > MOST_PROBLEMS_SHOWN:
        shown += f"; and {len(problems) - MOST_PROBLEMS_SHOWN} more"
    count = f"{len(problems)} problems: " if len(problems) > 1 else ""
    return ModelFileError(f"{path}: {count}{shown}")
