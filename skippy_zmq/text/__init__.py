"""Owns how the bytes of tokens become the text of an answer: whole characters, cut at stop strings.

Pure: no tokenizer, no model, no I/O. It does not decide when generation ends; it says that a stop string was met.
"""

from skippy_zmq.text.stops import MAX_STOP_BYTES, MAX_STOPS, check_stops
from skippy_zmq.text.stream import Delta, TextStream

__all__ = ["MAX_STOPS", "MAX_STOP_BYTES", "Delta", "TextStream", "check_stops"]
