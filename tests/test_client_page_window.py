"""How many pages are under way, at one stage and at all of them."""

from __future__ import annotations

from skippy_zmq.client.page_window import ALL_BYTES_UNDER_WAY, BYTES_UNDER_WAY, PAGES_UNDER_WAY, PageWindow

SMALL = 1024


def fill(window: PageWindow, size: int | None) -> list[int]:
    """Add pages as long as the window wants some; their stages."""
    given = []
    while (index := window.next()) is not None:
        window.add(index, size)
        given.append(index)
    return given


def test_stages_take_turns_up_to_their_limit() -> None:
    assert fill(PageWindow(2), SMALL) == [0, 1] * PAGES_UNDER_WAY


def test_more_go_when_half_are_back() -> None:
    window = PageWindow(1)
    fill(window, SMALL)
    for _ in range(PAGES_UNDER_WAY - PAGES_UNDER_WAY // 2 - 1):
        window.remove(0)
        assert window.next() is None
    window.remove(0)
    assert fill(window, SMALL) == [0] * (PAGES_UNDER_WAY - PAGES_UNDER_WAY // 2)


def test_one_page_alone_until_its_size_is_known() -> None:
    window = PageWindow(1)
    assert fill(window, None) == [0]
    window.remove(0, SMALL)
    assert len(fill(window, None)) == PAGES_UNDER_WAY


def test_bytes_are_limited_at_a_stage_and_in_all() -> None:
    window = PageWindow(1)
    assert len(fill(window, BYTES_UNDER_WAY // 4)) == 4
    many = PageWindow(64)
    assert len(fill(many, BYTES_UNDER_WAY)) == ALL_BYTES_UNDER_WAY // BYTES_UNDER_WAY
    huge = PageWindow(1)
    assert fill(huge, ALL_BYTES_UNDER_WAY) == [0]


def test_every_stage_gets_all_its_pages() -> None:
    """A stage that waits for the room that others have gets its turn, whatever the sizes."""
    for size in (SMALL, BYTES_UNDER_WAY // 3, BYTES_UNDER_WAY, ALL_BYTES_UNDER_WAY):
        n_stages, left = 7, [40] * 7
        window = PageWindow(n_stages)
        under_way: list[int] = []
        while True:
            while (index := window.next()) is not None:
                if left[index] == 0:
                    window.finish(index)
                    continue
                left[index] -= 1
                window.add(index, size)
                under_way.append(index)
                assert sum(size for _ in under_way) <= max(ALL_BYTES_UNDER_WAY, size)
            if not under_way:
                break
            window.remove(under_way.pop(0), size)
        assert left == [0] * n_stages
