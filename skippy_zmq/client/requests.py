"""Requests built from what a caller of the library gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from skippy_zmq.errors import RequestError
from skippy_zmq.wire.messages import ChatMessage, Generate, SamplingParams

DEFAULT_MAX_TOKENS = 256
GREEDY = SamplingParams()

Messages = Sequence[ChatMessage | Mapping[str, str]]


def generate_request(
    request: str,
    prompt: str | None,
    messages: Messages | None,
    token_ids: Sequence[int] | None,
    *,
    max_tokens: int,
    sampling: SamplingParams,
    stop: str | Sequence[str],
    timeout: float | None,
    logits: bool = False,
    keep: bool = False,
    session: str = "",
) -> Generate:
    """The message; what its fields hold is checked when it is encoded. Raises RequestError."""
    return Generate(
        request,
        max_tokens,
        prompt=prompt,
        messages=None if messages is None else tuple(_chat_message(message) for message in messages),
        token_ids=None if token_ids is None else tuple(token_ids),
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        timeout_ms=0 if timeout is None else math.ceil(check_timeout(timeout) * 1000),
        logits=logits,
        keep=keep,
        session=session,
    )


def check_timeout(seconds: float) -> float:
    """Return ``seconds``; raise RequestError where it is no positive, finite number."""
    if not (seconds > 0 and math.isfinite(seconds)):
        raise RequestError(f"timeout: wanted more than 0 seconds, got {seconds:g}")
    return seconds


def _chat_message(message: ChatMessage | Mapping[str, str]) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        shown = sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise RequestError(f"messages: wanted a role and a content each, got {shown}")
    return ChatMessage(message["role"], message["content"])
