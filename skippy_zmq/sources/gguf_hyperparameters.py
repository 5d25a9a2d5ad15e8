"""Check the hyperparameters of a model: the values that llama.cpp divides by, asserts on or indexes with.

Guards only; a file that llama.cpp refuses with a message of its own (a tensor of the wrong shape, a missing key of one
architecture) is left to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources import architectures
from skippy_zmq.sources.gguf_header import GgufHeader
from skippy_zmq.sources.gguf_values import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, VALUE_TYPES, shown, type_text

MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS
MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
MAX_EXTENT = 1 << 20  # of one dimension that metadata states; llama.cpp multiplies two of them in 32 bits
ROPE_SCALING_TYPES = ("none", "linear", "yarn", "longrope")
MAX_GATING_FUNCTION = 4
MAX_WINDOW = 1 << 23  # times 256 sequences must fit 32 bits
POOLING_TYPES = (0, 1, 2, 3, 4, 0xFFFF_FFFF)

_EXTENT_KEYS = (
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "ssm.group_count",
    "shortconv.l_cache",
    "wkv.head_size",
    "kda.head_dim",
)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What the rest of the program needs to know of the checked values."""

    n_blocks: int
    n_layers: int
    embedding_length: int
    context_length: int


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Typed access to ``<architecture>.<key>``; ``fail`` names the file and the key."""

    header: GgufHeader
    architecture: str

    def fail(self, key: str, text: str) -> ModelFileError:
        return ModelFileError(f"{self.header.path}: {self.architecture}.{key}: {text}")

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.values

    def _typed(self, key: str, wanted: int) -> int | float | bool | str | None:
        value = self.header.values.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if value.type != wanted:
            raise self.fail(key, f"wanted a {VALUE_TYPES[wanted]}, got {type_text(value)}")
        return self.header.scalar(f"{self.architecture}.{key}")

    def count(self, key: str, default: int = 0) -> int:
        value = self._typed(key, UINT32)
        return default if value is None else int(value)

    def required(self, key: str, low: int, high: int) -> int:
        if not self.has(key):
            raise self.fail(key, "this metadata key is missing")
        value = self.count(key)
        if not low <= value <= high:
            raise self.fail(key, f"wanted {low} to {high}, got {value}")
        return value

    def number(self, key: str, default: float = 0.0) -> float:
        value = self._typed(key, FLOAT32)
        return default if value is None else float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._typed(key, BOOL)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        value = self._typed(key, STRING)
        return default if value is None else str(value)

    def per_block(self, key: str, n_blocks: int) -> tuple[int, ...] | None:
        """One count for all blocks or an array with one for each; None when absent."""
        value = self.header.values.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if value.type != ARRAY:
            return (self.count(key),) * n_blocks
        if value.element_type not in (UINT32, INT32, BOOL):
            raise self.fail(key, f"wanted integers, got {type_text(value)}")
        if value.count != n_blocks:
            raise self.fail(key, f"wanted {n_blocks} elements (block_count), got {value.count}")
        counts = tuple(int(element) for element in self.header.array(f"{self.architecture}.{key}"))
        if min(counts) < 0:
            raise self.fail(key, f"wanted no negative element, got {min(counts)}")
        return counts


def check_hyperparameters(header: GgufHeader, architecture: str) -> Hyperparameters:
    """Raise ModelFileError for values that would abort llama.cpp; return the few that others need."""
    data = _Metadata(header, architecture)
    n_blocks = data.required("block_count", 1, MAX_BLOCKS)
    n_predict = data.count("nextn_predict_layers")
    if n_predict >= n_blocks:
        raise data.fail("nextn_predict_layers", f"wanted less than block_count ({n_blocks}), got {n_predict}")
    context_length = data.required("context_length", 1, 2**31 - 1)
    embedding_length = data.required("embedding_length", 1, MAX_EXTENT)
    _check_extents(data, n_blocks)
    _check_floats(data)
    _check_switches(data)
    _check_experts(data, n_blocks)
    heads = _check_heads(data, n_blocks, embedding_length)
    if heads[0]:
        _check_head_lengths(data, embedding_length, heads[0])
    _check_window(data, n_blocks)
    _check_rope(data, data.count("attention.key_length", embedding_length // max(heads[0], 1)))
    _check_state_space(data, embedding_length)
    _check_single_architectures(data, embedding_length, n_blocks - n_predict)
    return Hyperparameters(n_blocks, n_blocks - n_predict, embedding_length, context_length)


def _check_extents(data: _Metadata, n_blocks: int) -> None:
    for key in _EXTENT_KEYS:
        counts = data.per_block(key, n_blocks)
        if counts and max(counts) > MAX_EXTENT:
            raise data.fail(key, f"wanted at most {MAX_EXTENT}, got {max(counts)}")


def _check_floats(data: _Metadata) -> None:
    prefix = f"{data.architecture}."
    for name, value in data.header.values.items():
        if name.startswith(prefix) and name.endswith("epsilon") and value.type == FLOAT32:
            epsilon = float(data.header.scalar(name) or 0.0)
            if not (math.isfinite(epsilon) and epsilon >= 0.0):
                raise data.fail(name.removeprefix(prefix), f"wanted a number of at least 0, got {epsilon}")
    for key in ("attention.max_alibi_bias", "attention.clamp_kqv"):
        if not (math.isfinite(data.number(key)) and data.number(key) >= 0.0):
            raise data.fail(key, f"wanted a number of at least 0, got {data.number(key)}")
    if data.architecture in ("deepseek2", "mistral3", "mistral4") and data.number("attention.temperature_scale"):
        key = "attention.temperature_length"
        if data.has(key) and data.count(key) == 0:
            raise data.fail(key, "wanted at least 1 beside attention.temperature_scale, got 0")


def _check_switches(data: _Metadata) -> None:
    if not data.flag("attention.causal", True):
        raise data.fail("attention.causal", "wanted true; without it a model cannot generate text in stages")
    pooling = data.count("pooling_type", POOLING_TYPES[-1])
    if pooling not in POOLING_TYPES:
        raise data.fail("pooling_type", f"wanted one of {POOLING_TYPES}, got {pooling}")
    if data.count("full_attention_interval", 1) == 0:
        raise data.fail("full_attention_interval", "wanted at least 1, got 0")


def _check_experts(data: _Metadata, n_blocks: int) -> None:
    n_experts = data.count("expert_count")
    if n_experts > MAX_EXPERTS:
        raise data.fail("expert_count", f"wanted at most {MAX_EXPERTS}, got {n_experts}")
    used = max(data.per_block("expert_used_count", n_blocks) or (0,))
    if data.architecture in ("hunyuan-dense", "hunyuan_vl") and n_experts <= 1:
        n_experts = used = 0
    groups, groups_used = data.count("expert_group_count"), data.count("expert_group_used_count")
    if used > n_experts:
        raise data.fail("expert_used_count", f"wanted at most expert_count ({n_experts}), got {used}")
    if n_experts == 0:
        if groups:
            raise data.fail("expert_group_count", f"wanted 0 in a model without experts, got {groups}")
        if data.architecture in architectures.EXPERTS_REQUIRED:
            raise data.fail("expert_count", "wanted at least 1 for this architecture, got 0")
        return
    if used == 0:
        raise data.fail("expert_used_count", f"wanted 1 to expert_count ({n_experts}), got 0")
    if groups >= n_experts:
        raise data.fail("expert_group_count", f"wanted less than expert_count ({n_experts}), got {groups}")
    if groups > 1:
        if n_experts % groups:
            raise data.fail("expert_group_count", f"wanted a divisor of expert_count ({n_experts}), got {groups}")
        if not 0 < groups_used < groups:
            raise data.fail("expert_group_used_count", f"wanted 1 to {groups - 1}, got {groups_used}")
        if groups_used * (n_experts // groups) < used:
            raise data.fail("expert_used_count", f"wanted at most the experts of the groups used, got {used}")
    gating, lowest = data.count("expert_gating_func"), int(data.architecture in architectures.GATING_REQUIRED)
    if not lowest <= gating <= MAX_GATING_FUNCTION:
        raise data.fail("expert_gating_func", f"wanted {lowest} to {MAX_GATING_FUNCTION}, got {gating}")


def _check_heads(data: _Metadata, n_blocks: int, embedding_length: int) -> tuple[int, ...]:
    heads = data.per_block("attention.head_count", n_blocks) or (0,) * n_blocks
    heads_kv = data.per_block("attention.head_count_kv", n_blocks) or heads
    if max(heads) == 0 and data.architecture not in architectures.RECURRENT:
        raise data.fail("attention.head_count", "wanted at least 1, got 0")
    for block, (n_heads, n_heads_kv) in enumerate(zip(heads, heads_kv, strict=True)):
        if n_heads and n_heads_kv and n_heads % n_heads_kv:
            raise data.fail(
                "attention.head_count_kv",
                f"wanted a divisor of attention.head_count ({n_heads}), got {n_heads_kv} in block {block}",
            )
        if data.architecture not in architectures.EMBEDDING_WIDE_HEADS or not (n_heads and n_heads_kv):
            continue
        length = data.count("attention.value_length", embedding_length // n_heads)
        if n_heads * length != embedding_length:
            raise data.fail(
                "attention.head_count",
                f"wanted a number that gives embedding_length {embedding_length} with heads of {length}, got {n_heads}",
            )
    return heads


def _check_head_lengths(data: _Metadata, embedding_length: int, n_heads: int) -> None:
    if not data.has("attention.key_length") and embedding_length % n_heads:
        raise data.fail(
            "attention.head_count", f"wanted a divisor of embedding_length ({embedding_length}), got {n_heads}"
        )
    default = embedding_length // n_heads
    key, value = data.count("attention.key_length", default), data.count("attention.value_length", default)
    key_swa = data.count("attention.key_length_swa", key)
    value_swa = data.count("attention.value_length_swa", value)
    for name, length in (("key_length", key), ("value_length", value)):
        if length < 1:
            raise data.fail(f"attention.{name}", f"wanted at least 1, got {length}")
    if data.architecture not in architectures.OWN_WINDOW_LENGTHS:
        for name, first, second in (("key_length", key, key_swa), ("value_length", value, value_swa)):
            if first != second:
                raise data.fail(f"attention.{name}_swa", f"wanted the {name} {first}, got {second}")
    if data.architecture not in architectures.OWN_VALUE_LENGTH:
        for suffix, first, second in (("", key, value), ("_swa", key_swa, value_swa)):
            if first != second:
                raise data.fail(f"attention.value_length{suffix}", f"wanted the key length {first}, got {second}")
    if data.architecture in architectures.WITHOUT_ROPE:
        return
    rope = data.count("rope.dimension_count", key)
    rope_swa = data.count("rope.dimension_count_swa", rope)
    for suffix, rotated, length in (("", rope, key), ("_swa", rope_swa, key_swa)):
        if rotated % 2 or not 0 < rotated <= length:
            raise data.fail(f"rope.dimension_count{suffix}", f"wanted an even number from 2 to {length}, got {rotated}")
        if data.architecture in architectures.FULL_ROPE and rotated != length:
            raise data.fail(f"rope.dimension_count{suffix}", f"wanted the attention key length {length}, got {rotated}")


def _check_window(data: _Metadata, n_blocks: int) -> None:
    # Llama 4 has a window of 8192 unless the file says 0, and then this llama.cpp aborts on its temperature tuning
    is_llama4 = data.architecture == "llama4"
    window = data.count("attention.sliding_window", 8192 if is_llama4 else 0)
    if not is_llama4 <= window <= MAX_WINDOW:
        raise data.fail("attention.sliding_window", f"wanted {int(is_llama4)} to {MAX_WINDOW}, got {window}")
    key = "attention.sliding_window_pattern"
    if not window or data.architecture not in architectures.MIXED_WINDOW or not data.has(key):
        return
    pattern = data.per_block(key, n_blocks) or ()
    # a number n means: every n-th layer has no window
    is_array = data.header.values[f"{data.architecture}.{key}"].type == ARRAY
    if not any(pattern) if is_array else pattern[0] == 1:
        raise data.fail(key, f"wanted at least one layer with the sliding window of {window}, got none")


def _check_rope(data: _Metadata, key_length: int) -> None:
    scaling = data.text("rope.scaling.type", "linear")
    if scaling not in ROPE_SCALING_TYPES:
        raise data.fail("rope.scaling.type", f"wanted one of {', '.join(ROPE_SCALING_TYPES)}, got {shown(scaling)}")
    if data.has("rope.freq_base"):
        base = data.number("rope.freq_base")
        if not (math.isfinite(base) and base >= 0.0):
            raise data.fail("rope.freq_base", f"wanted a number of at least 0, got {base}")
    key = "rope.dimension_sections"
    value = data.header.values.get(f"{data.architecture}.{key}")
    if value is None or value.type != ARRAY or value.element_type not in (INT32, UINT32):
        return
    sections = [int(section) for section in data.header.array(f"{data.architecture}.{key}")]
    needed = 1 if data.architecture in architectures.MULTI_SECTION_ROPE else 0
    if min(sections, default=0) < 0 or sum(sections) > key_length or sum(sections[:3]) < needed:
        raise data.fail(key, f"wanted sections that add up to {needed} to {key_length}, got {sections[:8]}")


def _check_state_space(data: _Metadata, embedding_length: int) -> None:
    names = ("conv_kernel", "inner_size", "state_size", "time_step_rank")
    kernel, inner, state, rank = (data.count(f"ssm.{name}") for name in names)
    groups = data.count("ssm.group_count")
    if data.architecture in architectures.STATE_SPACE | architectures.DELTA_NET:
        for name, extent in zip(names, (kernel, inner, state, rank), strict=True):
            if extent < 1:
                raise data.fail(f"ssm.{name}", f"wanted at least 1, got {extent}")
    if data.architecture in architectures.TWICE_EMBEDDING_INNER_SIZE and inner != 2 * embedding_length:
        raise data.fail("ssm.inner_size", f"wanted twice embedding_length ({2 * embedding_length}), got {inner}")
    if data.architecture in architectures.STATE_SPACE - {"jamba", "mamba"}:
        if inner % rank:
            raise data.fail("ssm.time_step_rank", f"wanted a divisor of ssm.inner_size ({inner}), got {rank}")
        if data.architecture != "plamo2" and (groups < 1 or inner % groups or rank % groups):
            raise data.fail(
                "ssm.group_count",
                f"wanted a divisor of ssm.inner_size ({inner}) and ssm.time_step_rank ({rank}), got {groups}",
            )
    if data.architecture in architectures.DELTA_NET:
        if inner % rank or inner // rank != state:
            raise data.fail(
                "ssm.inner_size", f"wanted ssm.time_step_rank ({rank}) times ssm.state_size ({state}), got {inner}"
            )
        if groups < 1 or rank % groups:
            raise data.fail("ssm.group_count", f"wanted a divisor of ssm.time_step_rank ({rank}), got {groups}")


def _check_single_architectures(data: _Metadata, embedding_length: int, n_layers: int) -> None:
    if data.architecture == "ernie4_5-moe" and data.count("interleave_moe_layer_step") < 1:
        raise data.fail("interleave_moe_layer_step", "wanted at least 1, got 0")
    if data.architecture in ("lfm2", "lfm2moe") and data.count("shortconv.l_cache") < 2:
        raise data.fail("shortconv.l_cache", f"wanted at least 2, got {data.count('shortconv.l_cache')}")
    if data.architecture == "gemma4" and data.count("attention.shared_kv_layers") >= n_layers:
        raise data.fail("attention.shared_kv_layers", f"wanted less than the {n_layers} layers")
    if data.architecture in ("rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"):
        head = data.count("wkv.head_size")
        if head < 1 or embedding_length % head:
            raise data.fail("wkv.head_size", f"wanted a divisor of embedding_length ({embedding_length}), got {head}")
    if data.architecture in ("rwkv6", "rwkv7") and data.count("token_shift_count", 2) != 2:
        raise data.fail("token_shift_count", f"wanted 2, got {data.count('token_shift_count')}")
    if data.architecture == "nanbeige" and data.count("num_loops", 1) < 1:
        raise data.fail("num_loops", "wanted at least 1, got 0")
