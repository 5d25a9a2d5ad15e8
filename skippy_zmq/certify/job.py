"""What a child process does: compute the unsplit reference of a model, or try one split of it against that."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from skippy_zmq.certify.compare import emptiness, first_difference
from skippy_zmq.certify.reference import Unsplit
from skippy_zmq.certify.workload import Settings, Step, context_size, script, stage_options
from skippy_zmq.errors import ModelFileError, SkippyError
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.package.composing import compose
from skippy_zmq.sources.package.opening import PackageModel

# Files of a reference folder. The second exists only where llama.cpp's own grouping of lanes changes bits.
_WHOLE, _GROUPED, _FACTS = "whole.npy", "micro_batches.npy", "facts.json"


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job of ``reference_job`` or ``trial_job``; a refusal is a result like others: ``{"refused": reason}``."""
    settings = Settings(**job["settings"])
    try:
        if job["boundaries"] is None:
            return make_reference(Path(job["path"]), settings, Path(job["folder"]))
        return try_split(Path(job["path"]), settings, job["boundaries"], Path(job["folder"]))
    except SkippyError as error:
        return {"refused": str(error)}


def reference_job(path: Path, settings: Settings, folder: Path) -> dict[str, Any]:
    return {"path": str(path), "settings": dataclasses.asdict(settings), "folder": str(folder), "boundaries": None}


def trial_job(path: Path, settings: Settings, boundaries: tuple[int, ...], folder: Path) -> dict[str, Any]:
    return reference_job(path, settings, folder) | {"boundaries": boundaries}


def make_reference(path: Path, settings: Settings, folder: Path) -> dict[str, Any]:
    """Write the unsplit model's logits into ``folder``; raise SkippyError where there is nothing to compare with."""
    source = open_model(path)
    n_ctx = context_size(source)
    with contextlib.ExitStack() as stack:
        if isinstance(source, PackageModel):  # llama.cpp by itself opens one file
            path = folder / "whole.gguf"
            stack.callback(path.unlink, missing_ok=True)
            compose(source, path)
        unsplit = stack.enter_context(Unsplit(path, settings, n_ctx))
        steps = script(n_ctx, can_trim=unsplit.can_trim)
        whole = unsplit.run(steps, whole=True)
        grouped = unsplit.run(steps, whole=False)
        can_trim = unsplit.can_trim
    problem = emptiness(whole)
    if problem:
        raise ModelFileError(f"{path}: {problem}")
    np.save(folder / _WHOLE, whole)
    if first_difference(steps, whole, grouped) is not None:
        np.save(folder / _GROUPED, grouped)
    (folder / _FACTS).write_text(json.dumps({"can_trim": can_trim}), encoding="utf-8")
    return {"can_trim": can_trim}


def try_split(path: Path, settings: Settings, boundaries: list[int], folder: Path) -> dict[str, Any]:
    """Run the script through stages cut at ``boundaries`` and compare with the reference in ``folder``."""
    # the native extension is loaded in the child only: the process that forks must not hold GPU or thread state
    from skippy_zmq.certify.staged import StagedModel

    source = open_model(path)
    n_ctx = context_size(source)
    steps = script(n_ctx, can_trim=json.loads((folder / _FACTS).read_text(encoding="utf-8"))["can_trim"])
    staged = StagedModel(source, boundaries, stage_options(settings, n_ctx))
    crossing = {str(layer): [dataclasses.asdict(spec) for spec in specs] for layer, specs in staged.crossing().items()}
    return {"crosses": crossing, **_judge(steps, staged.run(steps), folder)}


def _judge(steps: tuple[Step, ...], got: np.ndarray[Any, np.dtype[np.float32]], folder: Path) -> dict[str, Any]:
    difference = first_difference(steps, np.load(folder / _WHOLE, allow_pickle=False), got)
    compared = "batches"
    if difference is not None and (folder / _GROUPED).exists():
        # Unsplit, llama.cpp runs lanes of unequal rows in groups of its own, by other kernels. Then it must be equal
        # with the same groups.
        difference = first_difference(steps, np.load(folder / _GROUPED, allow_pickle=False), got)
        compared = "micro-batches"
    return {"compared": compared, "difference": None if difference is None else dataclasses.asdict(difference)}
