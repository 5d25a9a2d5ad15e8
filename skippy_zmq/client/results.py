"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skippy_zmq.wire.messages import StageFacts


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of an answer: whole characters of ``text`` (maybe none yet) and the tokens behind it.

    ``finish_reason`` is "" until the last chunk, which says "stop", "length" or "cancelled". ``logits``: float32
    [n_vocab] that the token, or the end, was chosen by, where the request asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""
    logits: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """``ttft_ms``: from sending the request to the first token, at the client. Rates are None where too little ran."""

    ttft_ms: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. ``token_ids`` are without the token that ends a generation; ``text`` without any stop string.

    ``stages``: the pipeline that gave it, in layer order. ``prompt_token_ids`` is empty where the request was cancelled
    before it had a lane. ``logits``: float32 [choices, n_vocab], one row per token and one for a chosen end,
    where the request asked for them. ``session``: the name of the kept attention state, where the request asked to keep
    it and every stage does; else "". ``reused_tokens``: tokens of the prompt whose state was there and not computed.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    timings: Timings
    stages: tuple[StageFacts, ...]
    logits: npt.NDArray[np.float32] | None = None
    session: str = ""
    reused_tokens: int = 0
