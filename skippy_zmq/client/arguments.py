"""The command line of the client."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from skippy_zmq.client.requests import DEFAULT_MAX_TOKENS
from skippy_zmq.client.saved_conversations import check_session_flags
from skippy_zmq.errors import OptionError
from skippy_zmq.runtime.options import StageOptions, add_arguments, from_arguments, read_config
from skippy_zmq.wire.messages import SamplingParams

DEFAULT_LOCAL_STAGES = 2
DEFAULT_WATCH_SECONDS = 1.0
LEAST_WATCH_SECONDS = 0.1

_EXAMPLES = """\
examples:
  ask a pipeline that runs somewhere:
    python -m skippy_zmq.client --connect tcp://10.0.0.1:7700 --chat "Why is the sky blue?"
  start a pipeline of three stages here, ask it, stop it:
    python -m skippy_zmq.client --model m.gguf --split 10,20 --prompt "Once upon a time" --max-tokens 100
  for scripts:
    python -m skippy_zmq.client --connect 7700 --prompt-file question.txt --json | jq -r .text
  keep a conversation, and go on with it later, in other processes or on other machines:
    python -m skippy_zmq.client --connect 7700 --prompt "Once upon a time" --save-session tale
    python -m skippy_zmq.client --connect 7700 --load-session tale --prompt " The next day" --save-session tale
  see what every stage is doing, once or every two seconds:
    python -m skippy_zmq.client --connect 7700 --stats
    python -m skippy_zmq.client --connect 7700 --watch 2
