"""The last stage's messages to clients: what a batch gave to several requests of one client comes as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from model_files import tiny

from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.stage.last import TokenSource
from skippy_zmq.topology import LayerRange
from skippy_zmq.wire import messages as wire

LANES = 6
PROMPT = (20, 30, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    source = open_model(tiny(tmp_path_factory.mktemp("model") / "tiny.gguf"))
    return StageModel(
        source, LayerRange(0, source.n_layers), check_options({"ctx_size": 64, "lanes": LANES}, "options")
    )


class Scene:
    """Sessions at the last stage, a lane each; what their clients were sent, in order."""

    def __init__(self, model: StageModel) -> None:
        self._model = model
        self.sent: list[tuple[bytes, wire.Message]] = []
        self.gone: set[bytes] = set()
        self.source = TokenSource(model, self._send)
        self._opened: list[wire.SessionOpen] = []

    def _send(self, client: bytes, message: wire.Message, payloads: Sequence[memoryview]) -> bool:
        if isinstance(message, wire.Tokens):
            assert len(message.tensors) == len(payloads)
        self.sent.append((client, message))
        return client not in self.gone

    def open(self, client: bytes, max_tokens: int = 3, **fields: Any) -> None:
        lane = len(self._opened)
        sampling = wire.SamplingParams(ignore_eos=True)
        opened = wire.SessionOpen(f"s{lane}", lane, f"r{lane}", client, len(PROMPT), max_tokens, sampling, **fields)
        assert self.source.open(opened) is None
        self._opened.append(opened)

    def prefill(self) -> list[wire.SampledToken]:
        """One batch of all prompts; what stage 0 hears."""
        n = len(PROMPT)
        rows = [wire.SessionRows(o.session, o.lane, 0, n, True) for o in self._opened]
        tokens = np.array(PROMPT * len(rows), np.int32)
        self._model.run([(r.lane, 0, n) for r in rows], tokens, range(n - 1, len(tokens), n))
        sampled, failed = self.source.take(rows, tokens)
        assert not failed
        # Else stage 0 comes first.
        assert all(isinstance(message, wire.Tokens) and message.finish_reason for _, message in self.sent)
        self.source.stream()
        return sampled


@pytest.fixture
def scene(model: StageModel) -> Iterator[Scene]:
    yield Scene(model)
    for lane in range(LANES):
        model.trim(lane, 0)


def test_a_message_for_each_client(scene: Scene) -> None:
    for client in (b"a", b"b", b"a", b"a"):
        scene.open(client)
    first, second, third, fourth = (s.token for s in scene.prefill())
    (to_a, each), (to_b, alone) = scene.sent
    assert (to_a, to_b) == (b"a", b"b")
    assert isinstance(each, wire.TokensEach)
    assert [(t.request, t.index, t.token) for t in each.tokens] == [
        ("r0", 0, first),
        ("r2", 0, third),
        ("r3", 0, fourth),
    ]
    assert isinstance(alone, wire.Tokens)
    assert (alone.request, alone.index, alone.token_ids) == ("r1", 0, (second,))


def test_ends_and_logits_come_by_themselves(scene: Scene) -> None:
    scene.open(b"a")
    scene.open(b"a", logits=True)
    scene.open(b"a")
    scene.open(b"a", max_tokens=1)
    scene.prefill()
    (_, end), (_, with_logits), (_, each) = scene.sent
    assert isinstance(end, wire.Tokens)
    assert (end.request, end.finish_reason) == ("r3", "length")
    assert isinstance(with_logits, wire.Tokens)
    assert (with_logits.request, len(with_logits.tensors)) == ("r1", 1)
    assert isinstance(each, wire.TokensEach)
    assert [token.request for token in each.tokens] == ["r0", "r2"]


def test_all_of_a_client_that_does_not_read_end(scene: Scene) -> None:
    scene.gone = {b"a"}
    for client in (b"a", b"b", b"a"):
        scene.open(client)
    scene.prefill()
    assert scene.source.sessions == 1
    assert scene.source.undelivered == 2
