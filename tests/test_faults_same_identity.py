"""Z05: a client that is back under its old id is served at once, and hears nothing of what it asked in its former life.

The sockets alone: test_transport_link, test_transport_abort.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from fault_helpers import PATIENCE, Guest, Scene, recited
from stage_peers import Asker
from stage_processes import stage_environment
from transport_helpers import Transport

from skippy_zmq.transport import LinkEventKind
from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures", "fault_fixtures")

_IDENTITY = b"the-same-again"
_ROUNDS = 20
# A client that asks for a long answer and prints a line once it is coming; then it reads on until it is killed.
_OLD_LIFE = """
import sys
from skippy_zmq.transport import *
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode

identity, *endpoints = sys.argv[1:]
factory, loop = SocketFactory(), Loop()
links = [loop.add(Link(factory, Endpoint.parse(e), routing_id=identity.encode())) for e in endpoints]
greeted = 0
while True:
    for link in loop.wait(None):
        for event in link.events():
            if event.kind is LinkEventKind.CONNECTED:
                link.send(encode(wire.Hello("client", identity)))
        while (incoming := link.receive()) is not None:
            message, _ = decode(incoming.frames)
            if isinstance(message, wire.Welcome):
                greeted += 1
                if greeted == 2:
                    links[0].send(encode(wire.Generate("mine", 8000, token_ids=(5,))))
            elif isinstance(message, wire.Tokens) and message.index == 3:
                print("running", flush=True)
"""


class Life:
    """A client of both ends under the id; what comes of its one request at a time."""

    def __init__(self, scene: Scene, *, last_first: bool = False, transport: Transport | None = None) -> None:
        order = (1, 0) if last_first else (0, 1)
        peers = {index: scene.peer(index, greeted=False, identity=_IDENTITY, transport=transport) for index in order}
        self.first, self.last = peers[0], peers[1]
        self._open = True
        for index in order:
            self._greet(peers[index])

    @staticmethod
    def _greet(peer: Guest) -> None:
        """Whatever comes before WELCOME was sent to whoever had the id before."""
        peer.hello()
        peer.until(wire.Welcome)

    def ask(self, request: str, n_tokens: int) -> list[int]:
        """The tokens of a request that must succeed; nothing else may come meanwhile."""
        self.first.send(wire.Generate(request, n_tokens, token_ids=(6,)))
        accepted = self.first.expect(wire.Accepted)
        assert (accepted.request, accepted.prompt_token_ids) == (request, (6,))
        ids: list[int] = []
        while True:
            tokens = self.last.expect(wire.Tokens)
            assert (tokens.request, tokens.index) == (request, len(ids))
            ids += tokens.token_ids
            if tokens.finish_reason:
                assert tokens.finish_reason == "length"
                return ids

    def silent(self) -> bool:
        """Whether nothing more has come; asked when both stages have answered a question."""
        return self.first.ready() and self.last.ready() and self.first.poll() is None and self.last.poll() is None

    def close(self) -> None:
        """Leave; may be called twice."""
        if self._open:
            self._open = False
            self.first.close()
            self.last.close()


@pytest.fixture
def busy(scene: Scene, transport: Transport) -> Iterator[Asker]:
    """Somebody whose answer is long, so that the stages never stop to decode."""
    asker = Asker(transport, scene.pipeline.endpoint)
    asker.ask((7, 8), request="long", max_tokens=8000)
    yield asker
    asker.cancel("long")
    answer = asker.answer("long")
    assert answer.token_ids == recited(scene.model, len(answer.token_ids))


def _old_lives(scene: Scene) -> Iterator[subprocess.Popen[bytes]]:
    """Processes, one after the other, whose answer is coming."""
    command = [sys.executable, "-c", _OLD_LIFE, _IDENTITY.decode()]
    command += [scene.pipeline.endpoint_of(index) for index in (0, 1)]
    for _ in range(_ROUNDS):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=stage_environment()) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"running\n"
            yield process
            process.wait(PATIENCE)


def test_killed_and_back(scene: Scene, busy: Asker) -> None:
    """kill -9 in the middle of an answer, and back at once, 20 times; the same request id shows whose tokens come."""
    for number, old in enumerate(_old_lives(scene)):
        old.send_signal(signal.SIGKILL)
        new = Life(scene, last_first=number % 2 == 1)
        assert new.ask("mine", 20) == recited(scene.model, 20)
        assert new.silent()
        new.close()
    scene.good.wait_for(1)


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "still there"])
def test_back_in_the_middle_of_an_answer(
    ends: bool, last_first: bool, scene: Scene, busy: Asker, make_transport: Callable[..., Transport]
) -> None:
    for _ in range(5):
        old = Life(scene, transport=make_transport(), last_first=not last_first)
        old.first.send(wire.Generate("mine", 8000, token_ids=(5,)))
        for _ in range(3):
            old.last.expect(wire.Tokens)
        if ends:
            old.close()
        new = Life(scene, last_first=last_first)
        assert new.ask("mine", 20) == recited(scene.model, 20)
        assert new.silent()
        new.close()
        old.close()


def test_two_live_clients(scene: Scene, make_transport: Callable[..., Transport]) -> None:
    """The newer one has the id. The older one is told by the end of its connections, and can have the id back."""
    older = Life(scene)
    older.first.send(wire.Generate("mine", 8000, token_ids=(5,)))
    older.last.expect(wire.Tokens)
    newer = Life(scene, transport=make_transport())
    assert newer.ask("mine", 20) == recited(scene.model, 20)
    assert newer.silent()
    newer.close()
    for peer in (older.first, older.last):
        scene.transport.event(peer.link, LinkEventKind.DISCONNECTED)
        scene.transport.until(lambda peer=peer: peer.link.connected)
        peer.hello()
        peer.until(wire.Welcome)
    assert older.ask("mine", 20) == recited(scene.model, 20)
    assert older.silent()
