"""A manifest for people and for scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skippy_zmq.sources.ggml_types import type_name
from skippy_zmq.sources.gguf_layout import TensorEntry
from skippy_zmq.sources.package.manifest import ABI_VERSION, SCHEMA_VERSION, Manifest

_MIB = 2**20


def package_json(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """All but the tensor table; ``present``: whether there is a file of that name and size."""
    return {
        "path": str(folder),
        "schema_version": SCHEMA_VERSION,
        "abi_version": ABI_VERSION,
        "name": manifest.name,
        "architecture": manifest.architecture,
        "n_layers": manifest.n_layers,
        "n_tensors": len(manifest.tensors),
        "identity": manifest.identity,
        "quantization": manifest.quantization and manifest.quantization.model_dump(exclude_none=True),
        "size": sum(part.size for part in manifest.parts),
        "parts": [
            part.model_dump(exclude_none=True) | {"present": _present(folder, part.path, part.size)}
            for part in manifest.parts
        ],
    }


def package_table(folder: Path, manifest: Manifest) -> list[str]:
    """A heading, a line per part, and a sum."""
    groups = [*manifest.tensors_by_part, *([] for _ in manifest.projectors)]
    rows = [("part", "kind", "tensors", "MiB", "types", "")]
    for part, tensors in zip(manifest.parts, groups, strict=True):
        kind = part.kind if part.layer is None else f"layer {part.layer}"
        types = _types(tensors)
        if part.projector is not None:
            facts = part.projector
            seen = [name for name, has in (("vision", facts.vision), ("audio", facts.audio)) if has]
            types = _printable(" ".join(filter(None, (facts.type, *seen))))
        absent = "" if _present(folder, part.path, part.size) else "absent"
        rows.append((part.path, kind, str(part.tensor_count), f"{part.size / _MIB:.1f}", types, absent))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    total = sum(part.size for part in manifest.parts) / _MIB
    return [
        _printable(
            f"{manifest.name}: {manifest.architecture}, {manifest.n_layers} layers, {len(manifest.tensors)} tensors"
        ),
        f"identity {manifest.identity}",
        *_quantization(manifest),
        "",
        *(_line(row, widths) for row in rows),
        "",
        f"{len(manifest.parts)} parts, {total:.1f} MiB",
    ]


def _printable(text: str) -> str:
    """What a stranger's file says, without the control characters that a terminal would obey."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = (2, 3)
    cells = [
        cell.rjust(width) if column in numbers else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _quantization(manifest: Manifest) -> list[str]:
    facts = manifest.quantization
    if facts is None:
        return []
    matrix = f", importance matrix sha256 {facts.imatrix_sha256}" if facts.imatrix_sha256 else ""
    return [f"quantized to {facts.recipe}{matrix}"]


def _types(tensors: Sequence[TensorEntry]) -> str:
    counts = Counter(type_name(tensor.type) for tensor in tensors)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def _present(folder: Path, path: str, size: int) -> bool:
    try:
        return (folder / path).stat().st_size == size
    except OSError:
        return False
