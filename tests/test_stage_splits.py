"""Layer ranges that tile the model give its tokens; all else is refused by both names, and breaks nothing (R11)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_files import parrot, tiny
from pipeline_helpers import greedy_reference
from stage_peers import Asker, Peer
from stage_processes import SMALL, StagePipeline, StageProcess, error_line, run_many
from transport_helpers import Transport

from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.wire.messages import StageFacts

pytest_plugins = ("transport_fixtures", "stage_fixtures")

_PROMPT = (60, 70, 80, 90, 100)
_SPLITS = [
    " ".join(f"{low}:{high}" for low, high in itertools.pairwise((0, *inner, 4)))
    for n in range(4)
    for inner in itertools.combinations(range(1, 4), n)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return tiny(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def whole(model: Path) -> list[int]:
    return greedy_reference(model, [_PROMPT], 12, n_ctx=256, n_batch=64)[0]


@pytest.fixture(scope="module")
def last(module_dir: Path, model: Path) -> Iterator[StagePipeline]:
    """A pipeline of which only the last stage runs, the one that is connected to."""
    with StagePipeline(module_dir, model, "0:2 2:4") as pipeline:
        pipeline.start(1).ready()
        yield pipeline


@pytest.mark.parametrize("ranges", _SPLITS)
def test_every_split_gives_the_tokens_of_the_whole(
    ranges: str, make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path, whole: list[int]
) -> None:
    pipeline = make_pipeline(model, ranges).start_all()
    asker = Asker(transport, pipeline.endpoint)
    assert [f"{s.layer_start}:{s.layer_end}" for s in asker.stages] == ranges.split()
    assert asker.tokens(_PROMPT, max_tokens=12) == whole
    for index in range(len(pipeline.ranges)):
        assert pipeline[index].stop() == 0


def test_four_stages_recite(make_pipeline: Callable[..., StagePipeline], transport: Transport, folder: Path) -> None:
    bird = parrot(folder / "parrot.gguf", "polly wants a cracker")
    pipeline = make_pipeline(bird.path, "0:1 1:2 2:3 3:4").start_all()
    answer = Asker(transport, pipeline.endpoint).run((9, 8, 7), max_tokens=100)
    assert (answer.text, answer.finish_reason) == ("polly wants a cracker", "stop")
    assert tuple(answer.token_ids) == bird.token_ids


def test_neighbours_that_do_not_fit(
    last: StagePipeline,
    start_stage: Callable[..., StageProcess],
    transport: Transport,
    socket_dir: Path,
    folder: Path,
    model: Path,
    whole: list[int],
) -> None:
    others = {
        "hidden": tiny(folder / "hidden.gguf", hidden=96),
        "seed": tiny(folder / "seed.gguf", seed=1),
        "quant": tiny(folder / "quant.gguf", quant="q8_0"),
        "layers": tiny(folder / "layers.gguf", n_layers=5),
    }
    identity = {name: open_model(path).identity() for name, path in (*others.items(), ("tiny", model))}
    assert len(set(identity.values())) == 5
    wrong: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
        ((model, "0:1"), ("layer ranges 0:1 and 2:4 leave a gap", "layer 1")),
        ((model, "0:3"), ("layer ranges 0:3 and 2:4 overlap", "layer 3")),
        ((model, "2:3"), ("layer ranges 2:3 and 2:4 overlap",)),
        ((model, "0:2", "--ctx-size", 512), ("--ctx-size differs: 512 on stage 0:2", "256 on stage 2:4")),
        ((model, "0:2", "-ctk", "f32"), ("--cache-type-k differs: f32 on stage 0:2", "f16 on stage 2:4")),
        *(
            (
                (path, "0:2"),
                (f"model identity differs: {identity[name]} on stage 0:2", f"{identity['tiny']} on stage 2:4"),
            )
            for name, path in others.items()
        ),
    ]
    started = [
        start_stage("--model", path, "--layers", layers, "--bind", f"ipc://{socket_dir}/{i}", "--next",
                    last.endpoint_of(1), *SMALL, *more)
        for i, ((path, layers, *more), _) in enumerate(wrong)
    ]  # fmt: skip
    for stage, (_, words) in zip(started, wrong, strict=True):
        assert stage.wait() == 1
        message = error_line(stage.stderr())
        assert message.startswith("the next stage refused this one: ")
        for word in words:
            assert word in message
        assert stage.silent
    # It is as good as before to one that fits.
    with last.start(0) as first:
        first.ready()
        assert Asker(transport, last.endpoint).tokens(_PROMPT, max_tokens=12) == whole


def test_a_last_stage_that_does_not_fit_its_ring(
    start_stage: Callable[..., StageProcess],
    last: StagePipeline,
    transport: Transport,
    socket_dir: Path,
    folder: Path,
    whole: list[int],
) -> None:
    other = tiny(folder / "ring.gguf", seed=2)
    arguments = ("--layers", "2:4", *SMALL)
    with last.start(0) as first:
        first.ready()
        stranger = start_stage(
            "--model", other, "--first", last.endpoint, "--bind", f"ipc://{socket_dir}/0", *arguments
        )
        astray = start_stage(
            "--model", last.model, "--first", last.endpoint_of(1), "--bind", f"ipc://{socket_dir}/1", *arguments
        )
        assert stranger.wait() == 1
        message = error_line(stranger.stderr())
        assert message.startswith("stage 0 refused this one: model identity differs: ")
        assert "on stage 0:2" in message
        assert "on stage 2:4" in message
        assert astray.wait() == 1
        assert "must be the stage that begins at layer 0, not stage 2:4" in error_line(astray.stderr())
        assert Asker(transport, last.endpoint).tokens(_PROMPT, max_tokens=12) == whole


def test_a_second_last_stage_does_not_disturb_the_first(
    start_stage: Callable[..., StageProcess],
    last: StagePipeline,
    transport: Transport,
    socket_dir: Path,
    whole: list[int],
) -> None:
    arguments = ("--model", last.model, "--layers", "2:4", "--bind", f"ipc://{socket_dir}/0", *SMALL)
    with last.start(0) as first:
        first.logged("welcome, ring")
        second = start_stage("--first", last.endpoint, *arguments)
        first.logged("welcome, ring")
        asker = Asker(transport, last.endpoint)
        assert asker.tokens(_PROMPT, max_tokens=12) == whole
        second.kill()
        assert asker.tokens(_PROMPT, max_tokens=12) == whole


_FACTS: list[tuple[dict[str, Any], str]] = [
    ({"layer_end": 1}, "layer_mismatch"),
    ({"layer_end": 3}, "layer_mismatch"),
    ({"layer_start": 1, "layer_end": 4}, "layer_mismatch"),
    ({"model": "0" * 64}, "model_mismatch"),
    ({"build": "another"}, "model_mismatch"),
    ({"n_layers": 5}, "model_mismatch"),
    ({"lanes": 9}, "settings_mismatch"),
    ({"n_ctx": 512}, "settings_mismatch"),
    ({"n_batch": 32, "n_ubatch": 32}, "settings_mismatch"),
    ({"n_ubatch": 32}, "settings_mismatch"),
    ({"cache_type_k": "f32"}, "settings_mismatch"),
    ({"cache_type_v": "q8_0"}, "settings_mismatch"),
    ({"flash_attn": "off"}, "settings_mismatch"),
    ({"swa_full": False}, "settings_mismatch"),
    ({"offered": ()}, "crossing_mismatch"),
]


@pytest.mark.parametrize(("changes", "code"), _FACTS, ids=lambda value: str(value)[:40])
def test_facts_that_do_not_fit(changes: dict[str, Any], code: str, last: StagePipeline, transport: Transport) -> None:
    peer = Peer(transport, last.endpoint_of(1))
    facts = upstream_of(peer)
    assert peer.refusal("upstream", dataclasses.replace(facts, **changes)).code == code
    assert peer.greet("upstream", facts).ready


def test_a_crossing_tensor_of_another_type(last: StagePipeline, transport: Transport) -> None:
    peer = Peer(transport, last.endpoint_of(1))
    facts = upstream_of(peer)
    half = tuple(dataclasses.replace(spec, dtype="f16", row_bytes=spec.row_bytes // 2) for spec in facts.offered)
    refusal = peer.refusal("upstream", dataclasses.replace(facts, offered=half))
    assert refusal.code == "crossing_mismatch"
    assert "(f32, 256 bytes a row)" in refusal.message
    assert "(f16, 128 bytes a row)" in refusal.message


def upstream_of(peer: Peer) -> StageFacts:
    """Facts of a right neighbour for the stage behind ``peer``, under the peer's name."""
    peer.hello()
    downstream = peer.stats().facts
    return dataclasses.replace(
        downstream,
        stage=peer.identity.decode(),
        layer_start=0,
        layer_end=downstream.layer_start,
        wanted=(),
        offered=downstream.wanted,
    )


