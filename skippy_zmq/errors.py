"""Every error this package raises on purpose.

    SkippyError
    |-- UserError                 a mistake in an option, a file or a request; never our fault
    |   |-- ModelFileError        a model file is damaged, incomplete or unsupported
    |   |-- OptionError           an option has a wrong value or cannot be honoured here
    |   |-- EndpointError         an address cannot be bound or reached
    |   |-- RequestError          a request that no retry will help (carries a wire error code)
    |   `-- KvPageError           a KV page or saved session is damaged, or belongs to something else
    |-- PeerError                 the other side broke the protocol or refused us
    |   |-- ProtocolError         a message that does not follow docs/protocol.md
    |   `-- HandshakeError        two stages that do not fit together
    |-- RetryableError            nothing is wrong with the request: try again
    |   |-- BusyError             all lanes and the queue are full
    |   |-- StageLostError        a stage of the pipeline went away
    |   `-- DeadlineError         the answer did not come in time
    `-- NativeError               llama.cpp refused or failed; the message says what it said

Programs print the one-line message of a SkippyError and exit with its ``exit_code``; anything else is a bug and shows
its traceback.
"""

from __future__ import annotations


class SkippyError(Exception):
    """Base of all errors raised on purpose. ``code`` is the stable code that travels on the wire."""

    code = "internal"
    exit_code = 1

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class UserError(SkippyError):
    code = "invalid_request"
    exit_code = 2


class ModelFileError(UserError):
    code = "bad_model_file"


class OptionError(UserError):
    code = "bad_option"


class EndpointError(UserError):
    code = "bad_endpoint"


class RequestError(UserError):
    code = "invalid_request"


class KvPageError(UserError):
    code = "kv_page"


class PeerError(SkippyError):
    code = "peer"


class ProtocolError(PeerError):
    code = "protocol"


class HandshakeError(PeerError):
    code = "handshake"


class RetryableError(SkippyError):
    code = "retry"
    exit_code = 3


class BusyError(RetryableError):
    code = "busy"


class StageLostError(RetryableError):
    code = "stage_lost"


class DeadlineError(RetryableError):
    code = "deadline"


class NativeError(SkippyError):
    code = "native"
