"""The last stage's side of a session: choosing tokens, text, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from skippy_zmq.errors import SkippyError, StageLostError
from skippy_zmq.runtime.sampling import SessionSampler
from skippy_zmq.runtime.stage_model import StageModel, Tokens
from skippy_zmq.text import TextStream
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.failures import clipped, error_message
from skippy_zmq.wire.limits import MAX_LANES

# Sends a message and its payloads to a client; False where it cannot be delivered (gone, or it does not read).
SendToClient = Callable[[bytes, wire.Message, Sequence[memoryview]], bool]


@dataclass(slots=True)
class _Session:
    opened: wire.SessionOpen
    sampler: SessionSampler
    text: TextStream
    known: tuple[int, ...] = ()  # what has to come out first
    generated: int = 0
    opened_at: int = field(default_factory=time.monotonic_ns)
    first_token_at: int = 0


class _Unsent(msgspec.Struct, frozen=True):
    """A token that its client does not have yet, and the logits that it was chosen by, where they were asked for.

    ``text`` None: to be made of the token when it is sent.
    """

    session: _Session
    index: int
    token: int
    text: str | None
    logits: tuple[memoryview, ...]


class TokenSource:
    """Samples for every session, streams to its client, and says what goes back to stage 0."""

    def __init__(self, model: StageModel, send: SendToClient) -> None:
        self._model = model
        self._send = send
        self._sessions: dict[str, _Session] = {}
        self._forgotten: dict[str, str] = {}  # ended here, and why; stage 0 is told with their next batch
        self._unsent: list[_Unsent] = []
        self.tokens = 0
        self.undelivered = 0

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def open(self, opened: wire.SessionOpen) -> tuple[str, str, str] | None:
        """Begin a session; return (session, code, message) where its sampling cannot be set up."""
        try:
            sampler = SessionSampler(self._model, opened.sampling, opened.sampling.seed or 0)
            sampler.accept(np.frombuffer(opened.prefix, "<i4").astype(np.int32))
            known = tuple(np.frombuffer(opened.known, "<i4").tolist())
            self._sessions[opened.session] = _Session(opened, sampler, TextStream(opened.stop), known)
        except SkippyError as error:
            self._fail(opened, error)
            return opened.session, error.code, clipped(str(error))
        return None

    def forget_client(self, client: bytes) -> None:
        """The client said HELLO again: nobody is there to hear what it asked before."""
        for session in [session for session, found in self._sessions.items() if found.opened.client == client]:
            del self._sessions[session]
            self._forgotten[session] = "its client began anew"
            self.undelivered += 1

    def close(self, session: str, reason: str) -> None:
        """Stage 0 has ended the session: tell the client, unless the session ended here first."""
        self._forgotten.pop(session, None)
        found = self._sessions.pop(session, None)
        if found is not None and reason == "cancelled":
            self._finish(found, (), found.text.finish(), "cancelled", ())

    def close_all(self) -> None:
        self._sessions.clear()
        self._forgotten.clear()

    def fail(self, session: str, code: str, message: str) -> None:
        found = self._sessions.pop(session, None)
        if found is not None:
            self._send(found.opened.client, wire.Error(code, message, found.opened.request), ())

    def take(
        self, rows: Sequence[wire.SessionRows], tokens: Tokens, *, each_row: bool = False
    ) -> tuple[list[wire.SampledToken], list[tuple[str, str, str]]]:
        """After a batch ran: sample for the rows that ask for it. Returns tokens for stage 0 and failed sessions.

        ``each_row``: after every row of an entry, else after its last.
        """
        sampled: list[wire.SampledToken] = []
        failed: list[tuple[str, str, str]] = []
        row = 0
        for entry in rows:
            found = self._sessions.get(entry.session)
            first, row = row, row + entry.n_rows
            if (why := self._forgotten.pop(entry.session, None)) is not None:
                failed.append((entry.session, "stage_lost", why))
            if found is None:
                continue  # it ended here while this batch was under way
            try:
                if found.generated == 0:
                    found.sampler.accept(tokens[first:row])
                for at in range(first if each_row else row - 1, row) if entry.sample else ():
                    sampled.append(self._sample(found, at, entry.position + at - first + 1))
                    if sampled[-1].finish_reason:
                        break
            except StageLostError as error:  # stage 0 tells the client, as with all that a lost stage brings about
                del self._sessions[entry.session]
                failed.append((entry.session, error.code, str(error)))
            except SkippyError as error:
                del self._sessions[entry.session]
                self._fail(found.opened, error)
                failed.append((entry.session, error.code, clipped(str(error))))
        return sampled, failed

    def _sample(self, found: _Session, row: int, position: int) -> wire.SampledToken:
        """Choose the token for ``position`` by ``row``; raise StageLostError where another one is known to be there."""
        token = found.sampler.sample(row)
        if found.generated < len(found.known) and token != found.known[found.generated]:
            raise StageLostError(
                "after a stage was lost its answer came out differently: wanted token "
                f"{found.known[found.generated]} at {found.generated}, got {token}; --reproducible keeps it alike"
            )
        return self._emit(found, position, token, self._logits(row) if found.opened.logits else ())

    def _logits(self, row: int) -> tuple[memoryview, ...]:
        return (self._model.logits(row).astype("<f4", copy=False).data.cast("B"),)

    def _emit(self, found: _Session, position: int, token: int, logits: tuple[memoryview, ...]) -> wire.SampledToken:
        opened = found.opened
        if found.generated == 0:
            found.first_token_at = time.monotonic_ns()
        if self._model.is_end_of_generation(token):
            self._stream_before(found)
            return self._end(found, position, token, (), found.text.finish(), "stop", logits)
        self.tokens += 1
        found.generated += 1
        # The token itself would be run at `position`; without room for it nothing can follow.
        last = found.generated >= opened.max_tokens or position >= self._model.n_ctx
        shown = found.generated > opened.received  # else the client had it before the answer began anew
        sampled = wire.SampledToken(opened.session, opened.lane, position, token, "")
        if shown and not last and not opened.stop:  # its text decides nothing, and stage 0 waits for the token
            self._unsent.append(_Unsent(found, found.generated - 1, token, None, logits))
            return sampled
        if last:
            self._stream_before(found)
        delta = found.text.push(self._model.piece(token))
        if delta.stopped:
            self._stream_before(found)
            return self._end(found, position, token, (token,), delta.text, "stop", logits)
        if last:
            return self._end(found, position, token, (token,), delta.text + found.text.finish(), "length", logits)
        if shown:
            self._unsent.append(_Unsent(found, found.generated - 1, token, delta.text, logits))
        return sampled

    def stream(self) -> None:
        """Send clients the tokens of the last ``take``: after stage 0 has them, which needs them for the next step."""
        unsent, self._unsent = self._unsent, []
        together: dict[bytes, list[_Unsent]] = {}
        for each in unsent:
            if each.logits:
                self._stream([each])
            else:
                together.setdefault(each.session.opened.client, []).append(each)
        for of_client in together.values():
            for first in range(0, len(of_client), MAX_LANES):
                self._stream(of_client[first : first + MAX_LANES])

    def _stream_before(self, found: _Session) -> None:
        """In a replay: tokens of this session that wait come before what ends it."""
        if any(unsent.session is found for unsent in self._unsent):
            self.stream()

    def _stream(self, unsent: Sequence[_Unsent]) -> None:
        """Send tokens for one client in one message: a message costs both sides more than what is in it."""
        here = [each for each in unsent if each.session.opened.session not in self._forgotten]
        if not here:
            return
        tokens = [wire.NextToken(e.session.opened.request, e.index, e.token, self._text(e)) for e in here]
        message: wire.Tokens | wire.TokensEach
        if len(tokens) == 1:
            (token,) = tokens
            tensors = _described(here[0].logits)
            message = wire.Tokens(token.request, token.index, (token.token,), token.text, tensors=tensors)
        else:
            message = wire.TokensEach(tuple(tokens))
        if self._send(here[0].session.opened.client, message, here[0].logits):
            return
        for opened in (each.session.opened for each in here):
            self.undelivered += 1
            if self._sessions.pop(opened.session, None) is not None:
                self._forgotten[opened.session] = "the client is not connected to the last stage, or does not read"

    def _text(self, unsent: _Unsent) -> str:
        if unsent.text is not None:
            return unsent.text
        return unsent.session.text.push(self._model.piece(unsent.token)).text

    def _end(
        self,
        found: _Session,
        position: int,
        token: int,
        shown: tuple[int, ...],
        text: str,
        reason: str,
        logits: tuple[memoryview, ...],
    ) -> wire.SampledToken:
        del self._sessions[found.opened.session]
        if not self._finish(found, shown, text, reason, logits):
            reason = "cancelled"  # which stage 0 tells the client, if it can
        return wire.SampledToken(found.opened.session, found.opened.lane, position, token, reason)

    def _finish(
        self, found: _Session, shown: tuple[int, ...], text: str, reason: str, logits: tuple[memoryview, ...]
    ) -> bool:
        now = time.monotonic_ns()
        first = found.first_token_at or now
        timings = {"prefill_us": (first - found.opened_at) // 1000, "decode_us": (now - first) // 1000}
        index = found.generated - len(shown)
        message = wire.Tokens(found.opened.request, index, shown, text, reason, timings, _described(logits))
        delivered = self._send(found.opened.client, message, logits)
        self.undelivered += not delivered
        return delivered

    def _fail(self, opened: wire.SessionOpen, error: SkippyError) -> None:
        self._send(opened.client, error_message(error, opened.request), ())


def _described(logits: tuple[memoryview, ...]) -> tuple[wire.TensorDescriptor, ...]:
    return tuple(wire.TensorDescriptor("logits", 0, 0, "f32", (row.nbytes // 4,), row.nbytes) for row in logits)
