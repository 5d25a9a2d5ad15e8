"""READY comes when everything behind is ready, and comes again after any stage was lost and started anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from model_files import Parrot, parrot
from stage_peers import Asker, Peer
from stage_processes import StagePipeline
from transport_helpers import Transport

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_TEXT = "she sells sea shells"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", _TEXT, end="loop")


@pytest.fixture
def pipeline(make_pipeline: Callable[..., StagePipeline], model: Parrot) -> StagePipeline:
    return make_pipeline(model.path, "0:1 1:3 3:4")


def _recites(asker: Asker, model: Parrot) -> bool:
    n = len(model.pieces)
    return asker.tokens((5, 6, 7), max_tokens=n + 3) == [*model.token_ids, *model.token_ids[:3]]


def test_a_stage_is_ready_after_those_behind_it(pipeline: StagePipeline, transport: Transport, model: Parrot) -> None:
    pipeline.start(0)
    client = Peer(transport, pipeline.endpoint)
    welcome = client.greet()
    assert not welcome.ready
    assert [(s.layer_start, s.layer_end) for s in welcome.stages] == [(0, 1)]
    pipeline.start(1)
    pipeline[1].logged("welcome, upstream")
    assert not client.ready()
    assert pipeline[0].silent
    assert pipeline[1].silent
    pipeline.start(2)
    assert pipeline[2].ready()["layers"] == "3:4"
    assert [s["layer_start"] for s in pipeline[1].ready()["stages"]] == [1, 3]
    facts = pipeline[0].ready()
    assert facts["layers"] == "0:1"
    assert facts["endpoint"] == pipeline.endpoint
    assert [(s["layer_start"], s["layer_end"]) for s in facts["stages"]] == [(0, 1), (1, 3), (3, 4)]
    assert len({s["model"] for s in facts["stages"]} | {facts["model"]}) == 1
    assert client.ready()
    assert _recites(Asker(transport, pipeline.endpoint), model)


def test_last_stage_first(pipeline: StagePipeline, transport: Transport, model: Parrot) -> None:
    for index in (2, 1, 0):
        pipeline.start(index)
    for index in (2, 1, 0):
        pipeline[index].ready()
    assert _recites(Asker(transport, pipeline.endpoint), model)


@pytest.mark.parametrize("index", [2, 1])
def test_a_stage_that_crashed_is_started_again(
    index: int, pipeline: StagePipeline, transport: Transport, model: Parrot
) -> None:
    pipeline.start_all()
    asker = Asker(transport, pipeline.endpoint)
    running = asker.ask((5,), max_tokens=200)
    asker.wait(running, lambda answer: len(answer.token_ids) > 3)
    pipeline[index].kill()
    lost = asker.answer(running)
    assert lost.code == "stage_lost"
    assert lost.error is not None
    assert lost.error.retry
    assert asker.run((5,)).code == "not_ready"
    assert not asker.first.ready()
    asker.close()
    pipeline.start(index)
    for stage in range(index, -1, -1):
        pipeline[stage].ready()
    assert _recites(Asker(transport, pipeline.endpoint), model)


def test_stage_0_is_started_again(pipeline: StagePipeline, transport: Transport, model: Parrot) -> None:
    pipeline.start_all()
    asker = Asker(transport, pipeline.endpoint)
    asker.wait(asker.ask((5,), max_tokens=200), lambda answer: len(answer.token_ids) > 3)
    pipeline[0].kill()
    asker.close()
    pipeline.start(0).ready()
    asker = Asker(transport, pipeline.endpoint)
    assert _recites(asker, model)
    asker.last.at_rest()
