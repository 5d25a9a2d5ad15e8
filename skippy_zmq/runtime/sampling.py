"""One session's sampler: llama.cpp's own chain, behind the wire's parameters."""

from __future__ import annotations

import dataclasses

from skippy_zmq import _native
from skippy_zmq.errors import NativeError, RequestError
from skippy_zmq.runtime.stage_model import StageModel, Tokens
from skippy_zmq.wire.messages import SamplingParams


class SessionSampler:
    """Chooses the tokens of one session. ``seed``: 0 to 2^32 - 1; its random state is this session's own.

    Raises RequestError for a parameter that cannot be honoured (code "grammar" for the grammar).
    """

    def __init__(self, model: StageModel, params: SamplingParams, seed: int) -> None:
        values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name != "seed"}
        values["dry_sequence_breakers"] = list(params.dry_sequence_breakers)
        values["logit_bias"] = list(params.logit_bias)
        self._model = model
        try:
            self._native = _native.Sampler(model.native_model, seed=seed, **values)
        except _native.GrammarError as error:
            raise RequestError(str(error), code="grammar") from None
        except ValueError as error:
            raise RequestError(str(error)) from None

    def accept(self, tokens: Tokens) -> None:
        """Prompt tokens (int32): history for the penalties."""
        self._native.accept(tokens)

    def sample(self, row: int) -> int:
        """Choose and accept a token by the logits of ``row`` of the model's last batch.

        Raises RequestError where the grammar allows none, NativeError for logits that are no numbers.
        """
        try:
            return self._native.sample(self._model.native_context, row)
        except _native.GrammarError as error:
            raise RequestError(str(error), code="grammar") from None
        except (ValueError, RuntimeError) as error:
            raise NativeError(str(error)) from None


def check_sampling(model: StageModel, params: SamplingParams) -> None:
    """Raise RequestError where ``params`` cannot be honoured with this vocabulary; nothing is kept."""
    SessionSampler(model, params, 0)
