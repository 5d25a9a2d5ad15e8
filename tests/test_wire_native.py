"""The messages of every step are read natively: only what the converters of the fields read, and then as they do."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_values import ALL, EXAMPLES

from skippy_zmq.wire import limits
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.fields import FieldError
from skippy_zmq.wire.messages import MESSAGE_TYPES, Kind
from skippy_zmq.wire.schema import MESSAGE_FIELDS

STEPS = [Kind.ACTIVATIONS, Kind.BATCH_DONE, Kind.TOKENS_EACH]

_LARGEST = (limits.MAX_LANES, limits.MAX_TENSORS, limits.MAX_POSITION, limits.MAX_TOKEN_ID, limits.MAX_INT64)
_INTEGERS = st.sampled_from([edge + off for edge in (0, *_LARGEST, 1 << 64) for off in (-1, 0, 1)]).filter(
    lambda value: value < 1 << 64
)
_TEXTS = st.sampled_from(["", "decode", "stop", "f32", "é" * limits.MAX_NAME_BYTES, "x" * (limits.MAX_NAME_BYTES + 1)])
_ATOMS = (
    st.none()
    | st.booleans()
    | _INTEGERS
    | st.sampled_from([0.0, 1.0, -0.0, float("nan"), float("inf")])
    | _TEXTS
    | st.text(max_size=4)
    | st.sampled_from([b"", b"\0\0\0\x80", bytes(3), bytes(8), b"s-1"])
    | st.sampled_from([{}, {"a": 1}, msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 0)])
)
_VALUES = _ATOMS | st.lists(_ATOMS, max_size=4)


def _places(value: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Of everything within nested lists."""
    if not isinstance(value, list):
        return [path]
    return [path, *(place for index, item in enumerate(value) for place in _places(item, (*path, index)))]


def _damage(data: st.DataObject, header: list[Any]) -> Any:
    """``header`` with one place changed, left out, or doubled."""
    place = data.draw(st.sampled_from(_places(header)))
    if not place:
        return data.draw(_VALUES)
    inner: Any = header
    for index in place[:-1]:
        inner = inner[index]
    match data.draw(st.sampled_from(["change", "change", "leave out", "double"])):
        case "change":
            inner[place[-1]] = data.draw(_VALUES)
        case "leave out":
            del inner[place[-1]]
        case _:
            inner.insert(place[-1], inner[place[-1]])
    return header


def _converted(kind: Kind, header: bytes) -> Any:
    """By the converters of the fields; None where they refuse it."""
    try:
        values = msgpack.unpackb(header, use_list=False, strict_map_key=False)
        return MESSAGE_FIELDS[MESSAGE_TYPES[kind]].unpack(values)
    except (FieldError, ValueError):
        return None


def _read_natively(kind: Kind, header: bytes) -> Any:
    fields = MESSAGE_FIELDS[MESSAGE_TYPES[kind]]
    try:
        message = msgspec.msgpack.decode(header, type=fields.native)
        if fields.rest is not None:
            fields.rest(message)
    except (FieldError, msgspec.MsgspecError, ValueError):
        return None
    return message


def test_they_are_read_natively() -> None:
    assert [kind for kind, cls in MESSAGE_TYPES.items() if MESSAGE_FIELDS[cls].native] == sorted(STEPS)
    for kind in STEPS:
        message = EXAMPLES[kind]
        if kind is Kind.ACTIVATIONS:
            message = msgspec.structs.replace(message, opens=())
        header = bytes(msgspec.msgpack.encode(message))
        assert _read_natively(kind, header) == _converted(kind, header) == message


@pytest.mark.parametrize("kind", STEPS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_sent_is_the_same_either_way(kind: Kind, data: st.DataObject) -> None:
    message, payloads = data.draw(ALL[kind])
    header = bytes(encode(message, payloads)[1])
    assert header == msgpack.packb(MESSAGE_FIELDS[type(message)].pack(message))
    assert _converted(kind, header) == message
    assert _read_natively(kind, header) in (message, None)


@pytest.mark.parametrize("kind", STEPS)
@given(data=st.data())
@settings(max_examples=600, deadline=None)
def test_damaged_fields_are_never_read_natively_alone(kind: Kind, data: st.DataObject) -> None:
    header = msgpack.unpackb(msgpack.packb(MESSAGE_FIELDS[MESSAGE_TYPES[kind]].pack(EXAMPLES[kind])))
    if kind is Kind.ACTIVATIONS:
        header[8] = []  # sessions that open go the other way
    packed = msgpack.packb(_damage(data, header))
    native = _read_natively(kind, packed)
    assert native is None or repr(native) == repr(_converted(kind, packed))


@pytest.mark.parametrize("kind", STEPS)
@given(data=st.data())
@settings(max_examples=600, deadline=None)
def test_damaged_bytes_are_never_read_natively_alone(kind: Kind, data: st.DataObject) -> None:
    message = EXAMPLES[kind]
    if kind is Kind.ACTIVATIONS:
        message = msgspec.structs.replace(message, opens=())
    header = bytearray(msgspec.msgpack.encode(message))
    for _ in range(data.draw(st.integers(1, 2))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    packed = bytes(header[: data.draw(st.integers(0, len(header)) | st.just(len(header)))])
    native = _read_natively(kind, packed)
    assert native is None or repr(native) == repr(_converted(kind, packed))
