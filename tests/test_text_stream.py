from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_zmq.errors import RequestError
from skippy_zmq.text import Delta, TextStream

# Replacement characters that come of the first bytes of one that never ends: each byte may make one, as in ED A0.
INCOMPLETE = 3


def stream(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """Texts of all deltas, the flush last, and whether a stop string was met."""
    text_stream = TextStream(stop)
    texts = []
    stopped = False
    for piece in pieces:
        delta = text_stream.push(piece)
        texts.append(delta.text)
        stopped = delta.stopped
        if stopped:
            break
    texts.append(text_stream.finish())
    return texts, stopped


def one_by_one(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def reference(data: bytes, stops: Sequence[str]) -> str:
    """The definition: text up to the stop string that is complete first, the longest of those."""
    text = data.decode("utf-8", "replace")
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))]
    return text


@pytest.mark.parametrize(
    "text", ["🦜", "🦜🐢", "🇨🇭", "e\u0301a\u0308", "漢字かな", "a🦜b", "👩\u200d👩\u200d👧", "\U0010ffff\u0000\u007f"]
)
def test_characters_split_across_tokens(text: str) -> None:
    texts, _ = stream(one_by_one(text.encode()))
    assert "".join(texts) == text
    assert [t for t in texts if t] == list(text)  # each as soon as it is whole
    assert all(json.loads(json.dumps(t)) == t for t in texts)


@pytest.mark.parametrize("n_bytes", [1, 2, 3])
def test_incomplete_tail_is_one_replacement_character(n_bytes: int) -> None:
    data = "x🦜".encode()[: 1 + n_bytes]
    texts, stopped = stream(one_by_one(data))
    assert "".join(texts) == "x\ufffd"
    assert texts[-1] == "\ufffd"
    assert not stopped
    assert "".join(stream([data])[0]) == "x\ufffd"


def test_an_invalid_byte_does_not_wait() -> None:
    text_stream = TextStream()
    assert text_stream.push(b"\xff") == Delta("\ufffd", False)
    assert text_stream.push(b"\xf0") == Delta("", False)
    assert text_stream.push(b"ok") == Delta("\ufffdok", False)
    assert text_stream.push(b"\xc3") == Delta("", False)
    assert text_stream.push(b"\xc3\xa9") == Delta("\ufffdé", False)
    assert text_stream.finish() == ""


def test_a_stop_string_right_behind_an_emoji() -> None:
    assert stream(one_by_one("hi 🦜END more".encode()), ["END"]) == (
        ["h", "i", " ", "", "", "", "🦜", "", "", "", ""],
        True,
    )


PARROT = "alpha beta gamma"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["ta ga"], "alpha be"),
        (["beta X"], PARROT),
        (["gamma"], "alpha beta "),
        (["a"], ""),
        (["amma"], "alpha beta g"),
        (["be", "beta"], "alpha "),
        (["beta", "be"], "alpha "),
        (["eta", "beta"], "alpha "),
        (["mm", "gamma!", "zz", "gammo", "mma"], "alpha beta ga"),
        (["alpha beta gamma"], ""),
        (["alpha beta gamma."], PARROT),
        ([" "], "alpha"),
        (["ALPHA"], PARROT),
    ],
)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 100])
def test_stop_strings_split_across_tokens(stops: list[str], expected: str, width: int) -> None:
    data = PARROT.encode()
    texts, stopped = stream([data[i : i + width] for i in range(0, len(data), width)], stops)
    assert "".join(texts) == expected
    assert stopped == (expected != PARROT)


def test_a_stop_string_in_the_middle_of_an_emoji_sequence() -> None:
    family = "👩\u200d👩\u200d👧"
    texts, stopped = stream(one_by_one(family.encode()), ["\u200d👧"])
    assert ("".join(texts), stopped) == ("👩\u200d👩", True)


def test_held_back_text_comes_as_soon_as_it_cannot_match() -> None:
    text_stream = TextStream(["beta X", "tango"])
    assert [text_stream.push(p.encode()).text for p in ["a be", "ta ", "g", "t", "an"]] == ["a ", "", "beta g", "", ""]
    assert text_stream.finish() == "tan"


def test_an_incomplete_tail_can_complete_a_stop_string() -> None:
    assert stream([b"ab", b"\xf0\x9f"], ["b\ufffd"])[0] == ["a", "", ""]


def test_nothing_follows_a_stop() -> None:
    text_stream = TextStream(["b"])
    assert text_stream.push(b"abc") == Delta("a", True)
    assert text_stream.push(b"d") == Delta("", True)
    assert text_stream.finish() == ""
    assert text_stream.stopped


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_empty_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(RequestError):
        TextStream(stops)


texts_of_few_letters = st.text(alphabet="ab🦜\u0301\ufffd", max_size=6)
byte_strings = st.one_of(
    st.binary(max_size=40),
    st.text(alphabet="ab🦜\u0301\ufffd", max_size=40).map(str.encode),
    st.lists(st.sampled_from([b"a", b"b", b"\xf0", b"\x9f\xa6", b"\x9c", b"\xff", b"\xe2\x82"])).map(b"".join),
)
some_stops = st.lists(texts_of_few_letters.filter(bool), max_size=5)


@given(byte_strings, st.lists(st.integers(0, 40)), some_stops)
def test_any_split_gives_the_text_of_the_whole(data: bytes, cuts: list[int], stops: list[str]) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
    pieces = [data[low:high] for low, high in itertools.pairwise(edges)]
    whole = data.decode("utf-8", "replace")
    expected = reference(data, stops)

    text_stream = TextStream(stops)
    sent = ""
    for piece in pieces:
        delta = text_stream.push(piece)
        sent += delta.text
        assert expected.startswith(sent)
        if delta.stopped:
            assert sent == expected
    held_back = len(expected) - len(sent)
    assert held_back <= max([0, *map(len, stops)]) + INCOMPLETE
    sent += text_stream.finish()

    assert sent == expected
    assert whole.startswith(sent)


@given(st.binary(max_size=40))
def test_without_stop_strings_only_an_incomplete_character_is_held_back(data: bytes) -> None:
    text_stream = TextStream()
    sent = "".join(text_stream.push(byte).text for byte in one_by_one(data))
    whole = data.decode("utf-8", "replace")
    assert whole.startswith(sent)
    held_back = whole.removeprefix(sent)
    assert held_back == "\ufffd" * len(held_back)
    assert len(held_back) <= INCOMPLETE