"""

# Sampler flags: llama.cpp's names first, then our own; the field of SamplingParams that they set; type; help.
_SAMPLERS: tuple[tuple[tuple[str, ...], str, type, str], ...] = (
    (("--temp", "--temperature"), "temperature", float, "0 always takes the likeliest token"),
    (("--top-k",), "top_k", int, "choose among the K likeliest tokens; 0: all"),
    (("--top-p",), "top_p", float, "choose among the likeliest tokens that have this share together; 1: all"),
    (("--min-p",), "min_p", float, "leave out tokens below this share of the likeliest; 0: none"),
    (("--typical", "--typical-p"), "typical_p", float, "locally typical sampling; 1: off"),
    (("--top-nsigma", "--top-n-sigma"), "top_n_sigma", float, "keep logits within N sigma of the best; -1: off"),
    (("--repeat-last-n",), "repeat_last_n", int, "tokens that the penalties look back; 0: off, -1: the whole context"),
    (("--repeat-penalty",), "repeat_penalty", float, "penalty of tokens seen before; 1: off"),
    (("--presence-penalty",), "presence_penalty", float, "penalty of tokens seen at all; 0: off"),
    (("--frequency-penalty",), "frequency_penalty", float, "penalty by how often a token was seen; 0: off"),
    (("--dry-multiplier",), "dry_multiplier", float, "strength of DRY, which breaks repeated sequences; 0: off"),
    (("--dry-base",), "dry_base", float, "base of DRY's growth"),
    (("--dry-allowed-length",), "dry_allowed_length", int, "length of repetition that DRY lets pass"),
    (("--dry-penalty-last-n",), "dry_penalty_last_n", int, "tokens that DRY looks back; 0: off, -1: the whole context"),
    (("--xtc-probability",), "xtc_probability", float, "chance of leaving out the likeliest tokens; 0: off"),
    (("--xtc-threshold",), "xtc_threshold", float, "share above which XTC may leave tokens out"),
    (("--mirostat",), "mirostat", int, "1 or 2: that version of Mirostat; 0: off"),
    (("--mirostat-ent",), "mirostat_tau", float, "Mirostat's target entropy"),
    (("--mirostat-lr",), "mirostat_eta", float, "Mirostat's learning rate"),
    (("--seed",), "seed", int, "same seed, same choice (default: a fresh one each time)"),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see --help)")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; raise OptionError, one line, for what does not fit.

    Beside the flags, the namespace has ``sampling``, ``options`` (None with --connect) and ``request``: prompt,
    messages or token_ids by name, empty where only --stats or --watch is asked for.
    """
    arguments = _parser().parse_args(argv)
    arguments.sampling = _sampling(arguments)
    arguments.token_ids = _numbers("--token-ids", arguments.token_ids)
    arguments.split = _numbers("--split", arguments.split)
    if arguments.timeout is not None and not (arguments.timeout > 0 and math.isfinite(arguments.timeout)):
        raise OptionError(f"--timeout {arguments.timeout:g}: wanted more than 0 seconds")
    arguments.options = _stage_options(arguments)
    arguments.request = _request(arguments)
    check_session_flags(arguments)
    _check_watch(arguments)
    if arguments.request and not arguments.max_tokens >= 1:
        raise OptionError(f"--max-tokens {arguments.max_tokens}: wanted at least 1")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m skippy_zmq.client",
        description="Generate text with a pipeline: one that runs (--connect), or one of local stages (--model).",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--connect", metavar="ENDPOINT", help="stage 0: tcp://host:port, host:port, port or ipc://path")
    where.add_argument(
        "--model",
        metavar="MODEL",
        help="start local stages of this model (a path, or hf://owner/name), and stop them at the end",
    )

    local = parser.add_argument_group("local stages (with --model)")
    cut = local.add_mutually_exclusive_group()
    cut.add_argument("--local-stages", type=int, metavar="N", help=f"how many (default: {DEFAULT_LOCAL_STAGES})")
    cut.add_argument("--split", metavar="A,B", help="layer numbers to cut at: 10,20 makes three stages")
    local.add_argument("--config", metavar="FILE", help="a .toml or .json file with load and context options")
    local.add_argument(
        "--uncertified", action="store_true", help="run an architecture that docs/architectures.md does not list"
    )

    secure = parser.add_argument_group("encryption (with --connect)")
    secure.add_argument("--curve-key", metavar="FILE", help="this client's CURVE secret key")
    secure.add_argument("--server-key", metavar="KEY", help="the stages' public CURVE key")

    prompts = parser.add_argument_group("prompt")
    prompt = prompts.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, as it is")
    prompt.add_argument("--prompt-file", metavar="F", help="the same from a file; - is standard input")
    prompt.add_argument("--chat", metavar="TEXT", help="a question, put through the model's chat template")
    prompt.add_argument("--token-ids", metavar="1,2,3", help="tokens to continue, as they are")
    prompts.add_argument("--system", metavar="TEXT", help="system message to go with --chat")
    prompts.add_argument(
        "--load-session",
        metavar="DIR",
        help="go on with the conversation that --save-session saved there: the prompt is added to it; the same model, "
        "build and cache types, in any split",
    )

    output = parser.add_argument_group("answer")
    output.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"most tokens to generate (default: {DEFAULT_MAX_TOKENS})",
    )
    output.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; may be repeated"
    )
    output.add_argument(
        "--save-session",
        metavar="DIR",
        help="save the conversation and its attention state there afterwards, in place of one saved there before",
    )
    output.add_argument("--no-progress", action="store_true", help="show no progress of loading and saving sessions")
    output.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds for the whole answer, connecting included (default: 30 to connect, then any time)",
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object in place of text or tables; with --watch, one a line",
    )
    output.add_argument(
        "--stats",
        action="store_true",
        help="print what each stage is doing and has done: alone on standard output (exit code 3 where a stage is "
        "missing), after an answer on standard error",
    )
    output.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=DEFAULT_WATCH_SECONDS,
        metavar="S",
        help=f"show that again every S seconds (default: {DEFAULT_WATCH_SECONDS:g}) until Ctrl-C: in place on a "
        "terminal, else (or with NO_COLOR set) a line each",
    )
    _add_samplers(parser)
    add_arguments(parser)
    return parser


