"""``model-package.json``: what it says, and every check that needs no other file."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.ggml_types import TENSOR_TYPES, type_name
from skippy_zmq.sources.gguf_header import MAX_TENSOR_NAME_BYTES, MAX_TENSORS, tensor_bytes
from skippy_zmq.sources.gguf_layout import Layout, TensorEntry, lay_out, number_pair
from skippy_zmq.sources.gguf_values import INT32, UINT16, shown
from skippy_zmq.sources.needed_files import PACKAGE_MANIFEST
from skippy_zmq.sources.package.layout import EMBEDDINGS, LAYER, OUTPUT, PROJECTOR, SHARED, part_of
from skippy_zmq.sources.relative_names import name_problem, plain_name

MANIFEST_NAME = PACKAGE_MANIFEST
SCHEMA_VERSION = 1  # of the manifest
ABI_VERSION = 1  # of the parts: which tensor lies where, and the bytes of their headers
MAX_MANIFEST_BYTES = 32 << 20
MAX_PARTS = 4096
MOST_PROBLEMS_SHOWN = 20
PART_ALIGNMENT = 32  # of the tensors in every part but the shared one, which has that of the model

_TYPE_NUMBERS = {known.name: number for number, known in TENSOR_TYPES.items()}
_STRICT = ConfigDict(strict=True, frozen=True, extra="ignore", hide_input_in_errors=True)

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}\z", to_lower=True)]
_Label = Annotated[str, StringConstraints(max_length=512)]
_Count = Annotated[int, Field(ge=0, le=2**62)]
_M = TypeVar("_M", bound=BaseModel)


class ProjectorFacts(BaseModel):
    """What a projector turns into embeddings. ``type``: llama.cpp's name of its kind, where the file says one."""

    model_config = _STRICT

    type: _Label | None = None
    vision: bool = False
    audio: bool = False


class Part(BaseModel):
    """One GGUF file. ``path``: relative to the manifest, with ``/``. ``layer``: of the kind ``layer`` only."""

    model_config = _STRICT

    kind: Literal["shared", "embeddings", "layer", "output", "mmproj"]
    path: str
    layer: Annotated[int, Field(ge=0, le=100_000)] | None = None
    size: _Count
    tensor_count: _Count
    sha256: Sha256
    projector: ProjectorFacts | None = None


class _Tensor(BaseModel):
    model_config = _STRICT

    name: str
    type: str
    shape: list[int]
    part: str


class QuantizationFacts(BaseModel):
    """How the source was quantized as the package was built: llama.cpp's recipe, and the importance matrix's file."""

    model_config = _STRICT

    recipe: Annotated[str, StringConstraints(pattern=r"^[A-Z0-9_]{1,64}\z")]
    imatrix_sha256: Sha256 | None = None


class _Heading(BaseModel):
    model_config = _STRICT

    name: _Label
    architecture: _Label
    n_layers: Annotated[int, Field(ge=1, le=100_000)]
    identity: Sha256
    quantization: QuantizationFacts | None = None


