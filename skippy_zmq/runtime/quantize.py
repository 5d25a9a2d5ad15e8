"""Quantize a model while it loads, tensor by tensor, to the types and bytes that llama.cpp's quantizer would write."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skippy_zmq import _native
from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.runtime.recipes import Recipe
from skippy_zmq.sources.ggml_types import BF16, F16, F32, type_name
from skippy_zmq.sources.gguf_header import TensorInfo
from skippy_zmq.sources.gguf_model import GgufModel, Quantization, RowBytes, RowSource, open_header
from skippy_zmq.sources.gguf_values import UINT32, shown
from skippy_zmq.sources.gguf_writer import encoded, encoded_values, header_bytes
from skippy_zmq.sources.imatrix import ImportanceMatrix

log = logging.getLogger("skippy_zmq.stage")

_PLAIN = frozenset((F32, F16, BF16))
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_LISTED = 4  # tensors that a message names
# llama.cpp passes over importances of another size for these alone
_UNTROUBLED = frozenset(("token_embd.weight", "per_layer_token_embd.weight"))


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type a recipe gives a tensor. ``without_fallback``: what it would be if its rows fitted every type."""

    name: str
    source: int
    type: int
    without_fallback: int

    @property
    def fell_back(self) -> bool:
        return self.type != self.without_fallback


def planned_types(source: GgufModel, recipe: Recipe, *, has_imatrix: bool = False) -> tuple[TensorType, ...]:
    """The type of every tensor of the whole model, in the model's order; no weights are read.

    Raise ModelFileError where llama.cpp refuses the model, or knows no type for rows of some length.
    """
    table = [(tensor.name, tensor.type, tensor.shape, tensor.offset) for tensor in source.tensors]
    try:
        types = _native.recipe_types(source.header.raw, table, recipe.file_type, has_imatrix)
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(f"{source.path}: cannot be quantized to {recipe.name}: {error}") from None
    return tuple(
        TensorType(tensor.name, tensor.type, number, wanted)
        for tensor, (number, wanted) in zip(source.tensors, types, strict=True)
    )


def quantized(
    source: GgufModel, recipe: Recipe, *, imatrix: ImportanceMatrix | None = None, threads: int, strict: bool = False
) -> GgufModel:
    """``source``, whose tensors are F32, F16 or BF16, as a model in the recipe's types that quantizes while it loads.

    The types are logged, with a warning for tensors whose rows do not fit theirs, which get another. Raise OptionError
    where the recipe needs importances that are not there or, with ``strict``, for such tensors; ModelFileError for a
    source that is quantized already.
    """
    if source.rows is None or source.content is None:
        raise ModelFileError(f"{source.path}: wanted a model that is made while it loads, got files")
    plan = planned_types(source, recipe, has_imatrix=imatrix is not None)
    _check_sources(source, plan)
    _report_types(source, recipe, plan, strict=strict)
    importances = _importances(source, recipe, plan, imatrix)
    values = encoded_values(source.header)
    values["general.quantization_version"] = encoded(UINT32, _QUANTIZATION_VERSION)
    values["general.file_type"] = encoded(UINT32, recipe.file_type)
    table = [(planned.name, planned.type, tensor.shape) for planned, tensor in zip(plan, source.tensors, strict=True)]
    matrix = "" if imatrix is None else imatrix.sha256
    content = hashlib.sha256(f"{source.content} {recipe.name} {matrix}".encode()).hexdigest()
    rows = _QuantizedRows({tensor.name: tensor for tensor in source.tensors}, source.rows, importances, threads)
    return open_header(
        source.path,
        header_bytes(values, table, source.header.alignment),
        rows,
        content,
        origins=source.origins,
        quantization=Quantization(recipe.name, matrix),
    )


