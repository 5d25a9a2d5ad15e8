"""One request on its way, from the client's side: what has come of its answer. Pure; the time is passed in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skippy_zmq.client.results import Chunk, Generation, Timings
from skippy_zmq.errors import ProtocolError
from skippy_zmq.wire.messages import StageFacts, Tokens


class Answer:
    """Collects ACCEPTED and TOKENS, which come over two connections and in either order.

    ``complete``: both the last tokens and the prompt are there.
    """

    def __init__(self, request: str) -> None:
        self._request = request
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logits: list[npt.NDArray[np.float32]] = []
        self._prompt: tuple[int, ...] | None = None
        self._last: Tokens | None = None
        self._sent_at = 0.0
        self._accepted_at: float | None = None
        self._first_at: float | None = None
        self._last_at = 0.0

    def sent(self, now: float) -> None:
        self._sent_at = self._last_at = now

    def accepted(self, prompt_token_ids: tuple[int, ...], now: float) -> None:
        self._prompt = prompt_token_ids
        self._accepted_at = now

    def add(self, tokens: Tokens, now: float, payloads: Sequence[memoryview] = ()) -> Chunk:
        """Take the next part; raise ProtocolError where one is missing or comes after the end."""
        if self._last is not None:
            raise ProtocolError(f"request {self._request}: tokens after the last ones")
        if tokens.index != len(self._token_ids):
            wanted = len(self._token_ids)
            raise ProtocolError(f"request {self._request}: stream has a gap: wanted token {wanted}, got {tokens.index}")
        self._token_ids += tokens.token_ids
        self._text.append(tokens.text)
        self._last_at = now
        if self._first_at is None:
            self._first_at = now
        if tokens.finish_reason:
            self._last = tokens
        self._logits += [np.frombuffer(row, "<f4") for row in payloads]
        return Chunk(tokens.text, tokens.token_ids, tokens.finish_reason, self._logits[-1] if payloads else None)

    @property
    def complete(self) -> bool:
        return self._last is not None and self._prompt is not None

    def generation(self, stages: tuple[StageFacts, ...]) -> Generation:
        """Everything there is; "cancelled" where no last part came."""
        reason = self._last.finish_reason if self._last is not None else "cancelled"
        prompt = self._prompt or ()
        return Generation(
            "".join(self._text),
            tuple(self._token_ids),
            prompt,
            reason,
            self._timings(prompt),
            stages,
            np.stack(self._logits) if self._logits else None,
        )

    def _timings(self, prompt: tuple[int, ...]) -> Timings:
        measured = self._last.timings if self._last is not None else {}
        first_at = self._last_at if self._first_at is None else self._first_at
        accepted_at = self._sent_at if self._accepted_at is None else self._accepted_at
        # The last stage cannot see the stages before it at work, and a busy caller may not look when a message comes.
        prefill_s = max(measured.get("prefill_us", 0) / 1e6, first_at - accepted_at)
        decode_s = measured.get("decode_us", 0) / 1e6 or self._last_at - first_at
        n_decoded = len(self._token_ids) - 1  # the first token comes of the prefill
        return Timings(
            ttft_ms=round((first_at - self._sent_at) * 1e3, 3),
            prefill_tokens_per_s=_rate(len(prompt) if self._token_ids else 0, prefill_s),
            decode_tokens_per_s=_rate(n_decoded, decode_s),
        )


def _rate(n_tokens: int, seconds: float) -> float | None:
    return round(n_tokens / seconds, 2) if n_tokens > 0 and seconds > 0 else None
