"""File names from lists that others wrote: only ones that stay inside the folder they are joined to."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_values import shown

MAX_NAME_LENGTH = 1024


def checked_name(name: object, where: str) -> str:
    """``name`` without a leading ``./``; raise ModelFileError, naming ``where``, unless it is a plain relative path."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise ModelFileError(f"{where}: file name {shown(str(name))}: wanted 1 to {MAX_NAME_LENGTH} characters")
    parts = name.split("/")
    if len(parts) > 1 and parts[0] == ".":
        parts = parts[1:]
    if not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ModelFileError(f"{where}: file name {shown(name)}: wanted a relative path without empty parts, . and ..")
    return "/".join(parts)


def shortened(names: Sequence[str], most: int) -> str:
    """The names in one line, the first ``most`` of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
