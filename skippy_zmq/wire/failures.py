"""Exceptions to ERROR messages and back, so that an error keeps its code and its class across the wire."""

from __future__ import annotations

from collections.abc import Mapping

from skippy_zmq import errors
from skippy_zmq.wire.limits import ERROR_CODES, MAX_ERROR_BYTES, MAX_NAME_BYTES
from skippy_zmq.wire.messages import Error

_CUT = " ..."
_CLASSES: Mapping[str, type[errors.SkippyError]] = {
    **dict.fromkeys(("protocol", "too_large", "unknown_kind", "generation_mismatch"), errors.ProtocolError),
    **dict.fromkeys(
        ("handshake", "model_mismatch", "layer_mismatch", "crossing_mismatch", "settings_mismatch"),
        errors.HandshakeError,
    ),
    "peer": errors.PeerError,
    "busy": errors.BusyError,
    "deadline": errors.DeadlineError,
    "stage_lost": errors.StageLostError,
    "bad_model_file": errors.ModelFileError,
    "bad_option": errors.OptionError,
    "bad_endpoint": errors.EndpointError,
    "kv_page": errors.KvPageError,
    "native": errors.NativeError,
    "internal": errors.SkippyError,
}


def error_message(error: BaseException, request: str = "") -> Error:
    """The ERROR that reports ``error``; always within the limits, whatever its text.

    Anything but a SkippyError, and a code that ERROR_CODES lacks, travels as "internal" without its text: the stage's
    own log is the place for a bug's details.
    """
    if isinstance(error, errors.SkippyError) and error.code in ERROR_CODES:
        code, text = error.code, str(error)
    else:
        code, text = "internal", f"internal error ({type(error).__name__})"
    return Error(code, clipped(text), clipped(request, MAX_NAME_BYTES), ERROR_CODES[code].retry)


def exception_of(message: Error) -> errors.SkippyError:
    """The exception that ``message`` reports, of the class of its code."""
    other = errors.RetryableError if message.retry else errors.RequestError
    cls = _CLASSES.get(message.code, other)
    return cls(message.message or message.code, code=message.code)


def clipped(text: str, limit: int = MAX_ERROR_BYTES) -> str:
    """``text`` in at most ``limit`` bytes of valid UTF-8; a cut shows as three dots at the end."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode("utf-8")
    return data[: limit - len(_CUT)].decode("utf-8", "ignore") + _CUT
