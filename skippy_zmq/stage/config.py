"""What the stage program was asked to do: command line over config file over defaults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from skippy_zmq.errors import OptionError
from skippy_zmq.runtime.options import StageOptions, add_arguments, from_arguments, read_config
from skippy_zmq.topology import LayerRange

DEFAULT_BIND = "tcp://127.0.0.1:7700"
DEFAULT_DRAIN_SECONDS = 10.0
DEFAULT_ROW_CLASS_SECONDS = 1.0
_MAX_NAME_LENGTH = 100  # with the nonce that follows it, a name has to fit the wire's MAX_NAME_BYTES
_LOG_LEVELS = ("debug", "info", "warning", "error")

_EXAMPLES = """\
examples:
  a whole model in one stage:
    python -m skippy_zmq.stage --model m.gguf --layers 0:30 --bind tcp://127.0.0.1:7700
  two stages on one machine, started in any order:
    python -m skippy_zmq.stage --model m.gguf --layers 0:15  --bind ipc:///run/user/1000/s0 --next ipc:///run/user/1000/s1
    python -m skippy_zmq.stage --model m.gguf --layers 15:30 --bind ipc:///run/user/1000/s1 --first ipc:///run/user/1000/s0
  ask them something:
    python -m skippy_zmq.client --connect ipc:///run/user/1000/s0 --chat "Why is the sky blue?"
