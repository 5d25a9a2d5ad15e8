"""Bit-for-bit comparison of the logits of a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from skippy_zmq.certify.workload import Logits, Step


@dataclass(frozen=True, slots=True)
class Difference:
    """``step`` and ``row`` (of that step's batch): where the first differing logits are; ``values``: how many differ.

    ``largest``: the largest absolute difference; None where it is no number.
    """

    step: str
    row: int
    values: int
    largest: float | None


def first_difference(steps: Sequence[Step], wanted: Logits, got: Logits) -> Difference | None:
    """None where all bits agree; both hold the rows of ``steps`` in order."""
    if wanted.shape != got.shape:
        raise ValueError(f"logits of shape {got.shape}: wanted {wanted.shape}")
    unequal = wanted.view(np.uint32) != got.view(np.uint32)
    if not unequal.any():
        return None
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(wanted[unequal].astype(np.float64) - got[unequal]).max())
    places = [(step.name, row) for step in steps for row in step.outputs]
    step, row = places[int(unequal.any(axis=1).argmax())]
    return Difference(step, row, int(unequal.sum()), largest if math.isfinite(largest) else None)


def emptiness(logits: Logits) -> str:
    """Why equality with these logits would prove nothing; empty where it proves something."""
    if np.isnan(logits).any():
        return "unsplit: llama.cpp's own logits are not numbers"
    if float(logits.min()) == float(logits.max()):
        return "unsplit: llama.cpp's own logits are all equal, so that nothing would show"
    return ""
