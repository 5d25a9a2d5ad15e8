"""The model families that open as checkpoints, one entry of ``FAMILIES`` per model class.

``defaults`` are the values that transformers takes where config.json is silent. A setting that llama.cpp's graph of the
family cannot follow is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint import family_settings as settings
from skippy_zmq.sources.checkpoint import rope
from skippy_zmq.sources.checkpoint.config import Config
from skippy_zmq.sources.checkpoint.family import SCALINGS, Family
from skippy_zmq.sources.gguf_values import shown


def family_of(config: Config) -> tuple[Family, Config]:
    """The family of a checkpoint, and its config with the family's defaults; raise ModelFileError for others."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise ModelFileError(
            f"{config.path}: architectures: {shown(config.architecture)} does not open as a checkpoint; "
            f"wanted one of {', '.join(FAMILIES)}"
        )
    config = config.with_defaults(family.defaults)
    _check_common(config)
    family.check(config)
    return family, config


def _check_common(config: Config) -> None:
    for key, wanted in (
        ("hidden_act", config.defaults.get("hidden_act")),
        ("hidden_activation", config.defaults.get("hidden_activation")),
    ):
        if wanted is not None and config.get(key) != wanted:
            raise config.fail(key, f"wanted {wanted}, got {shown(str(config.get(key)))}")
    rope.refuse_unknown(config, ("rope_interleaved", "mrope_section", "alibi", "use_alibi", "rope_scaling_factor"))
    for key in ("use_bidirectional_attention", "is_encoder_decoder"):
        if config.get(key):
            raise config.fail(key, "wanted false")


def _family(architecture: str, defaults: Mapping[str, Any], **fields: Any) -> Family:
    return Family(architecture, MappingProxyType({"rope_theta": 10000.0, **defaults}), **fields)


def _llama_family(architecture: str, defaults: Mapping[str, Any], **fields: Any) -> Family:
    return _family(architecture, defaults, permutes_heads=True, space_prefix_from_settings=True, **fields)


_LLAMA = {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
_MISTRAL = {"hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "num_key_value_heads": 8}
_QWEN = {"hidden_act": "silu", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "sliding_window": 4096}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA3 = _family(
    "gemma3",
    {
        **_GEMMA,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    check=settings.check_gemma3,
    describe=settings.gemma3,
    scalings=("default", "linear"),
    norm_offset=1.0,
    per_layer_rope=True,
    multimodal=True,
    space_prefix=False,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _llama_family(
        "llama", _LLAMA, check=settings.no_checks, describe=settings.llama_with_heads, scalings=(*SCALINGS, "llama3")
    ),
    "MistralForCausalLM": _llama_family(
        "llama", _MISTRAL, check=settings.warn_of_window, describe=settings.llama_with_heads
    ),
    "MixtralForCausalLM": _llama_family(
        "llama",
        {**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_experts_per_tok": 2, "num_local_experts": 8},
        check=settings.warn_of_window,
        describe=settings.mixtral,
    ),
    "Qwen2ForCausalLM": _family("qwen2", _QWEN, check=settings.refuse_window, describe=settings.rope_and_heads),
    "Qwen3ForCausalLM": _family(
        "qwen3", {**_QWEN, "head_dim": 128}, check=settings.refuse_window, describe=settings.rope_and_heads
    ),
    "Qwen3MoeForCausalLM": _family(
        "qwen3moe",
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_local_experts": 128,
        },
        check=settings.check_qwen3_moe,
        describe=settings.qwen3_moe,
    ),
    "Gemma2ForCausalLM": _family(
        "gemma2",
        {
            **_GEMMA,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        check=settings.check_gemma2,
        describe=settings.gemma2,
        scalings=("default", "linear"),
        norm_offset=1.0,
        own_head=False,
        space_prefix=False,
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Phi3ForCausalLM": _family(
        "phi3",
        {
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        check=settings.check_phi3,
        describe=settings.phi3,
        scalings=("default", "longrope"),
        partial_rope=True,
        plain_added_tokens=True,
    ),
    "GraniteForCausalLM": _llama_family(
        "granite",
        {
            **_LLAMA,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        check=settings.refuse_other_heads,
        describe=settings.granite,
        scalings=(*SCALINGS, "llama3"),
    ),
    "Olmo2ForCausalLM": _family(
        "olmo2", {**_LLAMA, "rms_norm_eps": 1e-5}, check=settings.refuse_window, describe=settings.rope_and_heads
    ),
    "SmolLM3ForCausalLM": _llama_family(
        "smollm3",
        {
            **_LLAMA,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        check=settings.check_smollm3,
        describe=settings.smollm3,
    ),
}
