"""What --reproducible rests on, with real weights: which chunks and which batches give a row the same bits.

The first layers of each model, by what leaves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.row_class import measure_sizes, most_rows, row_class
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.demo_models import demo_model
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.topology import LayerRange

SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.real_model)
GEMMA3 = pytest.param("gemma3", marks=pytest.mark.test_models)
REPRODUCIBLE = {"reproducible": True, "threads": 2}
ONE_THREAD = {"threads": 1}
N_LAYERS, LANES = 4, 6


@cache
def path_of(name: str) -> Path:
    return demo_model(name)


def first_layers(name: str, **options: Any) -> StageModel:
    values = {"ctx_size": 1024, "lanes": LANES, **options}
    stage = StageModel(open_model(path_of(name)), LayerRange(0, N_LAYERS), check_options(values, "options"))
    stage.serve([spec for spec in stage.offered if spec.name == f"l_out-{N_LAYERS - 1}"])
    return stage


def leaving(stage: StageModel, lanes: Sequence[tuple[int, int]], tokens: Sequence[int], n_rows: int = 1) -> list[bytes]:
    """What leaves for ``n_rows`` rows each on ``lanes`` (lane, position), by row."""
    rows = [(lane, position, n_rows) for lane, position in lanes]
    (crossing,) = stage.run(rows, np.array(tokens, np.int32))
    size = len(crossing.data) // len(tokens)
    return [bytes(crossing.data[i * size : (i + 1) * size]) for i in range(len(tokens))]


def prompt(n_tokens: int, seed: int) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(10, 5000, n_tokens)))


def prefill(stage: StageModel, lane: int, tokens: Sequence[int], chunks: Sequence[int]) -> list[bytes]:
    assert sum(chunks) == len(tokens)
    rows: list[bytes] = []
    for end, size in zip(accumulate(chunks), chunks, strict=True):
        rows += leaving(stage, [(lane, end - size)], tokens[end - size : end], size)
    return rows


CHUNKS = {
    100: [[64, 36]],
    320: [[64] * 5, [128, 192], [320], [256, 64]],
    513: [[64] * 8 + [1], [128] * 4 + [1], [256, 256, 1], [512, 1], [192, 64, 256, 1]],
    577: [[64] * 9 + [1], [256, 320, 1], [512, 64, 1], [64, 512, 1]],
    630: [[64] * 9 + [54], [128] * 4 + [64, 54], [320, 256, 54]],
}


@pytest.mark.parametrize("options", [ONE_THREAD, REPRODUCIBLE], ids=["one thread", "reproducible"])
@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_whole_multiples_of_64_can_be_cut_at_will(name: str, options: dict[str, Any]) -> None:
    """As long as the rest of less than 64 is a chunk of its own. Every row counts, and the next token's."""
    stage = first_layers(name, **options)
    for n_tokens, cuts in CHUNKS.items():
        tokens = prompt(n_tokens, n_tokens)
        seen = set()
        for lane, cut in enumerate(cuts):
            rows = prefill(stage, lane, tokens, cut)
            rows += leaving(stage, [(lane, n_tokens)], [7])
            seen.add(tuple(rows))
            stage.trim(lane, 0)
        assert len(seen) == 1, n_tokens


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_a_rest_joined_to_a_chunk_gets_other_bits(name: str) -> None:
    stage = first_layers(name, **ONE_THREAD)
    tokens = prompt(100, 0)
    assert prefill(stage, 0, tokens, [64, 36])[:64] == prefill(stage, 1, tokens, [100])[:64]
    assert prefill(stage, 2, tokens, [64, 36])[64:] != prefill(stage, 3, tokens, [100])[64:]


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_rows_of_sessions_of_many_lengths_within_the_class(name: str) -> None:
    stage = first_layers(name, **REPRODUCIBLE)
    found = row_class(measure_sizes(stage, 3600, {}), most_rows(stage))
    assert found.low == 1
    assert found.high == {"smollm2": LANES, "gemma3": 3}[name]
    lengths = [10, 700, 64, 300, 513, 129]
    for lane, n_tokens in enumerate(lengths):
        rest = [n_tokens % 64] if n_tokens % 64 else []
        prefill(stage, lane, prompt(n_tokens, lane), [64] * (n_tokens // 64) + rest)
    tokens = prompt(LANES, 99)
    alone = [leaving(stage, [(lane, lengths[lane])], [tokens[lane]])[0] for lane in range(LANES)]
    differing = 0
    for n_rows in range(1, LANES + 1):
        for first in range(LANES - n_rows + 1):
            lanes = range(first, first + n_rows)
            rows = leaving(stage, [(lane, lengths[lane]) for lane in lanes], [tokens[lane] for lane in lanes])
            if n_rows <= found.high:
                assert rows == [alone[lane] for lane in lanes]
            else:
                differing += sum(row != alone[lane] for row, lane in zip(rows, lanes, strict=True))
    assert (differing > 0) == (name == "gemma3")


@pytest.mark.parametrize("name", [SMOLLM2])
def test_a_lone_row_with_two_threads_is_another(name: str) -> None:
    """So the threads of a lone row are what --reproducible has to change."""
    stage = first_layers(name, threads=2)
    for lane in (0, 1):
        prefill(stage, lane, prompt(640, lane), [320, 320])
    alone = leaving(stage, [(0, 640)], [7])
    assert leaving(stage, [(0, 640), (1, 640)], [7, 8])[0] != alone[0]
