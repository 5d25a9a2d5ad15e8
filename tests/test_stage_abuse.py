"""Whatever a peer sends, a stage answers with one error of a stable code, and those who run meanwhile are not hurt."""

from __future__ import annotations

import dataclasses
import pickle
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgpack
import pytest
from model_files import Parrot, parrot
from stage_peers import Answer, Asker, Peer
from stage_processes import StagePipeline
from transport_helpers import Transport
from wire_values import EXAMPLES, FACTS, example_payloads

from skippy_zmq.transport import boot_nonce
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import encode
from skippy_zmq.wire.messages import GENERATION, Kind

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_N_TOKENS = 40
_CONTEXT = 256
_ANSWERS = (Kind.WELCOME, Kind.READY, Kind.ERROR, Kind.PONG, Kind.ACCEPTED, Kind.TOKENS, Kind.TOKENIZED)
_RING = (Kind.ACTIVATIONS, Kind.SESSION_CLOSE, Kind.BATCH_DONE, Kind.BATCH_FAILED)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "pieces of eight! ", end="loop")


@pytest.fixture(scope="module")
def pipeline(module_dir: Path, model: Parrot) -> Iterator[StagePipeline]:
    with StagePipeline(module_dir, model.path, "0:1 1:3 3:4") as pipeline:
        yield pipeline.start_all()
        for index in range(3):
            assert pipeline[index].process.poll() is None
            assert pipeline[index].stop() == 0
            assert "Traceback" not in pipeline[index].stderr()


@pytest.fixture
def asker(transport: Transport, pipeline: StagePipeline, model: Parrot) -> Iterator[Asker]:
    """A client whose request runs while a test does what it does; in the end its answer must be right."""
    asker = Asker(transport, pipeline.endpoint)
    running = asker.ask((9, 8, 7), request="meanwhile", max_tokens=_N_TOKENS)
    asker.wait(running, lambda answer: bool(answer.token_ids))
    yield asker
    answer = asker.answer(running)
    n = len(model.pieces)
    assert answer.token_ids == [model.token_ids[i % n] for i in range(_N_TOKENS)]
    assert answer.finish_reason == "length"
    assert asker.last.at_rest().counters["now.sessions"] == 0


def _frames(kind: int, *header: object, generation: int = GENERATION) -> list[bytes]:
    return [bytes((generation, kind)), msgpack.packb(list(header))]


_PING = _frames(Kind.PING, 1)
_PICKLE = pickle.dumps(ValueError("run me"))
_GARBAGE: list[tuple[str, Sequence[bytes], str]] = [
    ("one empty frame", [b""], "protocol"),
    ("one frame", [_PING[0]], "protocol"),
    ("no header", [_PING[0], b""], "protocol"),
    ("line noise", [random.Random(1).randbytes(4096), b"x"], "generation_mismatch"),
    ("HTTP", [b"GET / HTTP/1.1\r\n\r\n", b""], "generation_mismatch"),
    ("generation 0", _frames(Kind.PING, 1, generation=0), "generation_mismatch"),
    ("generation 255", _frames(Kind.PING, 1, generation=255), "generation_mismatch"),
    ("unknown kind", _frames(99), "unknown_kind"),
    ("long prefix", [_PING[0] + b"x", _PING[1]], "protocol"),
    ("payload where none belongs", [*_PING, b"payload"], "protocol"),
    ("a thousand frames", [*_PING, *[b"x"] * 1000], "too_large"),
    ("a map", [_PING[0], msgpack.packb({"nonce": 1})], "protocol"),
    ("a pickle", [_PING[0], _PICKLE], "protocol"),
    ("an extension type", [_PING[0], msgpack.packb([msgpack.ExtType(1, _PICKLE)])], "protocol"),
    ("a timestamp", [_PING[0], msgpack.packb([msgpack.Timestamp(1)])], "protocol"),
    ("4 billion elements announced", [_PING[0], b"\xdd\xff\xff\xff\xff"], "protocol"),
    ("4 billion bytes announced", [_PING[0], b"\x91\xc6\xff\xff\xff\xff"], "protocol"),
    ("nested 100,000 times", [_PING[0], b"\x91" * 100_000], "protocol"),
    ("too few fields", _frames(Kind.CANCEL), "protocol"),
    ("too many fields", _frames(Kind.CANCEL, "a", "b"), "protocol"),
    ("a field of another type", _frames(Kind.CANCEL, 7), "protocol"),
    ("a boolean for an integer", _frames(Kind.PING, True), "protocol"),
    ("text that is no UTF-8", [bytes((GENERATION, Kind.CANCEL)), b"\x91\xa1\xff"], "protocol"),
]


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("greeted", [False, True])
def test_frames_that_are_no_message(
    greeted: bool, index: int, asker: Asker, pipeline: StagePipeline, transport: Transport
) -> None:
    peer = Peer(transport, pipeline.endpoint_of(index))
    if greeted:
        peer.greet()
    for name, frames, code in _GARBAGE:
        peer.send_frames(frames)
        error = peer.expect(wire.Error)
        assert (name, error.code, error.retry) == (name, code, False)
    if not greeted:
        peer.greet()
    assert peer.ready()


