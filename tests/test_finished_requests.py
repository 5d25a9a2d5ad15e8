"""Requests that ended a while ago: what stage 0 can say of them again."""

from __future__ import annotations

from msgspec import structs
from wire_values import BATCH

from skippy_zmq.stage.finished_requests import FinishedRequests
from skippy_zmq.stage.request import Request
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.limits import MAX_PROMPT_TOKENS


def test_a_very_long_answer_can_be_asked_for_again() -> None:
    """The client compares what the message that opens a session has no room for."""
    finished = FinishedRequests(1)
    finished.add(b"c", wire.Generate("r", 8, token_ids=(1,)), (1,), (5,) * (MAX_PROMPT_TOKENS + 9), 1.0)
    found = finished.take(b"c", "r")
    assert found is not None
    request = Request(b"c", found.ask, "s-3", found.deadline, 0.0, found.prompt, known=found.known)
    batch = structs.replace(BATCH, rows=(wire.SessionRows("s-3", 4, 0, 1, True),), tokens=bytes(4), tensors=())
    encode(structs.replace(batch, opens=(request.opening(4),)))
    assert found.known == (5,) * MAX_PROMPT_TOKENS
