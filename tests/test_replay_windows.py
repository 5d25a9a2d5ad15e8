"""An answer that begins anew at the last stage: what is known of it, run in windows, leaves everything as one by one.

The whole model in this process, so that every logit can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import tiny

from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.row_class import measure_sizes, most_rows, row_class
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.demo_models import demo_model
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.stage.last import TokenSource
from skippy_zmq.topology import LayerRange
from skippy_zmq.wire import messages as wire

LANES = 16
N_KNOWN, N_MORE = 40, 5
LONG_PROMPT = [int(token) for token in np.random.default_rng(3).integers(20, 250, 630)]
PROMPT = LONG_PROMPT[:70]
LANE = 3

SAMPLINGS = {
    "greedy": wire.SamplingParams(ignore_eos=True),
    "drawn": wire.SamplingParams(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True),
    "penalties": wire.SamplingParams(
        repeat_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2, repeat_last_n=256, ignore_eos=True
    ),
    "drawn, penalties, dry": wire.SamplingParams(
        temperature=0.9, repeat_penalty=1.2, repeat_last_n=30, dry_multiplier=0.8, dry_allowed_length=1, ignore_eos=True
    ),
    "mirostat": wire.SamplingParams(temperature=1.0, mirostat=2, ignore_eos=True),
    "grammar": wire.SamplingParams(
        temperature=1.5, grammar='root ::= ([a-z] [a-z] [0-9] " ")+', ignore_eos=True, min_p=0.0
    ),
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    return _opened(tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", quant="q4_1"))


@cache
def _real(name: str) -> StageModel:
    return _opened(demo_model(name))


def _opened(path: Path) -> StageModel:
    source = open_model(path)
    values = {"ctx_size": 1024, "lanes": LANES, "threads": 1, "reproducible": True}
    return StageModel(source, LayerRange(0, source.n_layers), check_options(values, "options"))


@pytest.fixture(
    params=[
        "tiny",
        pytest.param("smollm2", marks=pytest.mark.real_model),
        pytest.param("gemma3", marks=pytest.mark.test_models),  # sliding windows, and a small row class
    ]
)
def model(request: pytest.FixtureRequest, tiny_model: StageModel) -> StageModel:
    return tiny_model if request.param == "tiny" else _real(request.param)


@dataclass(slots=True)
class Ran:
    """What stage 0 and the client have heard."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    failed: list[tuple[str, str, str]] = field(default_factory=list)
    sent: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # index -> token and logits
    text: str = ""
    finish_reason: str = ""
    batches: int = 0


class Session:
    """One session at a last stage."""

    def __init__(
        self,
        model: StageModel,
        sampling: wire.SamplingParams,
        prompt: Sequence[int],
        *,
        known: Sequence[int] = (),
        received: int = 0,
        max_tokens: int = N_KNOWN + N_MORE,
    ) -> None:
        self.ran = Ran()
        self._prompt = prompt
        self._received = received
        self._model = model
        self._tokens = TokenSource(model, self._send)
        opened = wire.SessionOpen(
            "s", LANE, "r", b"c", len(prompt), max_tokens, sampling, logits=True, received=received,
            known=np.array(known, "<i4").tobytes(),
        )  # fmt: skip
        assert self._tokens.open(opened) is None

    def _send(self, client: bytes, message: wire.Message, payloads: Sequence[memoryview]) -> bool:
        assert isinstance(message, wire.Tokens), message
        (token,) = message.token_ids
        assert message.index == self._received + len(self.ran.sent)
        self.ran.sent[message.index] = (token, bytes(payloads[0]))
        self.ran.text += message.text
        self.ran.finish_reason = message.finish_reason
        return True

    def run(self, position: int, tokens: Sequence[int], *, sample: bool = True, each_row: bool = False) -> None:
        rows = [wire.SessionRows("s", LANE, position, len(tokens), sample)]
        outputs = range(len(tokens)) if each_row else [len(tokens) - 1]
        ids = np.array(tokens, np.int32)
        self._model.run([(LANE, position, len(tokens))], ids, outputs if sample else ())
        sampled, failed = self._tokens.take(rows, ids, each_row=each_row)
        self._tokens.stream()
        self.ran.tokens += [token.token for token in sampled]
        self.ran.positions += [token.position for token in sampled]
        self.ran.failed += failed
        self.ran.batches += 1

    def prefill(self) -> None:
        for at in range(0, len(self._prompt), 64):
            self.run(at, self._prompt[at : at + 64], sample=at + 64 >= len(self._prompt))

    def one_by_one(self, until: int) -> None:
        while len(self.ran.tokens) < until and not self.ran.failed:
            self.run(len(self._prompt) + len(self.ran.tokens) - 1, self.ran.tokens[-1:])

    def windows(self, known: Sequence[int], width: int) -> None:
        """As they come down the ring: without a look at what was chosen."""
        for at in range(0, len(known), width):
            self.run(len(self._prompt) + at, known[at : at + width], each_row=True)


