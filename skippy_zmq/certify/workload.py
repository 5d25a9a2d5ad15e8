"""What is run and compared: the settings, and one fixed script of batches on three lanes. Pure; opens nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from skippy_zmq.errors import ModelFileError
from skippy_zmq.runtime.options import CacheType, StageOptions
from skippy_zmq.sources.gguf_model import GgufModel

LaneRows = tuple[int, int, int]  # lane, position, number of rows
Logits = npt.NDArray[np.float32]  # [compared rows of all steps of a script, n_vocab]

LANES = 3
N_CTX = 256
N_UBATCH = 64
SHORTEST_CTX = 48  # tokens; the script needs room for its prompt, a second chunk and some steps


@dataclass(frozen=True, slots=True)
class Settings:
    """How both sides run. ``cache_type`` is used for K and V."""

    name: str
    cache_type: CacheType
    flash_attn: Literal["on", "off"]
    threads: int


PLAIN = Settings("f32 cache, no flash attention", "f32", "off", 1)
DEFAULTS = Settings("defaults", "f16", "on", 1)
DEFAULTS_TWO_THREADS = Settings("defaults, 2 threads", "f16", "on", 2)
ALL_SETTINGS = (PLAIN, DEFAULTS, DEFAULTS_TWO_THREADS)


@dataclass(frozen=True, slots=True)
class Step:
    """One batch. ``outputs``: rows whose logits are compared. ``forget``: (lane, position) to trim to before it."""

    name: str
    rows: tuple[LaneRows, ...]
    outputs: tuple[int, ...]
    forget: tuple[int, int] | None = None

    @property
    def n_rows(self) -> int:
        return sum(count for _, _, count in self.rows)

    def tokens(self, number: int, n_vocab: int) -> npt.NDArray[np.int32]:
        """Ids [n_rows] int32 of the step that is ``number`` in its script; no step repeats another's."""
        values = [(37 * i + 101 * number + 11) % n_vocab for i in range(self.n_rows)]
        return np.array(values, dtype=np.int32)


def context_size(source: GgufModel) -> int:
    """Tokens a lane gets; raise ModelFileError where the model cannot hold the script."""
    size = N_CTX if source.n_positions is None else min(N_CTX, source.n_positions)
    if size < SHORTEST_CTX:
        raise ModelFileError(f"{source.path}: {size} positions are too few to compare: wanted at least {SHORTEST_CTX}")
    return size


def stage_options(settings: Settings, n_ctx: int) -> StageOptions:
    return StageOptions(
        ctx_size=n_ctx,
        lanes=LANES,
        batch_size=N_UBATCH,
        ubatch_size=N_UBATCH,
        threads=settings.threads,
        cache_type_k=settings.cache_type,
        cache_type_v=settings.cache_type,
        flash_attn=settings.flash_attn,
    )


def script(n_ctx: int, *, can_trim: bool) -> tuple[Step, ...]:
    """Prompt, second chunk, decode steps, lanes together and apart, a trim (or a cleared lane), a lane used again."""
    prompt = min(40, n_ctx // 3)
    chunk = min(24, n_ctx // 4)
    held = prompt + chunk
    steps = [
        _step("prompt", (0, 0, prompt)),
        Step("second chunk", ((0, prompt, chunk),), (chunk - 1,)),
        *(_step("decode", (0, held + i, 1)) for i in range(2)),
        _step("two lanes, equal rows", (1, 0, 7), (2, 0, 7)),
        *(_step("three lanes, one row each", (0, held + 2 + i, 1), (1, 7 + i, 1), (2, 7 + i, 1)) for i in range(2)),
        _step("three lanes, unequal rows", (0, held + 4, 5), (1, 9, 2), (2, 9, 1)),
        _step("lanes that are no neighbours", (0, held + 9, 1), (2, 10, 1)),
    ]
    if can_trim:
        steps.append(_step("after a trim", (0, prompt - 5, 4), forget=(0, prompt - 5)))
        at = prompt - 1
    else:
        steps.append(_step("after a clear", (0, 0, 4), forget=(0, 0)))
        at = 4
    steps += [
        _step("lane used again", (1, 0, 9), forget=(1, 0)),
        _step("decode of all lanes", (0, at, 1), (1, 9, 1), (2, 11, 1)),
    ]
    return tuple(steps)


def _step(name: str, *rows: LaneRows, forget: tuple[int, int] | None = None) -> Step:
    return Step(name, rows, tuple(range(sum(count for _, _, count in rows))), forget)


def micro_batches(rows: Sequence[LaneRows]) -> list[tuple[LaneRows, ...]]:
    """The groups that a stage computes at once: neighbouring lanes with equal row counts."""
    groups: list[list[LaneRows]] = [[rows[0]]]
    for before, entry in pairwise(rows):
        if entry[0] == before[0] + 1 and entry[2] == before[2]:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [tuple(group) for group in groups]
