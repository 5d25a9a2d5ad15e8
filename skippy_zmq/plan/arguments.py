"""The command line of the planner."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from skippy_zmq.errors import OptionError
from skippy_zmq.plan.planner import DEFAULT_DECODE_SHARE, Machine
from skippy_zmq.runtime.options import StageOptions, add_arguments, from_arguments, read_config

DEFAULT_PORT = 7700
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_EXAMPLES = """\
examples:
  two stages on this machine that take equally long:
    python -m skippy_zmq.plan model.gguf --stages 2
  three machines of different sizes, the last one twice as fast, with a context of 32768 tokens for each of 4 lanes:
    python -m skippy_zmq.plan hf://owner/name --memory 8G,8G,24G --speed 1,1,2 --hosts node0,node1,node2 -c 32768
"""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a stage listens, and how others reach it where that is another address."""

    bind: str
    reached: str


@dataclass(frozen=True, slots=True)
class PlanRequest:
    model: str
    machines: tuple[Machine, ...]
    addresses: tuple[Address, ...]
    decode_share: float
    options: StageOptions
    as_json: bool
    progress: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see --help)")


def parse_request(argv: Sequence[str] | None = None) -> PlanRequest:
    """Read the command line; raise OptionError for what does not fit."""
    parser = _Parser(
        prog="python -m skippy_zmq.plan",
        description="Say where to cut a model: layer ranges that fit the memory of their machines and take equally "
        "long. Reads only what describes the model, no weights.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="as for python -m skippy_zmq.stage --model")
    parser.add_argument("--stages", type=int, metavar="N", help="how many stages (default: as many as --memory names)")
    parser.add_argument(
        "--memory", metavar="A,B", help="memory for each stage, like 8G,16G; a single one is that of every stage"
    )
    parser.add_argument("--speed", metavar="A,B", help="speed of each machine relative to the others (default: equal)")
    parser.add_argument(
        "--decode-share",
        type=float,
        default=DEFAULT_DECODE_SHARE,
        metavar="X",
        help="part of the time that goes to generating tokens, the rest to reading prompts: 1 where answers are long, "
        f"0 where prompts are (default: {DEFAULT_DECODE_SHARE})",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A,B", help="host of each stage, for the command lines (default: this one)")
    where.add_argument("--endpoints", metavar="A,B", help="address of each stage, for the command lines")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    parser.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=True, help="progress bars on a terminal"
    )
    parser.add_argument("--config", metavar="FILE", help="a .toml or .json file with load and context options")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    config = read_config(arguments.config) if arguments.config else {}
    unknown = sorted(set(config) - set(StageOptions.model_fields))
    if unknown:
        raise OptionError(f"config file {arguments.config}: no such option: {', '.join(unknown)}")
    machines = _machines(arguments.stages, arguments.memory, arguments.speed)
    return PlanRequest(
        arguments.model,
        machines,
        _addresses(len(machines), arguments.hosts, arguments.endpoints),
        arguments.decode_share,
        from_arguments(arguments, config),
        arguments.json,
        arguments.progress,
    )


def parse_size(text: str) -> int:
    """Bytes of a text like ``8G``; K, M, G and T are powers of 1024. Raises OptionError."""
    match = _SIZE.match(text.strip())
    nbytes = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    if not 1.0 <= nbytes <= 2.0**60:
        raise OptionError(f"--memory {text!r}: wanted a size like 8G or 512M")
    return int(nbytes)


def _machines(n_stages: int | None, memory: str | None, speed: str | None) -> tuple[Machine, ...]:
    if n_stages is None and memory is None:
        raise OptionError("wanted --stages N or --memory A,B (see --help)")
    sizes: list[int | None] = [parse_size(part) for part in memory.split(",")] if memory is not None else [None]
    count = len(sizes) if n_stages is None else n_stages
    if count < 1:
        raise OptionError(f"--stages: wanted at least 1, got {count}")
    speeds = [_speed(part) for part in speed.split(",")] if speed is not None else [1.0]
    sizes = sizes * count if len(sizes) == 1 else sizes
    speeds = speeds * count if len(speeds) == 1 else speeds
    for name, values in (("--memory", sizes), ("--speed", speeds)):
        if len(values) != count:
            raise OptionError(f"{name}: wanted one value or {count}, one for each stage, got {len(values)}")
    return tuple(Machine(size, rate) for size, rate in zip(sizes, speeds, strict=True))


def _speed(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0.0 and math.isfinite(value)):
        raise OptionError(f"--speed {text!r}: wanted numbers above 0, like 1,2")
    return value


def _addresses(n_stages: int, hosts: str | None, endpoints: str | None) -> tuple[Address, ...]:
    if endpoints is not None:
        given = [part.strip() for part in endpoints.split(",")]
        if len(given) != n_stages or not all(given):
            raise OptionError(f"--endpoints: wanted {n_stages}, one for each stage, got {endpoints!r}")
        return tuple(Address(endpoint, endpoint) for endpoint in given)
    names = [part.strip() for part in hosts.split(",")] if hosts is not None else [_LOOPBACK[1]] * n_stages
    if len(names) != n_stages or not all(names):
        raise OptionError(f"--hosts: wanted {n_stages}, one for each stage, got {hosts!r}")
    found = []
    for index, name in enumerate(names):
        port = DEFAULT_PORT + names[:index].count(name)
        host = f"[{name}]" if ":" in name else name
        reached = f"tcp://{host}:{port}"
        found.append(Address(reached if name in _LOOPBACK else f"tcp://*:{port}", reached))
    return tuple(found)
