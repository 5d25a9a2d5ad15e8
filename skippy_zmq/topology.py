"""Layer ranges: how contiguous half-open ranges tile a model. Pure arithmetic; owns no I/O and no model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from skippy_zmq.errors import OptionError

_RANGE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})\Z")


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Layers ``start`` (included) to ``end`` (excluded) of a model."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise OptionError(f"layer range {self.start}:{self.end}: wanted 0 <= start < end")

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def __len__(self) -> int:
        return self.end - self.start

    @classmethod
    def parse(cls, text: str) -> LayerRange:
        """Read ``"A:B"``; raise OptionError for anything else."""
        match = _RANGE.match(text.strip())
        if match is None:
            raise OptionError(f"layer range {text!r}: wanted A:B, for example 0:15")
        return cls(int(match[1]), int(match[2]))

    def within(self, n_layers: int) -> LayerRange:
        """Return self; raise OptionError where the model has fewer layers."""
        if self.end > n_layers:
            raise OptionError(
                f"layer range {self}: the model has {n_layers} layers, so the end can be at most {n_layers}"
            )
        return self


def split_at(boundaries: Sequence[int], n_layers: int) -> list[LayerRange]:
    """Ranges of a model of ``n_layers`` cut at ``boundaries`` (strictly increasing, between 1 and n_layers - 1)."""
    edges = [0, *boundaries, n_layers]
    if any(low >= high for low, high in itertools.pairwise(edges)):
        raise OptionError(
            f"split {','.join(map(str, boundaries))}: wanted increasing layer numbers between 1 and {n_layers - 1}"
        )
    return [LayerRange(low, high) for low, high in itertools.pairwise(edges)]


def split_evenly(n_stages: int, n_layers: int) -> list[LayerRange]:
    """``n_stages`` ranges whose lengths differ by at most one layer; the earlier stages get the longer ones."""
    if not 1 <= n_stages <= n_layers:
        raise OptionError(f"{n_stages} stages: the model has {n_layers} layers, so wanted 1 to {n_layers} stages")
    short, longer = divmod(n_layers, n_stages)
    return split_at([short * i + min(i, longer) for i in range(1, n_stages)], n_layers)
