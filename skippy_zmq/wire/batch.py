"""What holds for a batch as a whole: its micro-batches, and the agreement of rows, tokens and tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skippy_zmq.wire.fields import FieldError, Got
from skippy_zmq.wire.limits import DTYPE_BYTES, MAX_BATCH_ROWS, MAX_OPENS_TOKENS, MAX_POSITION
from skippy_zmq.wire.messages import Activations, BatchFailed, SessionRows


def micro_batches(rows: Sequence[SessionRows]) -> list[tuple[int, int]]:
    """Half-open index ranges of ``rows``, in the order in which they run.

    Consecutive entries run together while their lanes are consecutive rising ids and their row counts are equal.
    """
    spans: list[tuple[int, int]] = []
    start = 0
    for index in range(1, len(rows) + 1):
        if index < len(rows):
            before, here = rows[index - 1], rows[index]
            if here.lane == before.lane + 1 and here.n_rows == before.n_rows:
                continue
        spans.append((start, index))
        start = index
    return spans


def check_batch(message: Activations) -> None:
    """Raise FieldError where fields of ``message`` that are right alone contradict each other."""
    if message.layer_start >= message.layer_end:
        raise FieldError("layer_start below layer_end", Got(f"{message.layer_start}:{message.layer_end}"), ".layer_end")
    _check_rows(message)
    check_opens(message)
    _check_opens(message)
    _check_tensors(message)


def check_opens(message: Activations | BatchFailed) -> None:
    """Raise FieldError where the tokens of all sessions that a batch opens are more than its header has room for."""
    if not message.opens:
        return
    n_tokens = sum(len(opened.prefix) + len(opened.known) for opened in message.opens) // 4
    if n_tokens > MAX_OPENS_TOKENS:
        raise FieldError(f"at most {MAX_OPENS_TOKENS} tokens in prefix and known of all", n_tokens, ".opens")


def _check_rows(message: Activations) -> None:
    rows = message.rows
    total = 0
    for index, row in enumerate(rows):
        total += row.n_rows
        if row.position + row.n_rows - 1 > MAX_POSITION:
            wanted = f"a last position of at most {MAX_POSITION}"
            raise FieldError(wanted, row.position + row.n_rows - 1, f".rows[{index}].position")
    if total > MAX_BATCH_ROWS:
        raise FieldError(f"at most {MAX_BATCH_ROWS} rows in all", total, ".rows")
    if len(rows) > 1:
        if len({row.lane for row in rows}) != len(rows):
            raise FieldError("every lane once", Got("a lane given twice"), ".rows")
        if len({row.session for row in rows}) != len(rows):
            raise FieldError("every session once", Got("a session given twice"), ".rows")
    if len(message.tokens) != 4 * total:
        raise FieldError(f"{4 * total} bytes for {total} rows", len(message.tokens), ".tokens")


def _check_opens(message: Activations) -> None:
    if not message.opens:
        return
    lanes = {row.session: row.lane for row in message.rows}
    for index, opened in enumerate(message.opens):
        lane = lanes.pop(opened.session, None)
        if lane != opened.lane:
            raise FieldError("one session of rows, opened once, on its lane", opened.lane, f".opens[{index}].lane")


def _check_tensors(message: Activations) -> None:
    tensors = message.tensors
    if not tensors:
        return
    count = len(micro_batches(message.rows)) if len(message.rows) > 1 else 1
    last = 0
    for index, tensor in enumerate(tensors):
        size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if size != tensor.nbytes:
            raise FieldError(f"{size} bytes by shape and dtype", tensor.nbytes, f".tensors[{index}].nbytes")
        if not last <= tensor.micro_batch < count:
            wanted = f"integer {last}..{count - 1}"
            raise FieldError(wanted, tensor.micro_batch, f".tensors[{index}].micro_batch")
        last = tensor.micro_batch
    if len(tensors) > 1 and len({(t.micro_batch, t.name, t.occurrence) for t in tensors}) < len(tensors):
        raise FieldError("every tensor once per micro-batch", Got("a tensor given twice"), ".tensors")
