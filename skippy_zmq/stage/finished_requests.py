"""Requests that ended well a while ago, for clients that may not have heard of it.

The last stage sends a client its last tokens, and tells stage 0 that the answer is over. Where it dies in between, only
the one or the other may have got there.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.limits import MAX_PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """All that its answer can be computed from again, and the tokens that must come of it, as far as a message may say.

    ``deadline``: monotonic.
    """

    ask: wire.Generate
    prompt: tuple[int, ...]
    known: tuple[int, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class _Entry:
    ask: wire.Generate
    prompt: bytes
    known: bytes
    deadline: float


class FinishedRequests:
    """The latest ``most`` of them, with their tokens as plain int32."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: OrderedDict[tuple[bytes, str], _Entry] = OrderedDict()

    def add(
        self, client: bytes, ask: wire.Generate, prompt: Sequence[int], known: Sequence[int], deadline: float
    ) -> None:
        # Whether its state was kept has been told, or will be; its text is in the prompt's tokens.
        ask = dataclasses.replace(ask, prompt=None, messages=None, token_ids=None, keep=False)
        key = (client, ask.request)
        self._entries[key] = _Entry(ask, _packed(prompt), _packed(known[:MAX_PROMPT_TOKENS]), deadline)
        self._entries.move_to_end(key)
        if len(self._entries) > self._most:
            self._entries.popitem(last=False)

    def take(self, client: bytes, request: str) -> FinishedRequest | None:
        """Remove and return it; None where it is not known, or not any more."""
        entry = self._entries.pop((client, request), None)
        if entry is None:
            return None
        return FinishedRequest(entry.ask, _unpacked(entry.prompt), _unpacked(entry.known), entry.deadline)

    def forget_client(self, client: bytes) -> None:
        for key in [key for key in self._entries if key[0] == client]:
            del self._entries[key]


def _packed(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def _unpacked(tokens: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(tokens, np.int32).tolist())
