"""Typed GGUF metadata of a model that is in no GGUF file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from skippy_zmq.sources.gguf_values import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and its GGUF type; ``element_type`` is that of the elements where ``type`` is ARRAY."""

    type: int
    value: int | float | bool | str | bytes | tuple[int | float | bool | str | bytes, ...]
    element_type: int = 0


Metadata = dict[str, Entry]


def u32(value: int) -> Entry:
    return Entry(UINT32, value)


def f32(value: float) -> Entry:
    return Entry(FLOAT32, float(value))


def flag(value: bool) -> Entry:
    return Entry(BOOL, value)


def text(value: str) -> Entry:
    return Entry(STRING, value)


def texts(values: Iterable[str | bytes]) -> Entry:
    return Entry(ARRAY, tuple(values), STRING)


def i32s(values: Iterable[int]) -> Entry:
    return Entry(ARRAY, tuple(values), INT32)


def f32s(values: Iterable[float]) -> Entry:
    return Entry(ARRAY, tuple(values), FLOAT32)


def flags(values: Iterable[bool]) -> Entry:
    return Entry(ARRAY, tuple(values), BOOL)
