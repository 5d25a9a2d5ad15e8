"""Drives the client's half of the protocol by events, and shows what it asks for."""

from __future__ import annotations

import dataclasses

from wire_values import FACTS

from skippy_zmq.client.conversation import Conversation
from skippy_zmq.client.outcomes import Connect, Event, Leave, Send
from skippy_zmq.errors import SkippyError
from skippy_zmq.wire.codec import decode
from skippy_zmq.wire.messages import Generate, Message, StageFacts, Welcome

FIRST, LAST = "tcp://10.0.0.1:7700", "tcp://10.0.0.3:7700"
CONTACT = 30.0


def facts(start: int, end: int, endpoint: str) -> StageFacts:
    return dataclasses.replace(
        FACTS, layer_start=start, layer_end=end, n_layers=30, endpoint=endpoint, wanted=(), offered=()
    )


# Stage 0 calls itself by another name than the client does.
ZERO = facts(0, 10, "tcp://zero:7700")
MIDDLE = facts(10, 20, "tcp://10.0.0.2:7700")
END = facts(20, 30, LAST)
STAGES = (ZERO, MIDDLE, END)
ASK = Generate("r1", 8, prompt="hi")


class Driver:
    """A conversation, and what it has asked for."""

    def __init__(self) -> None:
        self.conversation = Conversation(FIRST, "client-1", CONTACT)

    def actions(self) -> list[Connect | Leave | tuple[str, Message]]:
        """What is to be done by now, sent frames decoded."""
        return [
            (action.endpoint, decode(action.frames)[0]) if isinstance(action, Send) else action
            for action in self.conversation.take_actions()
        ]

    def events(self) -> list[Event]:
        return self.conversation.take_events()

    def hear(self, endpoint: str, *messages: Message, now: float = 1.0) -> None:
        for message in messages:
            self.conversation.received(endpoint, message, now)

    def opened(self) -> Driver:
        """Welcome at both ends of a ready pipeline."""
        self.conversation.connected(FIRST)
        self.hear(FIRST, Welcome(STAGES, ready=True))
        self.conversation.connected(LAST)
        self.hear(LAST, Welcome((END,), ready=True))
        self.actions()
        return self

    def asked(self) -> Driver:
        """An open conversation with request r1 sent at time 1."""
        self.opened().conversation.submit("r1", ASK, 1.0)
        assert self.actions() == [(FIRST, ASK)]
        return self

    def failure(self) -> SkippyError:
        """The one error of r1."""
        ((request, error),) = self.events()
        assert request == "r1"
        assert isinstance(error, SkippyError)
        assert self.conversation.n_pending == 0
        return error
