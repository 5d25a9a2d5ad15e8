"""Answers that begin anew after a stage was lost: known tokens run in windows, and the end of an answer is not lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from last_stage import TOKEN, Played
from model_files import tiny
from stage_peers import Answer, Asker, Peer
from stage_processes import PATIENCE, StagePipeline
from transport_helpers import Transport

from skippy_zmq import Client
from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures")

LANES = 4
OPTIONS = ("--ctx-size", "512", "--lanes", str(LANES), "--recover-seconds", "60", "--row-class-seconds", "60")
PROMPT = [int(token) for token in np.random.default_rng(3).integers(20, 250, 70)]
N_TOKENS = 120
SAMPLINGS = (
    wire.SamplingParams(ignore_eos=True),
    wire.SamplingParams(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=7, ignore_eos=True),
    wire.SamplingParams(temperature=0.8, repeat_penalty=1.3, repeat_last_n=256, seed=8, ignore_eos=True),
    wire.SamplingParams(temperature=1.5, min_p=0.0, seed=9, grammar='root ::= ([a-z] [a-z] [0-9] " ")+'),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", quant="q4_1")


def test_what_every_kind_of_sampling_answers_is_the_same_to_the_bit(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path
) -> None:
    pipeline = make_pipeline(model, "0:1 1:3 3:4", *OPTIONS, "--reproducible").start_all()
    health = Peer(transport, pipeline.endpoint)
    health.greet()
    with Client(pipeline.endpoint, timeout=PATIENCE) as client:
        width = min(facts.row_class_high for facts in client.stages)
        assert width > 1
        expected = [
            client.generate(token_ids=PROMPT, max_tokens=N_TOKENS, sampling=sampling, logits=True)
            for sampling in SAMPLINGS
        ]
        streams = [
            client.stream(token_ids=PROMPT, max_tokens=N_TOKENS, sampling=sampling, logits=True)
            for sampling in SAMPLINGS
        ]
        n_received = N_TOKENS // 2
        for stream in streams:
            for _ in range(n_received):
                next(stream)
        pipeline[1].kill()
        while health.ready():
            pass
        pipeline.start(1).ready()
        for stream, one in zip(streams, expected, strict=True):
            for _ in stream:
                pass
            answer = stream.result
            assert (answer.token_ids, answer.text, answer.finish_reason) == (one.token_ids, one.text, one.finish_reason)
            assert answer.logits is not None
            assert one.logits is not None
            assert np.array_equal(answer.logits.view("u4"), one.logits.view("u4"))
        new, last = (client.stats().stages[index].counters for index in (1, 2))
    # The new process ran each token once, those that were known in windows.
    assert new["replay_rows"] >= LANES * n_received
    assert new["replay_rows"] + new["decode_rows"] == LANES * (N_TOKENS - 1)
    assert new["replay_batches"] <= new["replay_rows"] // width + LANES
    assert last["replay_rows"] == new["replay_rows"]


@pytest.mark.parametrize(
    ("options", "facts", "width"),
    [
        ((), {}, LANES),
        (("--reproducible",), {"row_class_high": 3}, 3),
        ((), {"window_rows": 1}, 1),
        ((), {"window_rows": 2}, 2),
        (("--flash-attn", "off"), {}, 1),
    ],
)
def test_as_wide_as_every_stage_allows(
    options: tuple[str, ...],
    facts: dict[str, Any],
    width: int,
    make_pipeline: Callable[..., StagePipeline],
    transport: Transport,
    model: Path,
) -> None:
    played = Played(transport, make_pipeline(model, "0:2 2:4", *OPTIONS, *options), **facts)
    last, (client,) = played.last, played.clients
    request = played.ask(70, 30)
    last.run_until(request, 11)
    played.settle()
    last.break_ring()
    client.send(wire.Resume(request, 4))
    last.run_until(request, 1)
    opened = last.named(request).opened
    assert opened.known == np.full(11, TOKEN, "<i4").tobytes()
    assert opened.received == 4
    last.run_until(request, 12)
    last.wait_for(1)
    phases = [(batch.phase, batch.rows[0].n_rows) for batch in last.batches]
    windows = [("replay", min(width, 11 - at)) for at in range(0, 11, width)] if width > 1 else [("decode", 1)] * 11
    assert phases == [("prefill", 64), ("prefill", 6), *windows, ("decode", 1)]
    assert last.batches[-1].rows[0].position == 70 + 11
    assert b"".join(batch.tokens for batch in last.batches[2:]) == np.full(12, TOKEN, "<i4").tobytes()
    last.run_until(request, 30)
    assert not played.settle()["now.requests_running"]


def test_more_than_stage_0_knows_is_compared_by_the_client(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path
) -> None:
    played = Played(transport, make_pipeline(model, "0:2 2:4", *OPTIONS))
    last, (client,) = played.last, played.clients
    request = played.ask(5, 30)
    last.run_until(request, 3)
    played.settle()
    last.break_ring()
    client.send(wire.Resume(request, 7))
    last.run_until(request, 1)
    assert last.named(request).opened.received == 3


def test_an_answer_that_comes_out_differently_ends(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path
) -> None:
    played = Played(transport, make_pipeline(model, "0:2 2:4", *OPTIONS))
    last, (client,) = played.last, played.clients
    request = played.ask(5, 30)
    last.run_until(request, 20)
    played.settle()
    last.break_ring()
    client.send(wire.Resume(request, 2))
    last.run_until(request, 5)
    last.fail("stage_lost", "it came out differently")
    refused = client.until(wire.Error)
    assert (refused.code, refused.request, refused.message) == ("stage_lost", request, "it came out differently")
    counters = played.settle()
    while last.held:  # windows that were under way
        last.answer()
        counters = played.settle()
    assert not any(counters[f"now.{name}"] for name in ("lanes_busy", "requests_running", "batches_in_flight"))
    client.send(wire.Resume(request, 2))
    assert client.until(wire.Error).code == "unknown_request"


def test_a_client_that_missed_the_end_of_an_answer(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path
) -> None:
    """Stage 0 holds it for over, as often as that happens; only what ended long ago, or otherwise, is unknown."""
    played = Played(transport, make_pipeline(model, "0:2 2:4", *OPTIONS))
    last, (client,) = played.last, played.clients
    request = played.ask(5, 6)
    for _ in range(2):
        last.run_until(request, 6)
        played.settle()
        last.break_ring()
        client.send(wire.Resume(request, 3))
        last.run_until(request, 1)
        opened = last.named(request).opened
        assert (opened.known, opened.received) == (np.full(5, TOKEN, "<i4").tobytes(), 3)
    cancelled = played.ask(5, 6)
    last.run_until(cancelled, 2)
    client.send(wire.Cancel(cancelled))
    for _ in range(2 * LANES):
        last.run_until(played.ask(5, 1), 1)
    played.settle()
    last.break_ring()
    for name in (cancelled, request, "never"):
        client.send(wire.Resume(name, 3))
        refused = client.until(wire.Error)
        assert (refused.code, refused.request) == ("unknown_request", name)


def test_the_end_of_an_answer_comes_again_from_a_new_last_stage(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path
) -> None:
    """As if the old one had died before it could send it, and had told stage 0 already."""
    pipeline = make_pipeline(model, "0:2 2:4", *OPTIONS).start_all()
    asker = Asker(transport, pipeline.endpoint)
    request = asker.ask(PROMPT, max_tokens=20, sampling=SAMPLINGS[2])
    whole = asker.answer(request)
    assert len(whole.token_ids) == 20
    pipeline[1].kill()
    while asker.first.ready():
        pass
    pipeline.start(1).ready()
    pipeline[0].ready()
    asker.meet_last_again()
    asker.answers[request] = Answer(token_ids=whole.token_ids[:15])
    asker.first.send(wire.Resume(request, 15))
    again = asker.answer(request)
    assert again.token_ids == whole.token_ids
    assert again.finish_reason == whole.finish_reason == "length"
    assert whole.text.endswith(again.text)
