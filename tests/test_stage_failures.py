"""A batch that cannot run ends its own sessions and nothing else, wherever in the ring it fails.

The test is stage 0 itself: it runs the first layer in this process, speaks the protocol to two real stages behind it,
and sends them whatever it likes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from model_files import Parrot, parrot
from msgspec import structs
from stage_peers import Peer
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import LayerRange
from skippy_zmq.transport import Server
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.limits import MAX_FRAMES

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_LANES, _CONTEXT = 4, 256

Edit = Callable[[wire.Activations, list[bytes]], tuple[wire.Activations, list[bytes]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "ahoy", end="loop")


@pytest.fixture(scope="module")
def pipeline(module_dir: Path, model: Parrot) -> Iterator[StagePipeline]:
    with StagePipeline(module_dir, model.path, "0:1 1:3 3:4", "--lanes", str(_LANES)) as pipeline:
        pipeline.start(2).ready()
        pipeline.start(1).ready()
        yield pipeline
        for index in (1, 2):
            assert pipeline[index].process.poll() is None
            assert pipeline[index].stop() == 0
            assert "Traceback" not in pipeline[index].stderr()


@pytest.fixture(scope="module")
def layer(model: Parrot) -> StageModel:
    options = StageOptions(ctx_size=_CONTEXT, lanes=_LANES, threads=1, ubatch_size=64)
    return StageModel(open_model(model.path), LayerRange(0, 1), options)


class FirstStage:
    """Stage 0 in the hands of a test, and the client of all its sessions."""

    def __init__(self, transport: Transport, pipeline: StagePipeline, layer: StageModel) -> None:
        self.transport = transport
        self.layer = layer
        self.server: Server = transport.server(pipeline.endpoint, max_frames=MAX_FRAMES)
        self.down = Peer(transport, pipeline.endpoint_of(1), name="stage-0-1")
        self.down.hello()
        behind = self.down.expect(wire.Welcome).stages
        self.facts = dataclasses.replace(
            behind[0],
            stage=self.down.identity.decode(),
            endpoint=pipeline.endpoint,
            layer_start=0,
            layer_end=1,
            wanted=(),
            offered=layer.offered,
        )
        layer.serve(behind[0].wanted)
        assert self.down.greet("upstream", self.facts).ready
        self.client = Peer(transport, pipeline.endpoint_of(2), name="client")
        self.client.greet()
        self._ring = b""
        hello = self._receive()
        assert isinstance(hello, wire.Hello)
        assert hello.role == "ring"
        assert hello.peer == behind[-1].stage
        self.send_ring(wire.Welcome((self.facts, *behind), True))
        self._batch = 0
        for lane in range(_LANES):
            layer.trim(lane, 0)

    def _receive(self) -> wire.Message:
        incoming = self.transport.message(self.server)
        self._ring = incoming.peer
        return decode(incoming.frames)[0]

    def send_ring(self, message: wire.Message) -> None:
        self.server.send(self._ring, encode(message))

    def batch(
        self, rows: Sequence[tuple[str, int, int, int]], tokens: Sequence[int], opens: Sequence[str] = ()
    ) -> tuple[wire.Activations, list[bytes]]:
        """Run a batch of (session, lane, position, number of rows) in the first layer; what would go down."""
        ids = np.array(tokens, np.int32)
        leaving = self.layer.run([(lane, position, n) for _, lane, position, n in rows], ids)
        self._batch += 1
        entries = tuple(wire.SessionRows(*entry, True) for entry in rows)
        message = wire.Activations(
            self._batch,
            self.facts.stage,
            0,
            1,
            "mixed",
            entries,
            ids.tobytes(),
            tuple(item.descriptor for item in leaving),
            tuple(
                wire.SessionOpen(
                    entry.session,
                    entry.lane,
                    f"request-{entry.session}",
                    self.client.identity,
                    entry.n_rows,
                    50,
                    wire.SamplingParams(),
                )
                for entry in entries
                if entry.session in opens
            ),
            wire.NO_TIMES,
        )
        return message, [bytes(memoryview(item.data)) for item in leaving]

    def send(self, message: wire.Message, payloads: Sequence[bytes] = ()) -> None:
        self.down.send(message, payloads)

    def done(self) -> wire.BatchDone:
        """The next batch that has left the ring."""
        message = self._receive()
        assert isinstance(message, wire.BatchDone), message
        return message

    def told(self) -> wire.Tokens | wire.Error:
        """What the client hears next."""
        message = self.client.receive()
        assert isinstance(message, wire.Tokens | wire.Error), message
        return message


@pytest.fixture
def first(transport: Transport, pipeline: StagePipeline, layer: StageModel) -> FirstStage:
    return FirstStage(transport, pipeline, layer)


def _open(first: FirstStage, model: Parrot, *sessions: str) -> None:
    """Begin sessions, one per lane from 0, with a prompt of three tokens and a first token each."""
    for lane, session in enumerate(sessions):
        first.send(*first.batch([(session, lane, 0, 3)], (5, 6, 7), opens=[session]))
        [token] = first.done().tokens
        assert (token.session, token.position, token.token) == (session, 3, model.token_ids[0])
        told = first.told()
        assert isinstance(told, wire.Tokens)
        assert told.token_ids == model.token_ids[:1]


def _goes_on(first: FirstStage, model: Parrot, session: str, lane: int, n_tokens: int = 2) -> None:
    """Check the next tokens of a session that has its first one."""
    for step in range(n_tokens):
        first.send(*first.batch([(session, lane, 3 + step, 1)], model.token_ids[step : step + 1]))
        done = first.done()
        assert done.failed == ()
        assert [token.token for token in done.tokens] == [model.token_ids[step + 1]]
        told = first.told()
        assert isinstance(told, wire.Tokens)
        assert told.request == f"request-{session}"


def _other(**changes: object) -> Edit:
    def edit(message: wire.Activations, payloads: list[bytes]) -> tuple[wire.Activations, list[bytes]]:
        tensor = structs.replace(message.tensors[0], **changes)  # type: ignore[arg-type]
        return structs.replace(message, tensors=(tensor,)), [bytes(tensor.nbytes)]

    return edit


def _twice(message: wire.Activations, payloads: list[bytes]) -> tuple[wire.Activations, list[bytes]]:
    more = structs.replace(message.tensors[0], occurrence=1)
    return structs.replace(message, tensors=(*message.tensors, more)), payloads * 2


def _nothing(message: wire.Activations, _payloads: list[bytes]) -> tuple[wire.Activations, list[bytes]]:
    return structs.replace(message, tensors=()), []


def _tokens(*ids: int) -> Edit:
    return lambda message, payloads: (
        structs.replace(message, tokens=np.array(ids, np.int32).tobytes()),
        payloads,
    )


def _rows(**changes: object) -> Edit:
    def edit(message: wire.Activations, payloads: list[bytes]) -> tuple[wire.Activations, list[bytes]]:
        rows = tuple(structs.replace(entry, **changes) for entry in message.rows)  # type: ignore[arg-type]
        return structs.replace(message, rows=rows), payloads

    return edit


_HIDDEN = 32
_BROKEN: dict[str, tuple[Edit, str]] = {
    "no tensor": (_nothing, "protocol"),
    "a tensor of another name": (_other(name="l_out-7"), "protocol"),
    "another occurrence": (_other(occurrence=1), "protocol"),
    "one tensor too many": (_twice, "protocol"),
    "half precision": (_other(dtype="f16", nbytes=2 * _HIDDEN), "protocol"),
    "a row too many": (_other(shape=(_HIDDEN, 2), nbytes=8 * _HIDDEN), "protocol"),
    "a column too few": (_other(shape=(_HIDDEN - 1, 1), nbytes=4 * (_HIDDEN - 1)), "protocol"),
    "a token outside the vocabulary": (_tokens(1 << 20), "protocol"),
    "a gap in the positions": (_rows(position=9), "protocol"),
    "a position beyond the context": (_rows(position=_CONTEXT), "protocol"),
    "a session of another lane": (_rows(lane=2), "protocol"),
    "a session that was not opened": (_rows(session="stranger"), "protocol"),
}


@pytest.mark.parametrize("name", _BROKEN)
def test_a_broken_batch_ends_its_own_session(name: str, first: FirstStage, model: Parrot) -> None:
    edit, code = _BROKEN[name]
    _open(first, model, "a", "b")
    message, payloads = edit(*first.batch([("a", 0, 3, 1)], model.token_ids[:1]))
    first.send(message, payloads)
    done = first.done()
    assert (done.batch, done.tokens) == (message.batch, ())
    session = message.rows[0].session
    assert [failed[:2] for failed in done.failed] == [(session, code)]
    if session == "a":
        error = first.told()
        assert isinstance(error, wire.Error)
        assert (error.code, error.request) == (code, "request-a")
    first.send(wire.SessionClose("a", 0, "error"))
    _goes_on(first, model, "b", 1)
    # Its lane serves the next one.
    _open(first, model, "c")


def test_a_broken_batch_of_several_sessions(first: FirstStage, model: Parrot) -> None:
    _open(first, model, "a", "b", "c")
    message, payloads = first.batch([("a", 0, 3, 1), ("c", 2, 3, 1)], model.token_ids[:1] * 2)
    first.send(message, [payloads[0], bytes(len(payloads[1]))])
    first.done()  # two micro-batches, one of nothing but zeros: numbers like any other
    broken, _ = first.batch([("a", 0, 4, 1), ("c", 2, 4, 1)], model.token_ids[1:2] * 2)
    both = first.client.until(wire.TokensEach)
    assert [token.request for token in both.tokens] == ["request-a", "request-c"]
    first.send(structs.replace(broken, tensors=()))
    assert [failed[0] for failed in first.done().failed] == ["a", "c"]
    errors = [first.told(), first.told()]
    assert [error.request for error in errors if isinstance(error, wire.Error)] == ["request-a", "request-c"]
    _goes_on(first, model, "b", 1)


def test_a_session_that_fails_with_its_first_batch(first: FirstStage, model: Parrot) -> None:
    _open(first, model, "a")
    message, _ = first.batch([("new", 1, 0, 3)], (5, 6, 7), opens=["new"])
    first.send(structs.replace(message, tensors=()))
    assert [failed[0] for failed in first.done().failed] == ["new"]
    error = first.told()
    assert isinstance(error, wire.Error)
    assert error.request == "request-new"
    _goes_on(first, model, "a", 0)


def test_a_failure_in_front_is_passed_on(first: FirstStage, model: Parrot) -> None:
    _open(first, model, "a", "b")
    message, _ = first.batch([("new", 2, 0, 3)], (5, 6, 7), opens=["new"])
    first.send(wire.BatchFailed(message.batch, ("new",), message.opens, "native", "no memory"))
    done = first.done()
    assert (done.batch, done.failed) == (message.batch, (("new", "native", "no memory"),))
    error = first.told()
    assert isinstance(error, wire.Error)
    assert (error.request, error.code, error.message) == ("request-new", "native", "no memory")
    _goes_on(first, model, "a", 0)
    _goes_on(first, model, "b", 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_none(value: float, first: FirstStage, model: Parrot) -> None:
    _open(first, model, "a", "b")
    message, payloads = first.batch([("a", 0, 3, 1), ("b", 1, 3, 1)], model.token_ids[:1] * 2)
    rows = np.frombuffer(payloads[0], np.float32).reshape(2, -1).copy()
    rows[0] = value
    first.send(message, [rows.tobytes()])
    done = first.done()
    assert [failed[:2] for failed in done.failed] == [("a", "native")]
    assert [(token.session, token.token) for token in done.tokens] == [("b", model.token_ids[1])]
    assert [first.told().request, first.told().request] == ["request-a", "request-b"]
    first.send(wire.SessionClose("a", 0, "error"))
    _open(first, model, "c")


@pytest.mark.parametrize(
    ("edit", "wanted"),
    [
        (_rows(lane=_LANES), f"lane {_LANES}: wanted 0 to {_LANES - 1}"),
        (
            lambda message, payloads: (structs.replace(message, layer_end=2), payloads),
            "activations of layers 0:2 for a stage that begins at layer 1",
        ),
    ],
)
def test_a_batch_that_cannot_be_meant_for_the_stage(edit: Edit, wanted: str, first: FirstStage, model: Parrot) -> None:
    _open(first, model, "a")
    first.send(*edit(*first.batch([("b", 1, 0, 1)], (5,), opens=[])))
    error = first.down.expect(wire.Error)
    assert error.code == "protocol"
    assert wanted in error.message
    _goes_on(first, model, "a", 0)


def test_a_position_before_the_end_runs_again(first: FirstStage, model: Parrot) -> None:
    _open(first, model, "a")
    _goes_on(first, model, "a", 0, n_tokens=3)
    first.send(*first.batch([("a", 0, 4, 1)], model.token_ids[1:2]))
    assert [(token.position, token.token) for token in first.done().tokens] == [(5, model.token_ids[2])]


def test_a_new_upstream_finds_every_lane_free(
    first: FirstStage, transport: Transport, pipeline: StagePipeline, model: Parrot
) -> None:
    _open(first, model, "a", "b", "c")
    first.down.greet("upstream", first.facts)
    _open(first, model, "d")
    for index in (1, 2):
        peer = Peer(transport, pipeline.endpoint_of(index))
        peer.greet()
        assert peer.stats().counters["now.sessions"] == 1


def test_ends_of_sessions_that_nobody_knows(first: FirstStage, model: Parrot) -> None:
    _open(first, model, "a")
    first.send(wire.SessionClose("nobody", 3, "done"))
    first.send(wire.SessionClose("a", 0, "cancelled"))
    told = first.told()
    assert isinstance(told, wire.Tokens)
    assert (told.token_ids, told.finish_reason) == ((), "cancelled")
    first.send(wire.SessionClose("a", 0, "cancelled"))
    _open(first, model, "b")
