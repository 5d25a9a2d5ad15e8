"""Z04: an answer that cannot be delivered is noticed, ends with a word where there is somebody to hear it, and never
has a hole; those who read go on meanwhile.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import zmq
from fault_helpers import PATIENCE, Scene, recited, until
from pipeline_helpers import read_exactly
from stage_processes import stage_environment

from skippy_zmq import Client
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode

pytest_plugins = ("transport_fixtures", "stage_fixtures", "fault_fixtures")

_LONG = 8000  # tokens: seconds of work, and megabytes where each has its logits


@pytest.mark.parametrize("listens", [False, True], ids=["to stage 0 alone", "to both ends"])
@pytest.mark.parametrize("when", ["at once", "when accepted", "in the middle"])
def test_a_client_that_asks_and_leaves(when: str, listens: bool, scene: Scene) -> None:
    """Its lane is free long before its answer would have been complete."""
    before, good_before = scene.counters(1)["tokens"], scene.good.n_tokens
    rounds = 10
    for number in range(rounds):
        first = scene.peer(0, name=f"leaves-{number}")
        peers = [first]
        if listens:
            last = scene.peer(1, identity=first.identity)
            peers.append(last)
        first.send(wire.Generate("mine", _LONG, token_ids=(5, 6)))
        if when != "at once":
            assert first.expect(wire.Accepted).request == "mine"
        if when == "in the middle":
            if listens:
                for _ in range(5):
                    last.expect(wire.Tokens)
            else:
                error = first.expect(wire.Error)
                assert (error.code, error.request) == ("stage_lost", "mine")
        for peer in peers:
            peer.close()
    scene.good.wait_for(2)
    scene.at_rest()
    spent = scene.counters(1)["tokens"] - before - (scene.good.n_tokens - good_before)
    assert spent < rounds * _LONG / 2


@dataclass
class _Heard:
    """What a client has been told of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def take(self, frames: list[bytes]) -> None:
        message, payloads = decode(frames)
        assert isinstance(message, wire.Tokens), message
        assert message.request == "mine"
        assert message.index == len(self.token_ids), "a hole"
        assert not self.finish_reason
        self.token_ids += message.token_ids
        self.finish_reason = message.finish_reason
        for row in payloads:
            assert int(np.frombuffer(row, "<f4").argmax()) == message.token_ids[0]


class _Deaf:
    """A client of raw sockets that reads what stage 0 says, and the last stage only when it is told to."""

    def __init__(self, scene: Scene) -> None:
        self.heard = _Heard()
        self.error: wire.Error | None = None
        self.first = scene.peer(0, name="deaf")
        self._context = zmq.Context()
        self.last = self._context.socket(zmq.DEALER)
        self.last.routing_id = self.first.identity
        self.last.rcvhwm, self.last.rcvbuf, self.last.linger = 1, 4096, 0
        self.last.connect(scene.pipeline.endpoint_of(1))
        self.last.send_multipart(encode(wire.Hello("client", self.first.identity.decode())))
        welcome, _ = decode(self._receive())
        assert isinstance(welcome, wire.Welcome)

    def ask(self, n_tokens: int, *, logits: bool = False) -> None:
        self.first.send(wire.Generate("mine", n_tokens, token_ids=(5, 6), logits=logits))
        self.first.expect(wire.Accepted)

    def listen(self, n_messages: int = 1) -> None:
        for _ in range(n_messages):
            self.heard.take(self._receive())

    def wait_for_error(self) -> None:
        self.error = self.first.expect(wire.Error)
        assert self.error.request == "mine"

    def listen_to_the_end(self) -> None:
        """Until the end of the answer, or until nothing more comes of one that has been ended."""
        deadline = time.monotonic() + PATIENCE
        while not self.heard.finish_reason:
            assert time.monotonic() < deadline, "neither an end nor an error"
            if self.last.poll(200):
                self.heard.take(self._receive())
            elif self.error is not None:
                return
            elif (message := self.first.poll()) is not None:
                assert isinstance(message, wire.Error)
                self.error = message

    def _receive(self) -> list[bytes]:
        assert self.last.poll(PATIENCE * 1000)
        return self.last.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def deaf(scene: Scene) -> Iterator[_Deaf]:
    deaf = _Deaf(scene)
    yield deaf
    deaf.close()


