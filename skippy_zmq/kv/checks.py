"""Checks of values from peers and files: exact types, ranges, and errors that say what was wanted and what was got."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.limits import MAX_TEXT_BYTES

_MOST_SHOWN = 80
_MOST_SHOWN_BYTES = 32


def check_integer(where: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise refused(where, f"{low}..{high}" if low < high else f"{low}", value)
    return value


def check_text(where: str, value: object) -> str:
    if type(value) is not str or not value or len(value.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise refused(where, f"a text of 1..{MAX_TEXT_BYTES} bytes", value)
    if not value.isprintable():
        raise refused(where, "printable characters", value)
    return value


def check_binary(where: str, value: object, size: int) -> bytes:
    if type(value) is not bytes or len(value) != size:
        raise refused(where, f"{size} bytes", value)
    return value


def refused(where: str, wanted: str, got: object) -> KvPageError:
    return KvPageError(f"{where}: wanted {wanted}, got {shown(got)}")


def shown(value: object) -> str:
    """A short text on one line for any value."""
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, bytes) and len(value) <= _MOST_SHOWN_BYTES:
        return value.hex() or "no bytes"
    if isinstance(value, (bytes, list, tuple, Mapping, set)):
        return f"{type(value).__name__} of {len(value)}"
    if not isinstance(value, (str, int, float, type(None))):
        return type(value).__name__
    text = str(value) if not isinstance(value, Sized) or value else "no text"
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
