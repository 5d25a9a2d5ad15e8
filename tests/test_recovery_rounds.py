"""Stages are killed at random moments under eight streams: every answer is what it is without, or a clear error.

``SKIPPY_KILL_ROUNDS=50`` runs as many rounds per model and setting as the promise in docs/design.md is about; a few are
the default. The number of a round is the seed of everything in it.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from model_files import tiny
from pipeline_helpers import child_processes, open_descriptors
from recovery_helpers import N_STAGES, N_STREAMS, SAMPLINGS, Answer, Ask, Footing, Round, Streams, round_of, settled

from skippy_zmq import LocalPipeline
from skippy_zmq.errors import DeadlineError, RetryableError
from skippy_zmq.sources.demo_models import demo_model

ROUNDS = int(os.environ.get("SKIPPY_KILL_ROUNDS", "3"))
_OPTIONS = {"ctx_size": 512, "lanes": N_STREAMS, "threads": 1, "reproducible": True}
# A request that needs longer than this hangs; a stage comes back within seconds.
_DEADLINE = 150.0
_NEVER = 1_000_000  # deaths are what these tests are about
_VOCABULARY = (20, 290)  # ordinary tokens of every model here
# Around the edges of chunks and pages.
_LENGTHS = (3, 17, 40, 63, 64, 65, 100, 129, 200)


@dataclass(frozen=True, slots=True)
class Setting:
    model: str
    most_tokens: int
    pages: bool


_SETTINGS = [
    pytest.param(Setting("tiny", 120, pages=True), id="tiny-pages"),
    pytest.param(Setting("tiny", 120, pages=False), id="tiny-no-pages"),
    pytest.param(Setting("smollm2", 24, pages=True), marks=pytest.mark.real_model, id="smollm2-pages"),
    pytest.param(Setting("smollm2", 24, pages=False), marks=pytest.mark.real_model, id="smollm2-no-pages"),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=6, quant="q4_1")


@cache
def _prompts() -> list[list[int]]:
    """Some begin alike, over a page and more."""
    choose = random.Random(5)
    ids = [choose.randrange(*_VOCABULARY) for _ in range(max(_LENGTHS))]
    other = [choose.randrange(*_VOCABULARY) for _ in range(max(_LENGTHS))]
    return [ids[:length] for length in _LENGTHS] + [ids[:70] + other[: length - 70] for length in (100, 200)]


class Reference:
    """What each prompt is answered without deaths, alone, on a pipeline that keeps no pages."""

    def __init__(self, model: Path, most_tokens: int) -> None:
        with LocalPipeline(model, stages=N_STAGES, kv_cache_bytes=0, **_OPTIONS) as pipeline:
            streams = Streams(pipeline, _prompts(), _DEADLINE)
            self._answers = {
                (prompt, sampling): streams.alone(prompt, sampling, most_tokens)
                for prompt in range(len(_prompts()))
                for sampling in range(len(SAMPLINGS))
            }
            streams.close()
        assert all(answer.error is None for answer in self._answers.values())
        assert len({tuple(answer.token_ids) for answer in self._answers.values()}) > len(_prompts())

    def check(self, plan: Round, answers: Sequence[Answer]) -> None:
        """Every answer is whole and right; where stage 0 was lost it may be the beginning of it, and a clear error."""
        for ask, answer in zip(plan.asks, answers, strict=True):
            alone = self._answers[ask.prompt, ask.sampling]
            wanted = alone.token_ids[: ask.max_tokens]
            assert answer.token_ids == wanted[: len(answer.token_ids)], (plan, ask, answer, wanted)
            if answer.error is None:
                assert answer.token_ids == wanted, (plan, ask, answer)
                whole = len(alone.token_ids) < ask.max_tokens and alone.finish_reason == "stop"
                assert answer.finish_reason == ("stop" if whole else "length"), (plan, ask, answer, alone)
            else:
                assert plan.loses_stage_0, (plan, ask, answer)
                assert isinstance(answer.error, RetryableError), (plan, ask, answer)
                assert not isinstance(answer.error, DeadlineError), (plan, ask, answer)
                assert str(answer.error)


_references: dict[str, Reference] = {}


@dataclass(slots=True)
class Scene:
    pipeline: LocalPipeline
    streams: Streams
    reference: Reference
    setting: Setting
    footing: Footing


@pytest.fixture(scope="module")
def no_delay() -> Iterator[None]:
    """A stage that dies often is started again at once all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skippy_zmq.supervision.RESTART_DELAY_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module", params=_SETTINGS)
def scene(request: pytest.FixtureRequest, tiny_model: Path, no_delay: None) -> Iterator[Scene]:
    setting: Setting = request.param
    model = tiny_model if setting.model == "tiny" else demo_model(setting.model)
    if setting.model not in _references:
        _references[setting.model] = Reference(model, setting.most_tokens)
    processes, descriptors, threads = child_processes(), open_descriptors(), set(threading.enumerate())
    off = {} if setting.pages else {"kv_cache_bytes": 0}
    with LocalPipeline(model, stages=N_STAGES, restart_limit=_NEVER, **_OPTIONS, **off) as pipeline:
        streams = Streams(pipeline, _prompts(), _DEADLINE)
        asks = tuple(Ask(prompt, 0, 2) for prompt in range(len(_prompts())))
        _references[setting.model].check(Round(asks, ()), streams.run(Round(asks, ())))
        streams.at_rest(pages=setting.pages)
        yield Scene(pipeline, streams, _references[setting.model], setting, Footing.of(pipeline))
        streams.close()
    assert child_processes() == processes
    assert open_descriptors() == descriptors
    assert set(threading.enumerate()) == threads


@pytest.mark.parametrize("number", range(ROUNDS))
def test_answers_survive_a_stage(scene: Scene, number: int) -> None:
    plan = round_of(random.Random(number), len(_prompts()), scene.setting.most_tokens)
    before = scene.pipeline.restarts
    scene.reference.check(plan, scene.streams.run(plan))
    scene.streams.restarted(before + len(plan.kills))
    scene.streams.at_rest(pages=scene.setting.pages)
    footing = settled(scene.pipeline, scene.footing)
    assert footing.fits(scene.footing), (plan, footing, scene.footing)
