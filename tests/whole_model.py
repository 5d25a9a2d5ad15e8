"""What llama.cpp with the whole model computes when it is given the batches of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from skippy_zmq.certify.reference import Unsplit
from skippy_zmq.certify.workload import Settings, Step

CHUNK = 64


@dataclass(frozen=True, slots=True)
class Fed(Step):
    """A batch of given tokens on lane 0, whose last row's logits are wanted or not."""

    ids: tuple[int, ...] = ()

    def tokens(self, number: int, n_vocab: int) -> npt.NDArray[np.int32]:
        return np.array(self.ids, np.int32)


class Batches:
    """The batches of one lane; each token is run once."""

    def __init__(self) -> None:
        self.steps: list[Fed] = []
        self.position = 0

    def run(self, ids: Sequence[int], *, wanted: bool) -> None:
        rows = ((0, self.position, len(ids)),)
        self.steps.append(Fed("", rows, (len(ids) - 1,) if wanted else (), None, tuple(ids)))
        self.position += len(ids)

    def prompt(self, ids: Sequence[int]) -> None:
        """In chunks that end at multiples of CHUNK; the logits after it are wanted."""
        rest = tuple(ids)
        while rest:
            n_rows = min(len(rest), CHUNK - self.position % CHUNK)
            chunk, rest = rest[:n_rows], rest[n_rows:]
            self.run(chunk, wanted=not rest)

    def generated(self, ids: Sequence[int]) -> None:
        """One row at a time; the logits after each are wanted."""
        for token in ids:
            self.run((token,), wanted=True)

    def logits(self, model: Path, cache_type: str, n_ctx: int) -> npt.NDArray[np.float32]:
        """[wanted, n_vocab], by llama.cpp with flash attention and one thread."""
        settings = Settings("", cache_type, "on", 1)  # type: ignore[arg-type]
        with Unsplit(model, settings, n_ctx) as whole:
            return whole.run(self.steps, whole=True)
