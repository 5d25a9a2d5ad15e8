"""``python -m skippy_zmq.stage``: load a range of layers, find the neighbours, serve."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

# An idle stage's OpenMP threads would spin and take the cores of the one that works; threads that sleep too soon, at
# every barrier within a step, cost more. libgomp reads this when it is loaded, so it must be set before anything
# imports the extension.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
# Where llama.cpp aborts after all, it would first start a debugger to print a backtrace.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

from skippy_zmq.errors import OptionError, SkippyError
from skippy_zmq.stage.config import StageConfig, check_role, parse_config
from skippy_zmq.stage.facts import check_certified, check_reproducible, ready_line, stage_facts
from skippy_zmq.stage.log_limit import LogLimit

if TYPE_CHECKING:
    from skippy_zmq.transport import Endpoint, Security

log = logging.getLogger("skippy_zmq.stage")


class _Stopped(BaseException):
    """A signal came while the model was loading."""


def main(argv: list[str] | None = None) -> int:
    """Run a stage; return the exit code."""
    try:
        config = parse_config(argv)
        logging.basicConfig(
            level=config.log_level.upper(),
            stream=sys.stderr,
            format=f"%(asctime)s {config.name} %(levelname)s %(message)s",
        )
        for handler in logging.getLogger().handlers:
            handler.addFilter(LogLimit())
        for library in ("httpx", "httpx2"):  # they would log the signed addresses of files
            logging.getLogger(library).setLevel(logging.WARNING)
        with _stop_while_loading():
            _serve(config)
    except SkippyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except _Stopped:
        return 0
    return 0


def _serve(config: StageConfig) -> None:
    from skippy_zmq.runtime.opening import open_with_options
    from skippy_zmq.runtime.row_class_cache import stage_row_class
    from skippy_zmq.runtime.stage_model import StageModel  # loads llama.cpp
    from skippy_zmq.sources.hub import Hub
    from skippy_zmq.sources.references import locate
    from skippy_zmq.stage.engine import Stage
    from skippy_zmq.stage.pages import LanePages
    from skippy_zmq.transport import (
        Endpoint,
        Link,
        Loop,
        Loopback,
        Server,
        SocketFactory,
        SocketLimits,
        boot_nonce,
        routing_id,
    )
    from skippy_zmq.wire.limits import MAX_FRAMES, MAX_PAYLOAD_BYTES
    from skippy_zmq.wire.messages import StageFacts

    if config.exit_with_stdin and sys.stdin is None:
        raise OptionError("--exit-with-stdin: there is no standard input")
    with contextlib.ExitStack() as stack:
        located = locate(
            config.model,
            config.layers,
            open_hub=partial(Hub, progress=config.progress),
            beside=config.options.imatrix,
        )
        source = open_with_options(located, config.options)
        check_role(config, source.n_layers)
        check_certified(source, uncertified=config.uncertified)
        factory = SocketFactory(security=_security(config), limits=SocketLimits(frame_bytes=MAX_PAYLOAD_BYTES))
        stack.callback(factory.close, 1.0)
        loop = stack.enter_context(Loop())
        # Bound before the model is loaded: a wrong or taken address is said at once.
        server = Server(
            factory, Endpoint.parse(config.bind), allow_plaintext=config.allow_plaintext, max_frames=MAX_FRAMES
        )
        stack.callback(server.close, 1.0)
        if server.warning:
            log.warning("%s", server.warning)
        endpoint = _advertised(config, server.endpoint)
        stage_id = routing_id(config.name, boot_nonce())
        with _progress(config) as progress:
            model = StageModel(source, config.layers, config.options, progress=progress)
        if config.options.warm_bytes and not model.warm_bytes:
            why = "none of its weights can be kept" if config.options.busy_poll_seconds else "it does not busy-poll"
            log.warning("--warm-bytes does nothing for this stage: %s (see --busy-poll-ms)", why)
        identity = source.identity()
        rows = stage_row_class(model, identity, config.row_class_seconds)
        log.info("%s", rows)
        check_reproducible(rows, config.options)
        pages = LanePages(model, identity)
        stack.callback(pages.close)
        facts = stage_facts(model, identity, stage_id.decode(), endpoint, rows, pages.page_tokens, located.revision)
        links = {}
        for name, key in (("next", config.next_key), ("first", config.first_key)):
            address = getattr(config, name)
            if address:
                link = Link(
                    factory,
                    Endpoint.parse(address),
                    routing_id=stage_id,
                    server_key=key.encode() if key else None,
                    max_frames=MAX_FRAMES,
                )
                stack.callback(link.close, 1.0)
                links[name] = link

        loopback = Loopback(factory)
        stack.callback(loopback.close)

        def announce(stages: tuple[StageFacts, ...]) -> None:
            try:
                print(ready_line(stages), flush=True)
            except OSError as error:  # nobody reads it any more, which is no reason to stop
                log.warning("READY could not be printed: %s", error.strerror)
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())  # or Python would try again at its end, and complain
                os.close(nowhere)

        stage = Stage(
            model,
            facts,
            pages,
            loop,
            server,
            links.get("next"),
            links.get("first"),
            loopback,
            announce,
            sys.stdin.fileno() if config.exit_with_stdin else None,
        )
        stack.callback(stage.close)
        log.info("layers %s of %s loaded, listening on %s", config.layers, source.path.name, endpoint)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection has to look at it again
        stack.callback(gc.unfreeze)
        with _signals(stage.stop, loop.wakeup_fd, config.drain_seconds):
            stage.run()
        log.info("stopped")


def _security(config: StageConfig) -> Security | None:
    from skippy_zmq.transport import Security, load_allowed_clients, load_keys

    if config.curve_key is None:
        if config.curve_allow or config.next_key or config.first_key:
            raise OptionError("--curve-allow, --next-key and --first-key need --curve-key")
        return None
    allowed = load_allowed_clients(config.curve_allow) if config.curve_allow else frozenset()
    return Security(load_keys(config.curve_key), allowed)


def _advertised(config: StageConfig, bound: Endpoint) -> str:
    """The address that clients are told; raise OptionError where they need it and could not use it."""
    from skippy_zmq.transport import Endpoint
    from skippy_zmq.wire.limits import MAX_LABEL_BYTES

    endpoint = Endpoint.parse(config.advertise) if config.advertise else bound
    unusable = endpoint.transport == "tcp" and (endpoint.host in ("*", "0.0.0.0", "::") or not endpoint.port)
    if unusable and (config.advertise or config.first):  # clients find the last stage by it, stage 0 without
        raise OptionError(f"clients cannot connect to {endpoint}: --advertise has to name one host and port")
    if len(str(endpoint).encode()) > MAX_LABEL_BYTES:
        raise OptionError(f"--advertise: wanted at most {MAX_LABEL_BYTES} bytes, got {len(str(endpoint).encode())}")
    return str(endpoint)


@contextlib.contextmanager
def _stop_while_loading() -> Iterator[None]:
    """SIGTERM and SIGINT end a load, at its next progress report at the latest."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(config: StageConfig) -> Iterator[Callable[[float], None]]:
    """A progress callback: a bar on a terminal, else one that only lets signals in."""
    if not config.progress or not sys.stderr.isatty():
        yield lambda _done: None
        return
    from tqdm import tqdm

    with tqdm(total=100, desc=f"loading layers {config.layers}", unit="%", leave=False) as bar:

        def report(done: float) -> None:
            bar.update(round(done * 100) - bar.n)

        yield report


@contextlib.contextmanager
def _signals(stop: Callable[[float], None], wakeup_fd: int, drain_seconds: float) -> Iterator[None]:
    """The first SIGTERM or SIGINT drains, the second ends at once; both wake the loop."""
    asked = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        stop(0.0 if asked else drain_seconds)
        asked = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    old_fd = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
