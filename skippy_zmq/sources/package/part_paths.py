"""Names of parts: which are allowed, and opening one without leaving the package. Manifests come from strangers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_values import shown

MAX_PATH_LENGTH = 512

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def path_problem(path: str) -> str | None:
    """Why ``path`` cannot name a part, or None. Nothing is looked up."""
    if not path:
        return "is empty"
    if len(path) > MAX_PATH_LENGTH:
        return f"has {len(path)} characters, wanted at most {MAX_PATH_LENGTH}"
    if not path.isprintable() or "\\" in path:
        return "has a control character or a backslash"
    names = path.split("/")
    if names[0] == "":
        return "is absolute, wanted a path inside the package"
    if ".." in names:
        return "leaves the package"
    if "" in names or names[-1] == ".":
        return "names no file"
    return None


def plain_path(path: str) -> str:
    """An allowed ``path`` without the steps that lead nowhere: ``./ok`` is ``ok``."""
    return "/".join(name for name in path.split("/") if name != ".")


def open_inside(folder: Path, path: str) -> int:
    """Open ``path``, relative to ``folder``, for reading; return the descriptor of a regular file.

    A link may lead only to what lies in the folder, or, in a cache of huggingface_hub, to the files of the same
    repository. Raises ModelFileError that begins with ``path``.
    """
    try:
        target = os.path.realpath(folder / path, strict=True)
    except FileNotFoundError:
        raise ModelFileError(f"{path} is missing; fetch it, or build the package again") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be reached: {error.strerror}") from None
    if not any(Path(target).is_relative_to(root) for root in _roots(folder)):
        raise ModelFileError(f"{path} is a link to {shown(target)}, outside of the package")
    try:
        status = os.stat(target)  # noqa: PTH116 - before open, which would wait for the other end of a pipe
        if stat.S_ISREG(status.st_mode):
            descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be opened: {error.strerror}") from None
    kind = next((name for test, name in _KINDS if test(status.st_mode)), "a device")
    raise ModelFileError(f"{path} is {kind}, wanted a regular file")


def _roots(folder: Path) -> list[str]:
    """Where parts may lie. In a hub cache, snapshots/COMMIT/... are links to the blobs of the same repository."""
    real = Path(os.path.realpath(folder))
    roots = [str(real)]
    for above in real.parents:
        if above.name == "snapshots" and above.parent.name.startswith("models--"):
            roots.append(str(above.parent / "blobs"))
    return roots