def quantize_rows(
    rows: RowBytes,
    source: TensorInfo,
    target: int,
    *,
    first_row: int = 0,
    importances: npt.NDArray[np.float32] | None = None,
    threads: int,
) -> npt.NDArray[np.uint8]:
    """Whole rows of the type of ``source`` (F32, F16, BF16), from row ``first_row`` of that tensor on, as ``target``.

    ``importances``: float32 [experts * row length]. Raise ModelFileError where values are not finite or do not fit.
    """
    per_expert = source.shape[1] if len(source.shape) > 1 else 1
    try:
        return _native.quantize_rows(
            rows, source.type, target, source.shape[0], first_row, per_expert, importances, threads
        )
    except (RuntimeError, ValueError) as error:
        raise ModelFileError(f"{source.path}: tensor {shown(source.name)} {error}") from None


@dataclass(frozen=True, slots=True)
class _QuantizedRows:
    """A RowSource; ``importances`` by tensor name."""

    origins: Mapping[str, TensorInfo]
    make: RowSource
    importances: Mapping[str, npt.NDArray[np.float32]]
    threads: int

    def __call__(self, tensor: TensorInfo, first_row: int, n_rows: int) -> RowBytes:
        origin = self.origins[tensor.name]
        rows = self.make(origin, first_row, n_rows)
        if origin.type == tensor.type:
            return rows
        return quantize_rows(
            rows,
            origin,
            tensor.type,
            first_row=first_row,
            importances=self.importances.get(tensor.name),
            threads=self.threads,
        )


def _check_sources(source: GgufModel, plan: Sequence[TensorType]) -> None:
    for planned in plan:
        if planned.type != planned.source and planned.source not in _PLAIN:
            raise ModelFileError(
                f"{source.path}: tensor {shown(planned.name)} is {type_name(planned.source)} already: wanted F32, F16"
                " or BF16 to quantize from"
            )


def _report_types(source: GgufModel, recipe: Recipe, plan: Sequence[TensorType], *, strict: bool) -> None:
    counts = Counter(type_name(planned.type) for planned in plan)
    log.info("%s: %s", recipe.name, ", ".join(f"{count} tensors {name}" for name, count in counts.most_common()))
    for planned in plan:
        log.debug("%s: %s becomes %s", recipe.name, shown(planned.name), type_name(planned.type))
    fallen = [planned for planned in plan if planned.fell_back]
    if not fallen:
        return
    one = fallen[0]
    text = f"{source.path}: {recipe.name}: {len(fallen)} of {len(plan)} tensors have rows that do not fit, such as"
    text += f" {shown(one.name)}: wanted {type_name(one.without_fallback)}, "
    if strict:
        raise OptionError(f"{text}would become {type_name(one.type)}")
    log.warning("%s", f"{text}becomes {type_name(one.type)}")


def _importances(
    source: GgufModel, recipe: Recipe, plan: Sequence[TensorType], imatrix: ImportanceMatrix | None
) -> dict[str, npt.NDArray[np.float32]]:
    """Those of the tensors that are to be quantized; raise OptionError where they are missing or of another size."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    missing = []
    for planned, tensor in zip(plan, source.tensors, strict=True):
        if planned.type == planned.source:
            continue
        entry = None if imatrix is None else imatrix.entries.get(planned.name)
        wanted = tensor.shape[0] * (tensor.shape[2] if len(tensor.shape) > 2 else 1)
        if entry is not None and entry.size == wanted:
            found[planned.name] = entry
        elif entry is not None and imatrix is not None and planned.name not in _UNTROUBLED:
            raise OptionError(
                f"{imatrix.path}: entry {shown(planned.name)}: wanted {wanted} values for {source.path.name},"
                f" got {entry.size}"
            )
        elif recipe.needs_importances(planned.name, planned.type):
            missing.append(planned)
    if missing:
        names = ", ".join(f"{shown(planned.name)} ({type_name(planned.type)})" for planned in missing[:_LISTED])
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        where = "give one with --imatrix" if imatrix is None else f"{imatrix.path} has no entries for them"
        raise OptionError(f"{source.path}: {recipe.name} needs an importance matrix for {names}{more}: {where}")
    return found
