"""The client's half of the protocol as a state machine: what happened goes in, what to send and to tell comes out.

No sockets, no threads, no clock (``now`` is time.monotonic's, passed in), so ``Client`` and ``AsyncClient`` share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skippy_zmq.client.answer import Answer
from skippy_zmq.client.results import Chunk, Generation
from skippy_zmq.client.stats import PipelineStats
from skippy_zmq.errors import DeadlineError, EndpointError, ProtocolError, SkippyError, StageLostError
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
    Message,
    Ping,
    Pong,
    Ready,
    StageFacts,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
    Tokens,
    Welcome,
)

# A cancelled request that nobody ends is ended here after this time.
CANCEL_SECONDS = 5.0

Frames = list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Connect:
    """Action: open a link to ``endpoint``."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Send:
    """Action: send ``frames`` to ``endpoint``; report ``unsendable`` with ``request`` where that fails."""

    endpoint: str
    frames: Frames
    request: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last chunk of an answer and the whole of it; ``chunk`` is None where the last one was told before."""

    chunk: Chunk | None
    generation: Generation


@dataclass(frozen=True, slots=True)
class Opened:
    """The pipeline is ready and the client welcome at both ends."""

    stages: tuple[StageFacts, ...]


Action = Connect | Send
Outcome = Chunk | Finished | Opened | Tokenized | Detokenized | StatsReply | PipelineStats | SkippyError
Event = tuple[str, Outcome]  # the request it belongs to


@dataclass(slots=True)
class _Peer:
    connected: bool = False
    welcomed: bool = False
    ready: bool = False  # as it said last
    detail: str = ""  # why the last attempt to connect failed
    refusal: SkippyError | None = None


@dataclass(slots=True)
class _Pending:
    """``target``: the peer that answers, None for the pipeline as a whole. No frames: waits for the pipeline only."""

    frames: Frames | None
    target: str | None
    contact_by: float
    deadline: float | None
    seconds: float  # what the deadline, or else the contact, was given
    ask_ready: bool = False
    answer: Answer | None = None
    sent: bool = False
    cancelling: bool = False
    told_last: bool = False


@dataclass(slots=True)
class _Output:
    actions: list[Action] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Conversation:
    """``peer``: this client's routing id. ``contact_seconds``: how long a request may wait for a ready pipeline."""

    def __init__(self, endpoint: str, peer: str, contact_seconds: float) -> None:
        self.endpoint = endpoint
        self.stages: tuple[StageFacts, ...] = ()
        self.contact_seconds = contact_seconds
        self._hello = Hello("client", peer)
        self._ready = False
        self._peers = {endpoint: _Peer()}
        self._pending: dict[str, _Pending] = {}
        self._out = _Output([Connect(endpoint)])

    # What to do and to tell.

    def take_actions(self) -> list[Action]:
        actions, self._out.actions = self._out.actions, []
        return actions

    def take_events(self) -> list[Event]:
        events, self._out.events = self._out.events, []
        return events

    @property
    def next_deadline(self) -> float | None:
        """When to call ``expire``."""
        return min((due for pending in self._pending.values() for due in _dues(pending)), default=None)

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent: the pipeline is ready and both of its ends have welcomed us."""
        last = self._peers.get(self._last_endpoint)
        return self._ready and self._peers[self.endpoint].welcomed and last is not None and last.welcomed

    @property
    def said_ready(self) -> bool:
        """Whether stage 0 is connected and has said last that the pipeline is ready; it says so only when asked."""
        return self._peers[self.endpoint].ready

    # What the caller wants.

    def submit(
        self,
        request: str,
        message: Generate | Tokenize | Detokenize | Stats | None,
        now: float,
        *,
        timeout: float | None = None,
        to: StageFacts | None = None,
        ask_ready: bool = False,
    ) -> None:
        """Start ``request``, or (``message`` None) wait for the pipeline; raise RequestError for what cannot be sent.

        ``timeout``: seconds for all of it; without one only a Generate may take any time. ``to``: the stage that
        answers, else stage 0. ``ask_ready``: have ``said_ready`` up to date when the answer comes.
        """
        frames = encode(message) if message is not None else None
        generating = isinstance(message, Generate)
        seconds = self.contact_seconds if timeout is None else timeout
        self._pending[request] = pending = _Pending(
            frames=frames,
            target=None if generating or message is None else self._address(to) if to else self.endpoint,
            contact_by=now + min(self.contact_seconds, seconds),
            deadline=None if generating and timeout is None else now + seconds,
            seconds=seconds,
            ask_ready=ask_ready,
            answer=Answer(request) if generating else None,
        )
        if pending.target is not None and pending.target not in self._peers:
            self._meet(pending.target)
        self._advance(now)

    def cancel(self, request: str, now: float) -> None:
        """End an answer early: what has come stays, the finish reason is "cancelled". Nothing happens after its end."""
        pending = self._pending.get(request)
        if pending is None or pending.answer is None or pending.cancelling:
            return
        if not pending.sent:
            self._finish(request, pending)
            return
        pending.cancelling = True
        by = now + CANCEL_SECONDS
        pending.deadline = by if pending.deadline is None else min(by, pending.deadline)
        self._out.actions.append(Send(self.endpoint, encode(Cancel(request))))

    def abandon(self, request: str) -> None:
        """Forget ``request``; nothing more is told about it."""
        pending = self._pending.pop(request, None)
        if pending is not None and pending.answer is not None and pending.sent and not pending.cancelling:
            self._out.actions.append(Send(self.endpoint, encode(Cancel(request))))

    @property
    def n_pending(self) -> int:
        return len(self._pending)

    # What happened.

    def connected(self, endpoint: str) -> None:
        self._peers[endpoint] = _Peer(connected=True)
        self._out.actions.append(Send(endpoint, encode(self._hello)))

    def disconnected(self, endpoint: str, detail: str) -> None:
        """Whatever was sent there and not answered is lost."""
        self._peers[endpoint] = _Peer(detail=detail)
        if endpoint == self.endpoint:
            self._ready = False
        self._fail_sent(endpoint, lambda: StageLostError(f"{detail} while the request was running"))

    def handshake_failed(self, endpoint: str, detail: str) -> None:
        self._peers[endpoint].detail = detail

    def unreachable(self, endpoint: str, error: SkippyError) -> None:
        """No link to ``endpoint`` can be made."""
        self._peers[endpoint].refusal = error
        self._refuse_waiting(endpoint)

    def unsendable(self, request: str, error: SkippyError) -> None:
        self._fail(request, StageLostError(f"request not sent: {error}"))

    def malformed(self, endpoint: str, error: ProtocolError) -> None:
        """A message from ``endpoint`` that cannot be understood: an answer may have been in it."""
        self._fail_sent(endpoint, lambda: ProtocolError(f"{endpoint}: {error}", code=error.code))

    def received(self, endpoint: str, message: Message, now: float, payloads: Sequence[memoryview] = ()) -> None:
        match message:
            case Welcome():
                self._peers[endpoint].welcomed, self._peers[endpoint].ready = True, message.ready
                if endpoint == self.endpoint:
                    self._learn(message.stages, message.ready)
                self._advance(now)
            case Ready():
                self._peers[endpoint].ready = True
                if endpoint == self.endpoint:
                    self._learn(message.stages, True)
                    self._advance(now)
            case Error():
                self._refused(endpoint, message)
            case Accepted():
                self._accepted(message, now)
            case Tokens():
                self._tokens(message, now, payloads)
            case Tokenized() | Detokenized() | StatsReply():
                if self._pending.pop(message.request, None) is not None:
                    self._out.events.append((message.request, message))
            case Pong():
                self._peers[endpoint].ready = message.ready
            case Ping():
                pass  # stage 0 only wants to know whether it can be sent
            case _:
                self.malformed(endpoint, ProtocolError(f"a client wants no {message.kind.name}"))

    def expire(self, now: float) -> None:
        """Give up what is overdue."""
        for request, pending in list(self._pending.items()):
            if min(_dues(pending), default=now + 1) > now:
                continue
            if not pending.sent:
                self._fail(request, self._no_contact(pending))
            elif pending.cancelling:
                self._finish(request, pending)
            else:
                self.abandon(request)
                words = f"{pending.target or self.endpoint}: no complete answer within {pending.seconds:g} s"
                self._out.events.append((request, DeadlineError(words)))

    # Inside.

    @property
    def _last_endpoint(self) -> str:
        return self._address(self.stages[-1]) if self.stages else self.endpoint

    def _address(self, stage: StageFacts) -> str:
        """Where ``stage`` is reached: stage 0 under the address that the caller gave."""
        return self.endpoint if stage.endpoint == self.stages[0].endpoint else stage.endpoint

    def _meet(self, endpoint: str) -> None:
        self._peers[endpoint] = _Peer()
        self._out.actions.append(Connect(endpoint))

    def _learn(self, stages: tuple[StageFacts, ...], ready: bool) -> None:
        self.stages, self._ready = stages, ready
        if ready and self._last_endpoint not in self._peers:
            self._meet(self._last_endpoint)

    def _advance(self, now: float) -> None:
        """Send what can be sent by now."""
        for endpoint in tuple(self._peers):
            self._refuse_waiting(endpoint)
        is_open = self.is_open
        for request, pending in list(self._pending.items()):
            target = self._peers.get(pending.target) if pending.target is not None else None
            if pending.sent or not (is_open if pending.target is None else target and target.welcomed):
                continue
            if pending.frames is None:
                del self._pending[request]
                self._out.events.append((request, Opened(self.stages)))
                continue
            pending.sent = True
            if pending.answer is not None:
                pending.answer.sent(now)
            if pending.ask_ready:  # a stage answers in the order of the questions
                self._out.actions.append(Send(pending.target or self.endpoint, encode(Ping(0))))
            self._out.actions.append(Send(pending.target or self.endpoint, pending.frames, request))
            pending.frames = None

    def _accepted(self, message: Accepted, now: float) -> None:
        pending = self._pending.get(message.request)
        if pending is not None and pending.answer is not None:
            pending.answer.accepted(message.prompt_token_ids, now)
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
            self.abandon(request)
            self._out.events.append((request, error))
            return
        if pending.answer.complete:
            self._finish(request, pending, chunk)
        else:
            pending.told_last = bool(chunk.finish_reason)
            self._out.events.append((request, chunk))

    def _finish(self, request: str, pending: _Pending, chunk: Chunk | None = None) -> None:
        assert pending.answer is not None
        del self._pending[request]
        generation = pending.answer.generation(self.stages)
        if chunk is None and not pending.told_last:
            chunk = Chunk("", (), generation.finish_reason)
        self._out.events.append((request, Finished(chunk, generation)))

    def _refused(self, endpoint: str, message: Error) -> None:
        if not message.request:
            error = exception_of(message)
            if self._peers[endpoint].welcomed:
                self._fail_sent(endpoint, lambda: exception_of(message))
            else:
                self._peers[endpoint].refusal = type(error)(f"{endpoint}: {error}", code=error.code)
                self._refuse_waiting(endpoint)
            return
        pending = self._pending.get(message.request)
        if pending is None or (pending.cancelling and message.code == "unknown_request"):
            return  # over already, or about to be: its end comes from the last stage
        if pending.cancelling and message.code == "cancelled":
            self._finish(message.request, pending)
        else:
            self._fail(message.request, exception_of(message))

    def _refuse_waiting(self, endpoint: str) -> None:
        refusal = self._peers[endpoint].refusal
        if refusal is not None:
            for request, pending in list(self._pending.items()):
                if not pending.sent and self._concerns(pending, endpoint):
                    self._fail(request, type(refusal)(str(refusal), code=refusal.code))

    def _fail_sent(self, endpoint: str, make: Callable[[], SkippyError]) -> None:
        for request, pending in list(self._pending.items()):
            if pending.sent and self._concerns(pending, endpoint):
                self._fail(request, make())

    def _concerns(self, pending: _Pending, endpoint: str) -> bool:
        if pending.target is not None:
            return pending.target == endpoint
        return endpoint in (self.endpoint, self._last_endpoint)

    def _fail(self, request: str, error: SkippyError) -> None:
        if self._pending.pop(request, None) is not None:
            self._out.events.append((request, error))

    def _no_contact(self, pending: _Pending) -> SkippyError:
        seconds = min(self.contact_seconds, pending.seconds)
        endpoint = pending.target or self.endpoint
        if pending.target is None and self._peers[self.endpoint].welcomed and self._ready:
            endpoint = self._last_endpoint
        peer = self._peers[endpoint]
        if not peer.connected:
            why = f" ({peer.detail.removeprefix(f'{endpoint}: ')})" if peer.detail else ""
            return EndpointError(f"cannot reach {endpoint}: nothing answered within {seconds:g} s{why}")
        if not peer.welcomed:
            return DeadlineError(f"{endpoint}: connected, but no stage answered within {seconds:g} s")
        known = ", ".join(f"{stage.layer_start}:{stage.layer_end}" for stage in self.stages)
        n_layers = self.stages[0].n_layers if self.stages else 0
        return DeadlineError(
            f"{endpoint}: the pipeline was not ready within {seconds:g} s: has layers {known} of {n_layers}",
            code="not_ready",
        )


def _dues(pending: _Pending) -> list[float]:
    dues = [] if pending.deadline is None else [pending.deadline]
    return dues if pending.sent else [*dues, pending.contact_by]
