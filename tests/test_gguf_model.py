"""Sound models open and say what they are; the models that tests write do in llama.cpp what they promise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf_bytes import STRING, UINT32, RawGguf, scalar
from model_files import BOS, EOS, parrot, rewrite, sparse, tiny

from skippy_zmq.sources.gguf_model import open_model

DATA = Path(__file__).parent / "data"
FIXTURES = sorted([*DATA.glob("arch/*.gguf"), *DATA.glob("golden/*/*.gguf")])


@contextmanager
def _loaded(path: Path) -> Iterator[llama_cpp.Llama]:
    model = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, logits_all=True, verbose=False)
    try:
        yield model
    finally:
        model.close()


def _greedy(model: llama_cpp.Llama, prompt: list[int], n: int) -> list[int]:
    tokens: list[int] = []
    for token in model.generate(prompt, temp=0.0):
        tokens.append(token)
        if token == EOS or len(tokens) == n:
            break
    return tokens


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_sound_models_of_many_kinds_open(path: Path) -> None:
    model = open_model(path)
    last = max(model.tensors, key=lambda tensor: tensor.offset)
    assert last.offset + last.nbytes <= path.stat().st_size
    assert model.n_blocks >= model.n_layers >= 1
    assert len(model.array("tokenizer.ggml.tokens")) == model.n_vocab
    assert model.metadata["general.architecture"] == model.architecture


def test_facts_of_a_model(tmp_path: Path) -> None:
    path = tiny(tmp_path / "tiny.gguf", n_layers=3, context=512, chat_template="{{ messages }}", add_bos=True)
    model = open_model(path)
    assert (model.architecture, model.n_blocks, model.n_layers, model.n_vocab) == ("llama", 3, 3, 300)
    assert (model.embedding_length, model.context_length, model.n_positions) == (64, 512, None)
    assert model.chat_template == "{{ messages }}"
    assert model.metadata["tokenizer.ggml.add_bos_token"] is True
    assert model.array("tokenizer.ggml.token_type")[:5] == [3, 3, 3, 3, 1]
    with pytest.raises(KeyError):
        model.array("llama.block_count")
    with pytest.raises(KeyError):
        model.array("absent")


def test_tied_output_and_absent_template_are_noticed(tmp_path: Path) -> None:
    tied, untied = tiny(tmp_path / "tied.gguf", tied=True), tiny(tmp_path / "untied.gguf")
    assert open_model(tied).tied_output
    assert not open_model(untied).tied_output
    assert open_model(tied).chat_template is None


def test_learned_positions_are_counted() -> None:
    assert open_model(DATA / "arch" / "gpt2-dense.gguf").n_positions == 256


def test_blocks_that_predict_ahead_are_no_layers(tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        raw.values["llama.nextn_predict_layers"] = scalar(UINT32, 1)

    model = open_model(rewrite(tiny(tmp_path / "tiny.gguf"), tmp_path / "ahead.gguf", edit))
    assert (model.n_blocks, model.n_layers) == (4, 3)


def test_version_2_opens(tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        raw.version = 2
        raw.values["general.description"] = scalar(STRING, "two")

    assert open_model(rewrite(tiny(tmp_path / "tiny.gguf"), tmp_path / "two.gguf", edit)).n_layers == 4


def test_sparse_model_takes_no_room(tmp_path: Path) -> None:
    status = sparse(tmp_path / "sparse.gguf", n_layers=100, layer_bytes=2**28).stat()
    assert status.st_size > 20 * 2**30
    assert status.st_blocks * 512 < 2**20


@pytest.mark.parametrize(
    "text",
    ["alpha beta gamma", "aaaa", "👍🏽🇩🇪e\u0301漢字", b"\xff\x00 a\xfe\n", [b"one ", b"two", b"\xf0\x9f", b"\x98"]],
    ids=["words", "repeats", "emoji", "raw bytes", "pieces"],
)
def test_parrot_recites_exactly_and_stops(tmp_path: Path, text: str | bytes | list[bytes]) -> None:
    bird = parrot(tmp_path / "parrot.gguf", text)
    assert open_model(bird.path).n_layers == 4
    whole = text.encode() if isinstance(text, str) else b"".join(text) if isinstance(text, list) else text
    with _loaded(bird.path) as model:
        for prompt in (b"hi", "was ist 漢?\n".encode()):
            tokens = _greedy(model, model.tokenize(prompt, add_bos=False), len(bird.pieces) + 1)
            assert tokens == [*bird.token_ids, EOS]
            assert b"".join(model.detokenize([token]) for token in tokens[:-1]) == bird.text == whole


def test_parrot_can_recite_for_ever(tmp_path: Path) -> None:
    bird = parrot(tmp_path / "parrot.gguf", "abc", end="loop", n_layers=2)
    with _loaded(bird.path) as model:
        tokens = _greedy(model, model.tokenize(b"x", add_bos=False), 10)
    assert tokens == [*bird.token_ids * 3, bird.token_ids[0]]


def test_parrot_refuses_a_long_piece_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="occurs twice"):
        parrot(tmp_path / "parrot.gguf", [b"ab", b"ab"])


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"quant": "q8_0"}, {"add_bos": True}])
def test_tiny_model_runs_and_tokenizes_any_text(tmp_path: Path, options: dict[str, bool | str]) -> None:
    path = tiny(tmp_path / "tiny.gguf", **options)
    open_model(path)
    with _loaded(path) as model:
        for text in (b"The thing in the wood", "ÿ漢👍".encode(), b"\x00\x01 \n"):
            tokens = model.tokenize(text, add_bos=False)
            assert b"".join(model.detokenize([token]) for token in tokens) == text
        assert (model.tokenize(b"x")[0] == BOS) is bool(options.get("add_bos"))
        model.eval(model.tokenize(b"hello"))
        assert np.isfinite(model.scores[: model.n_tokens]).all()
