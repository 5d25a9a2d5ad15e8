"""The row class of a stage: between which sizes of a decode batch a row's bits stay the same.

llama.cpp chooses kernels by the number of rows, so a row can get other bits beside three others than alone. Which sizes
are alike depends on the types of weights and caches, on the threads and on the machine. So it is measured, by this
stage's own layers, with made-up tensors from upstream and made-up contents of the caches.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from skippy_zmq.runtime.stage_model import StageModel

MOST_ROWS = 16  # larger batches are not tried
SHORT_CONTEXT = 8  # tokens
# From 257 tokens on CPU flash attention shares the cells of a lone row out among threads.
LONG_CONTEXT = 640
LONE_ROWS = 4  # that many different ones are tried

RowBits = dict[tuple[str, int], bytes]  # by tensor: name and occurrence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowClass:
    """Decode batches of ``low`` to ``high`` rows give every row the same bits.

    ``complete``: False where time ran out, so that further sizes might belong to it.
    """

    low: int = 1
    high: int = 1
    complete: bool = True

    def __str__(self) -> str:
        """In plain words, for the log."""
        if self.high == 1:
            text = "a row's bits are only known to be its own when it is computed alone"
        elif self.low == 1:
            text = f"a row has the same bits alone and beside up to {self.high - 1} others"
        else:
            text = f"a row has the same bits in every decode batch of {self.low} to {self.high} rows, but others alone"
        return text if self.complete else text + " (there was no time to try more)"


def most_rows(model: StageModel) -> int:
    """The largest size that is tried."""
    context = model.native_context
    return min(MOST_ROWS, context.lanes, context.n_ubatch, context.n_batch)


def measure_sizes(
    model: StageModel, seconds: float, known: Mapping[int, bool], *, clock: Callable[[], float] = time.monotonic
) -> dict[int, bool]:
    """Which sizes of a batch give a row the bits that it has in a batch of two, for row_class.

    Goes on from what is ``known`` for about ``seconds``; a size that was begun is finished. Empties every lane of
    ``model``. Each size is tried on lanes that hold few tokens, and on a mix of long and short lanes.
    """
    sizes = dict(known)
    start = clock()
    most = most_rows(model)
    trials = _Trials(model, most)
    try:
        while (size := _next_size(sizes, most)) is not None and clock() - start < seconds:
            if size != 2 and not trials.has_reference:
                trials.agree(2)
            sizes[size] = trials.agree(size)
    except (RuntimeError, ValueError) as error:
        log.info("the row class cannot be measured: %s", error)
        sizes[2] = False
    finally:
        model.native_context.forget_trials()
    return sizes


def row_class(sizes: Mapping[int, bool], most: int) -> RowClass:
    """The class of what was measured; ``most``: the largest size that counts.

    A lone row that differs from two stays outside, so that the class begins at 2, if more than that size is left.
    """
    complete = _next_size(sizes, most) is None
    high = 1
    while high < most and sizes.get(high + 1):
        high += 1
    if sizes.get(1) and high > 1:
        return RowClass(1, high, complete)
    # a lone row cannot be avoided, so its class is worth as much as another of one size
    return RowClass(2, high, complete) if 1 in sizes and high > 2 else RowClass(1, 1, complete)


def _next_size(sizes: Mapping[int, bool], most: int) -> int | None:
    """The next size whose trial can matter: 2, 1, 3, 4 ... up to the first that differs."""
    order: tuple[int, ...] = (2, 1, *range(3, most + 1))
    for size in order:
        if most == 1 or (size != 1 and sizes.get(size) is False):
            return None
        if size not in sizes:
            return size
    return None


class _Trials:
    """Runs rows on a stage, on each lane always the same one, and compares them with what they were in twos."""

    def __init__(self, model: StageModel, lanes: int) -> None:
        self._context = model.native_context
        self._lanes = lanes
        long = min(LONG_CONTEXT, model.n_ctx - 1)
        short = min(SHORT_CONTEXT, long)
        # Tokens held by the lanes: few, or lanes with many and with few in turn.
        self._contexts = ([short] * lanes, [short if lane % 2 else long for lane in range(lanes)])
        self._reference: dict[tuple[int, int], RowBits] = {}  # by lane and length

    @property
    def has_reference(self) -> bool:
        return bool(self._reference)

    def agree(self, size: int) -> bool:
        """Whether rows in batches of ``size`` have the bits that they have in batches of two, which must come first."""
        if size == 1:
            firsts = list(range(min(self._lanes, LONE_ROWS)))
        elif size == 2:
            firsts = sorted({*range(0, self._lanes - 1, 2), 1 if self._lanes > 2 else 0, self._lanes - 2})
        else:
            firsts = [0]
        return all(self._same_bits(lengths, first, size) for lengths in self._contexts for first in firsts)

    def _same_bits(self, lengths: Sequence[int], first: int, size: int) -> bool:
        self._hold(lengths, first, size)
        for lane, row in enumerate(self._context.trial(first, size), first):
            reference = self._reference.setdefault((lane, lengths[lane]), row)
            # A mask is among the tensors only where the longest lane of the batch is short; it is no result.
            common = row.keys() & reference.keys()
            if not common or any(row[key] != reference[key] for key in common):
                return False
        return True

    def _hold(self, lengths: Sequence[int], first: int, size: int) -> None:
        """Make lanes ``first`` to ``first + size`` hold as many made-up tokens as ``lengths`` says."""
        if not self._context.can_trim:  # the last trial went on from the states that the next one needs
            self._context.forget_trials()
        for lane in range(first, first + size):
            self._context.trim(lane, lengths[lane])
            while (missing := lengths[lane] - self._context.position(lane)) > 0:
                self._context.pretend(lane, min(missing, self._context.n_ubatch, self._context.n_batch))
