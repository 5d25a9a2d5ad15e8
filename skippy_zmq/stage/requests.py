"""Stage 0's side of a request: from a prompt to a lane, and everything that can end it.

A request whose ring breaks does not end: it gives up its lane and begins anew when the ring is closed again and its
client says how much of the answer it has. Prompt, seed and chunks being the same, so is what comes of it; the last
stage makes sure of that, token by token.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from skippy_zmq.chat.bos import add_special_for
from skippy_zmq.chat.renderer import Failed, Outcome, TemplateRenderer
from skippy_zmq.errors import BusyError, DeadlineError, RequestError, SkippyError, StageLostError
from skippy_zmq.runtime.sampling import check_sampling
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.schedule.scheduler import Batch, Scheduler
from skippy_zmq.stage.finished_requests import FinishedRequest, FinishedRequests
from skippy_zmq.stage.prefixes import Prefix, Prefixes
from skippy_zmq.stage.request import Request
from skippy_zmq.stage.tokenizing import INLINE_BYTES, BackgroundTokenizer
from skippy_zmq.text import check_stops
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.failures import error_message
from skippy_zmq.wire.limits import MAX_PROMPT_TOKENS, MAX_SEED

log = logging.getLogger("skippy_zmq.stage")

DEFAULT_TIMEOUT_SECONDS = 3600.0  # of a request that names none
MAX_TIMEOUT_SECONDS = 7 * 86400.0  # a longer one is cut to this; poll's timeouts end at 24 days

SendToClient = Callable[[bytes, wire.Message], bool]
CloseSession = Callable[[str, int, str], None]  # session, lane, reason


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
        prefixes: Prefixes,
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._renderer = renderer
        self._send = send
        self._close = close
        self._boot = boot
        self._count = 0
        self._by_session: dict[str, Request] = {}
        self._by_request: dict[tuple[bytes, str], Request] = {}
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._bos_text = self._special_text(model.native_model.bos)
        self._tokenizer = tokenizer
        self._prefixes = prefixes
        self._max_waiting = model.options.queue
        self._max_wait_seconds = float(model.options.queue_seconds)
        self._recover_seconds = model.options.recover_seconds
        self._finished = FinishedRequests(2 * scheduler.n_lanes)
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
        times += [r.recover_by for r in self._by_session.values() if r.recover_by is not None]
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
            self._prefixes.check(client, ask)
            if ask.sampling.seed is None:  # chosen here, so that the answer can begin anew
                sampling = dataclasses.replace(ask.sampling, seed=secrets.randbelow(MAX_SEED + 1))
                ask = dataclasses.replace(ask, sampling=sampling)
            now = time.monotonic()
            session = self._new_session()
            request = Request(client, ask, session, now + timeout, now + self._max_wait_seconds)
            if ask.messages is not None:
                self._renderer.submit(request.session, ask.messages, deadline=request.deadline)
            else:
                self._take_prompt(request, ask.token_ids if ask.token_ids is not None else ask.prompt or "")
        except SkippyError as error:
            self.refused += 1
            self._send(client, error_message(error, ask.request))
            return
        self._finished.take(client, ask.request)
        self._by_session[request.session] = self._by_request[client, ask.request] = request
        self._waiting[request.session] = request

    def _new_session(self) -> str:
        self._count += 1
        return f"{self._boot}-{self._count}"

    def _busy(self) -> str:
        lanes, waiting = self._scheduler.n_lanes, len(self._waiting)
        return f"all {lanes} lanes are taken and {waiting} requests wait already (limit {self._max_waiting}): try again"

    def _take_prompt(self, request: Request, prompt: str | tuple[int, ...]) -> None:
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
            why = "cancelled while the pipeline was broken" if request.accepted else "cancelled before it began"
            self._send(client, wire.Error("cancelled", why, name))
        else:
            self._end(request, "cancelled")

    @property
    def clients(self) -> set[bytes]:
        """Routing ids of those who have a request here."""
        return {request.client for request in self._by_session.values()}

    def forget_client(self, client: bytes) -> None:
        """Whoever asked is not there any more to read the answers: its requests end, or never start."""
        self._finished.forget_client(client)
        for request in [r for r in self._by_session.values() if r.client == client]:
            self._end(request, "error")

    # ---- from the template renderer and the clock

    def rendered(self) -> None:
        self._take(self._renderer.poll())

    def expire(self, now: float) -> None:
        self._take(self._renderer.expire(now))
        for request in [r for r in self._by_session.values() if r.deadline <= now]:
            self._fail(request, DeadlineError("the request was not finished within its timeout"))
        for request in [r for r in self._by_session.values() if r.recover_by is not None and r.recover_by <= now]:
            words = f"a stage was lost, and the request could not go on within {self._recover_seconds} s"
            self._fail(request, StageLostError(words))
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
            known = request.known if self._scheduler.window > 1 else ()
            lane = self._scheduler.start(session, request.prompt, hold=True, known=known)
            if lane is None:
                return
            request.n_windowed = len(known)
            del self._waiting[session]
            request.lane = lane
            prefix = self._prefixes.look_for(request.client, request.ask, request.prompt, session)
            if prefix is not None:
                self._begin(request, prefix)

    def _begin(self, request: Request, prefix: Prefix) -> None:
        """What the lane begins with is known: run the rest of the prompt."""
        request.prefix = prefix
        self._scheduler.release(request.session, len(prefix.tokens))
        if request.accepted:
            return
        request.accepted = True
        if not self._send(request.client, wire.Accepted(request.ask.request, request.prompt, len(prefix.tokens))):
            self._end(request, "cancelled")

    def opening(self, batch: Batch) -> tuple[wire.SessionOpen, ...]:
        """What the last stage needs to know of the sessions that begin in ``batch``."""
        opens = []
        for rows in batch.rows:
            if rows.opens:
                request = self._by_session[rows.session]
                request.opened = True
                opens.append(request.opening(rows.lane))
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
                if self._recover_seconds:
                    self._finished.add(request.client, request.ask, request.prompt, request.fed, request.deadline)
                if request.ask.keep:
                    tokens = (*request.prompt, *request.fed)
                    self._prefixes.keep(request.client, request.ask.request, request.session, request.lane or 0, tokens)
                self._end(request, "done")
            else:
                self._feed(request, token)
        for session, code, message in done.failed:
            request = self._by_session.get(session)
            if request is not None and code == "stage_lost":
                self._fail(request, StageLostError(message))
            elif request is not None and code == "kv_page" and request.prefix and request.prefix.tokens:
                self._begin_anew(request, reuse=False)
            elif request is not None:  # the last stage has told its client
                self._end(request, "error")

    def _feed(self, request: Request, token: wire.SampledToken) -> None:
        request.fed.append(token.token)
        if len(request.fed) > request.n_windowed:
            self._scheduler.feed(token.session, token.position, token.token)

    def take_kv_answer(self, answer: wire.KvAnswer) -> None:
        """All stages have looked for a session's pages, or have kept them."""
        request = self._by_session.get(answer.session)
        if request is not None and request.prefix is None:
            self._begin(request, self._prefixes.found(answer.session, answer.pages))
        else:
            self._prefixes.kept(answer)

    # ---- a ring that broke

    def suspend(self, why: str, now: float) -> None:
        """The ring broke: what has a lane gives it up, to begin anew; what waits goes on waiting.

        None of them starts before its client has said that it is connected to the last stage, which may be a new one,
        and how much of the answer it has.
        """
        self._prefixes.forget_all()
        for request in list(self._by_session.values()):
            if self._recover_seconds == 0:
                if request.lane is not None:
                    self._fail(request, StageLostError(why))
                continue
            if request.lane is not None:
                self._begin_anew(request)
            if self._waiting.pop(request.session, None) is not None:
                request.recover_by = now + self._recover_seconds
        if waiting := sum(r.recover_by is not None for r in self._by_session.values()):
            log.warning("%s: %d requests wait for it to come back, %d s at most", why, waiting, self._recover_seconds)

    def _begin_anew(self, request: Request, *, reuse: bool = True) -> None:
        """Give up the lane and wait for one, in front of all others, under a new session."""
        lane, opened = request.lane, request.opened
        self._scheduler.finish(request.session)
        self._prefixes.forget(request.session)
        del self._by_session[request.session]
        if lane is not None:
            self._close(request.session, lane, "error")
        log.info("session %s begins anew, opened before: %s", request.session, opened)
        request.session = self._new_session()
        request.known = max(request.known, tuple(request.fed[:MAX_PROMPT_TOKENS]), key=len)
        request.fed = []
        request.lane, request.opened, request.prefix = None, False, None
        request.wait_until = math.inf  # it has waited already; its deadline still counts
        if not reuse:
            self._prefixes.avoid(request.session)
        self._by_session[request.session] = request
        self._waiting[request.session] = request
        self._waiting.move_to_end(request.session, last=False)

    def resume(self, client: bytes, message: wire.Resume) -> None:
        """A client is there again and says what it has of an answer."""
        request = self._by_request.get((client, message.request))
        if request is None and (finished := self._finished.take(client, message.request)) is not None:
            self._repeat(client, finished, message.received)
        elif request is None:
            self._send(
                client, wire.Error("unknown_request", f"request {message.request} is not known", message.request)
            )
        elif request.recover_by is not None:
            request.recover_by = None
            request.received = message.received
            self._waiting[request.session] = request
            if request.accepted:
                self._waiting.move_to_end(request.session, last=False)

    def _repeat(self, client: bytes, finished: FinishedRequest, received: int) -> None:
        """Compute an answer again whose end may not have reached its client."""
        request = Request(client, finished.ask, self._new_session(), finished.deadline, math.inf)
        request.prompt, request.known, request.received = finished.prompt, finished.known, received
        request.accepted = True
        self._by_session[request.session] = self._by_request[client, finished.ask.request] = request
        self._waiting[request.session] = request  # behind those that wait already
        log.info("session %s repeats the end of an answer", request.session)

    def fail_all(self, error: SkippyError) -> None:
        for request in list(self._by_session.values()):
            self._fail(request, error)

    def session_reply(self, client: bytes, asked: wire.KvSession | wire.KvAdopt) -> wire.KvSessionReply:
        """What a client asks of kept sessions; raise KvPageError where there is no such one."""
        return self._prefixes.reply(client, asked)

    def _fail(self, request: Request, error: SkippyError) -> None:
        self._send(request.client, error_message(error, request.ask.request))
        self._end(request, "error")

    def _end(self, request: Request, reason: str) -> None:
        self._by_session.pop(request.session, None)
        self._by_request.pop((request.client, request.ask.request), None)
        self._waiting.pop(request.session, None)
        self._scheduler.finish(request.session)
        self._prefixes.forget(request.session)
        if request.lane is not None:  # a lane that was held without rows has pages waiting for it
            self._close(request.session, request.lane, reason)
