"""What a model family is here: its GGUF architecture, its defaults, and the metadata that all families have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from skippy_zmq.sources.checkpoint import rope
from skippy_zmq.sources.checkpoint.config import Config
from skippy_zmq.sources.checkpoint.metadata import Metadata, f32, u32
from skippy_zmq.sources.checkpoint.rope import Rope
from skippy_zmq.sources.gguf_hyperparameters import MAX_EXTENT

SCALINGS = ("default", "linear", "yarn")


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
    scalings: tuple[str, ...] = SCALINGS
    permutes_heads: bool = False
    norm_offset: float = 0.0
    per_layer_rope: bool = False
    partial_rope: bool = False
    multimodal: bool = False
    own_head: bool = True
    space_prefix: bool | None = None  # before a text, with SentencePiece; None: not said
    space_prefix_from_settings: bool = False  # or as tokenizer_config.json says
    plain_added_tokens: bool = False  # with SentencePiece: as they are, and those of tokenizer.json too


def describe(family: Family, config: Config, settings: Rope) -> Metadata:
    """The hyperparameters of the model as GGUF metadata, without the general keys."""
    name = family.architecture
    heads = config.count("num_attention_heads")
    values: Metadata = {
        f"{name}.block_count": u32(config.n_layers()),
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
    key, length = "head_dim", config.optional_count("head_dim")
    if length is None:
        width, heads = config.count("hidden_size"), config.count("num_attention_heads")
        if width % heads:
            raise config.fail("num_attention_heads", f"wanted a divisor of hidden_size {width}, got {heads}")
        key, length = "hidden_size", width // heads
    if length > MAX_EXTENT:
        raise config.fail(key, f"wanted heads of at most {MAX_EXTENT} elements, got {length}")
    return length


def tied(family: Family, config: Config) -> bool:
    """Whether the embedding is the output matrix too."""
    is_tied = config.flag("tie_word_embeddings")
    if not is_tied and not family.own_head:
        raise config.fail("tie_word_embeddings", "wanted true: llama.cpp knows no output matrix of its own here")
    return is_tied