"""


@dataclass(frozen=True, slots=True)
class StageConfig:
    model: str  # a path, or hf://...
    layers: LayerRange
    bind: str
    next: str | None
    first: str | None
    advertise: str | None  # how others reach this stage, where that is not the bind address
    name: str
    options: StageOptions
    uncertified: bool
    allow_plaintext: bool
    curve_key: Path | None
    curve_allow: Path | None
    next_key: str | None
    first_key: str | None
    drain_seconds: float
    row_class_seconds: float
    exit_with_stdin: bool
    progress: bool
    log_level: str


_TEXT_KEYS = {
    "model": (
        "--model",
        "MODEL",
        "a GGUF file, the first of its shards (-00001-of-0000N.gguf), a layer package, a checkpoint folder, or "
        "hf://owner/name[@revision][/file]",
    ),
    "layers": ("--layers", "A:B", "the layers to run, half-open: 0:15 is the first fifteen"),
    "bind": (
        "--bind",
        "ENDPOINT",
        f"where this stage listens: tcp://host:port or ipc://path (default: {DEFAULT_BIND})",
    ),
    "next": ("--next", "ENDPOINT", "the stage with the following layers; not for the last stage"),
    "first": ("--first", "ENDPOINT", "stage 0, for the last stage: tokens go back there"),
    "advertise": ("--advertise", "ENDPOINT", "how clients reach this stage, if not by its bind address"),
    "name": ("--name", "NAME", "name in messages and logs (default: stage-A-B)"),
    "curve_key": ("--curve-key", "FILE", "this stage's CURVE secret key; turns encryption on"),
    "curve_allow": ("--curve-allow", "FILE", "public keys of the peers and clients that may connect"),
    "next_key": ("--next-key", "KEY", "public CURVE key of the next stage"),
    "first_key": ("--first-key", "KEY", "public CURVE key of stage 0"),
}
_FLAG_KEYS = {
    "uncertified": ("--uncertified", "run an architecture that docs/architectures.md does not list"),
    "allow_plaintext": (
        "--allow-plaintext",
        "listen on a public address without keys: everybody who reaches it can read prompts and use the pipeline",
    ),
    "exit_with_stdin": ("--exit-with-stdin", "end when standard input closes (for programs that start stages)"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see --help)")


def parse_config(argv: list[str] | None = None) -> StageConfig:
    """Read the command line and the config file it names; raise OptionError for what does not fit."""
    parser = _Parser(
        prog="python -m skippy_zmq.stage",
        description="Run a range of a model's layers as one stage of a pipeline.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, (flag, metavar, text) in _TEXT_KEYS.items():
        parser.add_argument(flag, metavar=metavar, help=text, dest=name)
    for name, (flag, text) in _FLAG_KEYS.items():
        parser.add_argument(flag, action="store_true", default=None, help=text, dest=name)
    parser.add_argument("--config", metavar="FILE", help="a .toml or .json file with any of these options")
    parser.add_argument(
        "--drain-seconds",
        type=float,
        metavar="S",
        help=f"how long SIGTERM lets running requests finish (default: {DEFAULT_DRAIN_SECONDS:g})",
    )
    parser.add_argument(
        "--row-class-seconds",
        type=float,
        metavar="S",
        help="time to measure which sizes of a decode batch give a row the same bits; what was found is kept for later "
        f"starts, and 0 measures nothing (default: {DEFAULT_ROW_CLASS_SECONDS:g})",
    )
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=None, help="progress bars on a terminal"
    )
    parser.add_argument("--log-level", choices=_LOG_LEVELS, help="default: info")
    add_arguments(parser)
    arguments = parser.parse_args(argv)

    file = read_config(arguments.config) if arguments.config else {}
    own = {*_TEXT_KEYS, *_FLAG_KEYS, "drain_seconds", "row_class_seconds", "progress", "log_level"}
    unknown = sorted(set(file) - own - set(StageOptions.model_fields))
    if unknown:
        raise OptionError(f"config file {arguments.config}: no such option: {', '.join(unknown)}")
    values = {name: file.get(name) if getattr(arguments, name) is None else getattr(arguments, name) for name in own}
    for name in _TEXT_KEYS:
        if values[name] is not None and not isinstance(values[name], str):
            raise OptionError(f"{name}: wanted a text, got {values[name]!r}")
    for name in (*_FLAG_KEYS, "progress"):
        if values[name] is not None and not isinstance(values[name], bool):
            raise OptionError(f"{name}: wanted true or false, got {values[name]!r}")
    if not values["model"] or not values["layers"]:
        raise OptionError("--model and --layers are needed (see --help)")
    layers = LayerRange.parse(values["layers"])
    drain = _seconds("drain_seconds", values["drain_seconds"], DEFAULT_DRAIN_SECONDS)
    row_class = _seconds("row_class_seconds", values["row_class_seconds"], DEFAULT_ROW_CLASS_SECONDS)
    level = values["log_level"] or "info"
    if level not in _LOG_LEVELS:
        raise OptionError(f"log_level: wanted one of {', '.join(_LOG_LEVELS)}, got {level!r}")

    name = values["name"] or f"stage-{layers.start}-{layers.end}"
    if len(name) > _MAX_NAME_LENGTH:
        raise OptionError(f"--name: wanted at most {_MAX_NAME_LENGTH} characters, got {len(name)}")

    def path(name: str) -> Path | None:
        value = values[name]
        return Path(value) if isinstance(value, str) and value else None

    return StageConfig(
        model=values["model"],
        layers=layers,
        bind=values["bind"] or DEFAULT_BIND,
        next=values["next"],
        first=values["first"],
        advertise=values["advertise"],
        name=name,
        options=from_arguments(arguments, file),
        uncertified=bool(values["uncertified"]),
        allow_plaintext=bool(values["allow_plaintext"]),
        curve_key=path("curve_key"),
        curve_allow=path("curve_allow"),
        next_key=values["next_key"],
        first_key=values["first_key"],
        drain_seconds=drain,
        row_class_seconds=row_class,
        exit_with_stdin=bool(values["exit_with_stdin"]),
        progress=values["progress"] is not False,
        log_level=level,
    )


def _seconds(name: str, value: object, default: float) -> float:
    seconds = default if value is None else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 3600:
        raise OptionError(f"{name}: wanted 0 to 3600, got {seconds!r}")
    return float(seconds)


def check_role(config: StageConfig, n_layers: int) -> None:
    """Raise OptionError unless the links given are those that the layers need."""
    layers = config.layers.within(n_layers)
    is_first, is_last = layers.start == 0, layers.end == n_layers
    if not is_last and not config.next:
        raise OptionError(
            f"layers {layers} of {n_layers}: --next is needed, the stage that begins at layer {layers.end}"
        )
    if is_last and config.next:
        raise OptionError(f"layers {layers} are the last of {n_layers}: there is no --next")
    if is_last and not is_first and not config.first:
        raise OptionError(
            f"layers {layers} are the last of {n_layers}: --first is needed, the stage that begins at layer 0"
        )
    if config.first and (not is_last or is_first):
        raise OptionError(f"layers {layers} of {n_layers}: --first is for the last of several stages")
