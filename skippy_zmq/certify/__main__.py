"""Prove that models give exactly the same logits when they are cut into stages.

Every GGUF file is run by llama.cpp unsplit (through llama-cpp-python) and as one, two and three stages, each try in a
process of its own, and all logits are compared bit for bit. Exit code: 0 where nothing was inexact, 1 otherwise (with
``--strict``: also where anything was refused or crashed), 2 for a mistake in the options.

``--json`` writes this document (``null`` where a value is not known or does not apply):

    {"llama_cpp": str,                       the build that was tried
     "settings": [{"name": str, "cache_type": str, "flash_attn": "on" | "off", "threads": int}],
     "exact": [str],                         architecture names all of whose files were exact everywhere
     "models": [
       {"file": str, "architecture": str | null, "n_layers": int | null,
        "can_trim": bool | null,             false: "after a trim" was tried as "after a clear"
        "verdict": VERDICT, "reason": str | null,
        "boundaries": [{"layer": int, "verdict": VERDICT,
                        "crosses": [{"name": str, "occurrence": int, "dtype": str,
                                     "row_bytes": int, "fixed_bytes": int}]}],
        "tries": [{"split": [int], "settings": str, "verdict": VERDICT, "reason": str | null,
                   "compared": "batches" | "micro-batches" | null,
                   "difference": {"step": str, "row": int, "values": int, "largest": float | null} | null}]}]}

VERDICT is "exact", "inexact", "refused" (in words: by the file checks, an option, the handshake or llama.cpp) or
"crashed" (the process died or ran out of time). ``split`` lists the first layers of all stages but the first.
``compared`` is "micro-batches" where llama.cpp's own grouping of lanes with unequal row counts selects other kernels
than a stage's; the unsplit model then ran the same groups as the stages, one llama_decode each.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from skippy_zmq.certify.plan import model_files, parse_boundaries
from skippy_zmq.certify.report import as_json, line, names_json, summary, table
from skippy_zmq.certify.results import ModelResult, Verdict, worst
from skippy_zmq.certify.run import Plan, candidate, certify
from skippy_zmq.certify.workload import ALL_SETTINGS, DEFAULTS
from skippy_zmq.errors import OptionError, SkippyError
from skippy_zmq.runtime.options import available_cores


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m skippy_zmq.certify",
        description="Prove that models give exactly the same logits when they are cut into stages.",
    )
    add = result.add_argument
    add("paths", nargs="+", type=Path, metavar="FILE_OR_DIR", help="GGUF files, or folders of them (also below)")
    add("--json", type=Path, metavar="OUT", help="write all that was tried and found")
    add("--table", type=Path, metavar="OUT", help="write docs/architectures.md")
    add("--names", type=Path, metavar="OUT", help="write the names that were exact everywhere (certified.json)")
    add(
        "--flash-attn",
        choices=["on", "off"],
        help="only the settings with, or without, flash attention (default: both)",
    )
    add("--boundaries", default="all", metavar="all|K,K", help="layers to cut at (default: all)")
    add("--quick", action="store_true", help="only up to two stages, only with a stage's default cache and one thread")
    add("--strict", action="store_true", help="exit with 1 where anything was refused or crashed, too")
    add("--jobs", type=int, default=available_cores(), metavar="N", help="processes at once (default: all cores)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds that one try may take (default: 600)")
    return result


def plan_of(arguments: argparse.Namespace) -> Plan:
    settings = [s for s in ALL_SETTINGS if arguments.flash_attn in (None, s.flash_attn)]
    if arguments.quick:
        settings = [DEFAULTS] if DEFAULTS in settings else settings[:1]
    if arguments.jobs < 1:
        raise OptionError(f"--jobs {arguments.jobs}: wanted at least 1")
    if not 0 < arguments.timeout <= 1e6:
        raise OptionError(f"--timeout {arguments.timeout}: wanted a number of seconds above 0")
    boundaries = parse_boundaries(arguments.boundaries)
    return Plan(tuple(settings), boundaries, arguments.quick, arguments.timeout, arguments.jobs)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        plan = plan_of(arguments)
        files = model_files(arguments.paths)
        for output in (arguments.json, arguments.table, arguments.names):
            if output is not None and not output.absolute().parent.is_dir():
                raise OptionError(f"{output}: there is no folder {output.absolute().parent}")
        results = _run(files, plan)
        for output, content in (
            (arguments.json, as_json(results, plan.settings)),
            (arguments.table, table(results, plan.settings)),
            (arguments.names, names_json(results)),
        ):
            if output is not None:
                output.write_text(content, encoding="utf-8")
    except SkippyError as error:
        print(f"certify: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"certify: {error.filename}: {error.strerror}", file=sys.stderr)
        return OptionError.exit_code
    except KeyboardInterrupt:
        print("certify: interrupted", file=sys.stderr)
        return 130
    print(summary(results))
    return exit_code(results, strict=arguments.strict)


def exit_code(results: Sequence[ModelResult], *, strict: bool) -> int:
    """1 where anything was inexact or, with ``strict``, not exact; else 0."""
    verdict = worst(result.verdict for result in results)
    return int(verdict is Verdict.INEXACT or (strict and verdict is not Verdict.EXACT))


def _run(files: Sequence[Path], plan: Plan) -> list[ModelResult]:
    candidates = [candidate(path, plan) for path in files]
    total = sum(len(model.cuts) for model in candidates) * len(plan.settings)
    results = []
    lock = threading.Lock()  # tries end on several threads
    with tqdm(total=total, unit="try", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:

        def done(n: int) -> None:
            with lock:
                bar.update(n)

        for result in certify(candidates, plan, done=done):
            with lock:
                bar.write(line(result), file=sys.stdout)
            sys.stdout.flush()
            results.append(result)
    return results


if __name__ == "__main__":
    sys.exit(main())
