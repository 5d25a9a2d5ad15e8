"""The files of a checkpoint: which of a folder's safetensors files hold the weights, and that names stay inside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.checkpoint.json_file import read_object
from skippy_zmq.sources.checkpoint.safetensors_table import SourceTensor, read_table
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.needed_files import CHECKPOINT_INDEX, CHECKPOINT_SINGLE
from skippy_zmq.sources.relative_names import checked_name, link_roots

INDEX_NAME, SINGLE_NAME = CHECKPOINT_INDEX, CHECKPOINT_SINGLE
MAX_SHARDS = 65_535
_MAX_INDEX_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """``folder`` holds the metadata. ``index`` and where it says tensors are: None where one file holds all weights.

    ``outlines``: those of ``weights`` that hold no weights.
    """

    folder: Path
    weights: tuple[Path, ...]
    index: Path | None = None
    listed: Mapping[str, Path] | None = None
    outlines: frozenset[Path] = frozenset()


def find_files(path: Path, outlines: Mapping[str, Path] = MappingProxyType({})) -> CheckpointFiles:
    """The files of the checkpoint at ``path``; raise ModelFileError where they are missing or ambiguous.

    ``outlines``: by a name that an index lists, the file to take instead.
    """
    if path.is_dir():
        index, single = path / INDEX_NAME, path / SINGLE_NAME
        if index.exists():
            files = _indexed(path, index, outlines)
            if single.exists() and single not in files.weights:
                raise ModelFileError(
                    f"{path}: both {SINGLE_NAME} and {INDEX_NAME}, which does not list it, may hold the weights; "
                    "give the path of the one to use"
                )
            return files
        if not single.exists():
            raise ModelFileError(f"{path}: wanted {SINGLE_NAME} or {INDEX_NAME}, found neither")
        return CheckpointFiles(path, (single,))
    if not path.exists():
        raise ModelFileError(f"{path}: no such file")
    if path.name.endswith(".index.json"):
        return _indexed(path.parent, path, outlines)
    index = path.parent / INDEX_NAME
    if index.exists():
        files = _indexed(path.parent, index, outlines)
        if path.absolute() in [part.absolute() for part in files.weights]:
            return files
    return CheckpointFiles(path.parent, (path,))


def read_tables(files: CheckpointFiles) -> dict[str, SourceTensor]:
    """All tensors by name; raise ModelFileError for one that is in two files, or not where the index says."""
    tensors: dict[str, SourceTensor] = {}
    for part in files.weights:
        for tensor in read_table(part, fetched=part not in files.outlines):
            first = tensors.setdefault(tensor.name, tensor)
            if first is not tensor:
                raise ModelFileError(f"{part}: tensor {shown(tensor.name)} is also in {first.path}")
    if files.index is not None and files.listed is not None:
        _check_index(files.index, files.listed, tensors)
    return tensors


def safe_part(folder: Path, name: object, where: Path) -> Path:
    """The path of the file ``name`` that ``where`` lists; raise ModelFileError where it could leave ``folder``.

    Nothing is opened. A link may lead out only into the blobs of a hub cache whose snapshot the folder is.
    """
    part = checked_name(name, str(where))
    path = folder / part
    try:
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):
        raise ModelFileError(f"{where}: file {shown(part)} is missing from {folder}") from None
    if not any(real.is_relative_to(allowed) for allowed in link_roots(root)):
        raise ModelFileError(f"{where}: file name {shown(part)}: wanted a file inside {folder}, got a link out of it")
    if not real.is_file():
        raise ModelFileError(f"{where}: file name {shown(part)}: wanted a regular file")
    return path


def _indexed(folder: Path, index: Path, outlines: Mapping[str, Path]) -> CheckpointFiles:
    weight_map = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: weight_map: wanted a map of tensor names to file names")
    parts: dict[str, Path] = {}
    for name in weight_map.values():
        if not isinstance(name, str):
            raise ModelFileError(f"{index}: weight_map: wanted file names, got {shown(str(name))}")
        if name not in parts:
            parts[name] = outlines[name] if name in outlines else safe_part(folder, name, index)
        if len(parts) > MAX_SHARDS:
            raise ModelFileError(f"{index}: wanted at most {MAX_SHARDS} files")
    listed = {tensor: parts[name] for tensor, name in weight_map.items()}
    absent = frozenset(outlines[name] for name in parts if name in outlines)
    return CheckpointFiles(folder, tuple(sorted(set(parts.values()))), index, listed, absent)


def _check_index(index: Path, listed: Mapping[str, Path], tensors: Mapping[str, SourceTensor]) -> None:
    for name, part in listed.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.path != part:
            found = "in none of its files" if tensor is None else f"in {tensor.path.name}"
            raise ModelFileError(f"{index}: tensor {shown(name)}: wanted it in {part.name}, found it {found}")
    for name, tensor in tensors.items():
        if name not in listed:
            raise ModelFileError(f"{index}: tensor {shown(name)} of {tensor.path} is not listed")
