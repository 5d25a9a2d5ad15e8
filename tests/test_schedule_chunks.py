"""Sizes of prompt chunks: within their limit, at multiples of 64, as long as wanted at the slowest stage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.schedule.chunks import (
    CHUNK_STEP,
    AdaptiveChunks,
    ChunkPolicy,
    ScheduledChunks,
    aligned,
    fixed_chunks,
    next_chunk,
)
from skippy_zmq.schedule.scheduler import Scheduler


def _chunks(policy: ChunkPolicy, n_tokens: int, us_per_row: float = 1000.0) -> list[int]:
    """Of one prompt; each is run before the next begins."""
    sizes: list[int] = []
    while (position := sum(sizes)) < n_tokens:
        sizes.append(next_chunk(policy, position, n_tokens - position))
        policy.observe(sizes[-1], round(sizes[-1] * us_per_row))
    return sizes


def _with_rest(sizes: list[int], *, in_steps: bool) -> list[int]:
    """With steps, what is beyond the last multiple of 64 is a chunk of its own."""
    *before, last = sizes
    rest = last % CHUNK_STEP if in_steps else 0
    return [*before, last - rest, rest] if 0 < rest < last else sizes


@given(st.integers(1, 600) | st.sampled_from([64, 128, 512]), st.integers(1, 3000))
def test_fixed_chunks_have_one_size(n_rows: int, n_tokens: int) -> None:
    whole, rest = divmod(n_tokens, n_rows)
    sizes = [n_rows] * whole + [rest] * bool(rest)
    assert _chunks(fixed_chunks(n_rows), n_tokens) == _with_rest(sizes, in_steps=n_rows % CHUNK_STEP == 0)


@given(
    st.lists(st.integers(1, 600), min_size=1, max_size=5) | st.lists(st.sampled_from([64, 128, 256]), min_size=1),
    st.integers(1, 4000),
)
def test_a_schedule_is_followed_and_its_last_size_repeats(sizes: list[int], n_tokens: int) -> None:
    wanted: list[int] = []
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        wanted.append(min(size, n_tokens - sum(wanted)))
        if sum(wanted) == n_tokens:
            break
    in_steps = all(size % CHUNK_STEP == 0 for size in sizes)
    assert _chunks(ScheduledChunks(tuple(sizes)), n_tokens) == _with_rest(wanted, in_steps=in_steps)


@given(st.integers(1, 4000), st.integers(1, 10**6), st.floats(1, 10**5), st.sampled_from([64, 128, 256, 512]))
def test_rows_have_the_same_neighbours_of_their_64_under_every_policy(
    n_tokens: int, target_us: int, us_per_row: float, n_rows: int
) -> None:
    """Flash attention computes 64 rows alike, and what is less in another way."""
    for policy in (AdaptiveChunks(512, target_us), fixed_chunks(n_rows), ScheduledChunks((128, 256, 512))):
        *whole, last = _chunks(policy, n_tokens, us_per_row)
        assert all(size % CHUNK_STEP == 0 for size in whole)
        assert last % CHUNK_STEP in (0, last)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(0, 60))
def test_a_prompt_that_begins_in_the_middle_keeps_to_the_schedule(sizes: list[int], position: int) -> None:
    ends = itertools.accumulate(itertools.chain(sizes, itertools.repeat(sizes[-1])))
    policy = ScheduledChunks(tuple(sizes))
    assert position + policy.rows(position) == next(end for end in ends if end > position)


@given(st.integers(0, 5000), st.integers(1, 2000))
def test_chunks_end_at_multiples_of_64_within_reach(position: int, n_rows: int) -> None:
    rows = aligned(position, n_rows)
    assert 1 <= rows <= n_rows
    multiples = [end for end in range(position + 1, position + n_rows + 1) if end % CHUNK_STEP == 0]
    assert position + rows == (multiples[-1] if multiples else position + n_rows)


@given(st.integers(1, 2048), st.integers(1, 10**6), st.floats(1, 10**5), st.integers(1, 6000))
def test_adaptive_chunks_keep_to_their_limit_and_to_multiples_of_64(
    max_rows: int, target_us: int, us_per_row: float, n_tokens: int
) -> None:
    chunks = _chunks(AdaptiveChunks(max_rows, target_us), n_tokens, us_per_row)
    assert max(chunks) <= max_rows
    assert chunks[0] == min(CHUNK_STEP, max_rows, n_tokens)
    ends = list(itertools.accumulate(chunks))
    assert ends[-1] == n_tokens
    if max_rows >= CHUNK_STEP:
        assert all(end % CHUNK_STEP == 0 for end in ends[:-1])


@given(st.floats(10, 10_000), st.floats(10, 10_000), st.integers(1000, 500_000))
def test_adaptive_chunks_take_the_time_wanted_and_follow_a_change(before: float, after: float, target_us: int) -> None:
    policy = AdaptiveChunks(4096, target_us)
    for us_per_row in (before, after):
        for _ in range(60):
            policy.observe(CHUNK_STEP, round(CHUNK_STEP * us_per_row))
        wanted = min(max(target_us / us_per_row, CHUNK_STEP), 4096)
        assert wanted - CHUNK_STEP - wanted / 50 <= policy.rows(0) <= wanted + wanted / 50


def test_remainders_and_times_of_nothing_teach_nothing() -> None:
    policy = AdaptiveChunks(512, 100_000)
    policy.observe(128, 64_000)
    before = policy.rows(0)
    policy.observe(CHUNK_STEP - 1, 1)
    policy.observe(512, 0)
    assert policy.rows(0) == before == 192


@pytest.mark.parametrize("sizes", [(), (0,), (64, -1)])
def test_a_schedule_without_rows_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="wanted at least one, each of at least 1 row"):
        ScheduledChunks(sizes)


@pytest.mark.parametrize(("max_rows", "target_us"), [(0, 1), (1, 0)])
def test_adaptive_chunks_without_rows_or_time_are_refused(max_rows: int, target_us: int) -> None:
    with pytest.raises(ValueError, match="wanted at least 1 of each"):
        AdaptiveChunks(max_rows, target_us)


# ---- prompts that have the stages to themselves


def _settled(begin_us: int, n_tokens: int, n_stages: int, target_us: int = 10**9) -> AdaptiveChunks:
    """After prompts of ``n_tokens`` whose chunks took ``begin_us`` and 1000 us per row."""
    policy = AdaptiveChunks(512, target_us)
    for _ in range(40):
        position = 0
        while position < n_tokens:
            n_rows = next_chunk(policy, position, n_tokens - position, n_tokens, n_stages)
            policy.observe(n_rows, begin_us + 1000 * n_rows, position)
            position += n_rows
    return policy


def _until_the_end(n_rows: int, begin_us: int, n_tokens: int, n_stages: int) -> int:
    """The time of as many chunks one after the other, and of the last one at all but one of the stages."""
    return (-(-n_tokens // n_rows) + n_stages - 1) * (begin_us + 1000 * n_rows)


@given(st.integers(0, 200_000), st.integers(1, 64), st.integers(2, 6))
def test_chunks_of_prompts_alone_bring_them_soon_to_their_end(begin_us: int, n_steps: int, n_stages: int) -> None:
    n_tokens = CHUNK_STEP * n_steps
    policy = _settled(begin_us, n_tokens, n_stages)
    sizes = [size for size in (64, 128, 256, 512) if size < n_tokens] + [min(512, n_tokens)]
    times = {size: _until_the_end(size, begin_us, n_tokens, n_stages) for size in sizes}
    n_rows = next_chunk(policy, 0, n_tokens, n_tokens, n_stages)
    took = _until_the_end(n_rows, begin_us, n_tokens, n_stages)
    # Exactly, but where all is one chunk between two doubled sizes, which passes for the smaller of them.
    assert took == min(times.values()) or (n_tokens < 512 and took <= 1.5 * min(times.values()))


def test_a_chunk_that_costs_little_beside_its_rows_is_small_for_a_short_prompt() -> None:
    assert _settled(5000, 512, 2).rows(0, 512, 2) == 64
    assert _settled(5000, 8192, 2).rows(0, 8192, 2) >= 128
    assert _settled(500_000, 512, 2).rows(0, 512, 2) == 512


def test_smaller_chunks_are_for_several_stages_and_prompts_alone() -> None:
    """With one stage, or beside decoding lanes, which count as one, nothing is won by them."""
    policy = _settled(0, 512, 2)
    assert policy.rows(0, 512, 2) == 64
    assert policy.rows(0, 512, 1) == policy.rows(0) == 512


@pytest.mark.parametrize(("n_stages", "decodes", "wanted"), [(2, False, 64), (2, True, 512), (1, False, 512)])
def test_the_scheduler_says_what_a_prompt_shares_the_stages_with(n_stages: int, decodes: bool, wanted: int) -> None:
    scheduler = Scheduler(2, 512, _settled(0, 512, 2), n_stages)
    if decodes:
        scheduler.start("decodes", [1])
        first = scheduler.next_batch()
        assert first is not None
        scheduler.batch_done(first.number)
        scheduler.feed("decodes", 1, 1)
        step = scheduler.next_batch()
        assert step is not None
        assert step.phase == "decode"
    scheduler.start("prompt", range(512))
    chunk = scheduler.next_batch()
    assert chunk is not None
    assert (chunk.phase, len(chunk.tokens)) == ("prefill", wanted)


@given(st.integers(0, 5000), st.integers(0, 100_000), st.integers(1, 8), st.integers(1, 2048))
def test_sizes_for_a_ring_keep_to_the_limits_and_to_multiples_of_64(
    position: int, n_prompt: int, n_stages: int, max_rows: int
) -> None:
    policy = AdaptiveChunks(max_rows)
    policy.observe(128, 128_000)
    rows = policy.rows(position, n_prompt, n_stages)
    assert 1 <= rows <= policy.rows(position)
    if max_rows >= CHUNK_STEP:
        assert (position + rows) % CHUNK_STEP == 0
