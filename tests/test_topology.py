"""Layer ranges tile a model without gaps, or are refused by name."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.errors import OptionError
from skippy_zmq.topology import LayerRange, split_at, split_evenly


@given(st.integers(0, 999), st.integers(1, 999))
def test_a_range_reads_back_as_it_is_written(start: int, length: int) -> None:
    layers = LayerRange(start, start + length)
    assert LayerRange.parse(str(layers)) == layers
    assert len(layers) == length
    assert layers.within(start + length) is layers


@pytest.mark.parametrize(
    "text", ["", "3", ":", "1:", ":2", "-1:2", "1:2:3", "a:b", "1.0:2", "0x1:2", "1 :2", "1:2\n3", "1:9999999999"]
)
def test_what_is_not_a_range_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"layer range .*: wanted A:B, for example 0:15"):
        LayerRange.parse(text)


@pytest.mark.parametrize("text", ["0:0", "3:3", "4:2"])
def test_an_empty_range_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=f"layer range {text}: wanted 0 <= start < end"):
        LayerRange.parse(text)


def test_a_range_beyond_the_model_is_refused() -> None:
    with pytest.raises(OptionError, match="layer range 2:5: the model has 4 layers, so the end can be at most 4"):
        LayerRange(2, 5).within(4)


@given(st.integers(2, 300), st.data())
def test_ranges_cut_anywhere_tile_the_model(n_layers: int, data: st.DataObject) -> None:
    boundaries = sorted(data.draw(st.sets(st.integers(1, n_layers - 1), max_size=min(20, n_layers - 1))))
    ranges = split_at(boundaries, n_layers)
    assert [r.start for r in ranges] == [0, *boundaries]
    assert list(itertools.chain.from_iterable(range(r.start, r.end) for r in ranges)) == list(range(n_layers))


@pytest.mark.parametrize("boundaries", [[0], [4], [5], [2, 2], [3, 1], [-1]])
def test_cuts_that_leave_a_stage_without_layers_are_refused(boundaries: list[int]) -> None:
    with pytest.raises(OptionError, match="wanted increasing layer numbers between 1 and 3"):
        split_at(boundaries, 4)


@given(st.integers(1, 300), st.integers(1, 40))
def test_an_even_split_tiles_the_model(n_layers: int, n_stages: int) -> None:
    if n_stages > n_layers:
        with pytest.raises(OptionError, match=f"{n_stages} stages: the model has {n_layers} layers"):
            split_evenly(n_stages, n_layers)
        return
    ranges = split_evenly(n_stages, n_layers)
    lengths = [len(r) for r in ranges]
    assert len(ranges) == n_stages
    assert (ranges[0].start, ranges[-1].end) == (0, n_layers)
    assert all(one.end == other.start for one, other in itertools.pairwise(ranges))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_no_stages_is_refused() -> None:
    with pytest.raises(OptionError, match="0 stages"):
        split_evenly(0, 4)
