"""Open a part without leaving the package. Manifests come from strangers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.relative_names import link_roots

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


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
    if not any(Path(target).is_relative_to(root) for root in link_roots(folder)):
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
