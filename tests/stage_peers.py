"""Peers of a stage that say exactly what a test wants: raw connections, and a client with many requests at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transport_helpers import PATIENCE, Transport

from skippy_zmq.transport import boot_nonce, routing_id
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.limits import MAX_FRAMES

_M = TypeVar("_M")


class Peer:
    """One connection to a stage's socket, under a routing id of its own unless ``identity`` is given."""

    def __init__(self, transport: Transport, endpoint: str, *, identity: bytes = b"", name: str = "peer") -> None:
        self.identity = identity or routing_id(name, boot_nonce())
        self._transport = transport
        self.link = transport.link(endpoint, routing_id=self.identity, max_frames=MAX_FRAMES)
        transport.connected(self.link)

    def send(self, message: wire.Message, payloads: Sequence[bytes | memoryview] = ()) -> None:
        self.link.send(encode(message, payloads))

    def send_frames(self, frames: Sequence[bytes]) -> None:
        self.link.send(frames)

    def poll(self) -> wire.Message | None:
        """The next message, or None when there is none."""
        incoming = self.link.receive()
        return None if incoming is None else decode(incoming.frames)[0]

    def receive(self) -> wire.Message:
        """The next message."""
        return self._transport.until(self.poll)

    def expect(self, kind: type[_M]) -> _M:
        """The next message, which must be of this kind."""
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def until(self, kind: type[_M]) -> _M:
        """The next message of this kind; others before it are passed over."""
        while not isinstance(message := self.receive(), kind):
            pass
        return message

    def hello(self, role: str = "client", facts: wire.StageFacts | None = None) -> None:
        self.send(wire.Hello(role, self.identity.decode(), facts))

    def greet(self, role: str = "client", facts: wire.StageFacts | None = None) -> wire.Welcome:
        self.hello(role, facts)
        return self.expect(wire.Welcome)

    def refusal(self, role: str, facts: wire.StageFacts) -> wire.Error:
        """What a stage that does not want this peer answers to its HELLO."""
        self.hello(role, facts)
        return self.expect(wire.Error)

    def stats(self) -> wire.StatsReply:
        self.send(wire.Stats("stats"))
        return self.until(wire.StatsReply)

    def at_rest(self) -> wire.StatsReply:
        """Ask until no session is open at the stage any more, and no batch of one that was cancelled under way."""
        deadline = time.monotonic() + PATIENCE
        while True:
            counters = (reply := self.stats()).counters
            if not counters["now.sessions"] and not counters.get("now.batches_in_flight"):
                return reply
            assert time.monotonic() < deadline, counters

    def ready(self) -> bool:
        """Whether the stage says that it is ready."""
        self.send(wire.Ping(1))
        return self.until(wire.Pong).ready

    def close(self) -> None:
        self._transport.drop(self.link)


@dataclass(slots=True)
class Answer:
    """What has come of a request until now."""

    prompt: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error: wire.Error | None = None
    accepted: bool = False

    @property
    def over(self) -> bool:
        return bool(self.finish_reason) or self.error is not None

    @property
    def code(self) -> str:
        """The error code, or "" where it ended without one."""
        return "" if self.error is None else self.error.code


class Asker:
    """A client of a whole pipeline: connected to stage 0 and to the last stage, with many requests at once."""

    def __init__(self, transport: Transport, endpoint: str) -> None:
        self._transport = transport
        self.first = Peer(transport, endpoint, name="asker")
        welcome = self.first.greet()
        self.stages = welcome.stages if welcome.ready else self.first.until(wire.Ready).stages
        self._peers = [self.first]
        if self.stages[-1].endpoint != self.stages[0].endpoint:
            self.last = Peer(transport, self.stages[-1].endpoint, identity=self.first.identity)
            self.last.greet()
            self._peers.append(self.last)
        self._numbers = itertools.count()
        self.answers: dict[str, Answer] = {}
        self.order: list[str] = []  # requests as they were accepted
        self.n_together = 0  # messages with tokens of more than one request

    def ask(self, token_ids: Sequence[int] = (), *, request: str = "", max_tokens: int = 8, **fields: Any) -> str:
        """Send a request; its id."""
        request = request or f"r{next(self._numbers)}"
        if token_ids:
            fields["token_ids"] = tuple(token_ids)
        self.answers[request] = Answer()
        self.first.send(wire.Generate(request, max_tokens, **fields))
        return request

    def cancel(self, request: str) -> None:
        self.first.send(wire.Cancel(request))

    def answer(self, request: str) -> Answer:
        """Wait for the end of a request."""
        return self.wait(request, lambda answer: answer.over)

    def wait(self, request: str, condition: Callable[[Answer], bool]) -> Answer:
        """Wait until ``condition`` holds for what has come of a request."""
        answer = self.answers[request]

        def ask() -> Answer | None:
            for peer in self._peers:
                while (message := peer.poll()) is not None:
                    self._take(message)
            return answer if condition(answer) else None

        return self._transport.until(ask)

    def run(self, token_ids: Sequence[int] = (), **fields: Any) -> Answer:
        """A request from beginning to end."""
        return self.answer(self.ask(token_ids, **fields))

    def tokens(self, token_ids: Sequence[int] = (), **fields: Any) -> list[int]:
        """The tokens of a request that must succeed."""
        answer = self.run(token_ids, **fields)
        assert answer.finish_reason in ("stop", "length"), answer
        return answer.token_ids

    def _take(self, message: wire.Message) -> None:
        if isinstance(message, wire.Accepted):
            self.answers[message.request].prompt = message.prompt_token_ids
            self.answers[message.request].accepted = True
            self.order.append(message.request)
        elif isinstance(message, wire.TokensEach):
            self.n_together += 1
            for each in message.tokens:
                self._take(wire.Tokens(each.request, each.index, (each.token,), each.text))
        elif isinstance(message, wire.Tokens):
            answer = self.answers[message.request]
            assert not answer.finish_reason, (message, answer)
            if answer.error is not None and answer.code != "duplicate_request":
                return  # it was on its way when stage 0 ended the request
            if message.token_ids and answer.token_ids[message.index :][: len(message.token_ids)] == [
                *message.token_ids
            ]:
                return  # it came before a stage was lost
            assert message.index == len(answer.token_ids), "the stream has a gap"
            answer.token_ids += message.token_ids
            answer.text += message.text
            answer.finish_reason = message.finish_reason
        elif isinstance(message, wire.Error) and message.request:
            answer = self.answers[message.request]
            if not answer.finish_reason:  # else the end came from the last stage first
                assert answer.error is None, (message, answer)
                answer.error = message

    def meet_last_again(self) -> None:
        """Connect to the last stage, which was started again."""
        self.last.close()
        self._peers.remove(self.last)
        self.last = Peer(self._transport, self.stages[-1].endpoint, identity=self.first.identity)
        self.last.greet()
        self._peers.append(self.last)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
