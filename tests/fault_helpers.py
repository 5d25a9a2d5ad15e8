"""A pipeline at work for tests of what a bad peer can do to it: a good client beside, and how it must all look after.

Bad peers of other cases are in test_stage_abuse (one message at a time), test_wire_hostile (the codec alone) and
test_transport_hostile (the sockets alone).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from model_files import Parrot
from stage_peers import Peer
from stage_processes import PATIENCE, StagePipeline
from transport_helpers import Transport

from skippy_zmq import Client
from skippy_zmq.wire import messages as wire

N_GOOD_TOKENS = 40
_PROMPT = (9, 8, 7)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00"


def recited(model: Parrot, n_tokens: int) -> list[int]:
    """What a parrot that starts over at its end answers to any prompt."""
    return [model.token_ids[i % len(model.token_ids)] for i in range(n_tokens)]


class GoodClient:
    """Asks again and again in a thread of its own; every answer must be the parrot's, and no request may fail."""

    def __init__(self, endpoint: str, model: Parrot) -> None:
        self._endpoint = endpoint
        self._wanted = recited(model, N_GOOD_TOKENS)
        self._changed = threading.Condition()
        self._n_answers = 0
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="good-client", daemon=True)
        self._thread.start()
        self.wait_for(1)

    def _run(self) -> None:
        try:
            with Client(self._endpoint, timeout=PATIENCE) as client:
                while not self._stopping:
                    answer = client.generate(token_ids=_PROMPT, max_tokens=N_GOOD_TOKENS)
                    assert (list(answer.token_ids), answer.finish_reason) == (self._wanted, "length")
                    self._note(None)
        except BaseException as error:
            self._note(error)

    def _note(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self._n_answers += failure is None
            self._changed.notify_all()

    @property
    def n_tokens(self) -> int:
        """Tokens of its answers until now."""
        return self._n_answers * N_GOOD_TOKENS

    def wait_for(self, n_answers: int) -> None:
        """Wait until so many more answers have begun and ended: nothing holds it up."""
        with self._changed:
            enough = self._n_answers + n_answers + 1  # one may be under way
            assert self._changed.wait_for(lambda: self._failure or self._n_answers >= enough, PATIENCE)
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Let it finish; its answers until now must be right."""
        self._stopping = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure


class Guest(Peer):
    """A peer that passes over the PING of a stage, which only asks whether somebody is there."""

    def poll(self) -> wire.Message | None:
        while isinstance(message := super().poll(), wire.Ping):
            pass
        return message


class Scene:
    """Two stages, a good client at work, and, on the way out, everything as it was: stages alive, lanes free."""

    def __init__(self, pipeline: StagePipeline, model: Parrot, transport: Transport) -> None:
        self.pipeline = pipeline
        self.model = model
        self.transport = transport
        self.good = GoodClient(pipeline.endpoint, model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.good.wait_for(1)
        self.good.close()
        if kind is None:
            self.at_rest()

    def at_rest(self) -> None:
        """Wait until no lane is taken, no request waits, and no stage knows a session."""
        names = ("now.requests_running", "now.requests_queued", "now.lanes_busy", "now.sessions")
        peers = [self.peer(index) for index in range(len(self.pipeline.ranges))]
        deadline = time.monotonic() + PATIENCE
        while True:
            counters = [peer.stats().counters for peer in peers]
            assert all(name in counters[0] for name in names), counters[0]
            busy = [[stage.get(name, 0) for name in names] for stage in counters]
            if not any(map(sum, busy)):
                break
            assert time.monotonic() < deadline, (names, busy)
        for peer in peers:
            peer.close()
        for index in range(len(peers)):
            assert self.pipeline[index].process.poll() is None

    def peer(
        self,
        index: int,
        *,
        greeted: bool = True,
        name: str = "peer",
        identity: bytes = b"",
        transport: Transport | None = None,
    ) -> Guest:
        """A connection of a client to one stage."""
        endpoint = self.pipeline.endpoint_of(index)
        peer = Guest(transport or self.transport, endpoint, name=name, identity=identity)
        if greeted:
            peer.greet()
        return peer

    def counters(self, index: int) -> dict[str, int]:
        """What a stage has counted."""
        peer = self.peer(index)
        counters = dict(peer.stats().counters)
        peer.close()
        return counters


class TcpPipeline(StagePipeline):
    """A pipeline on tcp ports of this machine."""

    def __init__(self, directory: Path, model: Path, ranges: str, *options: str) -> None:
        super().__init__(directory, model, ranges, *options)
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in self.ranges]
        self.ports = [listener.getsockname()[1] for listener in listeners]
        for listener in listeners:
            listener.close()

    def endpoint_of(self, index: int) -> str:
        return f"tcp://127.0.0.1:{self.ports[index]}"

    def connection(self, index: int) -> socket.socket:
        """A plain connection to a stage."""
        return socket.create_connection(("127.0.0.1", self.ports[index]), timeout=PATIENCE)

    def zmtp(self, index: int, identity: bytes) -> socket.socket:
        """A plain connection that has become a ZeroMQ peer; what it sends next are frames."""
        connection = self.connection(index)
        ready = _READY + bytes([len(identity)]) + identity
        connection.sendall(GREETING + bytes([4, len(ready)]) + ready)
        with connection.makefile("rb") as reader:
            assert reader.read(64)[:1] == b"\xff"
            _, size = reader.read(2)
            assert reader.read(size)[:6] == b"\x05READY"
        return connection


def closed_by_peer(connection: socket.socket) -> bool:
    """Wait until the other side ends the connection, whatever it says before; TimeoutError where it does not."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


class Memory:
    """The most memory that a process has held at a time since this was made, over what it held then; bytes."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._value("VmRSS")

    def _value(self, name: str) -> int:
        lines = self._status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

    @property
    def growth(self) -> int:
        return self._value("VmHWM") - self._before


def n_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def until(condition: Callable[[], bool], scene: Scene) -> None:
    """Wait for a condition that nothing announces, an answer of the good client at a time."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        scene.good.wait_for(1)
