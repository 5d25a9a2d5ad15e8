"""``python -m skippy_zmq.client``: ask a pipeline from the command line."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from skippy_zmq.client.arguments import DEFAULT_LOCAL_STAGES, parse_arguments
from skippy_zmq.client.client import DEFAULT_CONTACT_SECONDS, Client
from skippy_zmq.client.json_values import as_line, generation_values, stats_values
from skippy_zmq.client.report import answer_line
from skippy_zmq.client.results import Generation
from skippy_zmq.client.saved_conversations import continued_request, save_conversation
from skippy_zmq.client.signals import EXIT_INTERRUPTED, cancel_on_interrupt, exit_on_terminate
from skippy_zmq.client.stats_view import stats_report
from skippy_zmq.client.watch import watch
from skippy_zmq.errors import OptionError, RetryableError, SkippyError, StageLostError
from skippy_zmq.local import LocalPipeline
from skippy_zmq.transport import Security, load_keys

EXIT_BROKEN_PIPE = 141  # what a shell reports for a program whose reader went away


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client; return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    where = ""
    try:
        arguments = parse_arguments(argv)
        where = f" while using {arguments.connect or arguments.model}"
        if arguments.model is not None:
            return _run_local(arguments)
        with _connect(arguments) as client:
            return _run(client, arguments)
    except SkippyError as error:
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"error: interrupted{where}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _connect(arguments: argparse.Namespace) -> Client:
    if (arguments.curve_key is None) != (arguments.server_key is None):
        raise OptionError("--curve-key and --server-key: wanted both or neither")
    security, server_key = None, None
    if arguments.curve_key is not None:
        security = Security(load_keys(arguments.curve_key))
        server_key = arguments.server_key.encode("utf-8", "replace")
    timeout = arguments.timeout or DEFAULT_CONTACT_SECONDS
    return Client(arguments.connect, security=security, server_key=server_key, timeout=timeout)


def _run_local(arguments: argparse.Namespace) -> int:
    stages = DEFAULT_LOCAL_STAGES if arguments.local_stages is None else arguments.local_stages
    pipeline = LocalPipeline(
        arguments.model,
        stages=stages,
        split=arguments.split,
        options=arguments.options,
        uncertified=arguments.uncertified,
    )
    timeout = arguments.timeout or DEFAULT_CONTACT_SECONDS
    with exit_on_terminate(), pipeline, pipeline.client(timeout=timeout) as client:
        try:
            return _run(client, arguments)
        except RetryableError as error:
            if not isinstance(error, StageLostError) and error.code != "shutting_down":  # as a failed pipeline does
                raise
            why = pipeline.failure()
            raise (StageLostError(why) if why else error) from None


def _run(client: Client, arguments: argparse.Namespace) -> int:
    if arguments.watch is not None:
        return watch(client, arguments.watch, as_json=arguments.json)
    if not arguments.request:
        return _print_stats(client, arguments)
    generation = _generate(client, arguments, continued_request(client, arguments))
    values = generation_values(generation)
    stats = client.stats() if arguments.stats else None
    if stats is not None and arguments.json:
        values["stats"] = stats_values(stats)
    elif stats is not None:
        print(f"{answer_line(generation)}\n\n{stats_report(stats, _width(sys.stderr))}", file=sys.stderr)
    if arguments.json:
        print(as_line(values), flush=True)
    if arguments.save_session is not None:
        save_conversation(client, generation, arguments)
    return EXIT_INTERRUPTED if generation.finish_reason == "cancelled" else 0


def _generate(client: Client, arguments: argparse.Namespace, request: dict[str, Any]) -> Generation:
    stream = client.stream(
        **request,
        max_tokens=arguments.max_tokens,
        sampling=arguments.sampling,
        stop=arguments.stop,
        timeout=arguments.timeout,
    )
    with stream, cancel_on_interrupt(stream):
        text = ""
        try:
            for chunk in stream:
                text = chunk.text or text
                if not arguments.json:
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
        finally:
            if text and not text.endswith("\n") and not arguments.json:
                sys.stdout.write("\n")
                sys.stdout.flush()
    generation = stream.result
    if generation.finish_reason == "cancelled" and not generation.token_ids:
        print(f"error: interrupted before {client.endpoint} gave an answer", file=sys.stderr)
    return generation


def _print_stats(client: Client, arguments: argparse.Namespace) -> int:
    stats = client.stats(timeout=arguments.timeout)
    print(as_line(stats_values(stats)) if arguments.json else stats_report(stats, _width(sys.stdout)), flush=True)
    return 0 if stats.complete else RetryableError.exit_code


def _width(stream: TextIO) -> int | None:
    """Characters in a line of a terminal; any number elsewhere, unless COLUMNS says so."""
    return shutil.get_terminal_size().columns if stream.isatty() or os.environ.get("COLUMNS") else None


def _one_line(error: SkippyError) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
