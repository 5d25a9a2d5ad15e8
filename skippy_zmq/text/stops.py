"""Stop strings: what is accepted, and an automaton that finds them in text that comes one character at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from skippy_zmq.errors import RequestError

MAX_STOPS = 16
MAX_STOP_BYTES = 256  # of UTF-8, each


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """Return ``stops`` as a tuple; raise RequestError for too many, or one that is empty, over-long or no text."""
    if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop: wanted a list of strings")
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: {len(stops)} strings, wanted at most {MAX_STOPS}")
    for stop in stops:
        if not stop:
            raise RequestError("stop: an empty string would stop before the first character")
        try:
            size = len(stop.encode())
        except UnicodeEncodeError:
            raise RequestError("stop: a lone surrogate is no text") from None
        if size > MAX_STOP_BYTES:
            raise RequestError(f"stop: a string of {size} bytes, wanted at most {MAX_STOP_BYTES}")
    return tuple(stops)


class StopFinder:
    """Aho-Corasick automaton over the stop strings.

    ``held`` is the length of the longest end of the text so far that a stop string may still continue.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Node 0 is the root; a node stands for the prefix of a stop string that leads to it.
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fallback = [0]  # node of the longest proper suffix that is a prefix too
        self._match = [0]  # length of the longest stop string that ends here, 0 if none does
        for stop in stops:
            self._add(stop)
        self._link()
        self._node = 0

    @property
    def held(self) -> int:
        return self._depth[self._node]

    def feed(self, character: str) -> int:
        """Take one character; return the length of the longest stop string that ends with it, 0 if none does."""
        node = self._node
        while node and character not in self._children[node]:
            node = self._fallback[node]
        self._node = self._children[node].get(character, 0)
        return self._match[self._node]

    def _add(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._children[node]:
                self._children[node][character] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._fallback.append(0)
                self._match.append(0)
            node = self._children[node][character]
        self._match[node] = len(stop)

    def _link(self) -> None:
        pending = deque(self._children[0].values())
        while pending:  # breadth first: a fallback is shorter, so it is complete
            node = pending.popleft()
            self._match[node] = self._match[node] or self._match[self._fallback[node]]
            for character, child in self._children[node].items():
                pending.append(child)
                fallback = self._fallback[node]
                while fallback and character not in self._children[fallback]:
                    fallback = self._fallback[fallback]
                self._fallback[child] = self._children[fallback].get(character, 0)
