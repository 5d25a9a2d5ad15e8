"""TOKENIZE and DETOKENIZE: any client may ask."""

from __future__ import annotations

from collections.abc import Callable

from skippy_zmq.errors import ProtocolError, RequestError, SkippyError
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.stage.requests import RequestTable
from skippy_zmq.stage.tokenizing import INLINE_BYTES, BackgroundTokenizer
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.failures import error_message
from skippy_zmq.wire.limits import MAX_PROMPT_TOKENS, MAX_TEXT_BYTES

Answer = Callable[[wire.Message], object]


def tokenize(message: wire.Tokenize, requests: RequestTable, tokenizer: BackgroundTokenizer, answer: Answer) -> None:
    """Answer now, or once a long text has been tokenized in the background. Raises BusyError and RequestError."""

    def ids() -> list[int]:
        found = requests.tokenize(message.text, add_special=message.add_special, parse_special=message.parse_special)
        if len(found) > MAX_PROMPT_TOKENS:
            raise RequestError(f"{len(found)} tokens: wanted at most {MAX_PROMPT_TOKENS}", code="too_large")
        return found

    def done(result: list[int] | SkippyError) -> None:
        if isinstance(result, SkippyError):
            answer(error_message(result, message.request))
        else:
            answer(wire.Tokenized(message.request, tuple(result)))

    if len(message.text) > INLINE_BYTES // 4:  # characters have up to 4 bytes
        tokenizer.submit(ids, done)
    else:
        done(ids())


def detokenized(message: wire.Detokenize, model: StageModel) -> wire.Detokenized:
    """The answer. Raises ProtocolError for an id outside the vocabulary, RequestError for too long a text."""
    for token in message.token_ids:
        if token >= model.n_vocab:
            raise ProtocolError(f"token id {token}: wanted 0 to {model.n_vocab - 1}", code="invalid_token")
    data = model.detokenize(message.token_ids)
    if len(data) > MAX_TEXT_BYTES:
        raise RequestError(f"{len(data)} bytes of text: wanted at most {MAX_TEXT_BYTES}", code="too_large")
    return wire.Detokenized(message.request, data)
