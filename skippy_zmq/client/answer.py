"""One request on its way, from the client's side: what has come of its answer. Pure; the time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from skippy_zmq.client.results import Chunk, Generation, Timings
from skippy_zmq.errors import ProtocolError
from skippy_zmq.wire.messages import Accepted, StageFacts, Tokens


class Answer:
    """Collects ACCEPTED, TOKENS and KEPT, which come over two connections; ``keep``: whether KEPT was asked for."""

    def __init__(self, request: str, *, keep: bool = False) -> None:
        self._request = request
        self._keep = keep
        self._session: str | None = None
        self._reused = 0
        self._resumed = False
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

    def accepted(self, message: Accepted, now: float) -> None:
        if self._prompt is None:
            self._prompt = message.prompt_token_ids
            self._reused = message.reused
            self._accepted_at = now

    def kept(self, session: str) -> None:
        """Take the name of the kept session; raise ProtocolError where none was asked for."""
        if not self._keep:
            raise ProtocolError(f"request {self._request}: KEPT, but nothing was to be kept")
        self._session = session

    @property
    def received(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    def resume(self) -> None:
        """What comes from now on may repeat some of what has come."""
        self._resumed = True

    def add(self, tokens: Tokens, now: float, payloads: Sequence[memoryview] = ()) -> Chunk | None:
        """Take the next part, None where it only repeats what came before ``resume``.

        Raises ProtocolError where a part is missing, comes after the end, or differs from what it repeats.
        """
        if self._resumed and self._ends_early(tokens):
            tokens = replace(tokens, index=len(self._token_ids), text="")
        if self._resumed and self._repeats(tokens):
            return None
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

    def _ends_early(self, tokens: Tokens) -> bool:
        """Whether it was cancelled before all that is here had come out again."""
        return self._last is None and tokens.finish_reason == "cancelled" and tokens.index < len(self._token_ids)

    def _repeats(self, tokens: Tokens) -> bool:
        """Whether ``tokens`` are here already; raise ProtocolError where others are in their place."""
        end = tokens.index + len(tokens.token_ids)
        if end > len(self._token_ids) or (end == tokens.index == len(self._token_ids) and self._last is None):
            return False
        have = tuple(self._token_ids[tokens.index : end])
        if have != tokens.token_ids:
            wanted = f"tokens {_shown(have)} at {tokens.index} again"
            raise ProtocolError(f"request {self._request}: resumed: wanted {wanted}, got {_shown(tokens.token_ids)}")
        ended = self._last.finish_reason if self._last is not None and end == len(self._token_ids) else ""
        if tokens.finish_reason != ended:
            wanted = f"the same end ({ended or 'none'}) after token {end}"
            raise ProtocolError(
                f"request {self._request}: resumed: wanted {wanted}, got {tokens.finish_reason or 'none'}"
            )
        return True

    @property
    def ended(self) -> bool:
        """Whether the answer itself is whole: its last tokens and its prompt are here."""
        return self._last is not None and self._prompt is not None

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come."""
        if not self.ended:
            return False
        return not self._keep or self._session is not None or self._reason == "cancelled"

    @property
    def _reason(self) -> str:
        return self._last.finish_reason if self._last is not None else "cancelled"

    def generation(self, stages: tuple[StageFacts, ...]) -> Generation:
        """Everything there is; "cancelled" where no last part came."""
        prompt = self._prompt or ()
        return Generation(
            "".join(self._text),
            tuple(self._token_ids),
            prompt,
            self._reason,
            self._timings(prompt),
            stages,
            np.stack(self._logits) if self._logits else None,
            self._session or "",
            self._reused,
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
            prefill_tokens_per_s=_rate(len(prompt) - self._reused if self._token_ids else 0, prefill_s),
            decode_tokens_per_s=_rate(n_decoded, decode_s),
        )


def _shown(token_ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, token_ids[:8])) + (" ..." if len(token_ids) > 8 else "") or "none"


def _rate(n_tokens: int, seconds: float) -> float | None:
    return round(n_tokens / seconds, 2) if n_tokens > 0 and seconds > 0 else None
