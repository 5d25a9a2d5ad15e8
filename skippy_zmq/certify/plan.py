"""Which files are models, and at which boundaries each is tried."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

from skippy_zmq.errors import OptionError
from skippy_zmq.sources.package.manifest import MANIFEST_NAME

ALL_PAIRS_LAYERS = 6  # up to so many layers, three stages are tried at every pair of boundaries

_LATER_SHARD = re.compile(r"-(?!00001-of-)\d{5}-of-\d{5}\.gguf\Z")


def model_files(paths: Sequence[Path]) -> list[Path]:
    """The models at or below ``paths``: GGUF files, of shards the first, and the folders of layer packages.

    Raises OptionError for a path without any.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            packages = {manifest.parent for manifest in path.rglob(MANIFEST_NAME)}
            found = sorted(
                p
                for p in path.rglob("*.gguf")
                if p.is_file() and not _LATER_SHARD.search(p.name) and packages.isdisjoint(p.parents)
            )
            found = sorted([*found, *packages])
            if not found:
                raise OptionError(f"{path}: this folder holds no .gguf file and no {MANIFEST_NAME}")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise OptionError(f"{path}: no such file or folder")
    return list(dict.fromkeys(files))


def parse_boundaries(text: str) -> tuple[int, ...] | None:
    """``"all"`` (None) or ``"K,K"``: rising layer numbers; raise OptionError for anything else."""
    if text == "all":
        return None
    try:
        boundaries = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(f"boundaries {text!r}: wanted all, or layer numbers like 10,20") from None
    if boundaries[0] < 1 or any(low >= high for low, high in pairwise(boundaries)):
        raise OptionError(f"boundaries {text!r}: wanted rising layer numbers from 1 on")
    return boundaries


def splits(n_layers: int, boundaries: Sequence[int] | None, *, quick: bool) -> list[tuple[int, ...]]:
    """The cuts to try: none, each boundary, and pairs of them (all pairs of a small model, else neighbours).

    ``quick`` leaves out the pairs. Raises OptionError for a boundary that the model does not have.
    """
    chosen = range(1, n_layers) if boundaries is None else boundaries
    for boundary in chosen:
        if boundary >= n_layers:
            raise OptionError(f"boundary {boundary}: the model has {n_layers} layers, so wanted 1 to {n_layers - 1}")
    pairs = combinations(chosen, 2) if n_layers <= ALL_PAIRS_LAYERS else pairwise(chosen)
    return [(), *((boundary,) for boundary in chosen), *([] if quick else pairs)]
