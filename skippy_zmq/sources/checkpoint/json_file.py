"""JSON files from a checkpoint folder: read once, with a size limit, and refused where two readers could differ."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_values import shown

MAX_CONFIG_BYTES = 16 * 1024 * 1024
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024  # the largest known tokenizer.json has 33 MB
_HALF_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")  # of a sign that takes two; JSON allows one alone, UTF-8 does not


def read_file(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most ``limit`` bytes; raise ModelFileError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot open: {getattr(error, 'strerror', error)}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: wanted a regular file")
        if status.st_size > limit:
            raise ModelFileError(f"{path}: wanted at most {limit} bytes, got {status.st_size}")
        try:
            return file.read(status.st_size)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot read: {error.strerror}") from None


def parse_object(path: Path, data: bytes, what: str = "") -> dict[str, Any]:
    """A JSON object in UTF-8 without duplicate keys; ``what`` names the part of ``path`` that ``data`` is."""
    where = f"{path}: {what}" if what else str(path)
    try:
        value = json.loads(data.decode(), object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise ModelFileError(f"{where}: wanted UTF-8") from None
    except RecursionError:
        raise ModelFileError(f"{where}: JSON is nested too deeply") from None
    except ValueError as error:
        raise ModelFileError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: wanted a JSON object, got {_kind(value)}")
    if _HALF_ESCAPE.search(data) and not _is_text(value):
        raise ModelFileError(f"{where}: wanted texts in Unicode, got half of a surrogate pair")
    return value


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object that the file ``path`` holds; raise ModelFileError."""
    return parse_object(path, read_file(path, limit))


def _is_text(value: dict[str, Any]) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shown(key)} appears twice")
            seen.add(key)
    return values


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
