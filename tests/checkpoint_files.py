"""Small Hugging Face checkpoints for tests: one for each family and spelling, their weights made from their names.

Imports nothing of skippy_zmq: scripts/checkpoint_oracles.py writes the same folders for llama.cpp's own converter.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
CHECKPOINTS = DATA / "checkpoints"
SENTENCEPIECE = CHECKPOINTS / "sentencepiece.model"
UNSPLIT = CHECKPOINTS / "unsplit-tokenizer.json"  # its merges go across words, so that every split of a text shows
VOCABULARY = 512  # rows of the tokenizers used here

HIDDEN, FFN, HEADS, KV_HEADS, HEAD, LAYERS = 32, 48, 4, 2, 8, 2

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS = {**_BYTES, "use_regex": True}
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _regex(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES]}


def _cased(suffix: str, digits: str) -> str:
    upper, lower = _CASED
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
    return words + rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# pre-tokenizers as tokenizer.json has them in published models, by llama.cpp's names
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "llama-bpe": _regex(_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST),
    "qwen2": _regex(_SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST),
    "tekken": _regex(_cased("", r"\p{N}")),
    "gpt-4o": _regex(_cased(_SUFFIX + "?", r"\p{N}{1,3}")),
    "gpt-2": _WORDS,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _WORDS]},
}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name: dtype, shape, bytes


def safetensors_bytes(tensors: Tensors) -> bytes:
    """A whole .safetensors file, tensors in the order given."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + b"".join(data for _, _, data in tensors.values())


def weights(name: str, shape: Sequence[int], dtype: str) -> bytes:
    """Finite values of both signs, of 2**-5 to 1, made from the name: the same bytes on every machine."""
    count = math.prod(shape)
    bits = np.frombuffer(hashlib.shake_256(name.encode()).digest(2 * count), dtype="<u2")
    values: NDArray[Any] = (bits & 0x807F) | (0x7A + ((bits >> 7) & 3)) << 7
    wide = (values.astype("<u4") << 16).view("<f4")
    if dtype == "BF16":
        return values.astype("<u2").tobytes()
    return (wide if dtype == "F32" else wide.astype("<f2")).tobytes()


