from __future__ import annotations

import pytest

from skippy_zmq.errors import RequestError
from skippy_zmq.text import MAX_STOP_BYTES, MAX_STOPS, check_stops
from skippy_zmq.text.stops import StopFinder


def test_accepts_what_requests_use() -> None:
    assert check_stops([]) == ()
    assert check_stops(["a", "b", "c", "d", "e"]) == ("a", "b", "c", "d", "e")
    assert check_stops(["x"] * MAX_STOPS) == ("x",) * MAX_STOPS
    assert check_stops(["é" * (MAX_STOP_BYTES // 2)]) == ("é" * (MAX_STOP_BYTES // 2),)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], "empty"),
        (["a", ""], "empty"),
        (["x"] * (MAX_STOPS + 1), "17 strings"),
        (["é" * (MAX_STOP_BYTES // 2) + "x"], "257 bytes"),
        (["\ud83d"], "surrogate"),
        ("stop", "list of strings"),
        ([b"stop"], "list of strings"),
    ],
)
def test_refuses(stops: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        check_stops(stops)
    assert caught.value.code == "invalid_request"


def test_finder_falls_back_to_the_longest_prefix() -> None:
    finder = StopFinder(["abab!", "b?"])
    held = []
    for character in "ababab?":
        match = finder.feed(character)
        held.append(finder.held)
    assert held == [1, 2, 3, 4, 3, 4, 2]
    assert match == 2
