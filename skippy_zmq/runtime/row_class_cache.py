"""Row classes measured before, one small file for each stage and all that its kernels depend on.

Files lie in the user's cache folder and are made anew where they are missing or damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skippy_zmq import _native
from skippy_zmq.runtime.row_class import MOST_ROWS, RowClass, measure_sizes, most_rows, row_class
from skippy_zmq.runtime.stage_model import LLAMA_CPP_BUILD, StageModel
from skippy_zmq.sources.demo_models import cache_directory

MOST_FILES = 256
_FORMAT = 1  # of the files, and of how a class is measured
_MOST_FILE_BYTES = 1 << 16
_WORTH_KEEPING_SECONDS = 0.1  # what is measured faster is measured again


def row_class_directory() -> Path:
    """Where the files are, beside the models that were fetched."""
    return cache_directory().parent / "row-classes"


def stage_row_class(
    model: StageModel,
    identity: str,
    seconds: float,
    *,
    directory: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> RowClass:
    """The row class of ``model``, whose lanes must be empty: as found in ``directory``, or measured.

    ``identity``: of its source. ``seconds``: for measuring. Where an earlier start ran out of time, this one goes on.
    """
    if most_rows(model) == 1:
        return RowClass()
    directory = row_class_directory() if directory is None else directory
    settings = _settings(model, identity)
    path = directory / f"{hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()}.json"
    known = _read(path)
    found = row_class(known, most_rows(model))
    if found.complete or seconds == 0:
        with contextlib.suppress(OSError):
            os.utime(path)  # the files used last are kept
        return found
    start = clock()
    sizes = measure_sizes(model, seconds, known, clock=clock)
    if sizes != known and clock() - start >= _WORTH_KEEPING_SECONDS:
        with contextlib.suppress(OSError):  # then the next start measures again
            _write(path, {"format": _FORMAT, "sizes": {str(n): alike for n, alike in sizes.items()}, **settings})
    return row_class(sizes, most_rows(model))


def _settings(model: StageModel, identity: str) -> dict[str, Any]:
    """All that chooses kernels."""
    context = model.native_context
    return {
        "model": identity,
        "layers": str(model.layers),
        "build": LLAMA_CPP_BUILD,
        "libraries": _libraries(),
        "devices": [*model.native_model.device_names, *map(list, _native.devices())],
        "processor": _processor(),
        "n_ctx": context.n_ctx,
        "threads": [context.threads, context.threads_batch],
        "options": model.options.model_dump(mode="json"),
    }


def _libraries() -> list[list[Any]]:
    """Name, size and time of the native libraries of this process that compute: the same version can be built anew."""
    paths = set()
    with contextlib.suppress(OSError), Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = Path("/" + line.rstrip("\n").partition("/")[2])
            if path.name.startswith(("libggml", "libllama", "_native")):
                paths.add(path)
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            status = path.stat()
            found.append([path.name, status.st_size, status.st_mtime_ns])
    return found


def _processor() -> list[str]:
    """Name and features of the first processor, as the kernel states them."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in wanted:
                found.setdefault(name.strip(), value.strip())
    return [f"{name}: {value}" for name, value in sorted(found.items())]


def _read(path: Path) -> dict[int, bool]:
    """What the file says of each size; nothing where it says nothing useful."""
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_MOST_FILE_BYTES))
        if values["format"] != _FORMAT:
            return {}
        sizes = {int(size): alike for size, alike in values["sizes"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    if not all(1 <= size <= MOST_ROWS and isinstance(alike, bool) for size, alike in sizes.items()):
        return {}
    return sizes


def _write(path: Path, values: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    by_age = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for old in by_age[MOST_FILES:]:
        old.unlink(missing_ok=True)
