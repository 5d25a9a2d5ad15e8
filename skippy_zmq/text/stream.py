"""From token pieces to text, as early as possible and never taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from skippy_zmq.text.stops import StopFinder, check_stops


@dataclass(frozen=True, slots=True)
class Delta:
    """Text to send now, maybe none. ``stopped``: a stop string was met, this is the last text."""

    text: str
    stopped: bool


class TextStream:
    """Turns token pieces into text.

    A character is sent when its last byte is there. Bytes that are not UTF-8 become U+FFFD, one for each maximal broken
    sequence, as soon as it is known to be broken; a character still incomplete at the end becomes one U+FFFD. So the
    text is ``b"".join(pieces).decode("utf-8", "replace")``, however the bytes were split.

    Text ends before the stop string that is complete first; where several end with the same character, before the
    longest of them. A stop string that another one begins with therefore never comes into play. Only text that may
    still become a stop string is held back.

    Raises RequestError for stop strings that ``check_stops`` refuses.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        stops = check_stops(stop)
        self._finder = StopFinder(stops) if stops else None
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        return self._stopped

    def push(self, piece: bytes) -> Delta:
        """Take the bytes of the next token. After a stop there is no more text, whatever comes."""
        if self._stopped:
            return Delta("", True)
        return Delta(self._advance(self._decoder.decode(piece)), self._stopped)

    def finish(self) -> str:
        """No token follows: return the text that was held back. Nothing after a stop."""
        if self._stopped:
            return ""
        text = self._advance(self._decoder.decode(b"", final=True))
        if not self._stopped:
            text += self._held
        self._held = ""
        self._stopped = True
        return text

    def _advance(self, new: str) -> str:
        if self._finder is None:
            return new
        text = self._held + new
        for index, character in enumerate(new, start=len(self._held) + 1):
            length = self._finder.feed(character)
            if length:
                self._held = ""
                self._stopped = True
                return text[: index - length]
        sent = len(text) - self._finder.held
        self._held = text[sent:]
        return text[:sent]