@dataclass(frozen=True)
class Manifest:
    """``parts``: those of the model in the order of their split numbers, then the projectors.

    ``tensors``: all tensors of the model, in the order of the file it was built from; ``part_of[i]``: the index of the
    part that holds ``tensors[i]``. ``quantization``: None where the tensors have the types of what it was built from.
    """

    name: str
    architecture: str
    n_layers: int
    identity: str
    parts: tuple[Part, ...]
    tensors: tuple[TensorEntry, ...]
    part_of: tuple[int, ...]
    quantization: QuantizationFacts | None = None

    @property
    def model_parts(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.kind != PROJECTOR)

    @property
    def projectors(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.kind == PROJECTOR)

    @functools.cached_property
    def tensors_by_part(self) -> tuple[tuple[TensorEntry, ...], ...]:
        """The tensors of each model part, in order."""
        result: list[list[TensorEntry]] = [[] for _ in self.model_parts]
        for tensor, index in zip(self.tensors, self.part_of, strict=True):
            result[index].append(tensor)
        return tuple(map(tuple, result))

    @functools.cached_property
    def layouts(self) -> dict[int, Layout]:
        """The file of every model part but the shared one, by the part's index."""
        n_parts, n_tensors = len(self.model_parts), len(self.tensors)
        return {
            index: part_layout(index, n_parts, n_tensors, own)
            for index, own in enumerate(self.tensors_by_part)
            if index
        }

    def text(self) -> str:
        """The JSON document, one part and one tensor per line."""
        heading: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "abi_version": ABI_VERSION,
            "name": self.name,
            "architecture": self.architecture,
            "n_layers": self.n_layers,
            "identity": self.identity,
        }
        if self.quantization is not None:
            heading["quantization"] = self.quantization.model_dump(exclude_none=True)
        parts = [part.model_dump(exclude_none=True) for part in self.parts]
        tensors = [
            {"name": t.name, "type": type_name(t.type), "shape": list(t.shape), "part": self.parts[index].path}
            for t, index in zip(self.tensors, self.part_of, strict=True)
        ]
        lines = [f'"{key}": {json.dumps(value)}' for key, value in heading.items()]
        for key, rows in (("parts", parts), ("tensors", tensors)):
            lines.append(f'"{key}": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]")
        return "{\n " + ",\n ".join(lines) + "\n}\n"


def split_pairs(index: int, n_parts: int, n_tensors: int) -> list[bytes]:
    """The keys by which llama.cpp takes the parts of a model for the shards of one file."""
    return [
        number_pair("split.no", UINT16, index),
        number_pair("split.count", UINT16, n_parts),
        number_pair("split.tensors.count", INT32, n_tensors),
    ]


def part_layout(index: int, n_parts: int, n_tensors: int, tensors: Iterable[TensorEntry]) -> Layout:
    """The file of every part but the shared one: what its header must be, byte for byte, and its size."""
    return lay_out(split_pairs(index, n_parts, n_tensors), list(tensors), PART_ALIGNMENT)


@dataclass(slots=True)
class Draft:
    """What could be read of a manifest, and all that is wrong with it."""

    problems: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    manifest: Manifest | None = None


def parse_manifest(raw: bytes) -> Draft:
    """Read a manifest; ``manifest`` is None where there are problems."""
    draft = Draft()
    try:
        content = json.loads(raw, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        draft.problems.append(f"not a JSON document: {error}")
        return draft
    if not isinstance(content, dict):
        draft.problems.append("wanted a JSON object")
        return draft
    for key, version in (("schema_version", SCHEMA_VERSION), ("abi_version", ABI_VERSION)):
        found = content.get(key)
        if type(found) is not int or found != version:
            draft.problems.append(
                f"{key}: wanted {version}, got {shown(repr(found))}; build the package again, or use the version of "
                "skippy-zmq that it was built for"
            )
    if draft.problems:  # nothing else can be judged
        return draft
    heading = _read(draft, _Heading, content, "")
    for index, row in enumerate(_rows(draft, content, "parts", MAX_PARTS)):
        part = _read(draft, Part, row, f"parts[{index}]")
        if part is not None:
            _keep_part(draft, part, index)
    n_layers = heading.n_layers if heading is not None else None
    _check_kinds(draft, n_layers)
    tensors, names = _read_tensors(draft, content)
    if heading is None or draft.problems:
        return draft
    _complete(draft, heading, tensors, names)
    return draft


def _keep_part(draft: Draft, part: Part, index: int) -> None:
    label = f"parts[{index}]"
    problem = name_problem(part.path)
    if problem:
        draft.problems.append(f"{label}: path {shown(part.path)} {problem}")
        return
    part = part.model_copy(update={"path": plain_name(part.path)})
    if any(part.path == other.path for other in draft.parts):
        draft.problems.append(f"{label}: path {shown(part.path)} appears twice")
    if (part.layer is None) == (part.kind == LAYER):
        draft.problems.append(f"{label}: wanted a layer number for parts of kind layer, and only for those")
    draft.parts.append(part)


def _check_kinds(draft: Draft, n_layers: int | None) -> None:
    for kind in (SHARED, EMBEDDINGS, OUTPUT):
        count = sum(part.kind == kind for part in draft.parts)
        if count != 1:
            draft.problems.append(f"wanted one part of kind {kind}, got {count}")
    layers = Counter(part.layer for part in draft.parts if part.layer is not None)
    draft.problems += [f"layer {layer} has {count} parts, wanted one" for layer, count in layers.items() if count > 1]
    missing = [layer for layer in range(n_layers or 0) if layer not in layers]
    if missing:
        listed = ", ".join(map(str, missing[:MOST_PROBLEMS_SHOWN])) + (
            " ..." if len(missing) > MOST_PROBLEMS_SHOWN else ""
        )
        draft.problems.append(f"n_layers is {n_layers}, but there is no part for layer {listed}")


def _read_tensors(draft: Draft, content: Mapping[str, Any]) -> tuple[list[TensorEntry], list[str]]:
    """The tensors and the paths of their parts."""
    tensors, paths = [], []
    seen: dict[str, str] = {}

    def failed(text: str) -> ModelFileError:
        return ModelFileError(text)

    for index, row in enumerate(_rows(draft, content, "tensors", MAX_TENSORS)):
        tensor = _read(draft, _Tensor, row, f"tensors[{index}]")
        if tensor is None:
            continue
        what = f"tensor {shown(tensor.name)}"
        name = tensor.name.encode(errors="replace")
        if not 1 <= len(name) <= MAX_TENSOR_NAME_BYTES or not tensor.name.isprintable():
            draft.problems.append(f"tensors[{index}]: {what}: wanted a name of 1 to {MAX_TENSOR_NAME_BYTES} bytes")
            continue
        path = plain_name(tensor.part)
        if tensor.name in seen:
            draft.problems.append(f"{what} appears twice, in {shown(seen[tensor.name])} and in {shown(path)}")
        seen[tensor.name] = path
        shape = tuple(tensor.shape)
        try:
            number = _TYPE_NUMBERS.get(tensor.type)
            if number is None:
                raise failed(f"{what}: wanted a known tensor type, got {shown(tensor.type)}")
            tensors.append(TensorEntry(tensor.name, number, shape, tensor_bytes(failed, what, number, shape)))
            paths.append(path)
        except ModelFileError as error:
            draft.problems.append(str(error))
    return tensors, paths


def _complete(draft: Draft, heading: _Heading, tensors: list[TensorEntry], paths: list[str]) -> None:
    """Put tensors into parts; check that each lies where it belongs, and what the parts must then look like."""
    order = {SHARED: 0, EMBEDDINGS: 1, LAYER: 2, OUTPUT: 3, PROJECTOR: 4}
    parts = sorted(draft.parts, key=lambda part: (order[part.kind], part.layer or 0))
    index_of = {part.path: index for index, part in enumerate(parts) if part.kind != PROJECTOR}
    part_indices = []
    for tensor, path in zip(tensors, paths, strict=True):
        what = f"tensor {shown(tensor.name)}"
        if path not in index_of:
            draft.problems.append(f"{what}: {shown(path)} is no part of the model")
            continue
        index = index_of[path]
        kind, layer = part_of(tensor.name)
        if (kind, layer) != (parts[index].kind, parts[index].layer):
            wanted = kind if layer is None else f"{kind} {layer}"
            draft.problems.append(f"{what} is in {path}, wanted it in the part of kind {wanted}")
        part_indices.append(index)
    if draft.problems:
        return
    manifest = Manifest(
        heading.name,
        heading.architecture,
        heading.n_layers,
        heading.identity,
        tuple(parts),
        tuple(tensors),
        tuple(part_indices),
        heading.quantization,
    )
    for part, own in zip(manifest.model_parts, manifest.tensors_by_part, strict=True):
        if part.tensor_count != len(own):
            draft.problems.append(f"{part.path}: tensor_count is {part.tensor_count}, but {len(own)} tensors are in it")
    for index, layout in manifest.layouts.items():
        part = parts[index]
        if part.size != layout.size:
            draft.problems.append(
                f"{part.path}: size is {part.size}, but its tensors make a file of {layout.size} bytes"
            )
    if not draft.problems:
        draft.manifest = manifest


def _rows(draft: Draft, content: Mapping[str, Any], key: str, limit: int) -> list[Any]:
    rows = content.get(key)
    if not isinstance(rows, list) or not 1 <= len(rows) <= limit:
        got = f"{len(rows)}" if isinstance(rows, list) else "none"
        draft.problems.append(f"{key}: wanted a list of 1 to {limit} entries, got {got}")
        return []
    return rows


def _read(draft: Draft, kind: type[_M], content: Any, where: str) -> _M | None:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            place = ".".join([where, *map(str, problem["loc"])] if where else map(str, problem["loc"]))
            draft.problems.append(f"{place}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
        return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {shown(twice)} appears twice in one object")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
