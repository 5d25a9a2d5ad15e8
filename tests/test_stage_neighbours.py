"""Neighbours that come and go, hang, speak nonsense or turn up twice."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from model_files import Parrot, parrot
from stage_peers import Asker, Peer
from stage_processes import SMALL, StagePipeline, StageProcess, error_line
from transport_helpers import Transport

from skippy_zmq.transport import Server
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.limits import MAX_FRAMES

pytest_plugins = ("transport_fixtures", "stage_fixtures")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "tock tick ", end="loop")


@pytest.fixture
def pipeline(make_pipeline: Callable[..., StagePipeline], model: Parrot) -> StagePipeline:
    return make_pipeline(model.path, "0:2 2:4")


def _recites(asker: Asker, model: Parrot) -> bool:
    return asker.tokens((5, 6, 7), max_tokens=len(model.pieces)) == [*model.token_ids]


def _greeted(transport: Transport, server: Server) -> wire.Hello:
    """The HELLO of the stage that connects to ``server``."""
    hello = decode(transport.message(server).frames)[0]
    assert isinstance(hello, wire.Hello)
    return hello


def _downstream(facts: wire.StageFacts) -> wire.StageFacts:
    """Facts of a stage that fits behind the one with ``facts``."""
    return dataclasses.replace(
        facts, stage="behind", layer_start=facts.layer_end, layer_end=facts.n_layers, wanted=facts.offered, offered=()
    )


def test_a_next_stage_that_comes_and_goes(pipeline: StagePipeline, transport: Transport, model: Parrot) -> None:
    pipeline.start(0)
    for number in range(4):
        server = transport.server(pipeline.endpoint_of(1), max_frames=MAX_FRAMES)
        hello = _greeted(transport, server)
        if number % 2:
            server.send(hello.peer.encode(), encode(wire.Welcome((_downstream(_facts(hello)),), False)))
        transport.drop(server)
    pipeline.start(1)
    pipeline[0].ready()
    assert _recites(Asker(transport, pipeline.endpoint), model)


def _facts(hello: wire.Hello) -> wire.StageFacts:
    assert hello.facts is not None
    return hello.facts


_Answer = Callable[[wire.StageFacts], list[bytes | memoryview]]
_NONSENSE: dict[str, tuple[_Answer, str]] = {
    "line noise": (lambda _: [b"\xff" * 20, b"x"], "message of generation 255: this side speaks generation 4"),
    "another generation": (
        lambda _: encode(wire.Error("generation_mismatch", "message of generation 1: this side speaks generation 4")),
        "the next stage refused this one: message of generation 1: this side speaks generation 4",
    ),
    "a message out of place": (lambda _: encode(wire.Pong(1, True)), "Pong from the next stage"),
    "a stage of other layers": (
        lambda facts: encode(wire.Welcome((dataclasses.replace(_downstream(facts), layer_start=3),), True)),
        "layer ranges 0:2 and 3:4 leave a gap",
    ),
    "a stage of another model": (
        lambda facts: encode(wire.Welcome((dataclasses.replace(_downstream(facts), model="f" * 64),), True)),
        "model identity differs",
    ),
    "a stage that wants more": (
        lambda facts: encode(
            wire.Welcome(
                (dataclasses.replace(_downstream(facts), wanted=(wire.CrossingSpec("more", 0, "f32", 4),)),), True
            )
        ),
        "wants tensor 'more' #0",
    ),
}


def test_a_next_stage_that_speaks_nonsense(
    start_stage: Callable[..., StageProcess], transport: Transport, socket_dir: Path, model: Parrot
) -> None:
    servers = [transport.server(f"ipc://{socket_dir}/next-{i}", max_frames=MAX_FRAMES) for i in range(len(_NONSENSE))]
    stages = [
        start_stage(
            *("--model", model.path, "--layers", "0:2", "--bind", f"ipc://{socket_dir}/{i}"),
            *("--next", f"ipc://{socket_dir}/next-{i}", *SMALL),
        )
        for i in range(len(_NONSENSE))
    ]
    for server, stage, (answer, words) in zip(servers, stages, _NONSENSE.values(), strict=True):
        hello = _greeted(transport, server)
        server.send(hello.peer.encode(), answer(_facts(hello)))
        assert stage.wait() == 1
        assert words in error_line(stage.stderr())
        assert stage.silent


def test_a_second_stage_0_waits_for_its_turn(
    pipeline: StagePipeline,
    transport: Transport,
    start_stage: Callable[..., StageProcess],
    socket_dir: Path,
    model: Parrot,
) -> None:
    pipeline.start_all()
    second = start_stage(
        *("--model", model.path, "--layers", "0:2", "--name", "second", "--bind", f"ipc://{socket_dir}/second"),
        *("--next", pipeline.endpoint_of(1), *SMALL),
    )
    second.logged("stage-0-2-")
    assert "is in front of stage-2-4-" in second.stderr()
    assert second.silent
    assert _recites(Asker(transport, pipeline.endpoint), model)
    pipeline[0].kill()
    pipeline[1].logged("welcome, upstream second-")  # its turn


def test_a_stage_that_hangs_for_a_while(pipeline: StagePipeline, transport: Transport, model: Parrot) -> None:
    pipeline.start_all()
    asker = Asker(transport, pipeline.endpoint)
    for _ in range(3):
        request = asker.ask((5,), max_tokens=240, timeout_ms=300)
        asker.wait(request, lambda answer: answer.over or bool(answer.token_ids))
        pipeline[1].send_signal(signal.SIGSTOP)
        assert asker.answer(request).code in ("deadline", "stage_lost")
        pipeline[1].send_signal(signal.SIGCONT)
    for request in [asker.ask((5, 6, 7), max_tokens=len(model.pieces)) for _ in range(6)]:
        assert asker.answer(request).token_ids == [*model.token_ids]
    for index in (0, 1):
        peer = Peer(transport, pipeline.endpoint_of(index))
        peer.greet()
        peer.at_rest()


def test_a_stage_0_that_dies_leaves_no_sessions_behind(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Parrot
) -> None:
    pipeline = make_pipeline(model.path, "0:1 1:2 2:4")
    pipeline.start_all()
    asker = Asker(transport, pipeline.endpoint)
    request = asker.ask((5,), max_tokens=240)
    asker.wait(request, lambda answer: bool(answer.token_ids))
    pipeline[0].kill()
    for index in (1, 2):
        peer = Peer(transport, pipeline.endpoint_of(index))
        peer.greet()
        peer.at_rest()
