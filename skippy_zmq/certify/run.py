"""Certify files: references and tries in child processes, several at once, results in the order of the files."""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from skippy_zmq.certify.job import reference_job, trial_job
from skippy_zmq.certify.plan import splits
from skippy_zmq.certify.results import ModelResult, Try, judged_try
from skippy_zmq.certify.worker import Worker
from skippy_zmq.certify.workload import Settings
from skippy_zmq.errors import SkippyError
from skippy_zmq.sources.models import open_model
from skippy_zmq.stage.facts import architecture_name


@dataclass(frozen=True, slots=True)
class Plan:
    """``boundaries``: None for all. ``seconds``: limit of each child process. ``jobs``: child processes at once."""

    settings: tuple[Settings, ...]
    boundaries: tuple[int, ...] | None = None
    quick: bool = False
    seconds: float = 600.0
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file and the splits to try. ``refusal``: why nothing of it can be tried; ``cuts`` is then empty."""

    path: Path
    architecture: str | None = None
    n_layers: int | None = None
    cuts: tuple[tuple[int, ...], ...] = ()
    refusal: str = ""


_Part = tuple[bool | None, list[Try]]  # what one of the settings gave: whether lanes can be trimmed, and its tries


def candidate(path: Path, plan: Plan) -> Candidate:
    """Check the file and plan its splits."""
    try:
        source = open_model(path)
    except SkippyError as error:
        return Candidate(path, refusal=str(error))
    name = architecture_name(source)
    try:
        cuts = splits(source.n_layers, plan.boundaries, quick=plan.quick)
    except SkippyError as error:
        return Candidate(path, name, source.n_layers, refusal=str(error))
    return Candidate(path, name, source.n_layers, tuple(cuts))


def certify(
    candidates: Sequence[Candidate], plan: Plan, *, done: Callable[[int], object] = lambda _n: None
) -> Iterator[ModelResult]:
    """Results in the order of ``candidates``. ``done(1)`` is called, from any thread, after each try."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skippy-certify-")))
        pool = ThreadPoolExecutor(plan.jobs)
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        # Ended before the pool is: where the caller gives up, the jobs that run end at once.
        workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(plan.jobs):
            workers.put(stack.enter_context(Worker(folder, plan.seconds)))

        def part(model: Candidate, settings: Settings) -> _Part:
            worker = workers.get()
            try:
                return certify_with(worker, model, settings, folder, done)
            finally:
                workers.put(worker)

        pending: list[tuple[Candidate, list[Future[_Part]]]] = [
            (model, [pool.submit(part, model, settings) for settings in plan.settings if model.cuts])
            for model in candidates
        ]
        for model, futures in pending:
            yield _model_result(model, [future.result() for future in futures])


def certify_with(
    worker: Worker, model: Candidate, settings: Settings, folder: Path, done: Callable[[int], object]
) -> _Part:
    """Make the reference of ``model`` once, below ``folder``, and try every split against it."""
    reference = Path(tempfile.mkdtemp(prefix="reference-", dir=folder))
    try:
        facts = worker.run(reference_job(model.path, settings, reference))
        can_trim: bool | None = facts.get("can_trim")
        tries = []
        for cut in model.cuts:
            result = facts if can_trim is None else worker.run(trial_job(model.path, settings, cut, reference))
            tries.append(judged_try(cut, settings.name, result))
            done(1)
        return can_trim, tries
    finally:
        shutil.rmtree(reference)


def _model_result(model: Candidate, parts: Sequence[_Part]) -> ModelResult:
    return ModelResult(
        file=model.path.name,
        architecture=model.architecture,
        n_layers=model.n_layers,
        can_trim=next((can_trim for can_trim, _ in parts if can_trim is not None), None),
        tries=tuple(t for _, tries in parts for t in tries),
        refusal=model.refusal,
    )