def _add_samplers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are chosen")
    defaults = SamplingParams()
    for flags, name, kind, text in _SAMPLERS:
        shown = "" if name == "seed" else f" (default: {getattr(defaults, name):g})"
        group.add_argument(*flags, dest=name, type=kind, metavar="N", help=text + shown)
    group.add_argument(
        "--dry-sequence-breaker",
        dest="dry_sequence_breakers",
        action="append",
        metavar="TEXT",
        help="text that DRY does not look beyond, in place of the default ones; may be repeated; none: no breakers",
    )
    group.add_argument(
        "--logit-bias",
        action="append",
        metavar="TOKEN+BIAS",
        help="add to a token's logit: 15043+1 or 15043-1; may be repeated",
    )
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--grammar", metavar="GBNF", help="grammar that the answer must follow")
    grammar.add_argument("--grammar-file", metavar="F", help="the same from a file")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the answer")


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    names = [name for _, name, _, _ in _SAMPLERS] + ["ignore_eos", "grammar"]
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.grammar_file is not None:
        given["grammar"] = _read_text("--grammar-file", arguments.grammar_file)
    if arguments.dry_sequence_breakers is not None:
        breakers = arguments.dry_sequence_breakers
        given["dry_sequence_breakers"] = tuple(breakers) if breakers != ["none"] else ()
    if arguments.logit_bias is not None:
        given["logit_bias"] = tuple(map(_logit_bias, arguments.logit_bias))
    return SamplingParams(**given)


def _logit_bias(text: str) -> tuple[int, float]:
    match = re.match(r"(\d{1,10})([+-][0-9.eE+-]+)\Z", text, re.ASCII)
    try:
        if match is None:
            raise ValueError
        return int(match[1]), float(match[2])
    except ValueError:
        raise OptionError(f"--logit-bias {text!r}: wanted TOKEN+BIAS or TOKEN-BIAS, for example 15043-1") from None


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if not re.match(r"\s*\d{1,10}\s*(,\s*\d{1,10}\s*)*\Z", text, re.ASCII):
        raise OptionError(f"{flag} {text!r}: wanted whole numbers with commas between them")
    return tuple(int(part) for part in text.split(","))


def _stage_options(arguments: argparse.Namespace) -> StageOptions | None:
    if arguments.model is None:
        names = ["local_stages", "split", "config", *StageOptions.model_fields]
        given = [name for name in names if getattr(arguments, name) is not None]
        given += ["uncertified"] if arguments.uncertified else []
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise OptionError(f"{flag}: only with --model; a pipeline that runs has its own options")
        return None
    for name in ("curve_key", "server_key"):
        if getattr(arguments, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')}: only with --connect; local stages use private sockets")
    config = read_config(arguments.config) if arguments.config is not None else {}
    unknown = sorted(set(config) - set(StageOptions.model_fields))
    if unknown:
        raise OptionError(f"config file {arguments.config}: no such option of local stages: {', '.join(unknown)}")
    return from_arguments(arguments, config)


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.system is not None and arguments.chat is None:
        raise OptionError("--system: only with --chat")
    if arguments.chat is not None:
        system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        return {"messages": [*system, {"role": "user", "content": arguments.chat}]}
    if arguments.prompt_file is not None:
        return {"prompt": _read_text("--prompt-file", arguments.prompt_file)}
    for name in ("prompt", "token_ids"):
        if getattr(arguments, name) is not None:
            return {name: getattr(arguments, name)}
    sessions = arguments.load_session is not None or arguments.save_session is not None
    if not arguments.stats and arguments.watch is None and not sessions:
        raise OptionError("wanted a prompt: --prompt, --prompt-file, --chat or --token-ids (see --help)")
    return {}


def _check_watch(arguments: argparse.Namespace) -> None:
    if arguments.watch is None:
        return
    if not LEAST_WATCH_SECONDS <= arguments.watch < math.inf:
        raise OptionError(f"--watch {arguments.watch:g}: wanted at least {LEAST_WATCH_SECONDS:g} seconds")
    if arguments.request:
        raise OptionError("--watch: wanted no prompt; ask from another terminal")
    if arguments.model is not None:
        raise OptionError("--watch: only with --connect; local stages have nobody else to work for")


def _read_text(flag: str, name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise OptionError(f"{flag} {name}: {reason}") from None
