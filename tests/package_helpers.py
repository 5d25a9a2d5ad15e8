"""Makes layer packages for tests, and the edits that make them wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.package.building import build_package
from skippy_zmq.sources.package.opening import open_package
from skippy_zmq.sources.package.weight_source import GgufWeights
from skippy_zmq.topology import LayerRange

Content = dict[str, Any]


def package_of(model: Path, folder: Path) -> Path:
    build_package(GgufWeights(open_model(model)), folder)
    return folder


def contents(folder: Path) -> Content:
    result: Content = json.loads((folder / "model-package.json").read_text())
    return result


def edited(folder: Path, edit: Callable[[Content], object]) -> Path:
    """Write the manifest anew after ``edit``."""
    content = contents(folder)
    edit(content)
    (folder / "model-package.json").write_text(json.dumps(content))
    return folder


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def with_parts(folder: Path, target: Path, parts: set[str]) -> Path:
    """A copy that has the manifest and these files only."""
    for name in ("model-package.json", *parts):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, target / name)
    return target


def flip(path: Path, position: int = -1) -> None:
    """Change one byte, in place."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_stage(folder: Path, layers: str = "0:4") -> None:
    """All that a stage checks before native code is called."""
    with open_package(folder).stage_files(LayerRange.parse(layers)):
        pass


def refusal_of(folder: Path, layers: str = "0:4") -> str:
    with pytest.raises(ModelFileError) as refusal:
        check_stage(folder, layers)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def part_of(content: Content, path: str) -> dict[str, Any]:
    """The part of a manifest's content that has this path."""
    return next(part for part in content["parts"] if part["path"] == path)
