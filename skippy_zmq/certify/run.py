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
from typing import Any

from skippy_zmq.certify.job import reference_job, trial_job
from skippy_zmq.certify.plan import splits
from skippy_zmq.certify.results import ModelResult, Try, judged_try
from skippy_zmq.certify.worker import Worker
from skippy_zmq.certify.workload import Settings
from skippy_zmq.errors import SkippyError
from skippy_zmq.sources.gguf_model import GgufModel, open_model
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
class _Opened:
    path: Path
    source: GgufModel | None
    cuts: tuple[tuple[int, ...], ...]
    refusal: str = ""


def n_tries(files: Sequence[Path], plan: Plan) -> int:
    """How many splits and settings ``certify`` will try."""
    return sum(len(_open(path, plan).cuts) for path in files) * len(plan.settings)


def certify(
    files: Sequence[Path], plan: Plan, *, done: Callable[[int], object] = lambda _n: None
) -> Iterator[ModelResult]:
    """Results in the order of ``files``. ``done`` is called, from any thread, with the number of tries that ended."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skippy-certify-")))
        workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(plan.jobs):
            workers.put(stack.enter_context(Worker(folder, plan.seconds)))
        pool = ThreadPoolExecutor(plan.jobs)
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def unit(opened: _Opened, settings: Settings) -> tuple[bool | None, list[Try]]:
            worker = workers.get()
            try:
                return _certify_settings(worker, opened, settings, folder, done)
            finally:
                workers.put(worker)

        pending: list[tuple[_Opened, list[Future[tuple[bool | None, list[Try]]]]]] = []
        for path in files:
            opened = _open(path, plan)
            futures = [pool.submit(unit, opened, s) for s in plan.settings] if opened.source is not None else []
            pending.append((opened, futures))
        for opened, futures in pending:
            yield _model_result(opened, [future.result() for future in futures])


def _open(path: Path, plan: Plan) -> _Opened:
    try:
        source = open_model(path)
        return _Opened(path, source, tuple(splits(source.n_layers, plan.boundaries, quick=plan.quick)))
    except SkippyError as error:
        return _Opened(path, None, (), str(error))


def _certify_settings(
    worker: Worker, opened: _Opened, settings: Settings, folder: Path, done: Callable[[int], object]
) -> tuple[bool | None, list[Try]]:
    reference = Path(tempfile.mkdtemp(prefix="reference-", dir=folder))
    try:
        facts: dict[str, Any] = worker.run(reference_job(opened.path, settings, reference))
        tries = []
        for cut in opened.cuts:
            usable = "can_trim" in facts
            result = worker.run(trial_job(opened.path, settings, cut, reference)) if usable else facts
            tries.append(judged_try(cut, settings.name, result))
            done(1)
        return facts.get("can_trim"), tries
    finally:
        shutil.rmtree(reference)


def _model_result(opened: _Opened, parts: Sequence[tuple[bool | None, list[Try]]]) -> ModelResult:
    source = opened.source
    return ModelResult(
        file=opened.path.name,
        architecture=None if source is None else architecture_name(source),
        n_layers=None if source is None else source.n_layers,
        can_trim=next((can_trim for can_trim, _ in parts if can_trim is not None), None),
        tries=tuple(t for _, tries in parts for t in tries),
        refusal=opened.refusal,
    )
