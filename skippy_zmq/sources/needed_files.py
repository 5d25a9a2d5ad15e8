"""Which files of a model a stage needs, by the list of files and the manifest or index among them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.relative_names import checked_name, shortened
from skippy_zmq.sources.stage_tensors import has_tied_norm, holder
from skippy_zmq.topology import LayerRange

PACKAGE_MANIFEST = "model-package.json"
CHECKPOINT_CONFIG = "config.json"
CHECKPOINT_INDEX = "model.safetensors.index.json"
CHECKPOINT_SINGLE = "model.safetensors"
# What a checkpoint may have beside its weights, and a reader may want.
_METADATA_ENDS = (".json", ".model", ".jinja", ".txt")
_MAX_METADATA_BYTES = 64 << 20
_SHARD = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf\Z")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d{1,9})\.")
_MOST_NAMES_SHOWN = 20


def gguf_files(names: Sequence[str], where: str, chosen: str = "") -> list[str]:
    """``chosen``, or else the only model among ``names``, with all its shards; the first one first.

    Raises ModelFileError where there is none, or several and none is chosen.
    """
    models = gguf_models(names)
    if chosen:
        match = _SHARD.match(chosen)
        first = f"{match['prefix']}-00001-of-{match['count']}.gguf" if match else chosen
        if first not in models and chosen not in names:
            raise ModelFileError(f"{where}: no file {shown(chosen)}; {_offer(list(models))}")
        return models.get(first, [chosen])
    if len(models) != 1:
        raise ModelFileError(f"{where}: wanted one GGUF model; {_offer(list(models))}")
    return next(iter(models.values()))


def gguf_models(names: Sequence[str]) -> dict[str, list[str]]:
    """The GGUF models among ``names``: first file to all files. Projectors are none, unless there is nothing else."""
    files = [name for name in names if name.endswith(".gguf")]
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        match = _SHARD.match(name)
        if match is None:
            models[name] = [name]
        elif match["number"] == "00001":
            count = int(match["count"])
            models[name] = [f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    without = {name: parts for name, parts in models.items() if "mmproj" not in name.rsplit("/", 1)[-1].lower()}
    return without or models


def _offer(names: Sequence[str]) -> str:
    if not names:
        return "there is none"
    return f"name one of {shortened(names, _MOST_NAMES_SHOWN)}"


def package_parts(manifest: bytes, where: str, layers: LayerRange | None = None) -> list[str]:
    """Paths, relative to the manifest, of the parts that a stage reads, the shared one first; of all stages' without
    ``layers``. Projectors are not among them.

    Judges no more of the manifest than it needs: whoever opens the package checks it. Raises ModelFileError.
    """
    values = _object(manifest, where)
    n_layers, parts = values.get("n_layers"), values.get("parts")
    tensors = values.get("tensors")
    if not isinstance(n_layers, int) or not isinstance(parts, list) or not isinstance(tensors, list):
        raise ModelFileError(f"{where}: wanted a manifest with n_layers, parts and tensors")
    wanted = layers.within(n_layers) if layers is not None else LayerRange(0, max(1, n_layers))
    names = {item.get("name") for item in tensors if isinstance(item, dict)}
    tables = {name for name in names if isinstance(name, str)}
    tied_output, tied_norm = "output.weight" not in tables, has_tied_norm(tables)
    ends = {"first": wanted.start == 0, "last": wanted.end == n_layers}
    at_the_end = any(holder(name, tied_output=tied_output, tied_norm=tied_norm) == "both" for name in tables)
    found: list[str] = []
    for part in parts:
        if not isinstance(part, dict):
            raise ModelFileError(f"{where}: parts: wanted objects, got {shown(str(part))}")
        kind, layer, path = part.get("kind"), part.get("layer"), checked_name(part.get("path"), where)
        if kind == "shared":
            found.insert(0, path)
        elif (
            (kind == "embeddings" and (ends["first"] or (ends["last"] and at_the_end)))
            or (kind == "output" and ends["last"])
            or (
                kind == "layer"
                and isinstance(layer, int)
                and wanted.start <= layer
                and (layer < wanted.end or ends["last"])
            )
        ):
            found.append(path)
    return found


def package_projectors(manifest: bytes, where: str) -> list[str]:
    """Paths, relative to the manifest, of the projectors, which no stage reads; raises as ``package_parts``."""
    parts = _object(manifest, where).get("parts")
    found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [checked_name(part.get("path"), where) for part in found if part.get("kind") == "mmproj"]


def is_checkpoint(names: Iterable[str], prefix: str = "") -> bool:
    """Whether the folder ``prefix`` (empty, or ending with ``/``) holds a checkpoint."""
    here = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    return CHECKPOINT_CONFIG in here and any(name.endswith(".safetensors") for name in here)


def checkpoint_metadata(names: Iterable[str], prefix: str = "") -> list[str]:
    """What of the folder ``prefix`` describes a checkpoint: configuration, tokenizer, index."""
    return [
        name
        for name in names
        if name.startswith(prefix) and "/" not in name.removeprefix(prefix) and name.endswith(_METADATA_ENDS)
    ]


def checkpoint_shards(
    index: bytes, where: str, layers: LayerRange | None = None, *, n_layers: int = 0, tied: bool = False
) -> list[str]:
    """Names, relative to the index, of the weight files that a stage reads; of all stages' without ``layers``.

    ``n_layers``: of the model; ``tied``: its output matrix is the embedding. Tensors of no layer count as needed by the
    first and the last stage. Raises ModelFileError for an index that is none.
    """
    weight_map = _object(index, where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{where}: weight_map: wanted a map of tensor names to file names")
    found: dict[str, None] = {}
    for tensor, name in weight_map.items():
        name = checked_name(name, where)
        if layers is None or _reads(tensor, layers, n_layers, tied=tied):
            found[name] = None
    return sorted(found)


def _reads(tensor: str, layers: LayerRange, n_layers: int, *, tied: bool) -> bool:
    match = _LAYER.match(tensor)
    is_last = layers.end == n_layers
    if match:
        layer = int(match[1])
        return layers.start <= layer and (layer < layers.end or is_last)
    if "embed_tokens" in tensor:
        return layers.start == 0 or (is_last and tied)
    return layers.start == 0 or is_last


def checkpoint_shape(config: bytes, where: str) -> tuple[int, bool]:
    """Number of layers, and whether the output matrix is the embedding, by ``config.json``; raise ModelFileError."""
    values = _object(config, where)
    text = values.get("text_config")
    inner = text if isinstance(text, dict) else {}
    settings = {**values, **{key: value for key, value in inner.items() if value is not None}}
    n_layers = settings.get("num_hidden_layers")
    if not isinstance(n_layers, int) or isinstance(n_layers, bool) or n_layers < 1:
        raise ModelFileError(f"{where}: num_hidden_layers: wanted at least 1, got {shown(str(n_layers))}")
    return n_layers, settings.get("tie_word_embeddings") is not False


def _object(text: bytes, where: str) -> Mapping[str, Any]:
    try:
        if len(text) > _MAX_METADATA_BYTES:
            raise ValueError(f"wanted at most {_MAX_METADATA_BYTES} bytes, got {len(text)}")
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{where}: no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{where}: wanted a JSON object, got a {type(values).__name__}")
    return values