def test_a_client_that_never_reads(deaf: _Deaf, scene: Scene) -> None:
    """Its answer ends with an error once its queue is full. What it had is there, in order, with no hole."""
    deaf.ask(_LONG, logits=True)
    deaf.wait_for_error()
    assert deaf.error is not None
    assert (deaf.error.code, deaf.error.retry) == ("stage_lost", True)
    assert "does not read" in deaf.error.message
    scene.good.wait_for(5)
    assert scene.counters(1)["undelivered"] > 0
    deaf.listen_to_the_end()
    heard = deaf.heard
    assert heard.finish_reason == ""
    assert 0 < len(heard.token_ids) < _LONG
    assert heard.token_ids == recited(scene.model, len(heard.token_ids))


@pytest.mark.parametrize("logits", [False, True])
def test_a_client_that_reads_late(logits: bool, deaf: _Deaf, scene: Scene) -> None:
    """2,000 tokens, read when the others have had ten answers: all of them arrive, or the answer ends with an error."""
    deaf.ask(2000, logits=logits)
    deaf.listen(5)
    scene.good.wait_for(10)
    deaf.listen_to_the_end()
    heard = deaf.heard
    assert heard.token_ids == recited(scene.model, len(heard.token_ids))
    assert (heard.finish_reason, len(heard.token_ids)) == ("length", 2000) or deaf.error is not None


def test_a_client_that_reads_a_little_at_a_time(deaf: _Deaf, scene: Scene) -> None:
    """Slower than the answer comes, and fast enough for a queue: every token arrives."""
    deaf.ask(1500)
    for _ in range(14):
        scene.good.wait_for(1)
        deaf.listen(100)
    deaf.listen_to_the_end()
    assert deaf.heard.token_ids == recited(scene.model, 1500)
    assert deaf.heard.finish_reason == "length"


def test_a_program_that_reads_late_loses_nothing(scene: Scene) -> None:
    """The library's own client keeps what has come until it is wanted."""
    with Client(scene.pipeline.endpoint) as client:
        stream = client.stream(token_ids=(5, 6), max_tokens=2500)
        first = next(stream)
        scene.good.wait_for(10)
        ids = [*first.token_ids, *(token for chunk in stream for token in chunk.token_ids)]
    assert ids == recited(scene.model, 2500)
    assert stream.result.finish_reason == "length"


def test_a_program_that_is_stopped(scene: Scene) -> None:
    """It goes on where it was, to the end or to an error, and what it printed is the beginning of the answer."""
    n_tokens = 3000
    command = [sys.executable, "-m", "skippy_zmq.client", "--connect", scene.pipeline.endpoint]
    command += ["--prompt", "x", "--max-tokens", str(n_tokens)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=stage_environment()
    ) as program:
        assert program.stdout is not None
        begin = read_exactly(program.stdout, 10)
        for _ in range(2):
            program.send_signal(signal.SIGSTOP)
            scene.good.wait_for(5)
            program.send_signal(signal.SIGCONT)
        output, errors = program.communicate(timeout=PATIENCE)
    text = (begin + output).rstrip(b"\n")
    whole = (scene.model.text * n_tokens)[:n_tokens]
    assert whole.startswith(text)
    if program.returncode == 0:
        assert text == whole
    else:
        assert program.returncode == 3
        assert errors.count(b"error: ") == 1


def test_stages_notice_who_does_not_hear(scene: Scene) -> None:
    """The end of an answer that is its only message counts as well."""
    before = scene.counters(1)["undelivered"]
    peer = scene.peer(0)
    for number in range(5):
        peer.send(wire.Generate(f"r{number}", 1, token_ids=(5,)))
        assert peer.expect(wire.Accepted).request == f"r{number}"
        error = peer.expect(wire.Error)
        assert (error.code, error.request) == ("stage_lost", f"r{number}")
    until(lambda: scene.counters(1)["undelivered"] >= before + 5, scene)
