"""What came down the ring and has not run yet, in order."""

from __future__ import annotations

import time
from collections import deque

from skippy_zmq.stage.batches import RingMessage
from skippy_zmq.wire import messages as wire


class RingQueue:
    """Messages, their payloads, and when they were taken from the socket (monotonic nanoseconds).

    Its length is bounded by stage 0's credit, and by the socket's own limits against one that has none.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[RingMessage, list[memoryview], int]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, message: RingMessage, payloads: list[memoryview]) -> None:
        if isinstance(message, wire.SessionClose) and message.reason != "done":
            self._drop_rows_of(message.session)
        self._entries.append((message, payloads, time.monotonic_ns()))

    def take(self) -> tuple[RingMessage, list[memoryview], int]:
        return self._entries.popleft()

    def clear(self) -> None:
        self._entries.clear()

    def _drop_rows_of(self, session: str) -> None:
        """The session is over: batches of nothing else need not run, but everybody has to hear of them."""
        for index, (message, _, taken_at) in enumerate(self._entries):
            if isinstance(message, wire.Activations) and all(rows.session == session for rows in message.rows):
                over = wire.BatchFailed(message.batch, (session,), message.opens, "cancelled", "the session is over")
                self._entries[index] = (over, [], taken_at)
