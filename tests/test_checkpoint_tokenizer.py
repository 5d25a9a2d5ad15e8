"""Tokenizers of checkpoints give the ids that the libraries of their formats give, or are refused (T09)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import (
    CASES,
    CHECKPOINTS,
    GOLDEN,
    PRE_TOKENIZERS,
    SENTENCEPIECE,
    UNSPLIT,
    edited,
    write_case,
)

from skippy_zmq.errors import ModelFileError
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint
from skippy_zmq.sources.checkpoint.metadata import Entry
from skippy_zmq.topology import LayerRange

TOKENIZER = "tokenizer.json"
EXPECTED = json.loads((CHECKPOINTS / "tokenizations.json").read_text())
TEXTS: list[str] = EXPECTED["texts"]

# Letters followed by combining marks: llama.cpp's form of two pre-tokenizers takes the marks for signs.
COMBINING = tuple(text for text in TEXTS if "e\u0301" in text or "\u093f" in text)

Change = Callable[[dict[str, Any]], None]


def folder_with(tmp_path: Path, change: Change | None = None, *, golden: str = "llama", **settings: Any) -> Path:
    """A small checkpoint with the tokenizer of a golden one, changed."""
    folder = write_case(CASES["granite"], tmp_path / "model")
    tokenizer = json.loads((GOLDEN / golden / TOKENIZER).read_text())
    if change is not None:
        change(tokenizer)
    (folder / TOKENIZER).write_text(json.dumps(tokenizer))
    edited(folder, settings, "tokenizer_config.json")
    return folder


def stage_of(folder: Path) -> StageModel:
    source = open_checkpoint(folder).model()
    return StageModel(source, LayerRange(0, source.n_layers), StageOptions(ctx_size=64, lanes=1, threads=1))


def ids(stage: StageModel) -> list[list[int]]:
    return [stage.tokenize(text, parse_special=False) for text in TEXTS]


def values(folder: Path) -> dict[str, Entry]:
    return dict(open_checkpoint(folder).metadata)


def array(folder: Path, key: str) -> tuple[Any, ...]:
    value = values(folder)[key].value
    assert isinstance(value, tuple)
    return value


@pytest.mark.parametrize("golden", ["llama", "qwen2", "mistral"])
def test_byte_level_texts_become_the_ids_of_the_tokenizers_library(golden: str, tmp_path: Path) -> None:
    found = ids(stage_of(folder_with(tmp_path, golden=golden)))
    assert dict(zip(TEXTS, found, strict=True)) == dict(zip(TEXTS, EXPECTED[golden], strict=True))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_pre_tokenizer_splits_texts_as_the_tokenizers_library_does(name: str, tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    tokenizer = json.loads(UNSPLIT.read_text())
    (folder / TOKENIZER).write_text(json.dumps({**tokenizer, "pre_tokenizer": PRE_TOKENIZERS[name]}))
    edited(folder, {"bos_token_id": 508, "eos_token_id": 509})
    assert values(folder)["tokenizer.ggml.pre"].value == name
    found = dict(zip(TEXTS, ids(stage_of(folder)), strict=True))
    wanted = dict(zip(TEXTS, EXPECTED["pre_tokenizers"][name], strict=True))
    for text in COMBINING if name in ("tekken", "gpt-4o") else ():
        assert found.pop(text) != wanted.pop(text)  # or docs/checkpoints.md says too much
    assert found == wanted


def test_the_texts_tell_pre_tokenizers_apart() -> None:
    answers = [json.dumps(EXPECTED["pre_tokenizers"][name]) for name in PRE_TOKENIZERS]
    assert len(set(answers)) == len(answers)
    assert len(TEXTS) >= 50


def test_sentencepiece_texts_become_the_ids_of_the_sentencepiece_library(tmp_path: Path) -> None:
    stage = stage_of(write_case(CASES["llama-f32-sentencepiece"], tmp_path / "model"))
    found = [stage.tokenize(text, add_special=False, parse_special=False) for text in TEXTS]
    assert dict(zip(TEXTS, found, strict=True)) == dict(zip(TEXTS, EXPECTED["sentencepiece"], strict=True))


def test_merges_in_both_spellings_are_the_same(tmp_path: Path) -> None:
    def joined(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["merges"] = [" ".join(merge) for merge in tokenizer["model"]["merges"]]

    assert all(
        isinstance(merge, list) for merge in json.loads((GOLDEN / "llama" / TOKENIZER).read_text())["model"]["merges"]
    )
    folder = folder_with(tmp_path, joined)
    assert array(folder, "tokenizer.ggml.merges") == array(GOLDEN / "llama", "tokenizer.ggml.merges")
    assert ids(stage_of(folder)) == EXPECTED["llama"]


def test_a_space_in_a_part_of_a_merge_survives(tmp_path: Path) -> None:
    def spaced(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["vocab"] |= {" x": 470, " xhe": 471, "x": tokenizer["model"]["vocab"]["x"]}
        tokenizer["model"]["merges"].append([" x", "he"])

    assert array(folder_with(tmp_path, spaced), "tokenizer.ggml.merges")[-1] == "\u0120x he"


def _ignoring(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["ignore_merges"] = True


def _unreachable(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"]["qzx"] = 470


def test_a_token_that_no_merge_makes_is_found_only_where_merges_are_ignored(tmp_path: Path) -> None:
    def both(tokenizer: dict[str, Any]) -> None:
        _ignoring(tokenizer)
        _unreachable(tokenizer)

    ignoring, merging = folder_with(tmp_path / "a", both), folder_with(tmp_path / "b", _unreachable)
    assert values(ignoring)["tokenizer.ggml.pre"].value == "llama-bpe"
    assert stage_of(ignoring).tokenize("qzx") == [470]
    assert values(merging)["tokenizer.ggml.pre"].value == "smaug-bpe"
    assert 470 not in stage_of(merging).tokenize("qzx")
    assert ids(stage_of(merging)) == EXPECTED["llama"]


def test_ignored_merges_without_a_pre_tokenizer_for_them_are_refused(tmp_path: Path) -> None:
    def both(tokenizer: dict[str, Any]) -> None:
        _ignoring(tokenizer)
        _unreachable(tokenizer)

    with pytest.raises(ModelFileError, match="ignore_merges: wanted false with a pre-tokenizer like qwen2, got true"):
        open_checkpoint(folder_with(tmp_path, both, golden="qwen2"))


def test_added_tokens_inside_beyond_and_with_gaps_keep_their_ids(tmp_path: Path) -> None:
    def added(tokenizer: dict[str, Any]) -> None:
        inside = next(token for token, number in tokenizer["model"]["vocab"].items() if number == 300)
        for content, number, special in ((inside, 300, True), ("<|far|>", 500, False), ("plain", 480, False)):
            tokenizer["added_tokens"].append({"id": number, "content": content, "special": special})

    folder = folder_with(tmp_path, added)
    tokens, kinds = array(folder, "tokenizer.ggml.tokens"), array(folder, "tokenizer.ggml.token_type")
    assert len(tokens) == len(kinds) == 512
    assert (tokens[500], kinds[500]) == ("<|far|>", 3)  # by its look
    assert (tokens[480], kinds[480]) == ("plain", 4)
    assert kinds[300] == 3
    assert (tokens[490], kinds[490]) == ("[PAD490]", 5)
    stage = stage_of(folder)
    assert stage.tokenize("a plain<|far|>") == [*stage.tokenize("a "), 480, 500]


def test_rows_without_a_token_can_be_sampled_and_shown(tmp_path: Path) -> None:
    stage = stage_of(folder_with(tmp_path))
    assert stage.n_vocab == 512
    assert isinstance(stage.piece(511), bytes)
    assert stage.detokenize([0, 511, 1])


def _more_tokens(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] |= {f"token{number}": number for number in range(470, 520)}


def _same_id(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"]["twin"] = 5


def _two_ids(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"].append({"id": 480, "content": "!", "special": True})


def _merge_of_three(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"][0] = ["a", "b", "c"]


def _merge_as_map(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"][0] = {"left": "a", "right": "b"}


def _merges_as_map(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"] = {"h e": 0}


def _merge_of_nothing(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["merges"][0] = ["h", "\u2603"]


def _other_regex(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\w+|\s+"}


def _other_behaviour(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"


def _prefix_space(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True


def _no_pre_tokenizer(tokenizer: dict[str, Any]) -> None:
    tokenizer["pre_tokenizer"] = None


def _normalizer(tokenizer: dict[str, Any]) -> None:
    tokenizer["normalizer"] = {"type": "Lowercase"}


def _unigram(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["type"] = "Unigram"


def _byte_fallback(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["byte_fallback"] = True


def _decoder(tokenizer: dict[str, Any]) -> None:
    tokenizer["decoder"] = {"type": "Fuse"}


def _negative_id(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"]["x"] = -1


def _huge_id(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"].append({"id": 2**40, "content": "far", "special": True})


def _no_vocabulary(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] = {}


def _first_token(tokenizer: dict[str, Any]) -> None:
    tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_more_tokens, "token 'token519' has id 519, but there are only 512 rows of embeddings"),
        (_same_id, "tokens .* and 'twin' have the same id 5"),
        (_two_ids, "token '!' has two ids, 0 and 480"),
        (_merge_of_three, "model.merges: merge 0: wanted two parts"),
        (_merge_as_map, "model.merges: merge 0: wanted two parts"),
        (_merges_as_map, "model.merges: wanted a list"),
        (_merge_of_nothing, r"model.merges: '(h)?\\u2603' is merged, but no token"),
        (_other_regex, "pre_tokenizer: llama.cpp knows none that splits text like this one"),
        (_other_behaviour, "pre_tokenizer: llama.cpp knows none that splits text like this one"),
        (_prefix_space, "pre_tokenizer.add_prefix_space: wanted false"),
        (_no_pre_tokenizer, "pre_tokenizer: wanted one, got 'None'"),
        (_normalizer, "normalizer: wanted none or NFC, got 'Lowercase'"),
        (_unigram, "model.type: wanted BPE, got 'Unigram'"),
        (_byte_fallback, "model.byte_fallback: a SentencePiece tokenizer; wanted its tokenizer.model"),
        (_decoder, "decoder: wanted ByteLevel"),
        (_negative_id, "token 'x': wanted an id from 0, got '-1'"),
        (_huge_id, "added_tokens: wanted entries with content and an id from 0"),
        (_no_vocabulary, "model.vocab: wanted a map of tokens to ids"),
        (_first_token, r"texts begin with '<\|im_start\|>', which is no bos token"),
    ],
)
def test_tokenizers_that_llama_cpp_would_not_follow_are_refused(change: Change, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=complaint) as refused:
        open_checkpoint(folder_with(tmp_path, change))
    assert TOKENIZER in str(refused.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / TOKENIZER).unlink()
    with pytest.raises(ModelFileError, match=r"wanted tokenizer\.json or tokenizer\.model, found neither"):
        open_checkpoint(folder)


def test_digits_one_by_one_are_told_from_words_alone(tmp_path: Path) -> None:
    def digits(tokenizer: dict[str, Any]) -> None:
        words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        split = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, words]}

    assert values(folder_with(tmp_path, digits))["tokenizer.ggml.pre"].value == "smollm"
    assert values(GOLDEN / "mistral")["tokenizer.ggml.pre"].value == "gpt-2"


def test_texts_begin_with_the_token_that_the_template_puts_first(tmp_path: Path) -> None:
    def first(tokenizer: dict[str, Any]) -> None:
        tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|bos|>", "type_id": 0}})

    assert stage_of(folder_with(tmp_path / "a", first)).tokenize("he")[0] == 462
    assert stage_of(folder_with(tmp_path / "b", first, add_bos_token=False)).tokenize("he")[0] != 462
    assert stage_of(folder_with(tmp_path / "c")).tokenize("he")[0] != 462


def test_ids_of_special_tokens_that_are_no_tokens_are_refused_or_left_out(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, bos_token=None, eos_token=None)
    edited(folder, {"pad_token_id": 99999})
    assert "tokenizer.ggml.padding_token_id" not in values(folder)
    edited(folder, {"eos_token_id": 99999})
    with pytest.raises(ModelFileError, match="eos token: wanted an id below 512, got 99999"):
        open_checkpoint(folder)


def test_chat_templates_are_found_in_every_place(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert open_checkpoint(folder).model().chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert open_checkpoint(folder).model().chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert open_checkpoint(folder).model().chat_template == "from jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool-use.jinja").write_text("with tools")
    model = open_checkpoint(folder).model()
    assert model.chat_template == "from jinja"
    assert model.metadata["tokenizer.chat_template.tool_use"] == "with tools"
    assert model.array("tokenizer.chat_templates") == ["tool_use"]
    edited(folder, {"chat_template": "from settings"}, "tokenizer_config.json")
    assert open_checkpoint(folder).model().chat_template == "from settings"
    edited(folder, {"chat_template": 7}, "tokenizer_config.json")
    with pytest.raises(ModelFileError, match="chat_template: wanted a text, or a list of named ones"):
        open_checkpoint(folder)


def _field(number: int, kind: int, payload: bytes) -> bytes:
    return bytes([number << 3 | kind]) + payload


def _spm(tmp_path: Path, data: bytes) -> Path:
    folder = write_case(CASES["llama-f32-sentencepiece"], tmp_path / "model")
    (folder / "tokenizer.model").write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "wanted a SentencePiece model, found no pieces"),
        (b"\x0a", "truncated inside a number"),
        (b"\x0a\x7f", "truncated: wanted 127 bytes more, got 0"),
        (b"\x0a" + b"\xff" * 11, "a number of more than 64 bits"),
        (b"\x0b", "field of unknown kind 3"),
        (_field(1, 0, b"\x05"), "a field of another kind than its number says"),
        (_field(1, 2, b"\x05" + _field(2, 5, struct.pack("<f", float("nan")))), "a known type and a finite score"),
        (_field(1, 2, b"\x02" + _field(3, 0, b"\x09")), "a known type and a finite score"),
        (_field(1, 2, b"\x03" + _field(1, 2, b"\x01a")), r"model_type: wanted BPE \(2\).*, got 1"),
        (SENTENCEPIECE.read_bytes()[:-3], "truncated"),
    ],
)
def test_damaged_sentencepiece_models_are_refused(data: bytes, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=complaint) as refused:
        open_checkpoint(_spm(tmp_path, data))
    assert "tokenizer.model" in str(refused.value)


def test_more_pieces_or_added_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    piece = _field(1, 2, b"\x03" + _field(1, 2, b"\x01a"))
    with pytest.raises(ModelFileError, match="pieces, but there are only 512 rows of embeddings"):
        open_checkpoint(_spm(tmp_path / "a", SENTENCEPIECE.read_bytes() + piece * 200))
    folder = _spm(tmp_path / "b", SENTENCEPIECE.read_bytes())
    edited(folder, {"added_tokens_decoder": {"600": {"content": "<x>", "special": True}}}, "tokenizer_config.json")
    with pytest.raises(ModelFileError, match="added token '<x>' has id 600, but there are only 512 rows"):
        open_checkpoint(folder)


def test_two_tokens_of_one_text_are_refused(tmp_path: Path) -> None:
    folder = _spm(tmp_path, SENTENCEPIECE.read_bytes())
    edited(folder, {"added_tokens_decoder": {"511": {"content": "<s>", "special": True}}}, "tokenizer_config.json")
    with pytest.raises(ModelFileError, match="wanted distinct tokens, got '<s>' as token 1 and 511"):
        open_checkpoint(folder).model()
