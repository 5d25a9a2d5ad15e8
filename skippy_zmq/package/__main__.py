"""``python -m skippy_zmq.package build|inspect|verify|compose``: make and check layer packages (docs/packages.md)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from skippy_zmq.errors import ModelFileError, SkippyError
from skippy_zmq.package.report import package_json, package_table
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.runtime.options import check_options
from skippy_zmq.runtime.recipes import PRESERVE
from skippy_zmq.sources.hub import Hub
from skippy_zmq.sources.package.building import build_package
from skippy_zmq.sources.package.composing import compose
from skippy_zmq.sources.package.opening import open_package
from skippy_zmq.sources.package.reading import package_folder, read_manifest
from skippy_zmq.sources.package.verifying import verify_package
from skippy_zmq.sources.package.weight_source import GgufWeights
from skippy_zmq.sources.references import fetch_projectors, locate, outline, parse_reference
from skippy_zmq.topology import LayerRange

_EXIT_PROBLEMS = 1
_EXIT_INTERRUPTED = 130
_PACKAGE = "the folder of a package, or hf://owner/name[@revision][/folder]"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m skippy_zmq.package",
        description="A model as a folder of parts, of which a stage needs and opens only its own.",
    )
    commands = result.add_subparsers(dest="command", required=True, metavar="build|inspect|verify|compose")
    build = commands.add_parser("build", help="write the package of a model; a build that was stopped goes on")
    build.add_argument(
        "model",
        metavar="MODEL",
        help="a GGUF file, the first of its shards, a checkpoint folder, or hf://owner/name[@revision][/file]",
    )
    build.add_argument("output", type=Path, metavar="OUT", help="the folder of the package")
    build.add_argument(
        "--mmproj", type=Path, action="append", default=[], metavar="FILE", help="a projector to add (repeatable)"
    )
    build.add_argument(
        "--quant",
        default=PRESERVE,
        metavar="RECIPE",
        help="types of a checkpoint's weights: preserve (default), or a recipe of llama-quantize like Q4_K_M",
    )
    build.add_argument(
        "--imatrix",
        default="",
        metavar="FILE",
        help="importance matrix for --quant; a relative path is relative to the checkpoint's folder",
    )
    build.add_argument(
        "--quant-strict",
        action="store_true",
        help="refuse rather than give tensors whose rows do not fit the recipe's type another one",
    )
    inspect = commands.add_parser("inspect", help="show what is in a package; reads the manifest only")
    inspect.add_argument("package", metavar="PACKAGE", help=_PACKAGE)
    inspect.add_argument("--json", action="store_true", help="for scripts")
    verify = commands.add_parser("verify", help="check every byte; list all problems; exit code 1 where there are any")
    verify.add_argument("package", metavar="PACKAGE", help=_PACKAGE)
    composed = commands.add_parser("compose", help="write the model as one GGUF file")
    composed.add_argument("package", metavar="PACKAGE", help=_PACKAGE)
    composed.add_argument("output", type=Path, metavar="OUT.gguf")
    composed.add_argument(
        "--layers",
        type=LayerRange.parse,
        metavar="A:B",
        help="a sparse file that has the whole tensor table, and the bytes of one stage only",
    )
    for command in (build, inspect, verify, composed):
        command.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code."""
    try:
        arguments = parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = _COMMANDS[arguments.command]
        return command(arguments)
    except SkippyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; a build goes on where it was when it is started again", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _build(arguments: argparse.Namespace) -> int:
    options = check_options(
        {name: getattr(arguments, name) for name in ("quant", "quant_strict", "imatrix")}, "options"
    )
    located = locate(arguments.model, open_hub=partial(Hub, progress=arguments.progress), beside=arguments.imatrix)
    source = GgufWeights(open_with_options(located, options))
    with _bar(arguments, "building") as (begin, progress):
        manifest = build_package(source, arguments.output, arguments.mmproj, begin=begin, progress=progress)
    size = sum(part.size for part in manifest.parts)
    print(f"{arguments.output}: {manifest.name}, {len(manifest.parts)} parts, {size} bytes")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    with _outlined(arguments) as path:
        folder = package_folder(path)
        manifest = read_manifest(folder)
        if arguments.json:
            print(json.dumps(package_json(folder, manifest)))
        else:
            print("\n".join(package_table(folder, manifest)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    path = _fetched(arguments, projectors=True)
    with _bar(arguments, "verifying") as (begin, progress):
        problems = verify_package(path, begin=begin, progress=progress)
    for problem in problems:
        print(problem)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        print(f"error: {arguments.package}: {count}", file=sys.stderr)
        return _EXIT_PROBLEMS
    print(f"{arguments.package}: all parts are what the manifest says")
    return 0


def _compose(arguments: argparse.Namespace) -> int:
    package = open_package(_fetched(arguments, arguments.layers))
    with _bar(arguments, "composing") as (begin, progress):
        copied = compose(package, arguments.output, arguments.layers, begin=begin, progress=progress)
    held = "" if arguments.layers is None else f" for layers {arguments.layers}"
    print(f"{arguments.output}: {copied} bytes of weights{held}")
    return 0


@contextlib.contextmanager
def _outlined(arguments: argparse.Namespace) -> Iterator[Path]:
    """Where the manifest of the package lies, fetched if need be."""
    if parse_reference(arguments.package) is None:
        yield Path(arguments.package)
        return
    with outline(arguments.package, open_hub=partial(Hub, progress=arguments.progress)) as located:
        if located.kind != "package":
            raise ModelFileError(f"{arguments.package}: holds no layer package")
        yield located.path


def _fetched(arguments: argparse.Namespace, layers: LayerRange | None = None, *, projectors: bool = False) -> Path:
    """The folder of the package, its parts fetched if need be: of ``layers``, or all."""
    with _outlined(arguments) as path:
        if parse_reference(arguments.package) is None:
            return path
    open_hub = partial(Hub, progress=arguments.progress)
    located = locate(arguments.package, layers, open_hub=open_hub)
    if projectors:
        fetch_projectors(located, open_hub=open_hub)
    return located.path


_COMMANDS = {"build": _build, "inspect": _inspect, "verify": _verify, "compose": _compose}


@contextlib.contextmanager
def _bar(arguments: argparse.Namespace, what: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """What to call with the total, and what with each step; a bar on a terminal."""
    shown = arguments.progress and sys.stderr.isatty()
    with tqdm(desc=what, unit="B", unit_scale=True, unit_divisor=1024, disable=not shown, leave=False) as bar:

        def begin(total: int) -> None:
            bar.reset(total)

        def progress(n_bytes: int) -> None:
            bar.update(n_bytes)

        yield begin, progress


if __name__ == "__main__":
    sys.exit(main())
