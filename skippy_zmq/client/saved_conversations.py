"""``--save-session`` and ``--load-session`` of the command line: a conversation that outlives its pipeline."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from skippy_zmq.client.client import Client
from skippy_zmq.client.results import Generation
from skippy_zmq.client.transfers import Progress
from skippy_zmq.errors import KvPageError, OptionError
from skippy_zmq.kv.session_files import SavedSession


def check_session_flags(arguments: argparse.Namespace) -> None:
    """Raise OptionError where the request does not go with ``--save-session`` or ``--load-session``."""
    if arguments.load_session is not None:
        if arguments.chat is not None:
            raise OptionError(
                "--load-session: not with --chat, whose template would begin a new conversation; "
                "wanted --prompt, --prompt-file or --token-ids"
            )
        if not arguments.request:
            raise OptionError("--load-session: wanted a prompt to go on with: --prompt, --prompt-file or --token-ids")
    if arguments.save_session is not None and not arguments.request:
        raise OptionError("--save-session: wanted a prompt, whose answer is saved with it")


def continued_request(client: Client, arguments: argparse.Namespace) -> dict[str, Any]:
    """What to ask: with ``--load-session``, after the stages have it, the saved tokens and then the new ones."""
    request: dict[str, Any] = dict(arguments.request)
    if arguments.save_session is not None:
        request["keep"] = True
    if arguments.load_session is None:
        return request
    directory = Path(arguments.load_session)
    saved = SavedSession(directory)
    with _progress(arguments, "loading session") as progress:
        request["session"] = client.import_session(directory, progress=progress)
    text = request.pop("prompt", None)
    added = request["token_ids"] if text is None else client.tokenize(text, add_special=False)
    return {**request, "token_ids": (*saved.facts.tokens, *added)}


def save_conversation(client: Client, generation: Generation, arguments: argparse.Namespace) -> None:
    """Save the prompt, the answer and their state; raise KvPageError where the stages have not kept that."""
    if not generation.session:
        why = "the answer was cancelled" if generation.finish_reason == "cancelled" else "they keep none or had no room"
        raise KvPageError(f"--save-session {arguments.save_session}: not saved: no state is kept by all stages: {why}")
    tokens = (*generation.prompt_token_ids, *generation.token_ids)
    with _progress(arguments, "saving session") as progress:
        client.export_session(generation.session, arguments.save_session, token_ids=tokens, progress=progress)


@contextlib.contextmanager
def _progress(arguments: argparse.Namespace, what: str) -> Iterator[Progress]:
    quiet = arguments.json or arguments.no_progress or not sys.stderr.isatty()
    with tqdm(desc=what, unit="page", file=sys.stderr, disable=quiet, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
