"""What the settings of each family say in GGUF metadata, and which of them llama.cpp's graph cannot follow."""

from __future__ import annotations

import logging

from skippy_zmq.sources.checkpoint import rope
from skippy_zmq.sources.checkpoint.config import Config
from skippy_zmq.sources.checkpoint.family import head_length
from skippy_zmq.sources.checkpoint.metadata import Metadata, f32, flags, u32
from skippy_zmq.sources.checkpoint.rope import Rope
from skippy_zmq.sources.gguf_values import shown

log = logging.getLogger("skippy_zmq.checkpoint")


def refuse_window(config: Config) -> None:
    """Qwen's window is off unless asked for; llama.cpp's graph of these models has none."""
    if config.flag("use_sliding_window") and config.get("sliding_window") is not None:
        raise config.fail("use_sliding_window", "wanted false: llama.cpp knows no sliding window here")
    types = config.get("layer_types")
    if isinstance(types, list) and any(kind != rope.FULL for kind in types):
        raise config.fail("layer_types", f"wanted {rope.FULL} in all layers")


def no_checks(config: Config) -> None:
    """Nothing beyond the common checks."""


def warn_of_window(config: Config) -> None:
    window, length = config.optional_count("sliding_window"), config.count("max_position_embeddings")
    if window is not None and window < length:
        log.warning(
            "%s: sliding_window: llama.cpp attends to all tokens here, so answers differ beyond %d tokens",
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


def rope_and_heads(config: Config, settings: Rope, name: str) -> Metadata:
    return _rope_base(config, settings, name) | _given_head_lengths(config, name)


def llama(config: Config, settings: Rope, name: str) -> Metadata:
    values = _rope_base(config, settings, name)
    values[f"{name}.vocab_size"] = u32(config.count("vocab_size"))
    values[f"{name}.rope.dimension_count"] = u32(head_length(config))
    return values


def llama_with_heads(config: Config, settings: Rope, name: str) -> Metadata:
    return llama(config, settings, name) | _head_lengths(config, name)


def _experts(config: Config, name: str) -> Metadata:
    key = "num_experts" if config.values.get("num_experts") is not None else "num_local_experts"
    return {
        f"{name}.expert_count": u32(config.count(key)),
        f"{name}.expert_used_count": u32(config.count("num_experts_per_tok")),
    }


def mixtral(config: Config, settings: Rope, name: str) -> Metadata:
    return llama(config, settings, name) | _experts(config, name) | _given_head_lengths(config, name)


def smollm3(config: Config, settings: Rope, name: str) -> Metadata:
    return llama(config, settings, name) | _given_head_lengths(config, name)


def check_smollm3(config: Config) -> None:
    refuse_window(config)
    n_layers = config.n_layers()
    layers = config.list_of("no_rope_layers", int, n_layers)
    interval = config.count("no_rope_layer_interval")
    pattern = layers or [int((layer + 1) % interval != 0) for layer in range(n_layers)]
    if any(bool(rotated) != bool((layer + 1) % 4) for layer, rotated in enumerate(pattern)):
        raise config.fail("no_rope_layers", "wanted every fourth layer without rotation, as llama.cpp has it")


def granite(config: Config, settings: Rope, name: str) -> Metadata:
    values = llama(config, settings, name)
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


def refuse_other_heads(config: Config) -> None:
    width, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if width % heads:
        raise config.fail("num_attention_heads", f"wanted a divisor of hidden_size {width}, got {heads}")
    given = config.optional_count("head_dim")
    if given is not None and given != width // heads:
        raise config.fail("head_dim", f"wanted hidden_size / num_attention_heads ({width // heads}), got {given}")


def qwen3_moe(config: Config, settings: Rope, name: str) -> Metadata:
    values = rope_and_heads(config, settings, name) | _experts(config, name)
    values[f"{name}.expert_feed_forward_length"] = u32(config.count("moe_intermediate_size"))
    return values


def check_qwen3_moe(config: Config) -> None:
    refuse_window(config)
    if not config.flag("norm_topk_prob"):
        raise config.fail("norm_topk_prob", "wanted true: llama.cpp always normalizes the weights of the experts")
    if config.get("mlp_only_layers") or config.count("decoder_sparse_step") != 1:
        raise config.fail("mlp_only_layers", "wanted experts in every layer")


def _gemma_attention_scale(config: Config, layers_with_wide_scale: int) -> None:
    """llama.cpp scales by the head length, and by the width per head in the model of so many layers."""
    heads, width = config.count("num_attention_heads"), config.count("hidden_size")
    wide = config.n_layers() == layers_with_wide_scale
    wanted = width // heads if wide else head_length(config)
    if config.number("query_pre_attn_scalar") != wanted:
        raise config.fail("query_pre_attn_scalar", f"wanted {wanted}, got {config.number('query_pre_attn_scalar'):g}")


def _window_pattern(config: Config, name: str, period: int) -> Metadata:
    """The layers with a sliding window, unless they are all but every ``period``-th, which llama.cpp takes them for."""
    n_layers = config.n_layers()
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


def gemma2(config: Config, settings: Rope, name: str) -> Metadata:
    values = _head_lengths(config, name)
    for setting, key in (("attn_logit_softcapping", "attn_logit_softcapping"), ("final_logit_softcapping",) * 2):
        values[f"{name}.{key}"] = f32(config.number(setting))
    values[f"{name}.attention.sliding_window"] = u32(config.count("sliding_window"))
    if settings.theta != 10000.0:
        values |= _rope_base(config, settings, name)
    return values | _window_pattern(config, name, 2)


def check_gemma2(config: Config) -> None:
    _gemma_attention_scale(config, 46)


def gemma3(config: Config, settings: Rope, name: str) -> Metadata:
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


def check_gemma3(config: Config) -> None:
    _gemma_attention_scale(config, 62)
    if config.get("attn_logit_softcapping") is not None:
        raise config.fail("attn_logit_softcapping", "wanted null: llama.cpp's Gemma 3 has none")


def phi3(config: Config, settings: Rope, name: str) -> Metadata:
    heads, width = config.count("num_attention_heads"), config.count("hidden_size")
    values = _rope_base(config, settings, name)
    values[f"{name}.rope.dimension_count"] = u32(int(settings.partial * width) // heads)
    values[f"{name}.rope.scaling.original_context_length"] = u32(config.count("original_max_position_embeddings"))
    values[f"{name}.attention.sliding_window"] = u32(config.optional_count("sliding_window", 0) or 0)
    if settings.kind == "longrope":
        factor = rope.long_attention_factor(settings, config.count("max_position_embeddings"))
        values[f"{name}.rope.scaling.attn_factor"] = f32(factor)
    return values


def check_phi3(config: Config) -> None:
    refuse_other_heads(config)
    warn_of_window(config)
