"""Layers that were checked once are known again; what only equals them is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from kv_states import State, plain_layers

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.checked_layers import _MOST_KNOWN, _known, checked_layers, layers_from_arrays
from skippy_zmq.kv.descriptor import PageDescriptor, descriptor_to_dict, pack_descriptor, unpack_descriptor
from skippy_zmq.kv.layout import LayerRows

LAYERS = plain_layers(1, 3)


def descriptor() -> PageDescriptor:
    return State(LAYERS, tuple(range(8))).page(0, 8).descriptor


def test_pages_of_a_stage_share_their_layers() -> None:
    packed = pack_descriptor(descriptor())
    assert unpack_descriptor(packed).layers is unpack_descriptor(packed).layers


@pytest.mark.parametrize(
    ("place", "value"), [(0, 1.0), (0, True), (3, 8.0), (4, 8.0), (5, 0), (5, 0.0), (1, b"f16")], ids=str
)
def test_equal_values_of_another_type_are_refused_after_good_ones(place: int, value: Any) -> None:
    values = descriptor_to_dict(descriptor())
    unpack_descriptor(msgpack.packb(values))  # known from here on
    first, *others = [list(layer) for layer in values["layers"]]
    first[place] = value
    with pytest.raises(KvPageError, match="layer"):
        unpack_descriptor(msgpack.packb({**values, "layers": [first, *others]}))


def test_equal_layers_of_another_type_are_refused_after_good_ones() -> None:
    checked_layers(LAYERS, "here")
    wrong: Any = 8.0
    with pytest.raises(KvPageError, match=r"here: layer 1: k_row_bytes: wanted 1\.\.\d+, got 8\.0"):
        checked_layers((replace(LAYERS[0], k_row_bytes=wrong), *LAYERS[1:]), "here")


def test_what_cannot_be_packed_is_refused_like_anything_else() -> None:
    with pytest.raises(KvPageError, match="layer"):
        layers_from_arrays([[1 << 70, "f16", "f16", 8, 8, False]], "here")


def test_what_is_known_stays_bounded() -> None:
    for size in range(2, 8 * _MOST_KNOWN, 2):
        layers = (LayerRows(0, "f16", "f16", size, size),)
        known = checked_layers(layers, "here")
        assert (known.layers, known.token_bytes) == (layers, 2 * size)
        assert len(_known) <= _MOST_KNOWN


def test_what_follows_a_known_start_is_checked_like_anything() -> None:
    values = descriptor_to_dict(descriptor())
    packed = msgpack.packb(values)
    known = unpack_descriptor(packed)
    assert pack_descriptor(known) == packed
    own = packed.index(msgpack.packb("first"))
    for rest in (
        {"first": 4.0},
        {"first": True},
        {"end": 1 << 63},
        {"checksum": b""},
        {"link_after": "x" * 32},
        {"version": 2},
        {"model": "cd" * 32},  # a second one, in place of another field
    ):
        changed = {name: value for name, value in values.items() if name not in ("model", "build", "layers")} | rest
        if "model" in rest:
            del changed["version"]
        tail = b"".join(msgpack.packb(part) for pair in changed.items() for part in pair)
        with pytest.raises(KvPageError):
            unpack_descriptor(packed[:own] + tail)
    with pytest.raises(KvPageError, match="not msgpack"):
        unpack_descriptor(packed[:own])
    with pytest.raises(KvPageError, match="not msgpack"):
        unpack_descriptor(packed + b"\xc0")
