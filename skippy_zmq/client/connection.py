"""The sockets of a client: carries out what a Conversation asks for and tells it what happened."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from skippy_zmq.client.conversation import Conversation
from skippy_zmq.client.outcomes import Connect, Event, Leave
from skippy_zmq.client.survey import Surveys
from skippy_zmq.errors import EndpointError, OptionError, ProtocolError
from skippy_zmq.transport import (
    Endpoint,
    Incoming,
    Link,
    LinkEvent,
    LinkEventKind,
    Loop,
    PeerGone,
    QueueFull,
    Security,
    SocketFactory,
    boot_nonce,
    routing_id,
)
from skippy_zmq.wire.codec import decode

# How long closing may take to tell the stages about what was cancelled.
CLOSE_DRAIN_SECONDS = 0.5
# What goes on arriving must not hold a request up.
LOOKS = 8


class Connection:
    """Owns the links to the stages. Belongs to the thread that makes it; only ``post`` may be called from elsewhere.

    Raises EndpointError for an address that cannot be right, OptionError for keys that do not fit together.
    """

    def __init__(
        self, endpoint: str, *, security: Security | None, server_key: bytes | None, contact_seconds: float
    ) -> None:
        name = str(Endpoint.parse(endpoint))
        identity = routing_id("client", boot_nonce())
        self.conversation = Conversation(name, identity.decode(), contact_seconds)
        self.surveys = Surveys(self.conversation)
        self._identity = identity
        self._server_key = server_key
        self._links: dict[str, Link] = {}
        self._posted: deque[Callable[[], object]] = deque()
        self._owner = threading.get_ident()
        self._closed = False
        self._loop = Loop()
        self._factory = SocketFactory(security=security)
        try:
            self._carry_out()
        except BaseException:
            self.close()
            raise

    def post(self, call: Callable[[], object]) -> None:
        """Have ``call`` run by the owner; callable from any thread and from a signal handler."""
        self._posted.append(call)
        self._loop.wake()

    def step(self, deadline: float | None = None) -> list[Event]:
        """What was posted, sent, received: wait until something happens, but not past ``deadline`` (time.monotonic).

        The list may be empty early.
        """
        self.check_usable()
        conversation = self.conversation
        n_posted = len(self._posted)
        for _ in range(n_posted):
            self._posted.popleft()()
        now = time.monotonic()
        conversation.expire(now)
        self._carry_out()
        events = self._take_events()
        if events or n_posted:
            return events
        dues = [due for due in (deadline, conversation.next_deadline) if due is not None]
        for source in self._loop.wait(max(0.0, min(dues) - now) if dues else None):
            if isinstance(source, Link):
                self._take_in(source)
        conversation.expire(time.monotonic())
        self._carry_out()
        return self._take_events()

    def look(self) -> list[Event]:
        """Take in what has happened while nobody looked; does not wait."""
        self.check_usable()
        for _ in range(LOOKS):
            if not (sources := self._loop.wait(0.0)):
                break
            for source in sources:
                if isinstance(source, Link):
                    self._take_in(source)
            self._carry_out()
        return self._take_events()

    def flush(self) -> None:
        """Send what is to be sent; does not wait."""
        self.check_usable()
        self._carry_out()

    def check_usable(self) -> None:
        """Raise OptionError after ``close``, RuntimeError in a thread other than the owner."""
        if self._closed:
            raise OptionError(f"client of {self.conversation.endpoint}: closed")
        if threading.get_ident() != self._owner:
            raise RuntimeError("a client belongs to the thread that made it")

    def close(self) -> None:
        """Close everything; may be called twice. Takes CLOSE_DRAIN_SECONDS at most."""
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            link.close(CLOSE_DRAIN_SECONDS)
        self._loop.close()
        self._factory.close(CLOSE_DRAIN_SECONDS)

    def _take_events(self) -> list[Event]:
        events = self.surveys.sift(self.conversation.take_events(), time.monotonic())
        self._carry_out()  # what the surveys ask next
        return events

    def _take_in(self, link: Link) -> None:
        name = next(name for name, known in self._links.items() if known is link)
        # A message that came before a disconnect is readable by now, and must be seen before it.
        events = link.events()
        while (incoming := link.receive()) is not None:
            self._receive(name, incoming)
        for event in events:
            self._note(name, event)

    def _receive(self, name: str, incoming: Incoming) -> None:
        if incoming.excess:
            self.conversation.malformed(name, ProtocolError(f"a message of {incoming.excess} frames too many"))
            return
        try:
            message, payloads = decode(incoming.frames)
        except ProtocolError as error:
            self.conversation.malformed(name, error)
            return
        self.conversation.received(name, message, time.monotonic(), payloads)

    def _note(self, name: str, event: LinkEvent) -> None:
        if event.kind is LinkEventKind.CONNECTED:
            self.conversation.connected(name)
        elif event.kind is LinkEventKind.DISCONNECTED:
            self.conversation.disconnected(name, event.detail)
        else:
            self.conversation.handshake_failed(name, event.detail)

    def _carry_out(self) -> None:
        for action in self.conversation.take_actions():
            if isinstance(action, Connect):
                self._connect(action.endpoint)
                continue
            if isinstance(action, Leave):
                self._leave(action.endpoint)
                continue
            try:
                self._links[action.endpoint].send(action.frames)
            except (PeerGone, QueueFull) as error:
                self.conversation.unsendable(action.request, error)

    def _connect(self, name: str) -> None:
        try:
            link = Link(self._factory, Endpoint.parse(name), routing_id=self._identity, server_key=self._server_key)
        except EndpointError as error:
            if not self._links:
                raise  # the caller's own address
            self.conversation.unreachable(name, EndpointError(f"a stage says it is at {name}: {error}"))
            return
        self._links[name] = self._loop.add(link)

    def _leave(self, name: str) -> None:
        link = self._links.pop(name, None)  # none was made where the address cannot be right
        if link is not None:
            self._loop.remove(link)
            link.close()
