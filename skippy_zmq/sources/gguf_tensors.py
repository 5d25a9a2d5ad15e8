"""Check the tensor table of a model against its metadata: names, layers, and types that llama.cpp can compute with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.architectures import STATE_SPACE
from skippy_zmq.sources.ggml_types import F32, I32, TENSOR_TYPES, type_name
from skippy_zmq.sources.gguf_header import TensorInfo
from skippy_zmq.sources.gguf_values import shown

_BLOCK = re.compile(r"blk\.(\d+)\.")
_HUGGING_FACE = re.compile(r"(model\.|transformer\.|lm_head\.|language_model\.|gpt_neox\.|backbone\.)")

# Tensors that ggml adds, multiplies, convolves or scans with rather than multiplying by as a matrix: its CPU kernels
# take F32 only and abort otherwise. Every converter writes these, and all vectors, as F32.
_F32_ONLY = re.compile(
    r"(\.bias|\.scale|\.input_scale"
    r"|(^|[._])(norm|norm_exps|norm_\d|norm1|norm2)\.weight"
    r"|(^|\.)(rope_freqs|rope_factors_long|rope_factors_short)\.weight"
    r"|\.(ssm_a|ssm_d|ssm_conv1d|ssm_conv1d_q|ssm_conv1d_k|ssm_conv1d_v|ple_conv1d|shortconv\.conv|attn_sinks|exp_probs_b"
    r"|time_mix_lerp_\w+|time_mix_decay|time_mix_first|time_mix_[wav]0|time_mix_k_[ka]|time_mix_r_k|time_mix_ln"
    r"|channel_mix_lerp_\w+|layer_output_scale|altup_correct_scale|attn_res_score|ffn_res_score|ffn\.act"
    r"|hc_\w+_(base|scale)|attn_conv_base|ffn_conv_base)(\.weight)?"
    r"|^output_(hc_base|hc_scale|res_score)(\.weight)?"
    r")$"
)
_INTEGER_ONLY = re.compile(r"blk\.\d+\.ffn_gate_tid2eid\.weight$")

# models some of whose layers hold no weights at all
_EMPTY_LAYERS = frozenset(("deci",))


def check_tensors(path: Path, tensors: Sequence[TensorInfo], architecture: str, n_blocks: int, n_layers: int) -> None:
    """Raise ModelFileError where the tensors cannot be those of a model with ``n_blocks`` blocks.

    The last ``n_blocks - n_layers`` blocks predict further tokens and may be absent. A single tensor missing inside a
    layer is left to llama.cpp, which knows what each architecture needs and names it.
    """
    if not tensors:
        raise ModelFileError(f"{path}: wanted tensors, got none (a vocabulary-only file?)")
    present: set[int] = set()
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if block:
            number = int(block[1])
            if number >= n_blocks:
                raise ModelFileError(
                    f"{tensor.path}: surplus tensor {shown(tensor.name)}, but {architecture}.block_count is {n_blocks}"
                )
            present.add(number)
        elif _HUGGING_FACE.match(tensor.name):
            raise ModelFileError(
                f"{tensor.path}: tensor {shown(tensor.name)}: names are Hugging Face style;"
                " convert the model with llama.cpp's convert_hf_to_gguf.py first"
            )
        _check_type(tensor)
    _check_convolutions(tensors, architecture)
    missing = set(range(n_layers)) - present
    if missing and architecture not in _EMPTY_LAYERS:
        raise ModelFileError(
            f"{path}: missing tensors 'blk.{min(missing)}.*', but {architecture}.block_count is {n_blocks}"
        )


def _check_convolutions(tensors: Sequence[TensorInfo], architecture: str) -> None:
    """llama.cpp takes this bias for optional, yet its Mamba layers follow the pointer unchecked."""
    if architecture not in STATE_SPACE:
        return
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        bias = tensor.name.removesuffix("weight") + "bias"
        if tensor.name.endswith(".ssm_conv1d.weight") and architecture != "plamo2" and bias not in names:
            raise ModelFileError(f"{tensor.path}: missing tensor {shown(bias)} beside {shown(tensor.name)}")


def _check_type(tensor: TensorInfo) -> None:
    if _INTEGER_ONLY.match(tensor.name):
        wanted = "I32" if tensor.type != I32 else ""
    elif _F32_ONLY.search(tensor.name) or all(extent == 1 for extent in tensor.shape[1:]):
        wanted = "F32" if tensor.type != F32 else ""
    else:
        wanted = "" if TENSOR_TYPES[tensor.type].weight else "a floating-point or quantized type"
    if wanted:
        raise ModelFileError(
            f"{tensor.path}: tensor {shown(tensor.name)}: wanted {wanted}, got {type_name(tensor.type)}"
        )