@contextmanager
def _session(
    model: StageModel,
    sampling: wire.SamplingParams,
    prompt: Sequence[int] = PROMPT,
    **fields: Any,
) -> Iterator[Session]:
    try:
        session = Session(model, sampling, prompt, **fields)
        session.prefill()
        yield session
    finally:
        model.trim(LANE, 0)


@cache
def _width(model: StageModel) -> int:
    found = row_class(measure_sizes(model, 3600, {}), most_rows(model))
    assert found.low == 1
    assert found.high > 1
    return found.high


def _reference(model: StageModel, sampling: wire.SamplingParams, prompt: Sequence[int] = PROMPT) -> Ran:
    with _session(model, sampling, prompt) as session:
        session.one_by_one(N_KNOWN + N_MORE)
        return session.ran


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_tokens_and_logits_are_those_of_one_by_one(kind: str, model: StageModel) -> None:
    """In the windows, and in what follows: penalties, random state and grammar stand where they stood."""
    width = _width(model)
    expected = _reference(model, SAMPLINGS[kind])
    assert len(set(expected.tokens)) > 1
    known = expected.tokens[:N_KNOWN]
    with _session(model, SAMPLINGS[kind], known=known) as session:
        session.windows(known, width)
        assert session.ran.tokens == expected.tokens[: N_KNOWN + 1]
        assert session.ran.batches == 2 + -(-N_KNOWN // width)
        session.one_by_one(N_KNOWN + N_MORE)
        assert session.ran.tokens == expected.tokens
        assert session.ran.positions == expected.positions
        assert session.ran.sent == expected.sent
        assert session.ran.text == expected.text


def test_at_a_long_context(model: StageModel) -> None:
    """Where llama.cpp computes the attention of a lone row in another way."""
    expected = _reference(model, SAMPLINGS["greedy"], LONG_PROMPT)
    known = expected.tokens[:N_KNOWN]
    with _session(model, SAMPLINGS["greedy"], LONG_PROMPT, known=known) as session:
        session.windows(known, _width(model))
        session.one_by_one(N_KNOWN + N_MORE)
        assert session.ran.sent == expected.sent


@pytest.mark.parametrize("received", [0, 1, 7, N_KNOWN])
def test_what_the_client_has_is_not_sent(received: int, tiny_model: StageModel) -> None:
    expected = _reference(tiny_model, SAMPLINGS["drawn"])
    known = expected.tokens[:N_KNOWN]
    with _session(tiny_model, SAMPLINGS["drawn"], known=known, received=received) as session:
        session.windows(known, _width(tiny_model))
        assert session.ran.sent == {
            index: sent for index, sent in expected.sent.items() if received <= index <= N_KNOWN
        }


@pytest.mark.parametrize("n_rest", [1, 2, 3, 4])
def test_the_end_may_come_out_of_a_window(n_rest: int, tiny_model: StageModel) -> None:
    """Its tokens go first."""
    expected = _reference(tiny_model, SAMPLINGS["greedy"])
    known = expected.tokens[: 4 + n_rest]
    with _session(tiny_model, SAMPLINGS["greedy"], known=known, max_tokens=len(known) + 1) as session:
        session.windows(known, 4)
        assert session.ran.finish_reason == "length"
        assert session.ran.tokens == expected.tokens[: len(known) + 1]
        assert session.ran.sent == {index: expected.sent[index] for index in range(len(known) + 1)}


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("at", [0, 1, 3, 4, 5, N_KNOWN - 1])
def test_another_token_than_before_ends_it(at: int, width: int, tiny_model: StageModel) -> None:
    """Neither the client nor stage 0 hears of one that is wrong, nor of any after it."""
    expected = _reference(tiny_model, SAMPLINGS["drawn"])
    known = expected.tokens[:N_KNOWN]
    other = [*known[:at], (known[at] + 1) % 200 + 20, *known[at + 1 :]]
    with _session(tiny_model, SAMPLINGS["drawn"], known=other) as session:
        session.windows(other, width)
        assert session.ran.tokens == known[:at]
        assert session.ran.sent == {index: expected.sent[index] for index in range(at)}
        ((name, code, words),) = session.ran.failed
        assert (name, code) == ("s", "stage_lost")
        assert f"wanted token {other[at]} at {at}, got {known[at]}" in words
