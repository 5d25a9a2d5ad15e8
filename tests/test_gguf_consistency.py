"""Case G06: metadata and tensors that contradict each other are refused by what is wrong, not as "truncated"."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import (
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    UINT64,
    RawGguf,
    RawTensor,
    array,
    scalar,
)
from model_files import byte_alphabet, rewrite, tiny

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.architectures import SUPPORTED, UNSUPPORTED
from skippy_zmq.sources.gguf_model import open_model

ARCHITECTURES = Path(__file__).parent / "data" / "arch"
F16, Q8_K, I32 = 1, 15, 26


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("sound") / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1)


def _refused(source: Path, folder: Path, edit: Callable[[RawGguf], None], complaint: str) -> None:
    path = rewrite(source, folder / "edited.gguf", edit)
    with pytest.raises(ModelFileError, match=complaint) as refusal:
        open_model(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def _with_value(key: str, value: bytes | None) -> Callable[[RawGguf], None]:
    def edit(raw: RawGguf) -> None:
        if value is None:
            del raw.values[key]
        else:
            raw.values[key] = value

    return edit


def test_surplus_layer_is_named(sound: Path, tmp_path: Path) -> None:
    edit = _with_value("llama.block_count", scalar(UINT32, 3))
    _refused(sound, tmp_path, edit, r"surplus tensor 'blk\.3\.attn_norm\.weight', but llama\.block_count is 3")


def test_missing_layer_is_named(sound: Path, tmp_path: Path) -> None:
    edit = _with_value("llama.block_count", scalar(UINT32, 5))
    _refused(sound, tmp_path, edit, r"missing tensors 'blk\.4\.\*', but llama\.block_count is 5")


def test_hugging_face_names_are_called_that(sound: Path, tmp_path: Path) -> None:
    def rename(raw: RawGguf) -> None:
        raw.tensors = {name.replace("blk.", "model.layers."): tensor for name, tensor in raw.tensors.items()}

    _refused(sound, tmp_path, rename, r"'model\.layers\.0\.attn_norm\.weight': names are Hugging Face style; convert")


@pytest.mark.parametrize("name", ["clip", "bert", "t5", "t5encoder", "dream", "llada", "wavtokenizer-dec", "eagle3"])
def test_model_that_cannot_generate_in_stages_is_unsupported(sound: Path, tmp_path: Path, name: str) -> None:
    edit = _with_value("general.architecture", scalar(STRING, name))
    _refused(sound, tmp_path, edit, f"unsupported architecture '{name}': .*cannot generate text in stages")


@pytest.mark.parametrize("name", ["klingon", "", "llama ", "llama\0", "x\n" * 300])
def test_unknown_architecture_is_unsupported(sound: Path, tmp_path: Path, name: str) -> None:
    _refused(sound, tmp_path, _with_value("general.architecture", scalar(STRING, name)), "unsupported architecture")


def test_no_architecture_is_both_supported_and_unsupported() -> None:
    assert not SUPPORTED & UNSUPPORTED.keys()


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("general.architecture", None, "this metadata key is missing"),
        ("general.architecture", scalar(UINT32, 1), "wanted a string, got u32"),
        ("llama.block_count", None, "this metadata key is missing"),
        ("llama.block_count", scalar(UINT32, 0), "wanted 1 to 512, got 0"),
        ("llama.block_count", scalar(UINT32, 513), "wanted 1 to 512, got 513"),
        ("llama.block_count", scalar(UINT64, 4), "wanted a u32, got u64"),
        ("llama.block_count", scalar(INT32, -1), "wanted a u32, got i32"),
        ("llama.nextn_predict_layers", scalar(UINT32, 4), r"wanted less than block_count \(4\), got 4"),
        ("llama.context_length", scalar(UINT32, 0), "wanted 1 to"),
        ("llama.embedding_length", scalar(UINT32, 0), "wanted 1 to"),
        ("llama.embedding_length", scalar(UINT32, 2**31), "wanted 1 to"),
        ("llama.feed_forward_length", scalar(UINT32, 2**31), "wanted at most"),
        ("llama.attention.head_count", None, "wanted at least 1, got 0"),
        ("llama.attention.head_count", scalar(UINT32, 0), "wanted at least 1, got 0"),
        ("llama.attention.head_count", array(UINT32, [2, 2, 2]), r"wanted 4 elements \(block_count\), got 3"),
        ("llama.attention.head_count", array(INT32, [2, 2, -2, 2]), "wanted no negative element, got -2"),
        ("llama.attention.head_count", array(FLOAT32, [2.0] * 4), "wanted integers, got array of f32"),
        ("llama.attention.head_count_kv", scalar(UINT32, 3), r"wanted a divisor of attention\.head_count \(2\), got 3"),
        ("llama.attention.head_count_kv", array(UINT32, [1, 1, 1, 4]), "got 4 in block 3"),
        ("llama.attention.key_length", scalar(UINT32, 0), "wanted at least 1, got 0"),
        ("llama.attention.value_length", scalar(UINT32, 8), "wanted the key length 16, got 8"),
        ("llama.rope.dimension_count", scalar(UINT32, 15), "wanted an even number from 2 to 16, got 15"),
        ("llama.rope.dimension_count", scalar(UINT32, 0), "wanted an even number from 2 to 16, got 0"),
        ("llama.rope.dimension_count", scalar(UINT32, 18), "wanted an even number from 2 to 16, got 18"),
        ("llama.rope.dimension_count", scalar(UINT32, 8), "wanted the attention key length 16, got 8"),
        ("llama.rope.scaling.type", scalar(STRING, "cubic"), "wanted one of none, linear, yarn, longrope"),
        ("llama.rope.freq_base", scalar(FLOAT32, math.nan), "wanted a number of at least 0, got nan"),
        ("llama.rope.dimension_sections", array(INT32, [5, -5, 0, 0]), "wanted sections that add up to 0 to 16, got"),
        ("llama.attention.layer_norm_rms_epsilon", scalar(FLOAT32, -1.0), "wanted a number of at least 0, got -1"),
        ("llama.attention.layer_norm_rms_epsilon", scalar(FLOAT32, math.nan), "wanted a number of at least 0, got nan"),
        ("llama.attention.causal", scalar(BOOL, False), "cannot generate text in stages"),
        ("llama.pooling_type", scalar(UINT32, 9), "wanted one of"),
        ("llama.full_attention_interval", scalar(UINT32, 0), "wanted at least 1, got 0"),
        ("llama.attention.sliding_window", scalar(UINT32, 2**31), "wanted 0 to"),
        ("llama.expert_used_count", scalar(UINT32, 2), r"wanted at most expert_count \(0\), got 2"),
        ("llama.expert_group_count", scalar(UINT32, 2), "wanted 0 in a model without experts"),
        ("tokenizer.ggml.model", None, "this metadata key is missing"),
        ("tokenizer.ggml.model", scalar(STRING, "none"), "no vocabulary, so it cannot generate text"),
        ("tokenizer.ggml.model", scalar(STRING, "bert"), "wanted one of llama, gpt2"),
        ("tokenizer.ggml.tokens", None, "this metadata key is missing"),
        ("tokenizer.ggml.tokens", array(UINT32, [1, 2]), "wanted an array of string, got array of u32"),
        ("tokenizer.ggml.tokens", array(STRING, []), "wanted 1 to .* tokens, got 0"),
        ("tokenizer.ggml.tokens", array(STRING, ["a", "b", "a"]), "wanted distinct tokens, got 'a' as token 0 and 2"),
        ("tokenizer.ggml.tokens", array(STRING, ["a\0b", "a\0c"]), "wanted distinct tokens"),
        ("tokenizer.ggml.tokens", array(STRING, ["", "[EMPTY_0]"]), "wanted distinct tokens"),
        (
            "tokenizer.ggml.tokens",
            array(STRING, ["a", "b" * 9000]),
            "wanted tokens of at most 8192 bytes, got one of 9000",
        ),
        ("tokenizer.ggml.token_type", array(INT32, [1, 1]), "wanted one element for each of 300 tokens, got 2"),
        ("tokenizer.ggml.token_type", array(UINT32, [1] * 300), "wanted an array of i32, got array of u32"),
        ("tokenizer.ggml.scores", array(FLOAT32, [0.0] * 299), "wanted one element for each of 300 tokens, got 299"),
        ("tokenizer.ggml.merges", None, "this metadata key is missing"),
        ("tokenizer.ggml.merges", scalar(UINT32, 1), "wanted an array of string, got u32"),
        ("tokenizer.ggml.eos_token_id", scalar(UINT32, 300), "wanted a token id below 300, got 300"),
        ("tokenizer.ggml.bos_token_id", scalar(INT32, -1), "wanted a u32, got i32"),
    ],
)
def test_value_that_would_hurt_native_code_is_refused(
    sound: Path, tmp_path: Path, key: str, value: bytes | None, complaint: str
) -> None:
    _refused(sound, tmp_path, _with_value(key, value), f"{key}: .*{complaint}")


def test_heads_that_do_not_divide_the_embedding_are_refused(sound: Path, tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        for key in ("key_length", "value_length", "head_count_kv"):
            del raw.values[f"llama.attention.{key}"]
        raw.values["llama.attention.head_count"] = scalar(UINT32, 3)

    _refused(sound, tmp_path, edit, r"attention\.head_count: wanted a divisor of embedding_length \(32\), got 3")


def test_vocabulary_that_adds_a_token_it_lacks_is_refused(sound: Path, tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        del raw.values["tokenizer.ggml.bos_token_id"]
        raw.values["tokenizer.ggml.add_bos_token"] = scalar(BOOL, True)
        raw.values["tokenizer.ggml.tokens"] = array(STRING, ["</s>", *byte_alphabet()[:5]])
        raw.values["tokenizer.ggml.token_type"] = array(INT32, [1] * 6)
        raw.values["tokenizer.ggml.eos_token_id"] = scalar(UINT32, 0)

    _refused(sound, tmp_path, edit, r"bos_token_id: this metadata key is missing; the tokenizer adds the token")


def test_tokenizer_that_would_never_advance_is_refused(sound: Path, tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        raw.values["tokenizer.ggml.model"] = scalar(STRING, "rwkv")
        raw.values["tokenizer.ggml.tokens"] = array(STRING, ["a", "ab", r"\x41b"])
        raw.values["tokenizer.ggml.token_type"] = array(INT32, [1] * 3)
        raw.values["tokenizer.ggml.bos_token_id"] = raw.values["tokenizer.ggml.eos_token_id"] = scalar(UINT32, 0)

    _refused(sound, tmp_path, edit, "wanted a token of the single byte 65, which starts others")


@pytest.mark.parametrize(
    ("name", "tensor_type", "complaint"),
    [
        ("blk.1.attn_norm.weight", F16, "wanted F32, got F16"),
        ("output_norm.weight", F16, "wanted F32, got F16"),
        ("blk.1.attn_q.weight", I32, "wanted a floating-point or quantized type, got I32"),
        ("token_embd.weight", I32, "wanted a floating-point or quantized type, got I32"),
    ],
)
def test_tensor_type_that_aborts_the_computation_is_refused(
    sound: Path, tmp_path: Path, name: str, tensor_type: int, complaint: str
) -> None:
    def edit(raw: RawGguf) -> None:
        tensor = raw.tensors[name]
        size = 2 if tensor_type == F16 else 4
        raw.tensors[name] = RawTensor(tensor.shape, tensor_type, bytes(size * math.prod(tensor.shape)))

    _refused(sound, tmp_path, edit, f"tensor '{name}': {complaint}")


def test_vocabulary_file_without_tensors_is_refused(sound: Path, tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        raw.tensors = {}

    _refused(sound, tmp_path, edit, "wanted tensors, got none")


def test_missing_bias_that_llama_cpp_follows_unchecked_is_refused(tmp_path: Path) -> None:
    def edit(raw: RawGguf) -> None:
        del raw.tensors["blk.1.ssm_conv1d.bias"]

    source = ARCHITECTURES / "granitehybrid-dense.gguf"
    _refused(source, tmp_path, edit, r"missing tensor 'blk\.1\.ssm_conv1d\.bias' beside")


@pytest.mark.parametrize(
    ("model", "key", "value", "complaint"),
    [
        ("llama-moe", "llama.expert_count", scalar(UINT32, 1025), "wanted at most 1024"),
        ("llama-moe", "llama.expert_used_count", scalar(UINT32, 0), "wanted 1 to expert_count"),
        ("llama-moe", "llama.expert_used_count", scalar(UINT32, 3), r"wanted at most expert_count \(2\), got 3"),
        ("llama-moe", "llama.expert_used_count", array(UINT32, [1, 1, 1, 3]), r"wanted at most expert_count \(2\)"),
        ("llama-moe", "llama.expert_group_count", scalar(UINT32, 2), "wanted less than expert_count"),
        ("llama-moe", "llama.expert_gating_func", scalar(UINT32, 5), "wanted 0 to 4, got 5"),
        ("gpt2-dense", "gpt2.attention.head_count", scalar(UINT32, 4), "wanted a number that gives embedding_length"),
        ("granitehybrid-dense", "granitehybrid.ssm.inner_size", scalar(UINT32, 64), "wanted twice embedding_length"),
        ("granitehybrid-dense", "granitehybrid.ssm.time_step_rank", scalar(UINT32, 3), "wanted a divisor"),
        ("granitehybrid-dense", "granitehybrid.ssm.group_count", scalar(UINT32, 0), "wanted a divisor"),
        ("granitehybrid-dense", "granitehybrid.ssm.conv_kernel", scalar(UINT32, 0), "wanted at least 1, got 0"),
        ("gemma3-dense", "gemma3.rope.dimension_count_swa", scalar(UINT32, 0), "wanted an even number"),
    ],
)
def test_value_of_other_kinds_of_model_is_refused(
    tmp_path: Path, model: str, key: str, value: bytes, complaint: str
) -> None:
    _refused(ARCHITECTURES / f"{model}.gguf", tmp_path, _with_value(key, value), f"{key}: .*{complaint}")
