"""How many rows of a prompt go into its next chunk.

Chunks end at multiples of 64 positions wherever the limit allows: with flash attention such chunks give the same bits
whatever their size, so a prompt's numbers do not depend on the policy nor on what else was running.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

CHUNK_STEP = 64  # rows
DEFAULT_TARGET_US = 100_000
_NEW_SHARE = 0.3  # of the latest chunk in the running rate


class ChunkPolicy(Protocol):
    """Sizes of prompt chunks, in rows."""

    @property
    def in_steps(self) -> bool:
        """Whether sizes are meant to be multiples of CHUNK_STEP."""

    def rows(self, position: int) -> int:
        """Most rows of the chunk that begins at ``position`` of its prompt; at least 1."""

    def observe(self, n_rows: int, slowest_us: int) -> None:
        """A chunk of ``n_rows`` took ``slowest_us`` at the slowest stage."""


def aligned(position: int, n_rows: int) -> int:
    """At most ``n_rows`` from ``position`` on, ending at a multiple of CHUNK_STEP where one is within reach."""
    end = (position + n_rows) // CHUNK_STEP * CHUNK_STEP
    return end - position if end > position else n_rows


@dataclass(frozen=True, slots=True)
class ScheduledChunks:
    """The first chunk of a prompt has ``sizes[0]`` rows, the next ``sizes[1]`` and so on; the last size repeats."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"chunk sizes {list(self.sizes)}: wanted at least one, each of at least 1 row")

    @property
    def in_steps(self) -> bool:
        return all(size % CHUNK_STEP == 0 for size in self.sizes)

    def rows(self, position: int) -> int:
        start = 0
        for size in self.sizes:
            if position < start + size:
                return start + size - position
            start += size
        last = self.sizes[-1]
        return last - (position - start) % last

    def observe(self, n_rows: int, slowest_us: int) -> None:
        """Sizes are given: nothing to learn."""


def next_chunk(policy: ChunkPolicy, position: int, n_left: int) -> int:
    """Rows of the chunk at ``position`` of a prompt with ``n_left`` tokens from there on.

    With steps, what is left beyond a multiple of CHUNK_STEP is a chunk of its own: joined to others, it would get other
    bits than where the policy cuts before it.
    """
    n_rows = policy.rows(position)
    if n_rows < n_left or not policy.in_steps:
        return min(n_rows, n_left)
    rest = (position + n_left) % CHUNK_STEP
    return n_left - rest if rest < n_left else n_left


def fixed_chunks(n_rows: int) -> ScheduledChunks:
    """Every chunk has ``n_rows`` rows."""
    return ScheduledChunks((n_rows,))


@dataclass(slots=True)
class AdaptiveChunks:
    """Chunks that take about ``target_us`` at the slowest stage, from CHUNK_STEP rows to ``max_rows``.

    Starts with the smallest: on a large model a chunk of full size could hold everybody up for seconds.
    """

    max_rows: int
    target_us: int = DEFAULT_TARGET_US
    _rows_per_us: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.target_us < 1:
            raise ValueError(f"chunks of up to {self.max_rows} rows in {self.target_us} us: wanted at least 1 of each")

    @property
    def in_steps(self) -> bool:
        return True

    def rows(self, position: int) -> int:
        wanted = max(CHUNK_STEP, int(self._rows_per_us * self.target_us))
        return aligned(position, min(wanted, self.max_rows))

    def observe(self, n_rows: int, slowest_us: int) -> None:
        if n_rows < CHUNK_STEP or slowest_us <= 0:
            return  # a remainder says little about chunks
        rate = n_rows / slowest_us
        share = _NEW_SHARE if self._rows_per_us else 1.0
        self._rows_per_us += share * (rate - self._rows_per_us)
