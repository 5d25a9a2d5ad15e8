"""The rows that a stage's lanes keep of their tokens, as payloads of pages (their layout: ``skippy_zmq.kv.layout``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skippy_zmq import _native
from skippy_zmq.errors import KvPageError, NativeError
from skippy_zmq.kv.layout import LayerRows

Payload = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | Payload


def kv_layers(context: _native.StageContext) -> tuple[LayerRows, ...]:
    """The own layers that keep attention state, by rising number; layers that use another layer's are left out."""
    return tuple(LayerRows(*rows) for rows in context.kv_layers)


def export_kv(context: _native.StageContext, lane: int, first: int, end: int) -> Payload:
    """The payload of tokens [first, end) of ``lane``, a uint8 array of its own; it takes as long as copying it.

    Raises KvPageError where the lane does not hold them or where the model has no pages.
    """
    try:
        return context.export_kv(lane, first, end)
    except ValueError as error:
        raise KvPageError(str(error)) from None
    except RuntimeError as error:
        raise NativeError(str(error)) from None


def import_kv(context: _native.StageContext, lane: int, payloads: Sequence[Buffer], n_tokens: Sequence[int]) -> None:
    """Let ``lane`` hold the tokens of ``payloads``, ``n_tokens`` of each, from position 0 on, and nothing else.

    Raises KvPageError where they do not fit this stage or hold no finite numbers, NativeError where llama.cpp does not
    take them. The lane is then empty; a lane that does not exist leaves all others as they were.
    """
    if len(payloads) != len(n_tokens):
        raise KvPageError(f"{len(payloads)} payloads with {len(n_tokens)} numbers of tokens: wanted as many")
    try:
        context.import_kv(lane, [(_bytes(p), n) for p, n in zip(payloads, n_tokens, strict=True)])
    except ValueError as error:
        raise KvPageError(str(error)) from None
    except RuntimeError as error:
        raise NativeError(str(error)) from None


def _bytes(payload: Buffer) -> Payload:
    return np.frombuffer(payload, np.uint8) if len(payload) else np.empty(0, np.uint8)