def test_ranges_that_no_stage_can_have(model: Path) -> None:
    wrong = {
        ("0:0",): "layer range 0:0: wanted 0 <= start < end",
        ("3:2",): "layer range 3:2: wanted 0 <= start < end",
        ("2:5",): "layer range 2:5: the model has 4 layers, so the end can be at most 4",
        ("7:9",): "layer range 7:9: the model has 4 layers",
        ("0-2",): "layer range '0-2': wanted A:B",
        ("0:2",): "layers 0:2 of 4: --next is needed, the stage that begins at layer 2",
        ("1:3",): "layers 1:3 of 4: --next is needed, the stage that begins at layer 3",
        ("2:4",): "layers 2:4 are the last of 4: --first is needed, the stage that begins at layer 0",
        ("2:4", "--next", "ipc://elsewhere"): "layers 2:4 are the last of 4: there is no --next",
        ("0:4", "--next", "ipc://elsewhere"): "layers 0:4 are the last of 4: there is no --next",
        ("0:4", "--first", "ipc://elsewhere"): "layers 0:4 of 4: --first is for the last of several stages",
        ("1:2", "--next", "ipc://elsewhere", "--first", "ipc://elsewhere"): "layers 1:2 of 4: --first is for the last",
    }
    results = run_many([("--model", str(model), "--layers", *arguments) for arguments in wrong])
    for (code, stderr), wanted in zip(results, wrong.values(), strict=True):
        assert code == 2
        assert error_line(stderr).startswith(wanted)
