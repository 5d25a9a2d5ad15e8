"""The model families that open as checkpoints: their GGUF architecture, defaults, and what their metadata says.

One entry of ``FAMILIES`` per model class. ``defaults`` are the values that transformers takes where config.json is
silent. A setting that llama.cpp's graph of the family cannot follow is refused by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint import rope
from skippy_zmq.sources.checkpoint.config import Config
from skippy_zmq.sources.checkpoint.metadata import Metadata, f32, flags, u32
from skippy_zmq.sources.checkpoint.rope import Rope
from skippy_zmq.sources.gguf_values import shown

log = logging.getLogger("skippy_zmq.checkpoint")

_SCALINGS = ("default", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class Family:
    """``permutes_heads``: Q and K rows change to the order in which llama.cpp rotates pairs; ``norm_offset``: what is
    added to norm weights; ``multimodal``: tensors of other modalities are left out; ``own_head``: an output matrix of
    its own is possible; ``describe``: metadata beyond the common; ``check``: refuse settings that cannot be followed.
    """

    architecture: str
    defaults: Mapping[str, Any]
    check: Callable[[Config], None]
    describe: Callable[[Config, Rope, str], Metadata]
    scalings: tuple[str, ...] = _SCALINGS
    permutes_heads: bool = False
    norm_offset: float = 0.0
    per_layer_rope: bool = False
    partial_rope: bool = False
    multimodal: bool = False
    own_head: bool = True
    space_prefix: bool | None = None  # before a text, with SentencePiece; None: not said
    space_prefix_from_settings: bool = False  # or as tokenizer_config.json says
    plain_added_tokens: bool = False  # with SentencePiece: as they are, and those of tokenizer.json too


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


def describe(family: Family, config: Config, settings: Rope) -> Metadata:
    """The hyperparameters of the model as GGUF metadata, without the general keys."""
    name = family.architecture
    heads = config.count("num_attention_heads")
    values: Metadata = {
        f"{name}.block_count": u32(config.count("num_hidden_layers")),
        f"{name}.context_length": u32(config.count("max_position_embeddings")),
        f"{name}.embedding_length": u32(config.count("hidden_size")),
        f"{name}.feed_forward_length": u32(config.count("intermediate_size")),
        f"{name}.attention.head_count": u32(heads),
        f"{name}.attention.head_count_kv": u32(config.optional_count("num_key_value_heads") or heads),
        f"{name}.attention.layer_norm_rms_epsilon": f32(config.number("rms_norm_eps")),
    }
    if settings.kind != "longrope":
        values |= rope.scaling_metadata(name, settings)
    values |= family.describe(config, settings, name)
    return values


def head_length(config: Config) -> int:
    """Elements of a head; raise ModelFileError where neither head_dim nor the sizes give it."""
    given = config.optional_count("head_dim")
    if given is not None:
        return given
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if width % heads:
        raise config.fail("num_attention_heads", f"wanted a divisor of hidden_size {width}, got {heads}")
    return width // heads


def tied(family: Family, config: Config) -> bool:
    """Whether the embedding is the output matrix too."""
    is_tied = config.flag("tie_word_embeddings")
    if not is_tied and not family.own_head:
        raise config.fail("tie_word_embeddings", "wanted true: llama.cpp knows no output matrix of its own here")
    return is_tied


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


def _no_window(config: Config) -> None:
    """Qwen's window is off unless asked for; llama.cpp's graph of these models has none."""
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        raise config.fail("use_sliding_window", "wanted false: llama.cpp knows no sliding window here")
    types = config.get("layer_types")
    if isinstance(types, list) and any(kind != rope.FULL for kind in types):
        raise config.fail("layer_types", f"wanted {rope.FULL} in all layers")


def _plain(config: Config) -> None:
    """Nothing beyond the common checks."""


def _ignored_window(config: Config) -> None:
    window, length = config.optional_count("sliding_window"), config.count("max_position_embeddings")
    if window is not None and window < length:
        log.warning(
            "%s: sliding_window: llama.cpp attends to all tokens here, so texts longer than %d differ from transformers'",
            config.path,
            window,
        )


def _rope_base(config: Config, settings: Rope, name: str) -> Metadata:
    return {f"{name}.rope.freq_base": f32(settings.theta)}


def _head_lengths(config: Config, name: str) -> Metadata:
    length = head_length(config)
    return {f"{name}.attention.key_length": u32(length), f"{name}.attention.value_length": u32(length)}


def _given_head_lengths(config: Config, name: str) -> Metadata:
    return _head_lengths(config, name) if config.get("head_dim") is not None else {}


def _rope_and_heads(config: Config, settings: Rope, name: str) -> Metadata:
    return _rope_base(config, settings, name) | _given_head_lengths(config, name)


def _llama(config: Config, settings: Rope, name: str) -> Metadata:
    values = _rope_base(config, settings, name)
    values[f"{name}.vocab_size"] = u32(config.count("vocab_size"))
    values[f"{name}.rope.dimension_count"] = u32(head_length(config))
    return values


def _llama_with_heads(config: Config, settings: Rope, name: str) -> Metadata:
    return _llama(config, settings, name) | _head_lengths(config, name)


def _experts(config: Config, name: str) -> Metadata:
    key = "num_experts" if config.values.get("num_experts") is not None else "num_local_experts"
    return {
        f"{name}.expert_count": u32(config.count(key)),
        f"{name}.expert_used_count": u32(config.count("num_experts_per_tok")),
    }


def _mixtral(config: Config, settings: Rope, name: str) -> Metadata:
    return _llama(config, settings, name) | _experts(config, name) | _given_head_lengths(config, name)


def _smollm3(config: Config, settings: Rope, name: str) -> Metadata:
    return _llama(config, settings, name) | _given_head_lengths(config, name)


def _check_smollm3(config: Config) -> None:
    _no_window(config)
    n_layers = config.count("num_hidden_layers")
    layers = config.list_of("no_rope_layers", int, n_layers)
    interval = config.count("no_rope_layer_interval")
    pattern = layers or [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    if any(bool(rotated) != bool((layer + 1) % 4) for layer, rotated in enumerate(pattern)):
        raise config.fail("no_rope_layers", "wanted every fourth layer without rotation, as llama.cpp has it")


def _granite(config: Config, settings: Rope, name: str) -> Metadata:
    values = _llama(config, settings, name)
    for setting, key in (
        ("attention_multiplier", "attention.scale"),
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ):
        number = config.number(setting)
        if number <= 0.0:
            raise config.fail(setting, f"wanted more than 0, got {number:g}")
        values[f"{name}.{key}"] = f32(number)
    return values


def _usual_heads(config: Config) -> None:
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if width % heads:
        raise config.fail("num_attention_heads", f"wanted a divisor of hidden_size {width}, got {heads}")
    given = config.optional_count("head_dim")
    if given is not None and given != width // heads:
        raise config.fail("head_dim", f"wanted hidden_size / num_attention_heads ({width // heads}), got {given}")


def _qwen3_moe(config: Config, settings: Rope, name: str) -> Metadata:
    values = _rope_and_heads(config, settings, name) | _experts(config, name)
    values[f"{name}.expert_feed_forward_length"] = u32(config.count("moe_intermediate_size"))
    return values


def _check_qwen3_moe(config: Config) -> None:
    _no_window(config)
    if not config.flag("norm_topk_prob"):
        raise config.fail("norm_topk_prob", "wanted true: llama.cpp always normalizes the weights of the experts")
    if config.get("mlp_only_layers") or config.count("decoder_sparse_step") != 1:
        raise config.fail("mlp_only_layers", "wanted experts in every layer")


def _gemma_attention_scale(config: Config, layers_with_wide_scale: int) -> None:
    """llama.cpp scales by the head length, and by the width per head in the model of so many layers."""
    heads, width = config.count("num_attention_heads"), config.count("hidden_size")
    wide = config.count("num_hidden_layers") == layers_with_wide_scale
    wanted = width // heads if wide else head_length(config)
    if config.number("query_pre_attn_scalar") != wanted:
        raise config.fail("query_pre_attn_scalar", f"wanted {wanted}, got {config.number('query_pre_attn_scalar'):g}")


def _window_pattern(config: Config, name: str, period: int) -> Metadata:
    """The layers with a sliding window, where they are not all but every ``period``-th, which llama.cpp takes them for."""
    n_layers = config.count("num_hidden_layers")
    given = config.list_of("layer_types", str, n_layers)
    if given is None:
        return {}
    for kind in given:
        if kind not in (rope.FULL, rope.SLIDING):
            raise config.fail("layer_types", f"wanted {rope.FULL} or {rope.SLIDING}, got {shown(kind)}")
    windows = [kind == rope.SLIDING for kind in given]
    if windows == [bool((layer + 1) % period) for layer in range(n_layers)]:
        return {}
    return {f"{name}.attention.sliding_window_pattern": flags(windows)}


def _gemma2(config: Config, settings: Rope, name: str) -> Metadata:
    values = _head_lengths(config, name)
    for setting, key in (("attn_logit_softcapping", "attn_logit_softcapping"), ("final_logit_softcapping",) * 2):
        values[f"{name}.{key}"] = f32(config.number(setting))
    values[f"{name}.attention.sliding_window"] = u32(config.count("sliding_window"))
    if settings.theta != 10000.0:
        values |= _rope_base(config, settings, name)
    return values | _window_pattern(config, name, 2)


def _check_gemma2(config: Config) -> None:
    _gemma_attention_scale(config, 46)


def _gemma3(config: Config, settings: Rope, name: str) -> Metadata:
    values = _rope_base(config, settings, name) | _head_lengths(config, name)
    assert settings.sliding_theta is not None
    values[f"{name}.rope.freq_base_swa"] = f32(settings.sliding_theta)
    if config.get("sliding_window_pattern") != 1:
        values[f"{name}.attention.sliding_window"] = u32(config.count("sliding_window"))
    capping = config.optional_number("final_logit_softcapping")
    if capping:
        values[f"{name}.final_logit_softcapping"] = f32(capping)
    period = config.optional_count("sliding_window_pattern") or config.optional_count("_sliding_window_pattern")
    if config.get("layer_types") is None and period not in (None, 1, 6):
        values[f"{name}.attention.sliding_window_pattern"] = u32(period)
    return values | _window_pattern(config, name, 6)


def _check_gemma3(config: Config) -> None:
    _gemma_attention_scale(config, 62)
    if config.get("attn_logit_softcapping") is not None:
        raise config.fail("attn_logit_softcapping", "wanted null: llama.cpp's Gemma 3 has none")


def _phi3(config: Config, settings: Rope, name: str) -> Metadata:
    heads, width = config.count("num_attention_heads"), config.count("hidden_size")
    values = _rope_base(config, settings, name)
    values[f"{name}.rope.dimension_count"] = u32(int(settings.partial * width) // heads)
    values[f"{name}.rope.scaling.original_context_length"] = u32(config.count("original_max_position_embeddings"))
    values[f"{name}.attention.sliding_window"] = u32(config.optional_count("sliding_window", 0) or 0)
    if settings.kind == "longrope":
        factor = rope.long_attention_factor(settings, config.count("max_position_embeddings"))
        values[f"{name}.rope.scaling.attn_factor"] = f32(factor)
    return values


def _check_phi3(config: Config) -> None:
    _usual_heads(config)
    _ignored_window(config)


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
    check=_check_gemma3,
    describe=_gemma3,
    scalings=("default", "linear"),
    norm_offset=1.0,
    per_layer_rope=True,
    multimodal=True,
    space_prefix=False,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _llama_family(
        "llama", _LLAMA, check=_plain, describe=_llama_with_heads, scalings=(*_SCALINGS, "llama3")
    ),
    "MistralForCausalLM": _llama_family("llama", _MISTRAL, check=_ignored_window, describe=_llama_with_heads),
    "MixtralForCausalLM": _llama_family(
        "llama",
        {**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_experts_per_tok": 2, "num_local_experts": 8},
        check=_ignored_window,
        describe=_mixtral,
    ),
    "Qwen2ForCausalLM": _family("qwen2", _QWEN, check=_no_window, describe=_rope_and_heads),
    "Qwen3ForCausalLM": _family("qwen3", {**_QWEN, "head_dim": 128}, check=_no_window, describe=_rope_and_heads),
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
        check=_check_qwen3_moe,
        describe=_qwen3_moe,
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
        check=_check_gemma2,
        describe=_gemma2,
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
        check=_check_phi3,
        describe=_phi3,
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
        check=_usual_heads,
        describe=_granite,
        scalings=(*_SCALINGS, "llama3"),
    ),
    "Olmo2ForCausalLM": _family("olmo2", {**_LLAMA, "rms_norm_eps": 1e-5}, check=_no_window, describe=_rope_and_heads),
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
        check=_check_smollm3,
        describe=_smollm3,
    ),
}
