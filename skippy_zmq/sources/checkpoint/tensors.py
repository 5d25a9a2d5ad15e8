"""From the tensors of a checkpoint to those of the GGUF model: names, shapes, types, and where their rows come from."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.config import Config
from skippy_zmq.sources.checkpoint.family import Family, head_length, tied
from skippy_zmq.sources.checkpoint.rope import Rope, llama3_factors, long_factors
from skippy_zmq.sources.checkpoint.safetensors_table import SourceTensor
from skippy_zmq.sources.ggml_types import F32, TENSOR_TYPES
from skippy_zmq.sources.gguf_header import MAX_DIMENSIONS
from skippy_zmq.sources.gguf_values import shown

log = logging.getLogger("skippy_zmq.checkpoint")

TYPES = {"F32": F32, "F16": 1, "BF16": 30}

_HEAD = "lm_head.weight"
_UNUSED = re.compile(r"(\.rotary_emb\.inv_freq|\.attention\.masked_bias|\.attention\.bias)$")
_OTHER_MODALITIES = re.compile(r"(^|\.)(vision_tower|multi_modal_projector|vision_model|embed_vision|audio_tower)\.")
_LANGUAGE = re.compile(r"(?<![^.])language_model\.")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(
    r"(?P<layer>.*\.layers\.\d+)\.(?P<block>block_sparse_moe|mlp)\.experts\.(?P<number>\d{1,5})\."
    r"(?P<kind>w1|w2|w3|gate_proj|up_proj|down_proj)\.weight"
)
_FUSED_EXPERTS = re.compile(
    r"(?P<layer>.*\.layers\.\d+)\.(block_sparse_moe|mlp)\.experts\.(?P<kind>gate_up_proj|down_proj)(\.weight)?"
)
_EXPERT_KINDS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Packed weights and what belongs to them: the marks of checkpoints that some method has quantized.
_PACKED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_scale(_inv|_2)?|weight_packed|weight_shape|weight_zero_point|absmax"
    r"|quant_map|quant_state\.\S+|SCB|input_scale|input_global_scale|weight_global_scale)$"
)


@dataclass(frozen=True, slots=True)
class Segment:
    """``n_rows`` rows of a source tensor, from ``first_row`` on."""

    source: SourceTensor
    first_row: int
    n_rows: int


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """A tensor of the GGUF model. ``shape``: innermost dimension first; its rows are those of the segments in order.

    ``type``: the checkpoint's own, or F32 where llama.cpp wants that. ``permuted_heads``: heads whose rows are to be
    interleaved, 0 for none; ``offset``: what is added. ``values``: those of a tensor that is computed, not read.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    permuted_heads: int = 0
    offset: float = 0.0
    values: npt.NDArray[np.float32] | None = None

    @property
    def layer(self) -> int | None:
        block = _BLOCK.match(self.name)
        return int(block[1]) if block else None

    @property
    def n_rows(self) -> int:
        rows = 1
        for extent in self.shape[1:]:
            rows *= extent
        return rows

    @property
    def nbytes(self) -> int:
        """In the type that ``type`` says."""
        return TENSOR_TYPES[self.type].row_bytes(self.shape[0]) * self.n_rows

    @property
    def source_bytes(self) -> int:
        return sum(segment.n_rows * segment.source.row_bytes for segment in self.segments)


def plan_tensors(
    family: Family, config: Config, rope: Rope, sources: Mapping[str, SourceTensor]
) -> tuple[CheckpointTensor, ...]:
    """Every tensor of the whole model; nothing is read. Raise ModelFileError for one that has no place in it."""
    names = _NameMap(family, config)
    tensors: dict[str, CheckpointTensor] = {}
    experts: dict[str, dict[int, SourceTensor]] = {}
    for tensor in _computed(config, rope):
        tensors[tensor.name] = tensor
    for name, source in _language_tensors(family, config, sources):
        expert, fused = _EXPERT.fullmatch(name), _FUSED_EXPERTS.fullmatch(name)
        if expert:
            kind = _EXPERT_KINDS.get(expert["kind"], expert["kind"])
            experts.setdefault(f"{expert['layer']}.mlp.experts.{kind}.weight", {})[int(expert["number"])] = source
            continue
        for tensor in _fused_experts(names, fused, source) if fused else (_mapped(names, family, name, source),):
            _add(tensors, tensor)
    for name, members in experts.items():
        _add(tensors, _stacked(names, config, name, members))
    return tuple(tensors.values())


class _NameMap:
    """GGUF names of a family's tensors, by the maps of the gguf package."""

    def __init__(self, family: Family, config: Config) -> None:
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        self.config = config
        self._map = gguf.get_tensor_name_map(numbers[family.architecture], config.n_layers())

    def gguf_name(self, name: str, source: SourceTensor) -> str:
        found: str | None = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelFileError(
                f"{source.path}: tensor {shown(source.name)}: {self.config.architecture} has no tensor of this name"
            )
        return found


def _add(tensors: dict[str, CheckpointTensor], tensor: CheckpointTensor) -> None:
    first = tensors.setdefault(tensor.name, tensor)
    if first is not tensor:
        one, other = (found.segments[0].source for found in (first, tensor))
        raise ModelFileError(
            f"{other.path}: tensor {shown(other.name)} and {shown(one.name)} of {one.path} are both {tensor.name}"
        )


