"""The client's half of the protocol as a state machine: what happened goes in, what to send and to tell comes out.

No sockets, no threads, no clock (``now`` is time.monotonic's, passed in), so ``Client`` and ``AsyncClient`` share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skippy_zmq.client.answer import Answer
from skippy_zmq.client.contacts import Contacts
from skippy_zmq.client.outcomes import Action, Event, Finished, Frames, Opened, Outcome, PagesReceived, Send
from skippy_zmq.client.pending import Pending
from skippy_zmq.client.recovery import Recovery, Verdict
from skippy_zmq.client.results import Chunk
from skippy_zmq.errors import (
    DeadlineError,
    ProtocolError,
    RetryableError,
    SkippyError,
    StageLostError,
)
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.failures import exception_of
from skippy_zmq.wire.messages import (
    Accepted,
    Cancel,
    Detokenize,
    Detokenized,
    Error,
    Generate,
    Hello,
    Kept,
    KvAdopt,
    KvExport,
    KvImport,
    KvImported,
    KvPages,
    KvSession,
    KvSessionReply,
    Message,
    Ping,
    Pong,
    Ready,
    Resume,
    StageFacts,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
    Tokens,
    TokensEach,
    Welcome,
)

# A cancelled request that nobody ends is ended here after this time.
CANCEL_SECONDS = 5.0
Ask = Generate | Tokenize | Detokenize | Stats | KvExport | KvImport | KvSession | KvAdopt


class Conversation:
    """``peer``: this client's routing id. ``contact_seconds``: how long a request may wait for a ready pipeline."""

    def __init__(self, endpoint: str, peer: str, contact_seconds: float) -> None:
        self.endpoint = endpoint
        self.contact_seconds = contact_seconds
        self._actions: list[Action] = []
        self._events: list[Event] = []
        self._pending: dict[str, Pending] = {}
        self._contacts = Contacts(endpoint, Hello("client", peer), self._do)
        self._recovery = Recovery(contact_seconds)

    @property
    def stages(self) -> tuple[StageFacts, ...]:
        """What stage 0 has told of the pipeline, in layer order."""
        return self._contacts.stages

    # What to do and to tell.

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @property
    def next_deadline(self) -> float | None:
        """When to call ``expire``."""
        dues = [due for pending in self._pending.values() if (due := pending.due) is not None]
        if self._recovery.by is not None and self._has_interrupted:
            dues.append(self._recovery.by)
        return min(dues, default=None)

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent: the pipeline is ready and both of its ends have welcomed us."""
        return self._contacts.is_open

    @property
    def said_ready(self) -> bool:
        """Whether stage 0 is connected and has said last that the pipeline is ready; it says so only when asked."""
        return self._contacts.first.ready

    # What the caller wants.

    def submit(
        self,
        request: str,
        message: Ask | None,
        now: float,
        *,
        payloads: Sequence[bytes | memoryview] = (),
        timeout: float | None = None,
        to: StageFacts | None = None,
        ask_ready: bool = False,
    ) -> None:
        """Start ``request``, or (``message`` None) wait for the pipeline; raise RequestError for what cannot be sent.

        ``timeout``: seconds for all of it; without one only a Generate may take any time. ``to``: the stage that
        answers, else stage 0. ``payloads``: the message's, not to be changed afterwards. ``ask_ready``: have
        ``said_ready`` up to date when the answer comes.
        """
        frames = encode(message, payloads) if message is not None else None
        generating = isinstance(message, Generate)
        seconds = self.contact_seconds if timeout is None else timeout
        self._pending[request] = pending = Pending(
            frames=frames,
            target=None if generating or message is None else self._contacts.address(to) if to else self.endpoint,
            contact_by=now + min(self.contact_seconds, seconds),
            deadline=None if generating and timeout is None else now + seconds,
            seconds=seconds,
            ask_ready=ask_ready,
            answer=Answer(request, keep=message.keep) if isinstance(message, Generate) else None,
        )
        if pending.target is not None:
            self._contacts.meet(pending.target)
            peer = self._contacts.peers[pending.target]
            if frames is not None and peer.welcomed and peer.refusal is None:
                self._send(request, pending, frames, now)  # it can go, and nobody else by it
                return
        self._advance(now)

    def cancel(self, request: str, now: float) -> None:
        """End an answer early: what has come stays, the finish reason is "cancelled". Nothing happens after its end."""
        pending = self._pending.get(request)
        if pending is None or pending.answer is None or pending.cancelling:
            return
        if not pending.sent:
            self._finish(request, pending)
            return
        if pending.answer.ended:  # only its state is still to be kept
            self._do(Send(self.endpoint, encode(Cancel(request))))
            self._finish(request, pending)
            return
        pending.cancelling = True
        by = now + CANCEL_SECONDS
        pending.deadline = by if pending.deadline is None else min(by, pending.deadline)
        self._do(Send(self.endpoint, encode(Cancel(request))))

    def abandon(self, request: str) -> None:
        """Forget ``request``; nothing more is told about it."""
        pending = self._pending.pop(request, None)
        if pending is not None and pending.answer is not None and pending.sent and not pending.cancelling:
            self._do(Send(self.endpoint, encode(Cancel(request))))

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    # What happened.

    def connected(self, endpoint: str) -> None:
        if endpoint in self._contacts.peers:
            self._contacts.connected(endpoint)

    def disconnected(self, endpoint: str, detail: str) -> None:
        """Whatever was sent there and not answered is lost; stage 0 keeps answers that lose another stage."""
        if endpoint not in self._contacts.peers:
            return
        self._contacts.lost(endpoint, detail)
        is_first = endpoint == self.endpoint
        if not is_first and endpoint == self._contacts.last_endpoint:
            self._recovery.interrupt()
            for pending in self._pending.values():
                pending.interrupted |= pending.sent and pending.answer is not None
        self._fail_sent(endpoint, lambda: StageLostError(f"{detail} while the request was running"), answers=is_first)

    def handshake_failed(self, endpoint: str, detail: str) -> None:
        if endpoint in self._contacts.peers:
            self._contacts.peers[endpoint].detail = detail

    def unreachable(self, endpoint: str, error: SkippyError) -> None:
        """No link to ``endpoint`` can be made."""
        self._contacts.peers[endpoint].refusal = error
        self._refuse_waiting(endpoint)

    def unsendable(self, request: str, error: SkippyError) -> None:
        self._fail(request, StageLostError(f"request not sent: {error}"))

    def malformed(self, endpoint: str, error: ProtocolError) -> None:
        """A message from ``endpoint`` that cannot be understood: an answer may have been in it."""
        self._fail_sent(endpoint, lambda: ProtocolError(f"{endpoint}: {error}", code=error.code))

    def received(self, endpoint: str, message: Message, now: float, payloads: Sequence[memoryview] = ()) -> None:
        peer = self._contacts.peers.get(endpoint)
        if peer is None:
            return  # it was left meanwhile
        is_first = endpoint == self.endpoint
        match message:
            case Welcome():
                self._contacts.welcomed(endpoint, message)
                if is_first:
                    self._learn(message.stages, message.ready)
                self._advance(now)
            case Ready():
                peer.ready = True
                if is_first:
                    self._recovery.interrupt()
                    self._learn(message.stages, True)
                    self._advance(now)
            case Error():
                self._refused(endpoint, message)
            case Accepted():
                self._accepted(message, now)
            case Tokens():
                self._tokens(message, now, payloads)
            case TokensEach():
                for each in message.tokens:
                    self._tokens(Tokens(each.request, each.index, (each.token,), each.text), now, ())
            case Kept():
                self._kept(message)
            case Tokenized() | Detokenized() | StatsReply() | KvImported() | KvSessionReply():
                if self._pending.pop(message.request, None) is not None:
                    self._tell(message.request, message)
            case KvPages():
                if self._pending.pop(message.request, None) is not None:
                    self._tell(message.request, PagesReceived(message.descriptors, tuple(payloads)))
            case Pong():
                peer.ready = message.ready
                if is_first:
                    self._recovery.told_ready(message.ready)
            case Ping():
                pass  # stage 0 only wants to know whether it can be sent
            case _:
                self.malformed(endpoint, ProtocolError(f"a client wants no {message.kind.name}"))

    def expire(self, now: float) -> None:
        """Give up what is overdue."""
        for request, pending in list(self._pending.items()):
            due = pending.due
            if due is None or due > now:
                continue
            if not pending.sent:
                seconds = min(self.contact_seconds, pending.seconds)
                self._fail(request, self._contacts.failure(pending.target, seconds))
            elif pending.cancelling:
                self._finish(request, pending)
            else:
                words = f"{pending.target or self.endpoint}: no complete answer within {pending.seconds:g} s"
                self._give_up(request, pending, DeadlineError(words))
        if self._has_interrupted:
            self._check_recovery(now)

    # Inside.

    def _do(self, action: Action) -> None:
        self._actions.append(action)

    def _tell(self, request: str, outcome: Outcome) -> None:
        self._events.append((request, outcome))

    @property
    def _has_interrupted(self) -> bool:
        return self._recovery.due and any(pending.runs for pending in self._pending.values())

    def _check_recovery(self, now: float) -> None:
        verdict = self._recovery.expire(now)
        if verdict is Verdict.ASK:
            self._do(Send(self.endpoint, encode(Ping(0))))
        elif verdict is Verdict.GIVE_UP:
            for request, pending in list(self._pending.items()):
                if pending.runs:
                    self._give_up(request, pending, self._contacts.failure(None, self.contact_seconds))

    def _resume(self) -> None:
        """Ask stage 0 to go on with every answer; it knows which of them were interrupted."""
        self._recovery.resumed()
        for request, pending in self._pending.items():
            if pending.runs and pending.answer is not None:
                pending.interrupted, pending.resumed = False, True
                pending.answer.resume()
                self._do(Send(self.endpoint, encode(Resume(request, pending.answer.received)), request))

    def _learn(self, stages: tuple[StageFacts, ...], ready: bool) -> None:
        for endpoint in self._contacts.learn(stages, ready):
            words = f"{endpoint}: no stage of the pipeline is there any more"
            for request, pending in list(self._pending.items()):
                if pending.target == endpoint:
                    self._fail(request, StageLostError(words))

    def _advance(self, now: float) -> None:
        """Send what can be sent by now."""
        for endpoint in tuple(self._contacts.peers):
            self._refuse_waiting(endpoint)
        is_open = self.is_open
        if is_open and self._recovery.due:
            self._resume()
        for request, pending in list(self._pending.items()):
            target = self._contacts.peers.get(pending.target) if pending.target is not None else None
            if pending.sent or not (is_open if pending.target is None else target and target.welcomed):
                continue
            if pending.frames is None:
                del self._pending[request]
                self._tell(request, Opened(self.stages))
                continue
            self._send(request, pending, pending.frames, now)

    def _send(self, request: str, pending: Pending, frames: Frames, now: float) -> None:
        pending.sent = True
        pending.frames = None
        if pending.answer is not None:
            pending.answer.sent(now)
        if pending.ask_ready:  # a stage answers in the order of the questions
            self._do(Send(pending.target or self.endpoint, encode(Ping(0))))
        self._do(Send(pending.target or self.endpoint, frames, request))

    def _accepted(self, message: Accepted, now: float) -> None:
        pending = self._pending.get(message.request)
        if pending is not None and pending.answer is not None:
            pending.answer.accepted(message, now)
            if pending.answer.complete:
                self._finish(message.request, pending)

    def _kept(self, message: Kept) -> None:
        pending = self._pending.get(message.request)
        if pending is None or pending.answer is None:
            return  # it was abandoned
        try:
            pending.answer.kept(message.session)
        except ProtocolError as error:
            self._give_up(message.request, pending, error)
            return
        if pending.answer.complete:
            self._finish(message.request, pending)

    def _tokens(self, message: Tokens, now: float, payloads: Sequence[memoryview]) -> None:
        request = message.request
        pending = self._pending.get(request)
        if pending is None or pending.answer is None:
            return  # it was abandoned
        try:
            chunk = pending.answer.add(message, now, payloads)
        except ProtocolError as error:
            lost = (pending.interrupted or pending.resumed) and message.index > pending.answer.received
            self.abandon(request)
            self._tell(request, StageLostError(f"{error}, after a stage was lost") if lost else error)
            return
        if chunk is None:
            return
        if pending.answer.complete:
            self._finish(request, pending, chunk)
        else:
            pending.told_last = bool(chunk.finish_reason)
            self._tell(request, chunk)

    def _finish(self, request: str, pending: Pending, chunk: Chunk | None = None) -> None:
        assert pending.answer is not None
        del self._pending[request]
        generation = pending.answer.generation(self.stages)
        if chunk is None and not pending.told_last:
            chunk = Chunk("", (), generation.finish_reason)
        self._tell(request, Finished(chunk, generation))

    def _refused(self, endpoint: str, message: Error) -> None:
        if not message.request:
            error = exception_of(message)
            if self._contacts.peers[endpoint].welcomed:
                answers = endpoint == self.endpoint or not message.retry
                self._fail_sent(endpoint, lambda: exception_of(message), answers=answers)
            else:
                self._contacts.peers[endpoint].refusal = type(error)(f"{endpoint}: {error}", code=error.code)
                self._refuse_waiting(endpoint)
            return
        pending = self._pending.get(message.request)
        if pending is None:
            return
        if pending.cancelling and message.code == "unknown_request" and not pending.interrupted:
            return  # over already, or about to be: its end comes from the last stage
        if pending.cancelling and message.code in ("cancelled", "unknown_request"):
            self._finish(message.request, pending)
        elif pending.resumed and message.code == "unknown_request":
            words = f"request {message.request} was lost: {self.endpoint} does not know it any more"
            self._fail(message.request, StageLostError(words))
        else:
            self._fail(message.request, exception_of(message))

    def _refuse_waiting(self, endpoint: str) -> None:
        refusal = self._contacts.peers[endpoint].refusal
        if refusal is not None:
            for request, pending in list(self._pending.items()):
                if not self._concerns(pending, endpoint):
                    continue
                error = type(refusal)(str(refusal), code=refusal.code)
                if not pending.sent:
                    self._fail(request, error)
                elif pending.runs and self._recovery.due and not isinstance(refusal, RetryableError):
                    self._give_up(request, pending, error)

    def _fail_sent(self, endpoint: str, make: Callable[[], SkippyError], *, answers: bool = True) -> None:
        for request, pending in list(self._pending.items()):
            if pending.sent and self._concerns(pending, endpoint) and (answers or pending.answer is None):
                self._fail(request, make())

    def _concerns(self, pending: Pending, endpoint: str) -> bool:
        if pending.target is not None:
            return pending.target == endpoint
        return endpoint in (self.endpoint, self._contacts.last_endpoint)

    def _fail(self, request: str, error: SkippyError) -> None:
        pending = self._pending.get(request)
        if pending is None:
            return
        if pending.answer is not None and pending.answer.ended:
            self._finish(request, pending)  # all of it is here; its state is not kept
        else:
            del self._pending[request]
            self._tell(request, error)

    def _give_up(self, request: str, pending: Pending, error: SkippyError) -> None:
        """Fail a request that stage 0 may still be at work on."""
        if pending.answer is not None:
            self._do(Send(self.endpoint, encode(Cancel(request))))
        self._fail(request, error)