@dataclass(frozen=True, slots=True)
class Case:
    """``shapes``: of the tensors by name; ``spm``: the SentencePiece vocabulary in place of the byte-level one."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    dtype: str = "BF16"
    spm: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # of tokenizer_config.json

    def tensors(self) -> Tensors:
        return {name: (self.dtype, shape, weights(name, shape, self.dtype)) for name, shape in self.shapes.items()}


def write_case(case: Case, folder: Path, *, shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case.config))
    golden = GOLDEN / "llama"
    settings = {**json.loads((golden / "tokenizer_config.json").read_text()), **case.settings}
    if case.spm:
        shutil.copyfile(SENTENCEPIECE, folder / "tokenizer.model")
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", **case.settings}
    else:
        shutil.copyfile(golden / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    write_weights(folder, case.tensors(), shards=shards)
    return folder


def write_weights(folder: Path, tensors: Tensors, *, shards: int = 1) -> None:
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return
    names = list(tensors)
    weight_map = {}
    for number in range(shards):
        part = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[number::shards]
        (folder / part).write_bytes(safetensors_bytes({name: tensors[name] for name in chosen}))
        weight_map |= dict.fromkeys(chosen, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def edited(folder: Path, changes: Mapping[str, Any], file: str = "config.json") -> None:
    """Change keys of a JSON file in ``folder``; None removes one."""
    values = json.loads((folder / file).read_text())
    for key, value in changes.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    (folder / file).write_text(json.dumps(values))


def _config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 256,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 462,
        "eos_token_id": 463,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **changes,
    }


def _dense(
    *,
    head: int = HEAD,
    tied: bool = False,
    norms: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
    head_norms: tuple[int, int] | None = None,
    biases: bool = False,
    fused: bool = False,
    mlp: bool = True,
    prefix: str = "model",
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes[f"{prefix}.embed_tokens.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        name = f"{prefix}.layers.{layer}"
        shapes |= {f"{name}.{norm}.weight": (HIDDEN,) for norm in norms}
        q, k = HEADS * head, KV_HEADS * head
        matrices = {"qkv_proj": q + 2 * k} if fused else {"q_proj": q, "k_proj": k, "v_proj": k}
        for kind, rows in matrices.items():
            shapes[f"{name}.self_attn.{kind}.weight"] = (rows, HIDDEN)
            if biases:
                shapes[f"{name}.self_attn.{kind}.bias"] = (rows,)
        shapes[f"{name}.self_attn.o_proj.weight"] = (HIDDEN, q)
        for kind, length in zip(("q_norm", "k_norm"), head_norms or (), strict=False):
            shapes[f"{name}.self_attn.{kind}.weight"] = (length,)
        if mlp:
            gates = {"gate_up_proj": 2 * FFN} if fused else {"gate_proj": FFN, "up_proj": FFN}
            shapes |= {f"{name}.mlp.{kind}.weight": (rows, HIDDEN) for kind, rows in gates.items()}
            shapes[f"{name}.mlp.down_proj.weight"] = (HIDDEN, FFN)
    shapes[f"{prefix}.norm.weight"] = (HIDDEN,)
    return shapes


def _mixtral(n_experts: int) -> dict[str, tuple[int, ...]]:
    shapes = _dense(mlp=False)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.block_sparse_moe"
        shapes[f"{name}.gate.weight"] = (n_experts, HIDDEN)
        for expert in range(n_experts):
            for kind, shape in (("w1", (FFN, HIDDEN)), ("w2", (HIDDEN, FFN)), ("w3", (FFN, HIDDEN))):
                shapes[f"{name}.experts.{expert}.{kind}.weight"] = shape
    return shapes


def _qwen3_moe_fused(n_experts: int) -> dict[str, tuple[int, ...]]:
    shapes = _dense(mlp=False, head_norms=(HEAD, HEAD))
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp"
        shapes[f"{name}.gate.weight"] = (n_experts, HIDDEN)
        shapes[f"{name}.experts.gate_up_proj"] = (n_experts, 2 * FFN, HIDDEN)
        shapes[f"{name}.experts.down_proj"] = (n_experts, HIDDEN, FFN)
    return shapes


_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_OLMO_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_FACTORS = [1.0 + number / 8 for number in range(HEAD // 2)]
_SPM_IDS = {"bos_token_id": 1, "eos_token_id": 2}


def _gemma3_with_vision() -> dict[str, tuple[int, ...]]:
    shapes = _dense(tied=True, norms=_GEMMA_NORMS, head_norms=(HEAD, HEAD), prefix="language_model.model")
    return {
        **shapes,
        "multi_modal_projector.mm_input_projection_weight": (HIDDEN, HIDDEN),
        "vision_tower.vision_model.embeddings.patch_embedding.weight": (HIDDEN, 3, 2, 2),
        "vision_tower.vision_model.post_layernorm.weight": (HIDDEN,),
    }


CASES: dict[str, Case] = {
    "llama-old-spelling": Case(
        _config("LlamaForCausalLM", "llama", rope_theta=50000.0, rope_scaling={"type": "linear", "factor": 4.0}),
        _dense(),
    ),
    "llama-f16-tied-biases": Case(
        _config("LlamaForCausalLM", "llama", tie_word_embeddings=True, attention_bias=True, head_dim=16),
        _dense(tied=True, biases=True, head=16),
        dtype="F16",
    ),
    "llama-f32-sentencepiece": Case(_config("LlamaForCausalLM", "llama", **_SPM_IDS), _dense(), dtype="F32", spm=True),
    "mistral-sentencepiece": Case(
        _config("MistralForCausalLM", "mistral", **_SPM_IDS, sliding_window=64),
        _dense(),
        spm=True,
        settings={
            "add_bos_token": True,
            "add_eos_token": False,
            "added_tokens_decoder": {
                "0": {"content": "<unk>", "special": True},
                "509": {"content": "<|user|>", "special": True},
                "510": {"content": "\u2581tool", "special": False},
                "511": {"content": "<plain>", "special": False},
            },
            "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        },
    ),
    "mixtral": Case(
        _config("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2, rope_theta=1e6),
        _mixtral(4),
    ),
    "qwen2-yarn": Case(
        _config(
            "Qwen2ForCausalLM",
            "qwen2",
            rope_theta=1e6,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        _dense(biases=True),
    ),
    "qwen3-moe-stacked": Case(
        _config(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            head_dim=HEAD,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=FFN,
            norm_topk_prob=True,
            rope_theta=1e6,
        ),
        _qwen3_moe_fused(4),
    ),
    "gemma2": Case(
        _config(
            "Gemma2ForCausalLM",
            "gemma2",
            **_SPM_IDS,
            head_dim=HEAD,
            query_pre_attn_scalar=HEAD,
            sliding_window=16,
            tie_word_embeddings=True,
            hidden_activation="gelu_pytorch_tanh",
        ),
        _dense(tied=True, norms=_GEMMA_NORMS),
        spm=True,
    ),
    "gemma3-with-vision": Case(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": _config(
                "Gemma3ForCausalLM",
                "gemma3_text",
                **_SPM_IDS,
                head_dim=HEAD,
                query_pre_attn_scalar=HEAD,
                sliding_window=16,
                tie_word_embeddings=True,
                rope_scaling={"rope_type": "linear", "factor": 8.0},
                final_logit_softcapping=30.0,
            ),
            "vision_config": {"hidden_size": HIDDEN, "num_hidden_layers": 1},
        },
        _gemma3_with_vision(),
        spm=True,
    ),
    "phi3": Case(
        _config("Phi3ForCausalLM", "phi3", original_max_position_embeddings=256, sliding_window=128),
        _dense(fused=True),
        settings={"tokenizer_class": "GPT2Tokenizer"},
    ),
    "phi3-long-sentencepiece": Case(
        _config(
            "Phi3ForCausalLM",
            "phi3",
            **_SPM_IDS,
            original_max_position_embeddings=64,
            rope_scaling={"type": "longrope", "long_factor": _FACTORS, "short_factor": _FACTORS[::-1]},
        ),
        _dense(fused=True),
        spm=True,
        settings={"added_tokens_decoder": {"511": {"content": "<|end|>", "special": True}}},
    ),
    "phi3-partial-rotation": Case(
        _config(
            "Phi3ForCausalLM",
            "phi3",
            original_max_position_embeddings=64,
            partial_rotary_factor=0.75,
            rope_scaling={"type": "longrope", "long_factor": _FACTORS[:3], "short_factor": _FACTORS[1:]},
            tie_word_embeddings=True,
        ),
        _dense(fused=True, tied=True),
        settings={"tokenizer_class": "GPT2Tokenizer"},
    ),
    "granite": Case(
        _config(
            "GraniteForCausalLM",
            "granite",
            tie_word_embeddings=True,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.125,
            logits_scaling=8.0,
        ),
        _dense(tied=True),
    ),
    "olmo2": Case(
        _config("Olmo2ForCausalLM", "olmo2", rope_theta=500000.0),
        _dense(norms=_OLMO_NORMS, head_norms=(HEADS * HEAD, KV_HEADS * HEAD)),
    ),
    "smollm3": Case(
        _config(
            "SmolLM3ForCausalLM",
            "smollm3",
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6},
        ),
        _dense(tied=True),
    ),
}


def wide(ffn: int, *, hidden: int = 256, layers: int = 3) -> Case:
    """A Llama whose rows fit K-quants; larger than the others where ``ffn`` is."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{name}.self_attn.{kind}_proj.weight": (hidden, hidden) for kind in "qkvo"}
        shapes |= {f"{name}.mlp.{kind}_proj.weight": (ffn, hidden) for kind in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj.weight"] = (hidden, ffn)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    return Case(_config("LlamaForCausalLM", "llama", **sizes, num_key_value_heads=HEADS), shapes)
