"""Stage 0's side of a request: from a prompt to a lane, and everything that can end it."""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skippy_zmq.chat.bos import add_special_for
from skippy_zmq.chat.renderer import Failed, Outcome, TemplateRenderer
from skippy_zmq.errors import BusyError, DeadlineError, RequestError, SkippyError, StageLostError
from skippy_zmq.runtime.sampling import check_sampling
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.schedule.scheduler import Batch, Scheduler
from skippy_zmq.stage.tokenizing import INLINE_BYTES, BackgroundTokenizer
from skippy_zmq.text import check_stops
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.failures import error_message

DEFAULT_TIMEOUT_SECONDS = 3600.0  # of a request that names none
MAX_TIMEOUT_SECONDS = 7 * 86400.0  # a longer one is cut to this; poll's timeouts end at 24 days

SendToClient = Callable[[bytes, wire.Message], bool]
CloseSession = Callable[[str, int, str], None]  # session, lane, reason


@dataclass(slots=True)
class _Request:
    client: bytes
    ask: wire.Generate
    session: str
    deadline: float
    wait_until: float  # for a lane; monotonic seconds, as the deadline
    prompt: tuple[int, ...] = ()
    lane: int | None = None
    opened: bool = False  # its first rows are on the ring


class RequestTable:
    """Requests by session, in order of arrival: rendering, waiting for a lane, running.

    ``send`` reaches the client that asked; ``close`` tells the ring that a session is over.
    """

    def __init__(
        self,
        model: StageModel,
        scheduler: Scheduler,
        renderer: TemplateRenderer,
        send: SendToClient,
        close: CloseSession,
        boot: str,
        tokenizer: BackgroundTokenizer,
        max_waiting: int,
        max_wait_seconds: float,
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._renderer = renderer
        self._send = send
        self._close = close
        self._boot = boot
        self._count = 0
        self._by_session: dict[str, _Request] = {}
        self._by_request: dict[tuple[bytes, str], _Request] = {}
        self._waiting: OrderedDict[str, _Request] = OrderedDict()
        self._bos_text = self._special_text(model.native_model.bos)
        self._tokenizer = tokenizer
        self._max_waiting = max_waiting
        self._max_wait_seconds = max_wait_seconds
        self._longest_piece = 0  # bytes; found when a long text comes
        self.refused = 0

    def _special_text(self, token: int) -> str:
        return self._model.piece(token, special=True).decode("utf-8", "replace") if token >= 0 else ""

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._by_session) - len(self._waiting)

    def next_deadline(self) -> float | None:
        """Monotonic seconds of the earliest deadline of a request or of a template being rendered."""
        times = [request.deadline for request in self._by_session.values()]
        times += [request.wait_until for request in self._waiting.values()]
        rendering = self._renderer.next_deadline()
        if rendering is not None:
            times.append(rendering)
        return min(times, default=None)

    # ---- from clients

    def submit(self, client: bytes, ask: wire.Generate, *, accepting: SkippyError | None) -> None:
        """Take a request; every refusal goes to the client. ``accepting``: why nothing is taken now, or None."""
        try:
            if accepting is not None:
                raise accepting
            if (client, ask.request) in self._by_request:
                raise RequestError(f"request {ask.request} is already running", code="duplicate_request")
            if len(self._waiting) >= self._max_waiting + self._scheduler.lanes.free:
                raise BusyError(self._busy())
            check_stops(ask.stop)
            check_sampling(self._model, ask.sampling)
            timeout = min(ask.timeout_ms / 1000 or DEFAULT_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS)
            self._count += 1
            now = time.monotonic()
            session = f"{self._boot}-{self._count}"
            request = _Request(client, ask, session, now + timeout, now + self._max_wait_seconds)
            if ask.messages is not None:
                self._renderer.submit(request.session, ask.messages, deadline=request.deadline)
            else:
                self._take_prompt(request, ask.token_ids if ask.token_ids is not None else ask.prompt or "")
        except SkippyError as error:
            self.refused += 1
            self._send(client, error_message(error, ask.request))
            return
        self._by_session[request.session] = self._by_request[client, ask.request] = request
        self._waiting[request.session] = request

    def _busy(self) -> str:
        lanes, waiting = self._scheduler.n_lanes, len(self._waiting)
        return f"all {lanes} lanes are taken and {waiting} requests wait already (limit {self._max_waiting}): try again"

    def _take_prompt(self, request: _Request, prompt: str | tuple[int, ...]) -> None:
        """Set the request's prompt: at once, or when a long text has been tokenized."""
        if isinstance(prompt, str):
            if len(prompt) > INLINE_BYTES // 4:  # characters have up to 4 bytes
                tokenize = functools.partial(self._tokenize_long, prompt)
                self._tokenizer.submit(tokenize, functools.partial(self._tokenized, request.session))
                return
            prompt = tuple(self.tokenize(prompt))
        self._check_prompt(prompt)
        request.prompt = prompt

    def _tokenize_long(self, text: str) -> list[int]:
        if self._longest_piece == 0:
            pieces = (self._model.piece(token, special=True) for token in range(self._model.n_vocab))
            self._longest_piece = max(map(len, pieces), default=0) or 1
        limit = self._model.n_ctx * self._longest_piece
        if (size := len(text.encode())) > limit:
            raise RequestError(
                f"the prompt has {size} bytes, the {self._model.n_ctx} tokens of a lane hold at most {limit}",
                code="context_length_exceeded",
            )
        return self.tokenize(text)

    def _tokenized(self, session: str, ids: list[int] | SkippyError) -> None:
        request = self._by_session.get(session)
        if request is None:
            return
        try:
            if isinstance(ids, SkippyError):
                raise ids
            self._check_prompt(ids)
            request.prompt = tuple(ids)
        except SkippyError as error:
            self._fail(request, error)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        special = add_special and add_special_for(text, self._bos_text, self._model.native_model.adds_bos)
        return self._model.tokenize(text, add_special=special, parse_special=parse_special)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestError("the prompt has no tokens")
        n_vocab = self._model.n_vocab
        for token in prompt:
            if not 0 <= token < n_vocab:
                raise RequestError(f"token id {token}: wanted 0 to {n_vocab - 1}", code="invalid_token")
        if len(prompt) > self._model.n_ctx:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, the context of a lane holds {self._model.n_ctx}",
                code="context_length_exceeded",
            )

    def cancel(self, client: bytes, name: str) -> None:
        request = self._by_request.get((client, name))
        if request is None:
            self._send(client, wire.Error("unknown_request", f"request {name} is not running", name))
        elif not request.opened:
            self._end(request, "cancelled")
            self._send(client, wire.Error("cancelled", "cancelled before it began", name))
        else:
            self._end(request, "cancelled")

    @property
    def clients(self) -> set[bytes]:
        """Routing ids of those who have a request here."""
        return {request.client for request in self._by_session.values()}

    def forget_client(self, client: bytes) -> None:
        """Whoever asked is not there any more to read the answers: its requests end, or never start."""
        for request in [r for r in self._by_session.values() if r.client == client]:
            self._end(request, "error")

    # ---- from the template renderer and the clock

    def rendered(self) -> None:
        self._take(self._renderer.poll())

    def expire(self, now: float) -> None:
        self._take(self._renderer.expire(now))
        for request in [r for r in self._by_session.values() if r.deadline <= now]:
            self._fail(request, DeadlineError("the request was not finished within its timeout"))
        for request in [r for r in self._waiting.values() if r.wait_until <= now]:
            self._fail(request, BusyError(f"no lane became free within {self._max_wait_seconds:g} s: try again"))

    def _take(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            request = self._by_session.get(outcome.request)
            if request is None:
                continue
            try:
                if isinstance(outcome, Failed):
                    raise outcome.error
                self._take_prompt(request, outcome.text)
            except SkippyError as error:
                self._fail(request, error)

    # ---- lanes

    def start_waiting(self) -> None:
        """Give lanes to those who wait, in order of arrival; a prompt that is still being rendered keeps nobody."""
        for session, request in list(self._waiting.items()):
            if not request.prompt:
                continue
            lane = self._scheduler.start(session, request.prompt)
            if lane is None:
                return
            del self._waiting[session]
            request.lane = lane
            if not self._send(request.client, wire.Accepted(request.ask.request, request.prompt)):
                self._end(request, "cancelled")

    def opening(self, batch: Batch) -> tuple[wire.SessionOpen, ...]:
        """What the last stage needs to know of the sessions that begin in ``batch``."""
        opens = []
        for rows in batch.rows:
            if rows.opens:
                request = self._by_session[rows.session]
                request.opened = True
                ask = request.ask
                opens.append(
                    wire.SessionOpen(
                        rows.session,
                        rows.lane,
                        ask.request,
                        request.client,
                        len(request.prompt),
                        ask.max_tokens,
                        ask.sampling,
                        ask.stop,
                        ask.logits,
                    )
                )
        return tuple(opens)

    # ---- from the last stage

    def take_tokens(self, done: wire.BatchDone) -> None:
        """Feed sampled tokens back; end sessions that are over. Tell clients that the last stage cannot reach."""
        for token in done.tokens:
            request = self._by_session.get(token.session)
            if request is None:
                continue
            if token.finish_reason == "cancelled":
                self._fail(request, StageLostError("the client is not connected to the last stage, or does not read"))
            elif token.finish_reason:
                self._end(request, "done")
            else:
                self._scheduler.feed(token.session, token.position, token.token)
        for session, code, message in done.failed:
            request = self._by_session.get(session)
            if request is not None and code == "stage_lost":
                self._fail(request, StageLostError(message))
            elif request is not None:  # the last stage has told its client
                self._end(request, "error")

    def fail_running(self, error: SkippyError) -> None:
        """The ring broke: everything that has a lane is lost; what waits goes on waiting."""
        for request in [r for r in self._by_session.values() if r.lane is not None]:
            self._fail(request, error)

    def fail_all(self, error: SkippyError) -> None:
        for request in list(self._by_session.values()):
            self._fail(request, error)

    def lost(self, what: str) -> None:
        self.fail_running(StageLostError(what))

    def _fail(self, request: _Request, error: SkippyError) -> None:
        self._send(request.client, error_message(error, request.ask.request))
        self._end(request, "error")

    def _end(self, request: _Request, reason: str) -> None:
        self._by_session.pop(request.session, None)
        self._by_request.pop((request.client, request.ask.request), None)
        self._waiting.pop(request.session, None)
        self._scheduler.finish(request.session)
        if request.lane is not None and request.opened:
            self._close(request.session, request.lane, reason)
