"""A model cut into stages, in one process, gives the bits of the whole model, and transformers' logits (T04: tied)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from model_files import tiny

from skippy_zmq.certify.compare import first_difference
from skippy_zmq.certify.reference import Unsplit
from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.certify.workload import (
    DEFAULTS,
    DEFAULTS_TWO_THREADS,
    PLAIN,
    Logits,
    Settings,
    Step,
    context_size,
    script,
    stage_options,
)
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import split_evenly

DATA = Path(__file__).parent / "data"
ARCH_FILES = sorted(DATA.glob("arch/*.gguf"))
FOUR_LAYER_SPLITS = [(), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)]


@functools.cache
def unsplit(path: Path, settings: Settings) -> tuple[tuple[Step, ...], Logits]:
    """The script and the logits of llama.cpp with the whole model, which runs the micro-batches of a stage."""
    n_ctx = context_size(open_model(path))
    with Unsplit(path, settings, n_ctx) as whole:
        steps = script(n_ctx, can_trim=whole.can_trim)
        return steps, whole.run(steps, whole=False)


def staged(path: Path, boundaries: Sequence[int], settings: Settings) -> StagedModel:
    source = open_model(path)
    return StagedModel(source, boundaries, stage_options(settings, context_size(source)))


def assert_exact(path: Path, boundaries: Sequence[int], settings: Settings) -> None:
    steps, wanted = unsplit(path, settings)
    assert first_difference(steps, wanted, staged(path, boundaries, settings).run(steps)) is None


def test_there_are_models() -> None:
    assert len(ARCH_FILES) >= 5
    assert all(open_model(path).n_layers == 4 for path in ARCH_FILES)


@pytest.mark.parametrize("settings", [PLAIN, DEFAULTS], ids=["plain", "defaults"])
@pytest.mark.parametrize("boundaries", FOUR_LAYER_SPLITS, ids=str)
@pytest.mark.parametrize("path", ARCH_FILES, ids=lambda path: path.stem)
def test_split_equals_whole(path: Path, boundaries: tuple[int, ...], settings: Settings) -> None:
    assert_exact(path, boundaries, settings)


@pytest.mark.parametrize("path", ARCH_FILES, ids=lambda path: path.stem)
def test_split_equals_whole_with_two_threads(path: Path) -> None:
    assert_exact(path, (1, 3), DEFAULTS_TWO_THREADS)


@pytest.mark.parametrize("boundaries", [(), (2,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("quant", [None, "q8_0", "q4_0"])
def test_tied_output_matrix(tmp_path: Path, quant: str | None, boundaries: tuple[int, ...]) -> None:
    path = tiny(tmp_path / "tied.gguf", tied=True, quant=quant)
    assert open_model(path).tied_output
    assert_exact(path, boundaries, DEFAULTS)


@pytest.mark.parametrize("name", ["gemma3_text", "llama", "qwen3"])
@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
def test_golden_logits_and_greedy_tokens(name: str, n_stages: int) -> None:
    folder = DATA / "golden" / name
    expected = json.loads((folder / "expected.json").read_text())
    wanted = np.load(folder / "logits.npy")
    prompt: list[int] = expected["prompt_ids"]
    source = open_model(folder / "reference-f32.gguf")
    boundaries = [layers.start for layers in split_evenly(n_stages, source.n_layers)][1:]
    model = StagedModel(source, boundaries, stage_options(PLAIN, 128))

    logits = model.decode([(0, 0, len(prompt))], np.array(prompt, np.int32), range(len(prompt)))
    tolerance = 1e-3 if name == "gemma3_text" else 1e-5  # llama.cpp's table of Gemma's activation is f16
    assert np.abs(np.stack(logits) - wanted).max() <= tolerance * np.abs(wanted).max()

    tokens = [int(logits[-1].argmax())]
    while len(tokens) < len(expected["greedy_ids"]):
        at = len(prompt) + len(tokens) - 1
        (step,) = model.decode([(0, at, 1)], np.array(tokens[-1:], np.int32), [0])
        tokens.append(int(step.argmax()))
    assert tokens == expected["greedy_ids"]


def steps_of(model: StagedModel, steps: Sequence[Step]) -> Iterator[list[Logits]]:
    for number, step in enumerate(steps):
        if step.forget is not None:
            model.trim(*step.forget)
        yield model.decode(step.rows, step.tokens(number, model.last.n_vocab), step.outputs)


def test_pipelines_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    paths = [tiny(tmp_path / f"{seed}.gguf", seed=seed) for seed in range(2)]
    alone = [unsplit(path, DEFAULTS) for path in paths]
    models = [staged(paths[0], (1,), DEFAULTS), staged(paths[1], (2, 3), DEFAULTS), staged(paths[0], (3,), DEFAULTS)]
    interleaved = zip(*(steps_of(model, alone[0][0]) for model in models), strict=True)
    got = [np.concatenate(rows) for rows in zip(*interleaved, strict=True)]
    for logits, (steps, wanted) in zip(got, [alone[0], alone[1], alone[0]], strict=True):
        assert first_difference(steps, wanted, logits) is None
    assert first_difference(alone[0][0], alone[0][1], alone[1][1]) is not None


def test_a_closed_pipeline_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model.gguf")
    steps, wanted = unsplit(path, DEFAULTS)
    model, other = staged(path, (2,), DEFAULTS), staged(path, (1,), DEFAULTS)
    running, others = steps_of(model, steps), steps_of(other, steps)
    got = [next(running) for _ in range(4)]
    got_others = [next(others) for _ in range(4)]
    del other, others
    got += running
    assert first_difference(steps, wanted, np.concatenate(got)) is None
    assert np.array_equal(np.concatenate(got_others), wanted[: sum(map(len, got_others))])
