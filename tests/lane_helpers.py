"""Looking at the lanes of a running pipeline, and a client program that can be killed at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from model_files import Parrot
from stage_peers import Peer
from stage_processes import PATIENCE, StagePipeline, stage_environment
from transport_helpers import Transport

Counters = Mapping[str, int]

_FREE = ("now.sessions", "now.queue", "now.kv_cells")
_FREE_AT_STAGE_0 = ("now.lanes_busy", "now.requests_running", "now.requests_queued", "now.batches_in_flight")


def recited(model: Parrot, n_tokens: int) -> list[int]:
    """What a parrot that starts over at its end answers to any prompt."""
    return [model.token_ids[i % len(model.token_ids)] for i in range(n_tokens)]


class StageWatch:
    """A connection to every stage of a pipeline, for its counters."""

    def __init__(self, transport: Transport, pipeline: StagePipeline) -> None:
        self._transport = transport
        self._pipeline = pipeline
        self.peers = [self._peer(index) for index in range(len(pipeline.ranges))]

    def _peer(self, index: int) -> Peer:
        peer = Peer(self._transport, self._pipeline.endpoint_of(index), name="watch")
        peer.greet()
        return peer

    def meet_again(self, index: int) -> None:
        """Connect to a stage that was started again."""
        self.peers[index].close()
        self.peers[index] = self._peer(index)

    def counters(self, index: int = 0) -> Counters:
        return self.peers[index].stats().counters

    def until(self, condition: Callable[[Counters], bool], *, index: int = 0, seconds: float = PATIENCE) -> Counters:
        """Ask a stage until its counters are so; each answer says that it has looked at its sockets again."""
        deadline = time.monotonic() + seconds
        while not condition(counters := self.counters(index)):
            assert time.monotonic() < deadline, counters
        return counters

    def until_free(self, *, seconds: float = PATIENCE) -> list[Counters]:
        """Wait until no stage holds a session, a cell or a batch, and stage 0 no lane and no request."""
        deadline = time.monotonic() + seconds
        free = []
        for index in range(len(self.peers)):
            names = (*_FREE, *(() if index else _FREE_AT_STAGE_0))
            left = max(0.0, deadline - time.monotonic())
            free.append(
                self.until(lambda counters, names=names: not any(counters[n] for n in names), index=index, seconds=left)
            )
        return free

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


def resident_kib(pid: int) -> int:
    """Memory that a process holds now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def cpu_seconds(pid: int) -> float:
    """Processor time of a process since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Program:
    """A program of ours in a process of its own, which is killed if it has not ended by the end of the block."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=stage_environment(**environment),
        )

    def read(self, n_bytes: int) -> bytes:
        """The next bytes that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.read(n_bytes)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def client_program(endpoint: str, *arguments: object) -> Program:
    """``python -m skippy_zmq.client --connect`` and what follows."""
    return Program("-m", "skippy_zmq.client", "--connect", endpoint, *map(str, arguments))


# A client that is nothing but sockets, with a routing id of its own: what it was asked to send, then silence.
_RAW = """
import sys, zmq
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
identity, n_prompt, max_tokens, *endpoints = sys.argv[1:]
context = zmq.Context()
sockets = []
for endpoint in endpoints:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity.encode())
    socket.connect(endpoint)
    socket.send_multipart(encode(wire.Hello("client", identity)))
    decode(socket.recv_multipart())
    sockets.append(socket)
sockets[0].send_multipart(encode(wire.Generate("r", int(max_tokens), token_ids=(5,) * int(n_prompt))))
print("asked", flush=True)
while True:
    sockets[-1].recv_multipart()
"""


def raw_client(identity: str, endpoints: Sequence[str], *, n_prompt: int, max_tokens: int) -> Program:
    """A client without this package's own client code; it has asked when this returns."""
    program = Program("-c", _RAW, identity, str(n_prompt), str(max_tokens), *endpoints)
    assert program.read(6) == b"asked\n"
    return program