def _language_tensors(
    family: Family, config: Config, sources: Mapping[str, SourceTensor]
) -> Iterator[tuple[str, SourceTensor]]:
    """The tensors of the language model under the names they have in a model of text alone."""
    is_tied = tied(family, config)
    has_head = False
    for original, source in sources.items():
        if _PACKED.search(original):
            raise ModelFileError(
                f"{source.path}: tensor {shown(original)}: this checkpoint is quantized already; "
                "wanted F32, F16 or BF16 weights"
            )
        if _UNUSED.search(original) or (family.multimodal and _OTHER_MODALITIES.search(original)):
            continue
        name = original
        if family.multimodal:
            name = _LANGUAGE.sub("", original)
            if not name.startswith(("model.", "lm_head.")):
                name = f"model.{name}"
        if name == _HEAD:
            has_head = True
            if is_tied:
                log.warning(
                    "%s: tensor %s is left out: tie_word_embeddings says that the embedding is the output matrix",
                    source.path,
                    shown(original),
                )
                continue
        yield name, source
    if not is_tied and not has_head:
        raise config.fail("tie_word_embeddings", f"is false, but the checkpoint has no tensor {_HEAD!r}")


def _type(source: SourceTensor) -> int:
    if source.dtype not in TYPES:
        raise ModelFileError(f"{source.path}: tensor {shown(source.name)}: wanted F32, F16 or BF16, got {source.dtype}")
    return TYPES[source.dtype]


def _checked_shape(source: SourceTensor, extra: int = 0) -> tuple[int, ...]:
    if not 1 <= len(source.shape) <= MAX_DIMENSIONS - extra or 0 in source.shape:
        raise ModelFileError(
            f"{source.path}: tensor {shown(source.name)}: wanted a shape of 1 to {MAX_DIMENSIONS - extra} dimensions "
            f"from 1, got {list(source.shape)}"
        )
    return source.shape


def _mapped(names: _NameMap, family: Family, name: str, source: SourceTensor) -> CheckpointTensor:
    found = names.gguf_name(name, source)
    shape = _checked_shape(source)
    heads = _permuted_heads(names.config, name, source) if family.permutes_heads else 0
    number = _type(source)
    if len(shape) == 1 or found.endswith(("norm.weight", "ffn_gate_inp.weight")) or not found.endswith(".weight"):
        number = F32
    offset = family.norm_offset if name.endswith("norm.weight") else 0.0
    return CheckpointTensor(found, number, shape[::-1], (Segment(source, 0, source.rows),), heads, offset)


def _permuted_heads(config: Config, name: str, source: SourceTensor) -> int:
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        heads = config.count("num_attention_heads")
    elif name.endswith(("k_proj.weight", "k_proj.bias")):
        heads = config.optional_count("num_key_value_heads") or config.count("num_attention_heads")
    else:
        return 0
    if source.shape[0] % (2 * heads):
        raise ModelFileError(
            f"{source.path}: tensor {shown(source.name)}: wanted rows for {heads} heads of even length, "
            f"got {source.shape[0]}"
        )
    return heads


def _fused_experts(names: _NameMap, match: re.Match[str], source: SourceTensor) -> Iterable[CheckpointTensor]:
    """Experts that are stacked already, their gate and up matrices in one."""
    shape = _checked_shape(source)
    if len(shape) != 3 or (match["kind"] == "gate_up_proj" and shape[1] % 2):
        raise ModelFileError(
            f"{source.path}: tensor {shown(source.name)}: wanted three dimensions, the experts' rows in pairs, "
            f"got {list(shape)}"
        )
    _check_experts(names.config, source, shape[0])
    kinds = ("gate_proj", "up_proj") if match["kind"] == "gate_up_proj" else ("down_proj",)
    rows = shape[1] // len(kinds)
    for part, kind in enumerate(kinds):
        found = names.gguf_name(f"{match['layer']}.mlp.experts.{kind}.weight", source)
        segments = tuple(Segment(source, expert * shape[1] + part * rows, rows) for expert in range(shape[0]))
        yield CheckpointTensor(found, _type(source), (shape[2], rows, shape[0]), segments)


def _stacked(names: _NameMap, config: Config, name: str, members: Mapping[int, SourceTensor]) -> CheckpointTensor:
    first = next(iter(members.values()))
    found = names.gguf_name(name, first)
    _check_experts(config, first, len(members))
    ordered = []
    for number in range(len(members)):
        source = members.get(number)
        if source is None:
            raise ModelFileError(f"{first.path}: tensor {shown(first.name)}: expert {number} of its layer is missing")
        if (source.dtype, source.shape) != (first.dtype, first.shape):
            raise ModelFileError(
                f"{source.path}: tensor {shown(source.name)}: wanted {first.dtype} {list(first.shape)} as in "
                f"{shown(first.name)}, got {source.dtype} {list(source.shape)}"
            )
        ordered.append(source)
    shape = _checked_shape(first, extra=1)
    segments = tuple(Segment(source, 0, source.rows) for source in ordered)
    return CheckpointTensor(found, _type(first), (*shape[::-1], len(ordered)), segments)


def _check_experts(config: Config, source: SourceTensor, count: int) -> None:
    wanted = config.optional_count(
        "num_experts" if config.values.get("num_experts") is not None else "num_local_experts"
    )
    if count != wanted:
        raise ModelFileError(f"{source.path}: tensor {shown(source.name)}: wanted {wanted} experts, got {count}")


def _computed(config: Config, rope: Rope) -> Iterator[CheckpointTensor]:
    if rope.kind == "llama3":
        yield _constant("rope_freqs.weight", llama3_factors(rope, head_length(config)))
    elif rope.kind == "longrope":
        rotated = int(rope.partial * config.count("hidden_size")) // config.count("num_attention_heads")
        long, short = long_factors(rope, rotated // 2)
        yield _constant("rope_factors_long.weight", long)
        yield _constant("rope_factors_short.weight", short)


def _constant(name: str, values: npt.NDArray[np.float32]) -> CheckpointTensor:
    return CheckpointTensor(name, F32, (len(values),), (), values=values)
