"""How many pages are under way, at one stage and at all of them."""

from __future__ import annotations

from skippy_zmq.client.page_window import (
    ALL_BYTES_UNDER_WAY,
    BYTES_UNDER_WAY,
    MESSAGE_BYTES,
    MESSAGES_UNDER_WAY,
    PageWindow,
)
from skippy_zmq.wire.limits import MAX_PAGES_AT_ONCE

SMALL = 1024


def fill(window: PageWindow) -> list[tuple[int, int]]:
    """Add as many pages as the window wants; their stages and numbers."""
    given = []
    while (turn := window.next()) is not None:
        window.add(*turn)
        given.append(turn)
    return given


def test_stages_take_turns_up_to_their_limit() -> None:
    assert fill(PageWindow([SMALL] * 2)) == [(0, MAX_PAGES_AT_ONCE), (1, MAX_PAGES_AT_ONCE)] * MESSAGES_UNDER_WAY


def test_the_next_message_goes_when_one_is_back() -> None:
    window = PageWindow([SMALL])
    given = fill(window)
    window.remove(*given[0])
    assert fill(window) == [(0, MAX_PAGES_AT_ONCE)]


def test_a_message_has_as_many_pages_as_its_bytes_allow() -> None:
    assert set(fill(PageWindow([MESSAGE_BYTES // 3]))) == {(0, 3)}
    assert set(fill(PageWindow([MESSAGE_BYTES]))) == {(0, 1)}
    assert set(fill(PageWindow([MESSAGE_BYTES + 1]))) == {(0, 1)}


def test_bytes_are_limited_at_a_stage_and_in_all() -> None:
    assert fill(PageWindow([BYTES_UNDER_WAY // 2])) == [(0, 1), (0, 1)]
    assert len(fill(PageWindow([BYTES_UNDER_WAY] * 64))) == ALL_BYTES_UNDER_WAY // BYTES_UNDER_WAY
    assert fill(PageWindow([ALL_BYTES_UNDER_WAY] * 2)) == [(0, 1)]


def test_every_stage_gets_all_its_pages() -> None:
    """A stage that waits for the room that others have gets its turn, whatever the sizes."""
    for size in (SMALL, BYTES_UNDER_WAY // 3, BYTES_UNDER_WAY, ALL_BYTES_UNDER_WAY):
        n_stages, left = 7, [40] * 7
        window = PageWindow([size] * n_stages)
        under_way: list[tuple[int, int]] = []
        while True:
            while (turn := window.next()) is not None:
                index, most = turn
                n_pages = min(most, left[index])
                if n_pages == 0:
                    window.finish(index)
                    continue
                left[index] -= n_pages
                window.add(index, n_pages)
                under_way.append((index, n_pages))
                assert sum(n * size for _, n in under_way) <= max(ALL_BYTES_UNDER_WAY, size)
            if not under_way:
                break
            window.remove(*under_way.pop(0))
        assert left == [0] * n_stages
