"""Writes small model files for tests: random ones, ones that recite a given text, shards, edited and sparse copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf_bytes import BOOL, FLOAT32, INT32, STRING, UINT16, UINT32, RawGguf, RawTensor, array, read_raw, scalar
from numpy.typing import NDArray

BOS, EOS, TURN_START, TURN_END = range(4)
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
FIRST_BYTE_TOKEN = len(SPECIAL_TOKENS)  # token FIRST_BYTE_TOKEN + b is the byte b

_MERGE_LIST = (
    "Ġ t|h e|Ġt he|i n|e r|a n|o n|r e|a t|e n|n d|o r|Ġ a|e s|i s|i t|Ġ w|o u|in g|an d|Ġ s|Ġ o|Ġo f|e d|a l|a r|l e"
    "|s t|Ġt o|v e|h a|Ġ in|o m|l l|Ġ h|m e|u r|r o|i c|l i"
)
_MERGES = tuple(_MERGE_LIST.split("|"))


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's alphabet)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def _write_vocabulary(
    writer: gguf.GGUFWriter,
    extra: Sequence[tuple[str, gguf.TokenType]],
    merges: Sequence[str],
    add_bos: bool | None,
    chat_template: str | None,
) -> None:
    """Byte-level BPE: the special tokens, 256 byte tokens, then ``extra``. Any text tokenizes."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*SPECIAL_TOKENS, *byte_alphabet(), *(name for name, _ in extra)])
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * FIRST_BYTE_TOKEN
        + [gguf.TokenType.NORMAL] * 256
        + [token_type for _, token_type in extra]
    )
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(
    path: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    n_layers: int = 4,
    hidden: int = 64,
    ffn: int = 192,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    chat_template: str | None = None,
    add_bos: bool | None = None,
    quant: str | None = None,
    experts: int = 0,
    unused: int = 0,
) -> Path:
    """A Llama-type model of random weights, float32 or as ``quant`` ("bf16", "q8_0", "q4_0" ...); 300 tokens.

    ``unused``: so many more, which no text contains.

    The same ``seed`` gives the same weights. ``tied``: without an output matrix of its own. ``experts``: of each layer,
    two of which a token asks.
    """
    merged = [(merge.replace(" ", ""), gguf.TokenType.NORMAL) for merge in _MERGES]
    merged += [(f"<unused{index}>", gguf.TokenType.UNUSED) for index in range(unused)]
    n_vocab = FIRST_BYTE_TOKEN + 256 + len(merged)
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    _write_shape(writer, n_layers, hidden, ffn, heads, kv_heads, hidden // heads, context)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    _write_vocabulary(writer, merged, _MERGES, add_bos, chat_template)

    def matrix(name: str, *shape: int) -> None:
        data = random.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)
        if quant is None:
            writer.add_tensor(name, data)
        else:
            number = gguf.GGMLQuantizationType[quant.upper()]
            writer.add_tensor(name, gguf.quants.quantize(data, number), raw_dtype=number)

    def norm(name: str) -> None:
        writer.add_tensor(name, random.uniform(0.8, 1.2, hidden).astype(np.float32))

    matrix("token_embd.weight", n_vocab, hidden)
    for layer in range(n_layers):
        norm(f"blk.{layer}.attn_norm.weight")
        matrix(f"blk.{layer}.attn_q.weight", hidden, hidden)
        matrix(f"blk.{layer}.attn_k.weight", hidden * kv_heads // heads, hidden)
        matrix(f"blk.{layer}.attn_v.weight", hidden * kv_heads // heads, hidden)
        matrix(f"blk.{layer}.attn_output.weight", hidden, hidden)
        norm(f"blk.{layer}.ffn_norm.weight")
        if experts:
            gates = random.normal(0.0, hidden**-0.5, (experts, hidden)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", gates)
            matrix(f"blk.{layer}.ffn_gate_exps.weight", experts, ffn, hidden)
            matrix(f"blk.{layer}.ffn_up_exps.weight", experts, ffn, hidden)
            matrix(f"blk.{layer}.ffn_down_exps.weight", experts, hidden, ffn)
        else:
            matrix(f"blk.{layer}.ffn_gate.weight", ffn, hidden)
            matrix(f"blk.{layer}.ffn_up.weight", ffn, hidden)
            matrix(f"blk.{layer}.ffn_down.weight", hidden, ffn)
    norm("output_norm.weight")
    if not tied:
        matrix("output.weight", n_vocab, hidden)
    return _written(writer, path)


def _write_shape(
    writer: gguf.GGUFWriter, n_layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head: int, context: int
) -> None:
    writer.add_block_count(n_layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)


@dataclass(frozen=True, slots=True)
class Parrot:
    """``token_ids``: the tokens it recites, one per piece of ``pieces``, in order."""

    path: Path
    pieces: tuple[bytes, ...]
    token_ids: tuple[int, ...]

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


def parrot(
    path: Path,
    text: str | bytes | Sequence[bytes],
    *,
    n_layers: int = 4,
    end: str = "eos",
    context: int = 2048,
    chat_template: str | None = None,
    add_bos: bool | None = None,
) -> Parrot:
    """A model that answers any prompt with ``text``, one token per byte (or per given piece), whatever the bytes.

    After the last token comes the end-of-text token (``end="eos"``) or the first one again (``end="loop"``). The text
    repeats bytes, so each position has a token of its own: a one-byte piece is a byte token whose text only starts
    like that of the byte, a longer piece is a normal token and must occur once. Prompts tokenize into plain byte
    tokens; all of those, and the special ones, lead to the first piece. The chosen token leads by 60 and more.
    """
    if isinstance(text, str | bytes):
        raw = text.encode() if isinstance(text, str) else text
        pieces = tuple(raw[i : i + 1] for i in range(len(raw)))
    else:
        pieces = tuple(text)
    alphabet = byte_alphabet()
    names = tuple(
        f"<0x{piece[0]:02X}>@{position}" if len(piece) == 1 else "".join(alphabet[byte] for byte in piece)
        for position, piece in enumerate(pieces)
    )
    if len(set(names)) != len(names):
        raise ValueError("a piece of several bytes occurs twice; give its bytes one by one")
    first = FIRST_BYTE_TOKEN + 256
    n_vocab = first + len(pieces)
    # component 0: nothing recited yet; component 1 + i: piece i was the last
    hidden = -(-(len(pieces) + 1) // 32) * 32
    embedding = np.zeros((n_vocab, hidden), np.float32)
    embedding[:first, 0] = 1.0
    output = np.zeros((n_vocab, hidden), np.float32)
    strength = 64.0 / hidden**0.5  # the last norm scales a one-hot row by the root of its length
    for position in range(len(pieces)):
        embedding[first + position, 1 + position] = 1.0
        output[first + position, position] = strength
    output[EOS if end == "eos" else first, len(pieces)] = strength
    head = 32
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("parrot")
    _write_shape(writer, n_layers, hidden, head, 1, 1, head, context)
    types = [gguf.TokenType.BYTE if len(piece) == 1 else gguf.TokenType.NORMAL for piece in pieces]
    _write_vocabulary(writer, list(zip(names, types, strict=True)), ["Ġ Ġ"], add_bos, chat_template)
    writer.add_tensor("token_embd.weight", embedding)
    random = np.random.default_rng(0)
    ones: NDArray[np.float32] = np.ones(hidden, np.float32)
    for layer in range(n_layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            data = random.normal(0.0, 0.1, (head, hidden)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data)
        # nothing is added to the residual stream, so the one-hot row arrives as it was
        writer.add_tensor(f"blk.{layer}.attn_output.weight", np.zeros((hidden, head), np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", np.zeros((hidden, head), np.float32))
    writer.add_tensor("output_norm.weight", ones)
    writer.add_tensor("output.weight", output)
    return Parrot(_written(writer, path), pieces, tuple(range(first, n_vocab)))


def rewrite(path_in: Path, path_out: Path, edit: Callable[[RawGguf], None]) -> Path:
    """Copy a model file with ``edit`` applied to its metadata and tensors; nothing is checked."""
    raw = read_raw(path_in)
    edit(raw)
    return raw.write(path_out)


def shards(path_single: Path, n: int) -> Path:
    """Write the ``n`` shards of a model file beside it and return the path of the first."""
    raw = read_raw(path_single)
    names = list(raw.tensors)
    paths = [path_single.with_name(f"{path_single.stem}-{i + 1:05d}-of-{n:05d}.gguf") for i in range(n)]
    for index, path in enumerate(paths):
        split = {
            "split.no": scalar(UINT16, index),
            "split.count": scalar(UINT16, n),
            "split.tensors.count": scalar(INT32, len(names)),
        }
        mine = names[len(names) * index // n : len(names) * (index + 1) // n]
        part = RawGguf(split if index else {**raw.values, **split}, {name: raw.tensors[name] for name in mine})
        part.version, part.alignment = raw.version, 32 if index else raw.alignment
        part.write(path)
    return paths[0]


def sparse(path: Path, n_layers: int = 100, layer_bytes: int = 256 * 1024 * 1024) -> Path:
    """A Llama-type model with a true header and zeros that are not stored: tens of gigabytes that use a few blocks."""
    hidden, heads, kv_heads, f32, f16 = 2048, 16, 4, 0, 1
    kv = hidden * kv_heads // heads
    ffn = max(32, (layer_bytes // 2 - 2 * hidden * hidden - 2 * hidden * kv) // (3 * hidden) // 32 * 32)
    tokens = [*SPECIAL_TOKENS, *byte_alphabet()]
    types = [int(gguf.TokenType.CONTROL)] * FIRST_BYTE_TOKEN + [int(gguf.TokenType.NORMAL)] * 256
    raw = RawGguf(
        {
            "general.architecture": scalar(STRING, "llama"),
            "general.name": scalar(STRING, "sparse"),
            "llama.block_count": scalar(UINT32, n_layers),
            "llama.context_length": scalar(UINT32, 2048),
            "llama.embedding_length": scalar(UINT32, hidden),
            "llama.feed_forward_length": scalar(UINT32, ffn),
            "llama.attention.head_count": scalar(UINT32, heads),
            "llama.attention.head_count_kv": scalar(UINT32, kv_heads),
            "llama.attention.layer_norm_rms_epsilon": scalar(FLOAT32, 1e-5),
            "tokenizer.ggml.model": scalar(STRING, "gpt2"),
            "tokenizer.ggml.pre": scalar(STRING, "gpt-2"),
            "tokenizer.ggml.tokens": array(STRING, tokens),
            "tokenizer.ggml.token_type": array(INT32, types),
            "tokenizer.ggml.merges": array(STRING, ["Ġ Ġ"]),
            "tokenizer.ggml.bos_token_id": scalar(UINT32, BOS),
            "tokenizer.ggml.eos_token_id": scalar(UINT32, EOS),
            "tokenizer.ggml.add_bos_token": scalar(BOOL, False),
        }
    )

    def zeros(name: str, *shape: int) -> None:
        dtype, size = (f16, 2) if len(shape) > 1 else (f32, 4)
        raw.tensors[f"{name}.weight"] = RawTensor(shape, dtype, None, size * int(np.prod(shape)))

    zeros("token_embd", hidden, len(tokens))
    for layer in range(n_layers):
        zeros(f"blk.{layer}.attn_norm", hidden)
        zeros(f"blk.{layer}.attn_q", hidden, hidden)
        zeros(f"blk.{layer}.attn_k", hidden, kv)
        zeros(f"blk.{layer}.attn_v", hidden, kv)
        zeros(f"blk.{layer}.attn_output", hidden, hidden)
        zeros(f"blk.{layer}.ffn_norm", hidden)
        zeros(f"blk.{layer}.ffn_gate", hidden, ffn)
        zeros(f"blk.{layer}.ffn_up", hidden, ffn)
        zeros(f"blk.{layer}.ffn_down", ffn, hidden)
    zeros("output_norm", hidden)
    zeros("output", hidden, len(tokens))
    return raw.write(path)


LATENT_ROW = 64 + 32  # values that a token leaves in each layer of ``latent``


def latent(path: Path, *, n_layers: int = 4) -> Path:
    """A model of random weights with latent attention (deepseek2, all layers dense), whose cache holds keys only."""
    hidden, ffn, heads, nope, rope, value, q_rank, kv_rank = 64, 96, 2, 32, 32, 32, 48, 64
    n_vocab, row = FIRST_BYTE_TOKEN + 256, LATENT_ROW
    writer = gguf.GGUFWriter(path, "deepseek2")
    writer.add_name("mla")
    writer.add_block_count(n_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_leading_dense_block_count(n_layers)
    writer.add_expert_feed_forward_length(ffn)
    writer.add_expert_shared_count(0)
    writer.add_expert_weights_scale(1.0)
    writer.add_q_lora_rank(q_rank)
    writer.add_kv_lora_rank(kv_rank)
    writer.add_key_length(row)
    writer.add_value_length(kv_rank)
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rope)
    _write_vocabulary(writer, (), ["Ġ Ġ"], None, None)
    random = np.random.default_rng(7)

    def matrix(name: str, *shape: int) -> None:
        data = random.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", data)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", random.uniform(0.8, 1.2, size).astype(np.float32))

    matrix("token_embd", n_vocab, hidden)
    for layer in range(n_layers):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm", hidden)
        matrix(f"{block}.attn_q_a", q_rank, hidden)
        norm(f"{block}.attn_q_a_norm", q_rank)
        matrix(f"{block}.attn_q_b", heads * (nope + rope), q_rank)
        matrix(f"{block}.attn_kv_a_mqa", row, hidden)
        norm(f"{block}.attn_kv_a_norm", kv_rank)
        matrix(f"{block}.attn_k_b", heads, kv_rank, nope)
        matrix(f"{block}.attn_v_b", heads, value, kv_rank)
        matrix(f"{block}.attn_output", hidden, heads * value)
        norm(f"{block}.ffn_norm", hidden)
        matrix(f"{block}.ffn_gate", ffn, hidden)
        matrix(f"{block}.ffn_up", ffn, hidden)
        matrix(f"{block}.ffn_down", hidden, ffn)
    norm("output_norm", hidden)
    matrix("output", n_vocab, hidden)
    return _written(writer, path)
