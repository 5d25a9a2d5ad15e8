"""Layers of pages, checked once: the pages of a stage are many and have the same ones.

Only what was checked as this very object is known, never something equal: ``1 == 1.0 == True``, and types are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgpack  # type: ignore[import-untyped]

from skippy_zmq.kv.checks import check_integer, refused
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.limits import CACHE_TYPES, MAX_LAYERS, MAX_ROW_BYTES

LAYER_FIELDS = tuple(field.name for field in fields(LayerRows))
_fields_of = attrgetter(*LAYER_FIELDS)
LayerArrays = tuple[tuple[Any, ...], ...]

# Of each kind: more than a pipeline has stages, and a bound on what peers can have kept here.
_MOST_KNOWN = 64


@dataclass(frozen=True, slots=True)
class CheckedLayers:
    """``arrays``: of each layer its fields in order. ``token_bytes``: of one token in all of them.

    ``starts``: how a packed descriptor with these layers begins, by model and build; the descriptor's own.
    """

    layers: tuple[LayerRows, ...]
    arrays: LayerArrays
    token_bytes: int
    starts: dict[tuple[str, str], bytes] = field(default_factory=dict)


_known: dict[int, CheckedLayers] = {}  # by identity; an entry keeps its object alive, so that nothing else gets its id


def checked_layers(layers: object, where: str) -> CheckedLayers:
    """What there is to know of layers that a page can have, ascending; KvPageError for anything else."""
    found = _known.get(id(layers))
    if found is not None and found.layers is layers:
        return found
    checked = _check(layers, where)
    found = CheckedLayers(checked, tuple(map(_fields_of, checked)), sum(rows.token_bytes for rows in checked))
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[id(layers)] = found
    return found


def layers_from_arrays(values: object, where: str) -> tuple[LayerRows, ...]:
    """Layers out of arrays of their fields, from anywhere; KvPageError for what cannot be. Equal ones are the same."""
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= MAX_LAYERS:
        raise refused(f"{where}: layers", f"an array of 1..{MAX_LAYERS}", values)
    try:
        packed = msgpack.packb(values)
    except Exception:  # of no type that a field has, which the checks say better
        return _made(values, where)
    return _read(packed, where)


@lru_cache(_MOST_KNOWN)
def _read(packed: bytes, where: str) -> tuple[LayerRows, ...]:
    # Packed, unlike values that are equal, two texts differ where a type does.
    return _made(msgpack.unpackb(packed), where)


def _made(values: Sequence[Any], where: str) -> tuple[LayerRows, ...]:
    for layer in values:
        if not isinstance(layer, (list, tuple)) or len(layer) != len(LAYER_FIELDS):
            raise refused(f"{where}: layers", f"arrays of {', '.join(LAYER_FIELDS)}", layer)
    layers = tuple(LayerRows(*layer) for layer in values)
    return checked_layers(layers, where).layers


def _check(layers: object, where: str) -> tuple[LayerRows, ...]:
    if not isinstance(layers, tuple) or not 1 <= len(layers) <= MAX_LAYERS:
        raise refused(f"{where}: layers", f"1..{MAX_LAYERS} layers", layers)
    before = -1
    for rows in layers:
        if not isinstance(rows, LayerRows):
            raise refused(f"{where}: layers", "LayerRows", rows)
        check_integer(f"{where}: layers", rows.layer, before + 1, MAX_LAYERS - 1)
        before = rows.layer
        at = f"{where}: layer {rows.layer}: "
        if type(rows.v_transposed) is not bool:
            raise refused(f"{at}v_transposed", "a boolean", rows.v_transposed)
        for part, least in (("k", 1), ("v", 0)):
            kind, size = getattr(rows, f"{part}_type"), getattr(rows, f"{part}_row_bytes")
            if not isinstance(kind, str) or kind not in CACHE_TYPES:
                raise refused(f"{at}{part}_type", f"one of {', '.join(CACHE_TYPES)}", kind)
            check_integer(f"{at}{part}_row_bytes", size, least, MAX_ROW_BYTES)
            block_bytes, block_elements = CACHE_TYPES[kind]
            if size % block_bytes:
                raise refused(f"{at}{part}_row_bytes", f"a multiple of {block_bytes}, {kind}'s block", size)
            if part == "v" and rows.v_transposed and block_elements > 1:
                raise refused(f"{at}v_type", "a type without blocks, as V is transposed", kind)
    return layers
