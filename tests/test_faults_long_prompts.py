"""R08: long prompts beside a stream that runs. Between two of its tokens at most one chunk goes; nobody starves.

The order of batches is looked at from the ring's last stage, which the test plays; the same once more from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from lane_helpers import StageWatch, recited
from last_stage import LastStage, Played
from model_files import Parrot, parrot
from stage_peers import Asker
from stage_processes import StagePipeline
from transport_helpers import Transport

from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_CONTEXT, _LANES, _CHUNK, _TOKENS, _AFTER, _AT_ONCE = 2048, 4, 64, 200, 20, 3
_PROMPT = _CONTEXT - 48  # near n_ctx
_CHUNKS = -(-_PROMPT // _CHUNK)
_OPTIONS = ("--lanes", str(_LANES), "--ctx-size", str(_CONTEXT))
_POLICIES = {
    "adaptive": ("--chunk-policy", "adaptive"),
    "fixed": ("--chunk-policy", "fixed", "--chunk-sizes", str(_CHUNK)),
    "schedule": ("--chunk-policy", "schedule", "--chunk-sizes", f"16,32,{_CHUNK}"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("model") / "parrot.gguf", "all in good time ", end="loop", context=_CONTEXT)


@pytest.fixture
def play(make_pipeline: Callable[..., StagePipeline], model: Parrot, transport: Transport) -> Callable[..., Played]:
    return lambda *options: Played(transport, make_pipeline(model.path, "0:2 2:4", *_OPTIONS, *options))


def _gaps(last: LastStage, session: str) -> list[list[wire.Activations]]:
    """The batches between each two in which a session's tokens were made; what came before its first is left out."""
    gaps: list[list[wire.Activations]] = []
    for batch in last.batches:
        if any(rows.session == session and rows.sample for rows in batch.rows):
            gaps.append([])
        elif gaps:
            gaps[-1].append(batch)
    return gaps[:-1]


@pytest.mark.parametrize("policy", _POLICIES)
@pytest.mark.parametrize("full", [False, True], ids=["answers at once", "full ring"])
def test_at_most_one_chunk_between_two_tokens(policy: str, full: bool, play: Callable[..., Played]) -> None:
    """``full``: a batch comes back only when stage 0 has sent as many as it will."""
    played = play(*_POLICIES[policy])
    last = played.last
    stream = played.ask(3, _TOKENS)
    last.run_until(stream, _AFTER)
    running = [played.ask(_PROMPT, 2) for _ in range(_AT_ONCE)]
    newcomers = list(running)
    while last.named(stream).tokens < _TOKENS:
        if full:
            played.settle()
        last.answer()
        for request in [r for r in running if r in last.order and last.named(r).tokens == 2]:
            running.remove(request)
            running.append(played.ask(_PROMPT, 2))  # one more whenever one finishes
            newcomers.append(running[-1])
    gaps = _gaps(last, last.session_of(stream))
    assert len(gaps) == _TOKENS - 1
    chunks = [sum(batch.phase == "prefill" for batch in gap) for gap in gaps]
    assert max(chunks) == 1  # and not 0: they did come in between
    assert max(sum(rows.n_rows for rows in batch.rows) for gap in gaps for batch in gap) <= _CHUNK
    # Other lanes decode too, at most one step each.
    assert max(len(gap) for gap in gaps) <= 1 + _AT_ONCE
    # The first newcomers had a chunk after every token of the stream, until their prompts were through.
    busy = chunks[_AFTER : _AFTER + _AT_ONCE * _CHUNKS - 2]
    assert sum(busy) >= len(busy) - 2
    assert len(newcomers) > _AT_ONCE
    assert [request for request in last.order if request in newcomers] == newcomers[: len(last.order) - 1]
    while running:  # the rest is finished as well
        last.answer()
        running = [r for r in running if r not in last.order or last.named(r).tokens < 2]
    assert {last.named(request).tokens for request in newcomers} == {2}
    assert played.stage_0.stop() == 0


def test_prompts_take_turns_and_a_short_one_does_not_wait_for_the_long(play: Callable[..., Played]) -> None:
    played = play(*_POLICIES["fixed"])
    last = played.last
    long = played.ask(_PROMPT, 1)
    last.wait_for(2)
    short = played.ask(2 * _CHUNK, 1)
    last.run_until(short, 1)
    began = last.named(short).batches[0]
    between = [batch for batch in last.batches if began < batch.batch < last.named(short).batches[-1]]
    assert [batch.opens for batch in between] == [()]  # one chunk of the long one in between
    assert last.named(long).rows < _PROMPT
    last.run_until(long, 1)
    assert played.stage_0.stop() == 0


@pytest.fixture
def pipeline(make_pipeline: Callable[..., StagePipeline], model: Parrot) -> Iterator[StagePipeline]:
    pipeline = make_pipeline(model.path, "0:2 2:4", *_OPTIONS).start_all()
    yield pipeline
    assert [pipeline[index].stop() for index in (0, 1)] == [0, 0]


def test_a_stream_among_long_prompts_and_they_beside_it(
    pipeline: StagePipeline, transport: Transport, model: Parrot
) -> None:
    asker, watch = Asker(transport, pipeline.endpoint), StageWatch(transport, pipeline)
    stream = asker.ask((5, 6), max_tokens=_TOKENS)
    asker.wait(stream, lambda answer: len(answer.token_ids) >= _AFTER)
    running = [asker.ask((7,) * _PROMPT, max_tokens=2) for _ in range(_AT_ONCE)]
    newcomers = list(running)
    begun: set[str] = set()

    def one_is_over_or_the_stream_is(_answer: object) -> bool:
        begun.update(r for r in newcomers if asker.answers[r].token_ids and not asker.answers[stream].over)
        return asker.answers[stream].over or any(asker.answers[r].over for r in running)

    while not asker.answers[stream].over:
        asker.wait(stream, one_is_over_or_the_stream_is)
        for request in [r for r in running if asker.answers[r].over]:
            running.remove(request)
            running.append(asker.ask((7,) * _PROMPT, max_tokens=2))
            newcomers.append(running[-1])
    assert asker.answers[stream].token_ids == recited(model, _TOKENS)
    assert begun >= set(newcomers[:_AT_ONCE])  # their first tokens came while it ran
    for request in newcomers:
        assert asker.answer(request).token_ids == recited(model, 2)
    watch.until_free()
