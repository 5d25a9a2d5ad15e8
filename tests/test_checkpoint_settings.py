"""Settings of a checkpoint are followed in every spelling or refused by name (T04, T08, T10)."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy_llama
import pytest
from checkpoint_files import CASES, KV_HEADS, Case, edited, safetensors_bytes, weights, write_case
from numpy_llama import Rotation

from skippy_zmq.certify.staged import StagedModel
from skippy_zmq.certify.workload import PLAIN, stage_options
from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.checkpoint import open_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def llama(**changes: Any) -> Case:
    """A float32 Llama whose config has no position settings but ``changes``."""
    head = changes.get("head_dim") or 8
    case = CASES["llama-old-spelling"]
    config = {key: value for key, value in case.config.items() if not key.startswith("rope")}
    shapes = {name: tuple(extents) for name, extents in case.shapes.items()}
    for name, shape in shapes.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shapes[name] = (shape[0] * head // 8, shape[1])
        elif name.endswith("o_proj.weight"):
            shapes[name] = (shape[0], shape[1] * head // 8)
    return dataclasses.replace(case, config={**config, **changes}, shapes=shapes, dtype="F32")


SPELLINGS: dict[str, tuple[dict[str, Any], Rotation]] = {
    "absent": ({}, numpy_llama.plain(8, 10000)),
    "theta at the top": ({"rope_theta": 700.0}, numpy_llama.plain(8, 700)),
    "theta inside": ({"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}, numpy_llama.plain(8, 700)),
    "theta inside, no type": ({"rope_parameters": {"rope_theta": 700.0}}, numpy_llama.plain(8, 700)),
    "scaling null": ({"rope_theta": 700.0, "rope_scaling": None}, numpy_llama.plain(8, 700)),
    "linear, old": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, numpy_llama.linear(8, 10000, 4)),
    "linear, new": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, numpy_llama.linear(8, 10000, 4)),
    "linear, whole": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 700}},
        numpy_llama.linear(8, 700, 4),
    ),
    "llama3": ({"rope_theta": 700.0, "rope_scaling": LLAMA3}, numpy_llama.llama3(8, 700, 8, 1, 4, 32)),
    "llama3, whole": ({"rope_parameters": {**LLAMA3, "rope_theta": 700.0}}, numpy_llama.llama3(8, 700, 8, 1, 4, 32)),
    "yarn": ({"rope_scaling": YARN}, numpy_llama.yarn(8, 10000, 4, 32)),
    "yarn, length beside": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
        numpy_llama.yarn(8, 10000, 4, 32),
    ),
    "heads of their own length": ({"head_dim": 16, "rope_theta": 700.0}, numpy_llama.plain(16, 700)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_position_settings_give_at_position_100_what_the_equations_give(name: str, tmp_path: Path) -> None:
    changes, rope = SPELLINGS[name]
    case = llama(**changes)
    source = open_checkpoint(write_case(case, tmp_path / "model")).model()
    tokens = [(37 * position + 11) % 512 for position in range(101)]
    model = StagedModel(source, (1,), stage_options(PLAIN, 128))
    found = None
    for first in range(0, len(tokens), 60):
        part = np.array(tokens[first : first + 60], np.int32)
        found = model.decode([(0, first, len(part))], part, [len(part) - 1])[-1]
    values = {
        tensor: np.frombuffer(data, np.float32).reshape(shape).astype(np.float64)
        for tensor, (_, shape, data) in case.tensors().items()
    }
    wanted = numpy_llama.logits(
        values, tokens, heads=4, kv_heads=KV_HEADS, head=changes.get("head_dim", 8), eps=1e-5, rope=rope
    )
    assert found is not None
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()


def test_the_equations_tell_the_spellings_apart() -> None:
    """A setting that was ignored would show."""
    case = llama()
    values = {
        name: np.frombuffer(weights(name, shape, "F32"), np.float32).reshape(shape).astype(np.float64)
        for name, shape in case.shapes.items()
    }
    tokens = [(37 * position + 11) % 512 for position in range(101)]
    ropes = [rope for changes, rope in SPELLINGS.values() if "head_dim" not in changes]
    distinct = {np.round(np.concatenate([rope[0], [rope[1]]]), 6).tobytes(): rope for rope in ropes}
    answers = [
        numpy_llama.logits(values, tokens, heads=4, kv_heads=KV_HEADS, head=8, eps=1e-5, rope=rope)
        for rope in distinct.values()
    ]
    assert len(answers) >= 6
    scale = np.abs(answers[0]).max()
    for number, one in enumerate(answers):
        assert all(np.abs(one - other).max() > 1e-3 * scale for other in answers[:number])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown kind": (
        "llama-old-spelling",
        {"rope_scaling": {"type": "foo"}},
        "rope_scaling.rope_type: unknown kind .*'foo'",
    ),
    "dynamic": (
        "llama-old-spelling",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling.rope_type: unknown kind of scaling 'dynamic'",
    ),
    "linear without its factor": (
        "llama-old-spelling",
        {"rope_scaling": {"type": "linear"}},
        "rope_scaling.factor: this setting is missing",
    ),
    "yarn without its length": (
        "llama-old-spelling",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_scaling.original_max_position_embeddings: this setting is missing",
    ),
    "yarn with a factor of its own": (
        "llama-old-spelling",
        {"rope_scaling": {**YARN, "attention_factor": 2.0}},
        "rope_scaling.attention_factor: wanted 1.138629",
    ),
    "yarn without truncation": (
        "llama-old-spelling",
        {"rope_scaling": {**YARN, "truncate": False}},
        "rope_scaling.truncate: wanted True",
    ),
    "yarn with betas of its own": (
        "llama-old-spelling",
        {"rope_scaling": {**YARN, "beta_fast": 4.0}},
        "rope_scaling.beta_fast: wanted 32, got '4.0'",
    ),
    "llama3 without a factor": (
        "llama-old-spelling",
        {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "low_freq_factor"}},
        "rope_scaling.low_freq_factor: this setting is missing",
    ),
    "llama3 where llama.cpp has none": ("qwen2-yarn", {"rope_scaling": LLAMA3}, "wanted one of default, .*got llama3"),
    "longrope where llama.cpp has none": (
        "llama-old-spelling",
        {"rope_scaling": {"type": "longrope"}},
        "wanted one of default, .*got longrope",
    ),
    "unknown setting": (
        "llama-old-spelling",
        {"rope_parameters": {"rope_type": "default", "mscale_all_dim": 1.0}, "rope_scaling": None},
        "rope_parameters.mscale_all_dim: this setting is unknown for default scaling",
    ),
    "sections": (
        "qwen2-yarn",
        {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}},
        "rope_scaling.mrope_section: this setting is unknown",
    ),
    "two names of the kind": (
        "llama-old-spelling",
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        "rope_scaling.rope_type: differs from type: got 'yarn' and 'linear'",
    ),
    "two thetas": (
        "llama-old-spelling",
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0},
        "rope_theta: differs from rope_parameters.rope_theta",
    ),
    "two blocks": (
        "llama-old-spelling",
        {"rope_parameters": {"rope_theta": 50000.0}},
        "rope_scaling: differs from rope_parameters",
    ),
    "part of a head": (
        "llama-old-spelling",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: wanted 1 .*got 0.5",
    ),
    "theta of zero": ("llama-old-spelling", {"rope_theta": 0}, "rope_theta: wanted more than 0"),
    "theta as text": ("llama-old-spelling", {"rope_theta": "big"}, "rope_theta: wanted a number, got 'big'"),
    "block as list": ("llama-old-spelling", {"rope_scaling": [1]}, "rope_scaling: wanted a JSON object"),
    "short list of factors": (
        "phi3-long-sentencepiece",
        {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]}},
        "rope_scaling.long_factor: wanted a list of 4 numbers",
    ),
    "per kind of layer": (
        "llama-old-spelling",
        {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters.full_attention: this setting is unknown",
    ),
    "activation": ("llama-old-spelling", {"hidden_act": "gelu"}, "hidden_act: wanted silu, got 'gelu'"),
    "window": (
        "qwen2-yarn",
        {"use_sliding_window": True, "sliding_window": 8},
        "use_sliding_window: wanted false",
    ),
    "layers with a window": (
        "qwen2-yarn",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types: wanted full_attention",
    ),
    "experts not normalized": ("qwen3-moe-stacked", {"norm_topk_prob": False}, "norm_topk_prob: wanted true"),
    "layers without experts": ("qwen3-moe-stacked", {"mlp_only_layers": [0]}, "mlp_only_layers: wanted experts"),
    "fewer experts": ("mixtral", {"num_local_experts": 5}, "wanted 5 experts, got 4"),
    "attention scale": ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar: wanted 8, got 99"),
    "softcapping of Gemma 3": (
        "gemma3-with-vision",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping: wanted null",
    ),
    "rotation in every layer": ("smollm3", {"no_rope_layers": [0, 1]}, "no_rope_layers: wanted every fourth"),
    "heads of Granite": ("granite", {"head_dim": 16}, "head_dim: wanted hidden_size / num_attention_heads .8., got 16"),
    "scale of zero": ("granite", {"logits_scaling": 0}, "logits_scaling: wanted more than 0"),
    "unknown architecture": (
        "granite",
        {"architectures": ["FooForCausalLM"]},
        "architectures: 'FooForCausalLM' does not open as a checkpoint; wanted one of LlamaForCausalLM",
    ),
    "no architecture": ("granite", {"architectures": []}, "architectures: wanted a list"),
    "missing size": ("granite", {"hidden_size": None}, "hidden_size: this setting is missing"),
    "size as text": ("granite", {"hidden_size": "32"}, "hidden_size: wanted a whole number from 1, got '32'"),
    "size as truth": ("granite", {"num_attention_heads": True}, "num_attention_heads: wanted a whole number"),
    "negative size": ("granite", {"num_hidden_layers": -1}, "num_hidden_layers: wanted a whole number from 1"),
    "size of 2**40": ("granite", {"hidden_size": 2**40}, "hidden_size: wanted a whole number"),
    "other vocabulary": ("granite", {"vocab_size": 511}, "vocab_size: wanted 512, the rows of embeddings, got 511"),
    "tie as number": ("granite", {"tie_word_embeddings": 1}, "tie_word_embeddings: wanted true or false"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_be_followed_are_refused_by_name(name: str, tmp_path: Path) -> None:
    case, changes, complaint = REFUSED[name]
    folder = write_case(CASES[case], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        changes = {"text_config": {**config["text_config"], **changes}}
    edited(folder, changes)
    with pytest.raises(ModelFileError, match=complaint) as refused:
        open_checkpoint(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_window_that_llama_cpp_ignores_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        open_checkpoint(write_case(CASES["mistral-sentencepiece"], tmp_path / "model"))
    assert "sliding_window: llama.cpp attends to all tokens here, so answers differ beyond 64 tokens" in caplog.text


def test_layers_with_a_window_in_another_pattern_are_written_down(tmp_path: Path) -> None:
    folder = write_case(CASES["gemma2"], tmp_path / "model")
    usual, other = ["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]
    key = "gemma2.attention.sliding_window_pattern"
    edited(folder, {"layer_types": usual})
    assert key not in open_checkpoint(folder).metadata
    edited(folder, {"layer_types": other})
    assert open_checkpoint(folder).model().array(key) == [False, True]


def test_a_head_beside_a_tie_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_case(CASES["llama-old-spelling"], tmp_path / "model")
    assert not open_checkpoint(folder).model().tied_output
    edited(folder, {"tie_word_embeddings": True})
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(folder).model().tied_output
    assert "'lm_head.weight' is left out: tie_word_embeddings says" in caplog.text


@pytest.mark.parametrize("flag", [False, None], ids=["false", "absent"])
def test_no_head_and_no_tie_is_refused(flag: bool | None, tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    edited(folder, {"tie_word_embeddings": flag})
    with pytest.raises(
        ModelFileError, match="tie_word_embeddings: is false, but the checkpoint has no tensor 'lm_head"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("block", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "something new"}, "something new"),
        ({}, "None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_quantized_checkpoint_is_refused_by_method_before_any_tensor(
    block: dict[str, Any], method: str, nested: bool, tmp_path: Path
) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"never looked at")
    edited(folder, {"text_config": {"quantization_config": block}} if nested else {"quantization_config": block})
    with pytest.raises(ModelFileError, match=f"quantization_config: .* quantized already, by method '{method}'"):
        open_checkpoint(folder)


def test_a_null_block_is_no_quantization(tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    assert open_checkpoint(folder).model().n_layers == 2


def test_a_file_of_a_quantizer_refuses_the_checkpoint(tmp_path: Path) -> None:
    folder = write_case(CASES["granite"], tmp_path / "model")
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"hf_quant_config\.json: this checkpoint is quantized already"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "complaint"),
    [
        (
            "model.layers.0.self_attn.q_proj.qweight",
            "I32",
            (4, 8),
            "'model.layers.0.self_attn.q_proj.qweight': .*already",
        ),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "F32", (1, 1), "weight_scale_inv': .* quantized already"),
        ("model.layers.0.self_attn.q_proj.weight", "F8_E4M3", (32, 32), "wanted F32, F16 or BF16, got F8_E4M3"),
        ("model.layers.0.self_attn.q_proj.weight", "I8", (32, 32), "wanted F32, F16 or BF16, got I8"),
        ("model.layers.0.self_attn.q_proj.weight", "F64", (32, 32), "wanted F32, F16 or BF16, got F64"),
        ("model.layers.0.self_attn.q_proj.weight", "BF16", (), "wanted a shape of 1 to 4 dimensions"),
        ("model.layers.0.self_attn.q_proj.weight", "BF16", (0, 4), "wanted a shape of 1 to 4 dimensions"),
        ("model.layers.0.self_attn.q_proj.weight", "BF16", (33, 32), "wanted rows for 4 heads of even length, got 33"),
        ("model.layers.0.self_attn.new_proj.weight", "BF16", (4, 4), "GraniteForCausalLM has no tensor of this name"),
        ("model.layers.9.input_layernorm.weight", "BF16", (32,), "GraniteForCausalLM has no tensor of this name"),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(
    name: str, dtype: str, shape: tuple[int, ...], complaint: str, tmp_path: Path
) -> None:
    case = CASES["granite"]
    folder = write_case(case, tmp_path / "model")
    n_bytes = int(np.prod(shape)) * {"I32": 4, "F32": 4, "F8_E4M3": 1, "I8": 1, "F64": 8, "BF16": 2}[dtype]
    tensors = {**case.tensors(), name: (dtype, shape, bytes(n_bytes))}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(ModelFileError, match=complaint) as refused:
        open_checkpoint(folder)
    assert name in str(refused.value)


def test_tables_of_angles_that_old_checkpoints_store_are_passed_over(tmp_path: Path) -> None:
    case = CASES["granite"]
    folder = write_case(case, tmp_path / "model")
    tensors = {**case.tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": ("F64", (4,), bytes(32))}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    assert len(open_checkpoint(folder).tensors) == len(case.shapes)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    case = CASES["mixtral"]
    tensors = case.tensors()
    tensors["model.layers.1.block_sparse_moe.experts.7.w1.weight"] = tensors.pop(
        "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    )
    folder = write_case(case, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(ModelFileError, match="expert 2 of its layer is missing"):
        open_checkpoint(folder)
