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


def known(n_stages: int, size: int) -> PageWindow:
    """A window that has seen a page of each stage come and go."""
    window = PageWindow(n_stages)
    for index in range(n_stages):
        window.add(index, 1)
        window.remove(index, 1, size)
    return window


def fill(window: PageWindow) -> list[tuple[int, int]]:
    """Add as many pages as the window wants; their stages and numbers."""
    given = []
    while (turn := window.next()) is not None:
        window.add(*turn)
        given.append(turn)
    return given


def test_stages_take_turns_up_to_their_limit() -> None:
    assert fill(known(2, SMALL)) == [(0, MAX_PAGES_AT_ONCE), (1, MAX_PAGES_AT_ONCE)] * MESSAGES_UNDER_WAY


def test_the_next_message_goes_when_one_is_back() -> None:
    window = known(1, SMALL)
    given = fill(window)
    window.remove(*given[0])
    assert fill(window) == [(0, MAX_PAGES_AT_ONCE)]


def test_a_message_has_as_many_pages_as_its_bytes_allow() -> None:
    assert set(fill(known(1, MESSAGE_BYTES // 3))) == {(0, 3)}
    assert set(fill(known(1, MESSAGE_BYTES))) == {(0, 1)}
    assert set(fill(known(1, MESSAGE_BYTES + 1))) == {(0, 1)}


def test_one_page_alone_until_its_size_is_known() -> None:
    window = PageWindow(1)
    assert fill(window) == [(0, 1)]
    window.remove(0, 1, SMALL)
    assert len(fill(window)) == MESSAGES_UNDER_WAY
    of_known_size = PageWindow(1)
    of_known_size.add(0, 1, SMALL)
    assert len(fill(of_known_size)) == MESSAGES_UNDER_WAY - 1


def test_a_last_smaller_page_does_not_make_the_others_small() -> None:
    window = known(1, BYTES_UNDER_WAY)
    window.add(0, 1, SMALL)
    assert fill(window) == []


def test_bytes_are_limited_at_a_stage_and_in_all() -> None:
    assert fill(known(1, BYTES_UNDER_WAY // 2)) == [(0, 1), (0, 1)]
    assert len(fill(known(64, BYTES_UNDER_WAY))) == ALL_BYTES_UNDER_WAY // BYTES_UNDER_WAY
    assert fill(known(2, ALL_BYTES_UNDER_WAY)) == [(0, 1)]


def test_every_stage_gets_all_its_pages() -> None:
    """A stage that waits for the room that others have gets its turn, whatever the sizes."""
    for size in (SMALL, BYTES_UNDER_WAY // 3, BYTES_UNDER_WAY, ALL_BYTES_UNDER_WAY):
        n_stages, left = 7, [40] * 7
        window = PageWindow(n_stages)
        under_way: list[tuple[int, int]] = []
        while True:
            while (turn := window.next()) is not None:
                index, most = turn
                n_pages = min(most, left[index])
                if n_pages == 0:
                    window.finish(index)
                    continue
                left[index] -= n_pages
                window.add(index, n_pages, size)
                under_way.append((index, n_pages))
                assert sum(n * size for _, n in under_way) <= max(ALL_BYTES_UNDER_WAY, size)
            if not under_way:
                break
            window.remove(*under_way.pop(0), size)
        assert left == [0] * n_stages
