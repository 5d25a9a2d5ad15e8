"""An error keeps its code, class and words across the wire, and no text of an error can stop its report."""

from __future__ import annotations

import inspect

import pytest

from skippy_zmq import errors
from skippy_zmq.errors import SkippyError
from skippy_zmq.wire import limits
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.failures import clipped, error_message, exception_of
from skippy_zmq.wire.messages import Error

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, SkippyError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_travels_with_its_code(cls: type[SkippyError]) -> None:
    sent = error_message(cls("lane 3: wanted this, got that"), "r-1")
    back, _ = decode(encode(sent))
    assert isinstance(back, Error)
    again = exception_of(back)
    assert again.code == cls.code
    assert str(again) == "lane 3: wanted this, got that"
    assert isinstance(again, errors.RetryableError) == issubclass(cls, errors.RetryableError)
    assert again.exit_code == cls.exit_code


@pytest.mark.parametrize("code", limits.ERROR_CODES)
def test_every_code_becomes_an_exception_that_agrees_on_retrying(code: str) -> None:
    sent = error_message(SkippyError("words", code=code))
    assert sent.code == code
    assert isinstance(exception_of(sent), errors.RetryableError) == limits.ERROR_CODES[code].retry


@pytest.mark.parametrize(
    "text", ["", "x" * 100_000, "é" * 100_000, "🦙" * 2000, "half \ud83e of a pair", "x" * 4095 + "é", "a\nb"]
)
def test_any_text_can_be_reported(text: str) -> None:
    sent = error_message(errors.NativeError(text), "r" * 500)
    back, _ = decode(encode(sent))
    assert back == sent
    assert len(sent.message.encode()) <= limits.MAX_ERROR_BYTES


def test_a_bug_is_reported_without_its_details() -> None:
    sent = error_message(KeyError("secret"))
    assert (sent.code, sent.retry) == ("internal", False)
    assert "secret" not in sent.message


def test_a_code_of_no_list_becomes_internal() -> None:
    assert error_message(SkippyError("x", code="made_up")).code == "internal"


def test_clipping_keeps_what_fits_and_cuts_between_characters() -> None:
    assert clipped("short") == "short"
    assert clipped("é" * 10, 20) == "é" * 10
    assert clipped("é" * 11, 21) == "é" * 8 + " ..."
