"""File names from lists that others wrote: only ones that stay inside the folder they are joined to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_values import shown

MAX_NAME_LENGTH = 1024


def name_problem(name: str) -> str | None:
    """Why ``name`` cannot be that of a file inside the folder, or None. Nothing is looked up."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"has {len(name)} characters, wanted at most {MAX_NAME_LENGTH}"
    if not name.isprintable() or "\\" in name:
        return "has a control character or a backslash"
    parts = name.split("/")
    if parts[0] == "":
        return "is absolute, wanted a path inside the folder"
    if ".." in parts:
        return "leaves the folder"
    if "" in parts or parts[-1] == ".":
        return "names no file"
    return None


def plain_name(name: str) -> str:
    """An allowed ``name`` without the steps that lead nowhere: ``./ok`` is ``ok``."""
    return "/".join(part for part in name.split("/") if part != ".")


def checked_name(name: object, where: str) -> str:
    """``plain_name`` of ``name``; raise ModelFileError, naming ``where``, unless it stays inside the folder."""
    problem = name_problem(name) if isinstance(name, str) else "is no text"
    if problem or not isinstance(name, str):
        raise ModelFileError(f"{where}: file name {shown(str(name))} {problem}")
    return plain_name(name)


def link_roots(folder: Path) -> list[Path]:
    """Where links in ``folder`` may lead: into it, or, in a hub cache, to the blobs of the same repository.

    There, files under snapshots/COMMIT are such links.
    """
    real = Path(os.path.realpath(folder))
    roots = [real]
    for above in real.parents:
        if above.name == "snapshots" and above.parent.name.startswith("models--"):
            roots.append(above.parent / "blobs")
    return roots


def shortened(names: Sequence[str], most: int) -> str:
    """The names in one line, the first ``most`` of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
