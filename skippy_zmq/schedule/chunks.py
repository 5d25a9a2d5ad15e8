"""How many rows of a prompt go into its next chunk.

Chunks end at multiples of 64 positions wherever the limit allows: with flash attention such chunks give the same bits
whatever their size, so a prompt's numbers do not depend on the policy nor on what else was running.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

CHUNK_STEP = 64  # rows
DEFAULT_TARGET_US = 100_000
_NEW_SHARE = 0.3  # of the latest chunk in what is remembered
# Of each size the quickest of some chunks counts, as whatever disturbs one makes it slower; and all is learnt anew now
# and then, as a size that once looked slow would not be tried again.
_FEWEST_READINGS = 2
_MOST_READINGS = 8
_PROMPTS_UNTIL_ANEW = 64


class ChunkPolicy(Protocol):
    """Sizes of prompt chunks, in rows."""

    @property
    def in_steps(self) -> bool:
        """Whether sizes are meant to be multiples of CHUNK_STEP."""

    def rows(self, position: int, n_prompt: int = 0, n_stages: int = 1) -> int:
        """Most rows of the chunk that begins at ``position`` of its prompt; at least 1.

        ``n_prompt``: tokens of all prompts under way, which have ``n_stages`` to themselves.
        """

    def observe(self, n_rows: int, slowest_us: int, position: int = 0) -> None:
        """A chunk of ``n_rows`` from ``position`` on took ``slowest_us`` at the slowest stage."""


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

    def rows(self, position: int, n_prompt: int = 0, n_stages: int = 1) -> int:
        start = 0
        for size in self.sizes:
            if position < start + size:
                return start + size - position
            start += size
        last = self.sizes[-1]
        return last - (position - start) % last

    def observe(self, n_rows: int, slowest_us: int, position: int = 0) -> None:
        """Sizes are given: nothing to learn."""


def next_chunk(policy: ChunkPolicy, position: int, n_left: int, n_prompt: int = 0, n_stages: int = 1) -> int:
    """Rows of the chunk at ``position`` of a prompt with ``n_left`` tokens from there on; else as ``policy.rows``.

    With steps, what is left beyond a multiple of CHUNK_STEP is a chunk of its own: joined to others, it would get other
    bits than where the policy cuts before it.
    """
    n_rows = policy.rows(position, n_prompt, n_stages)
    if n_rows < n_left or not policy.in_steps:
        return min(n_rows, n_left)
    rest = (position + n_left) % CHUNK_STEP
    return n_left - rest if rest < n_left else n_left


def fixed_chunks(n_rows: int) -> ScheduledChunks:
    """Every chunk has ``n_rows`` rows."""
    return ScheduledChunks((n_rows,))


@dataclass(slots=True)
class AdaptiveChunks:
    """Chunks of CHUNK_STEP to ``max_rows`` rows that take at most about ``target_us`` at the slowest stage.

    Starts with the smallest: on a large model a chunk of full size could hold everybody up for seconds. Where prompts
    have several stages to themselves, chunks are as small as brings the prompts to their end soonest: n chunks take the
    time of n + stages - 1, so small ones fill and drain the ring faster, but each costs something beside its rows.
    """

    max_rows: int
    target_us: int = DEFAULT_TARGET_US
    _rows_per_us: float = field(init=False, default=0.0)
    _us_per_row: dict[int, deque[float]] = field(init=False, default_factory=dict)  # by _size_class, at position 0
    _prompts: int = field(init=False, default=0)  # that readings are of

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.target_us < 1:
            raise ValueError(f"chunks of up to {self.max_rows} rows in {self.target_us} us: wanted at least 1 of each")

    @property
    def in_steps(self) -> bool:
        return True

    def rows(self, position: int, n_prompt: int = 0, n_stages: int = 1) -> int:
        wanted = max(CHUNK_STEP, int(self._rows_per_us * self.target_us))
        most = aligned(position, min(wanted, self.max_rows))
        if n_stages == 1 or most <= CHUNK_STEP:
            return most
        smaller = (CHUNK_STEP << doubled for doubled in range(_size_class(most) + 1))
        sizes = {aligned(position, size) for size in smaller if size < most} | {most}
        return min(sizes, key=lambda size: self._until_the_end(size, n_prompt, n_stages))

    def _until_the_end(self, n_rows: int, n_prompt: int, n_stages: int) -> float:
        """Microseconds for prompts of ``n_prompt`` tokens in chunks of ``n_rows``."""
        n_rows = max(1, min(n_rows, n_prompt))
        return (-(-n_prompt // n_rows) + n_stages - 1) * n_rows * self._expected_us_per_row(_size_class(n_rows))

    def _expected_us_per_row(self, size_class: int) -> float:
        """As seen; of a class that was hardly seen, as if more rows took no longer: so it is tried."""
        known = [seen for seen, us in self._us_per_row.items() if seen <= size_class and len(us) >= _FEWEST_READINGS]
        return min(self._us_per_row[max(known)]) / (1 << (size_class - max(known))) if known else 1.0

    def observe(self, n_rows: int, slowest_us: int, position: int = 0) -> None:
        if n_rows < CHUNK_STEP or slowest_us <= 0:
            return  # a remainder says little about chunks
        rate = n_rows / slowest_us
        share = _NEW_SHARE if self._rows_per_us else 1.0
        self._rows_per_us += share * (rate - self._rows_per_us)
        if position == 0:  # later ones take longer the more tokens are before them, and would not compare
            self._compare(_size_class(n_rows), 1 / rate)

    def _compare(self, size_class: int, us_per_row: float) -> None:
        self._prompts += 1
        if self._prompts % _PROMPTS_UNTIL_ANEW == 0:
            self._us_per_row.clear()
        self._us_per_row.setdefault(size_class, deque(maxlen=_MOST_READINGS)).append(us_per_row)


def _size_class(n_rows: int) -> int:
    """0 for less than 2 CHUNK_STEP rows, 1 for less than 4, 2 for less than 8 and so on."""
    return max(0, (n_rows // CHUNK_STEP).bit_length() - 1)
