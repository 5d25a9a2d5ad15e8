"""A client that asks for pages and does not read them: what waits for it is bounded, and others get theirs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from model_files import tiny
from pipeline_helpers import Pipelines
from transport_helpers import PATIENCE

from skippy_zmq import Client
from skippy_zmq.kv.page import KvPage
from skippy_zmq.stage.page_requests import MAX_UNREAD_MESSAGES
from skippy_zmq.transport import boot_nonce, routing_id
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.messages import SamplingParams

pytest_plugins = ("pipeline_fixtures",)

ASKED = 400
IN_THE_KERNEL = 64  # messages that a socket's buffers may hold
PROMPT = tuple((37 * i + 11) % 290 + 4 for i in range(200))


class Deaf:
    """Asks again and again, and reads only when it is told to."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.routing_id = identity = routing_id("deaf", boot_nonce())
        self._socket.rcvhwm, self._socket.rcvbuf, self._socket.linger = 1, 4096, 0
        self._socket.connect(endpoint)
        self.send(wire.Hello("client", identity.decode()))
        while not isinstance(self.read()[0], wire.Welcome):
            pass

    def send(self, message: wire.Message) -> None:
        self._socket.send_multipart(encode(message))

    def read(self) -> tuple[wire.Message, list[memoryview]]:
        assert self._socket.poll(int(PATIENCE * 1000)), "nothing came"
        return decode(self._socket.recv_multipart())

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def deaf(client: Client) -> Iterator[Deaf]:
    made = Deaf(client.endpoint)
    yield made
    made.close()


@pytest.fixture(params=[128, 1024], ids=["small pages", "large pages"])  # which are copied, and which are not
def client(request: pytest.FixtureRequest, pipelines: Pipelines, tmp_path: Path) -> Client:
    model = tiny(tmp_path / "model.gguf", hidden=request.param, n_layers=2)
    return pipelines(model, 2, ctx_size=256, chunk_policy="fixed", chunk_sizes=(64,))


def test_a_client_that_does_not_read(client: Client, deaf: Deaf) -> None:
    answer = client.generate(token_ids=PROMPT, max_tokens=2, sampling=SamplingParams(ignore_eos=True), keep=True)
    kept: list[KvPage] = []
    client.export_pages(answer.session, kept.append)
    own = sorted((p for p in kept if p.descriptor.layers[0].layer == 0), key=lambda page: page.descriptor.first)
    links = b"".join(page.descriptor.link_after for page in own)
    for _ in range(ASKED):
        deaf.send(wire.KvExport("r", links))
    deadline = time.monotonic() + PATIENCE
    while (busy := client.stats()[0].counters.get("errors.busy", 0)) < ASKED - MAX_UNREAD_MESSAGES - IN_THE_KERNEL:
        assert time.monotonic() < deadline, busy

    again: list[KvPage] = []
    client.export_pages(answer.session, again.append)
    assert sorted(bytes(page.payload) for page in again) == sorted(bytes(page.payload) for page in kept)

    n_answers = n_refused = 0
    for _ in range(ASKED):
        message, payloads = deaf.read()
        if isinstance(message, wire.KvPages):
            assert [bytes(payload) for payload in payloads] == [bytes(page.payload) for page in own]
            n_answers += 1
        else:
            assert isinstance(message, wire.Error)
            assert (message.code, message.request, message.retry) == ("busy", "r", True)
            assert "read them, then ask again" in message.message
            n_refused += 1
    assert MAX_UNREAD_MESSAGES <= n_answers <= MAX_UNREAD_MESSAGES + IN_THE_KERNEL
    assert n_refused == ASKED - n_answers
    # Whoever has read is answered again.
    deaf.send(wire.KvExport("r", links))
    assert isinstance(deaf.read()[0], wire.KvPages)