@pytest.mark.parametrize("index", [0, 2])
def test_nothing_works_before_hello(index: int, asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    peer = Peer(transport, pipeline.endpoint_of(index))
    for kind, message in EXAMPLES.items():
        if kind is not Kind.HELLO:
            peer.send(message, example_payloads(kind))
            error = peer.expect(wire.Error)
            assert (kind, error.code) == (kind, "not_ready")
    assert peer.greet().ready


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_client_is_no_stage(index: int, asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    peer = Peer(transport, pipeline.endpoint_of(index))
    peer.greet()
    for kind in (*_RING, *_ANSWERS):
        peer.send(EXAMPLES[kind], example_payloads(kind))
        error = peer.expect(wire.Error)
        assert (kind, error.code) == (kind, "protocol")
        assert "'client'" in error.message


@pytest.mark.parametrize("index", [1, 2])
def test_requests_are_for_stage_0(index: int, asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    peer = Peer(transport, pipeline.endpoint_of(index))
    peer.greet()
    for message in (
        wire.Generate("mine", 5, token_ids=(5,)),
        wire.Cancel("mine"),
        wire.Tokenize("mine", "text"),
    ):
        peer.send(message)
        error = peer.expect(wire.Error)
        assert (error.code, error.request) == ("protocol", "mine")


def test_hello_must_be_true(asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    peer = Peer(transport, pipeline.endpoint_of(1))
    peer.send(wire.Hello("client", "somebody-else"))
    assert "came over a connection of another routing id" in peer.expect(wire.Error).message
    facts = dataclasses.replace(asker.stages[0], stage="somebody-else")
    assert "has the facts of 'somebody-else'" in peer.refusal("upstream", facts).message
    assert peer.refusal("upstream", dataclasses.replace(FACTS, stage=peer.identity.decode())).code == "model_mismatch"
    peer.send_frames(_frames(Kind.HELLO, "upstream", peer.identity.decode(), None))
    assert peer.expect(wire.Error).code == "protocol"
    peer.send_frames(_frames(Kind.HELLO, "emperor", peer.identity.decode(), None))
    assert peer.expect(wire.Error).code == "protocol"
    assert peer.greet().ready
    assert peer.greet().ready  # saying it twice changes nothing


_UNFIT: list[tuple[str, Callable[[Asker, int], str], str]] = [
    ("beyond the vocabulary", lambda a, n: a.ask((5, n)), "invalid_token"),
    ("far beyond it", lambda a, n: a.ask((2**31 - 1,)), "invalid_token"),
    ("prompt longer than the context", lambda a, _: a.ask((5,) * (_CONTEXT + 1)), "context_length_exceeded"),
    ("prompt much longer", lambda a, _: a.ask((5,) * 100_000), "context_length_exceeded"),
    ("text longer than the context", lambda a, _: a.ask(prompt="x" * 5000), "context_length_exceeded"),
    ("empty text", lambda a, _: a.ask(prompt=""), "invalid_request"),
    ("no chat template", lambda a, _: a.ask(messages=(wire.ChatMessage("user", "hi"),)), "chat_template"),
    ("grammar", lambda a, _: a.ask((5,), sampling=wire.SamplingParams(grammar="root ::= (")), "grammar"),
    (
        "a large grammar",
        lambda a, _: a.ask((5,), sampling=wire.SamplingParams(grammar="root ::= " + "x" * 60_000)),
        "grammar",
    ),
    (
        "bias beyond the vocabulary",
        lambda a, n: a.ask((5,), sampling=wire.SamplingParams(logit_bias=((n, 1.0),))),
        "invalid_request",
    ),
]


@pytest.mark.parametrize(("name", "ask", "code"), _UNFIT, ids=[name for name, _, _ in _UNFIT])
def test_requests_that_cannot_be_served(name: str, ask: Callable[[Asker, int], str], code: str, asker: Asker) -> None:
    answer = asker.answer(ask(asker, asker.stages[0].n_vocab))
    assert answer.code == code, answer.error
    assert answer.error is not None
    assert not answer.error.retry
    assert "\n" not in answer.error.message


def _generate(**changes: object) -> list[bytes]:
    """A request with one field of its header replaced."""
    fields = ["mine", 5, None, None, struct.pack("<i", 5), *msgpack.unpackb(encode(wire.Generate("m", 1, "x"))[1])[5:]]
    names = [field.name for field in dataclasses.fields(wire.Generate)]
    for name, value in changes.items():
        fields[names.index(name)] = value
    return _frames(Kind.GENERATE, *fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 2**31},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"token_ids": b""},
        {"token_ids": struct.pack("<i", -1)},
        {"token_ids": b"\0\0\0"},
        {"token_ids": [5]},
        {"prompt": "both"},
        {"token_ids": None},
        {"request": ""},
        {"request": "x" * 129},
        {"timeout_ms": -1},
        {"stop": [""]},
        {"stop": ["x"] * 17},
        {"stop": "x"},
    ],
    ids=str,
)
def test_requests_outside_the_grammar(
    changes: dict[str, object], asker: Asker, pipeline: StagePipeline, transport: Transport
) -> None:
    peer = Peer(transport, pipeline.endpoint)
    peer.greet()
    peer.send_frames(_generate(**changes))
    assert peer.expect(wire.Error).code == "protocol"


def test_a_request_id_is_used_once_at_a_time(asker: Asker, model: Parrot) -> None:
    answer = asker.answers["meanwhile"]
    asker.first.send(wire.Generate("meanwhile", 5, token_ids=(5,)))
    asker.wait("meanwhile", lambda a: a.error is not None)
    assert answer.code == "duplicate_request"
    answer.error = None  # the first one goes on
    asker.answer("meanwhile")
    asker.answers["meanwhile"] = Answer()
    asker.last.at_rest()
    assert asker.tokens((9, 8, 7), request="meanwhile", max_tokens=_N_TOKENS)[: len(model.pieces)] == [*model.token_ids]


def test_ids_of_other_clients_are_their_own(asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    other = Asker(transport, pipeline.endpoint)
    other.answers["meanwhile"] = Answer()
    other.cancel("meanwhile")
    assert other.answer("meanwhile").code == "unknown_request"
    other.answers.clear()
    assert len(other.tokens((5,), request="meanwhile", max_tokens=3)) == 3


def test_a_request_that_nobody_knows(asker: Asker) -> None:
    asker.answers["nobody"] = Answer()
    asker.cancel("nobody")
    assert asker.answer("nobody").code == "unknown_request"


def test_the_context_can_be_filled_to_the_last_token(asker: Asker, model: Parrot) -> None:
    answer = asker.run((5,) * _CONTEXT, max_tokens=100)
    assert (answer.token_ids, answer.finish_reason) == ([model.token_ids[0]], "length")
    answer = asker.run((5,) * (_CONTEXT - 6), max_tokens=100)
    assert (len(answer.token_ids), answer.finish_reason) == (7, "length")


def test_a_client_that_nobody_hears(asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    """One that is not connected to the last stage is told so by stage 0; its lane is free again."""
    deaf = Peer(transport, pipeline.endpoint)
    deaf.greet()
    deaf.send(wire.Generate("deaf", 1000, token_ids=(5,)))
    assert deaf.expect(wire.Accepted).request == "deaf"
    error = deaf.expect(wire.Error)
    assert (error.code, error.request) == ("stage_lost", "deaf")
    assert "not connected" in error.message


def test_a_client_that_leaves(asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    other = Asker(transport, pipeline.endpoint)
    for request in [other.ask((5,), max_tokens=200) for _ in range(3)]:
        other.wait(request, lambda answer: bool(answer.token_ids))
    other.close()
    asker.answer("meanwhile")
    for index in range(3):
        peer = Peer(transport, pipeline.endpoint_of(index))
        peer.greet()
        counters = peer.at_rest().counters
    assert counters["undelivered"] > 0


def test_text_to_tokens_and_back(asker: Asker) -> None:
    first = asker.first
    first.send(wire.Tokenize("t", "héllo"))
    ids = first.until(wire.Tokenized).token_ids
    first.send(wire.Detokenize("d", ids))
    assert first.until(wire.Detokenized).data == "héllo".encode()
    first.send(wire.Detokenize("d", (asker.stages[0].n_vocab,)))
    error = first.until(wire.Error)
    assert (error.code, error.request) == ("invalid_token", "d")


def test_many_peers_come_and_go(asker: Asker, pipeline: StagePipeline, transport: Transport) -> None:
    for _ in range(30):
        peer = Peer(transport, pipeline.endpoint, name=f"passing-{boot_nonce()}")
        assert peer.greet().ready
        peer.close()
