"""A client whose pipeline is not there, is no pipeline, dies, or whose caller fails (Z07)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from model_files import Parrot, parrot
from pipeline_helpers import PATIENCE, SMALL, Pipelines, run_client, wait_until_idle

from skippy_zmq import Client, LocalPipeline
from skippy_zmq.errors import DeadlineError, EndpointError, OptionError, RequestError, StageLostError

pytest_plugins = ("pipeline_fixtures",)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Parrot:
    return parrot(tmp_path_factory.mktemp("parrot") / "parrot.gguf", "alpha beta ", end="loop", context=100_000)


@pytest.fixture
def served(pipelines: Pipelines, endless: Parrot) -> Iterator[Client]:
    client = pipelines(endless.path, 2, ctx_size=65536, lanes=2)
    yield client
    wait_until_idle(client)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)
        yield server


def address(server: socket.socket) -> str:
    return f"tcp://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return address(server)


@pytest.mark.parametrize("extra", [(), ("--json",), ("--stats",)])
def test_nothing_there_ends_the_program_with_one_line_that_names_the_address(
    nowhere: str, extra: tuple[str, ...]
) -> None:
    ended = run_client("--connect", nowhere, "--prompt", "x", "--timeout", 1, *extra)
    assert (ended.status, ended.output) == (2, "")
    assert ended.errors == f"error: cannot reach {nowhere}: nothing answered within 1 s\n"


def test_nothing_at_a_socket_path(tmp_path: Path) -> None:
    ended = run_client("--connect", f"ipc://{tmp_path}/s0", "--prompt", "x", "--timeout", 1)
    assert (ended.status, ended.output) == (2, "")
    assert f"cannot reach ipc://{tmp_path}/s0" in ended.errors


def test_ctrl_c_while_connecting_ends_the_program_with_one_line(listener: socket.socket) -> None:
    command = [sys.executable, "-m", "skippy_zmq.client", "--connect", address(listener), "--prompt", "x"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        connection, _ = listener.accept()
        with connection:
            # Its handshake is there: the program waits for ours.
            connection.settimeout(PATIENCE)
            connection.recv(1)
            program.send_signal(signal.SIGINT)
            output, errors = program.communicate(timeout=PATIENCE)
    assert (program.returncode, output) == (130, b"")
    assert errors.count(b"\n") == 1
    assert address(listener).encode() in errors


def test_something_else_at_the_address_is_said(listener: socket.socket) -> None:
    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with Client(address(listener), timeout=2.0) as client, pytest.raises(EndpointError) as caught:
            client.generate("x")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert address(listener) in str(caught.value)
    assert "not a stage" in str(caught.value)


def test_the_library_says_so_too_and_can_be_asked_again(nowhere: str) -> None:
    with Client(nowhere, timeout=0.2) as client:
        for _ in range(2):
            with pytest.raises(EndpointError, match=nowhere):
                client.generate("x")
        with pytest.raises(EndpointError, match=nowhere):
            client.tokenize("x")
        with pytest.raises(EndpointError, match=nowhere):
            client.stats()
        with pytest.raises(EndpointError, match=nowhere):
            _ = client.stages


def script(text: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", text, *arguments]
    return subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE)


CALLER_FAILS = """
import sys
from skippy_zmq import Client
with Client(sys.argv[1]) as client:
    for chunk in client.stream("x", max_tokens=60000):
        raise ValueError("the caller's own")
"""


def test_an_exception_of_the_caller_is_the_only_one_seen(served: Client) -> None:
    ended = script(CALLER_FAILS, served.endpoint)
    assert ended.returncode == 1
    assert ended.stderr.count(b"Traceback") == 1
    assert ended.stderr.endswith(b"ValueError: the caller's own\n")


FORGETS_TO_CLOSE = """
import sys
from skippy_zmq import Client
client = Client(sys.argv[1])
stream = client.stream("x", max_tokens=60000)
print(next(stream).text)
"""


def test_a_client_that_is_never_closed_does_not_hold_the_program(served: Client) -> None:
    ended = script(FORGETS_TO_CLOSE, served.endpoint)
    assert (ended.returncode, ended.stdout) == (0, b"a\n")
    assert ended.stderr == b""


def test_leaving_a_loop_early_frees_the_lane(served: Client) -> None:
    for _ in range(3):
        for chunk in served.stream("x", max_tokens=60_000):
            assert chunk.text == "a"
            break
    wait_until_idle(served)
    assert served.generate("x", max_tokens=5).text == "alpha"


def test_closing_the_client_cancels_what_runs(served: Client) -> None:
    with Client(served.endpoint) as other:
        streams = [other.stream("x", max_tokens=60_000) for _ in range(3)]
        for stream in streams[:2]:
            next(stream)
    for stream in streams:
        with pytest.raises(OptionError, match="closed"):
            next(stream)
    wait_until_idle(served)


def test_cancelling_one_answer_leaves_the_others_alone(served: Client) -> None:
    kept = served.stream("x", max_tokens=200)
    with served.stream("x", max_tokens=60_000) as stream:
        next(stream)
        stream.cancel()
        *_, last = stream
    assert last.finish_reason == "cancelled"
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.text == ("alpha beta " * len(stream.result.text))[: len(stream.result.text)]
    for _ in kept:
        pass
    assert (kept.result.finish_reason, len(kept.result.token_ids)) == ("length", 200)


def test_a_request_that_waits_for_a_lane_can_be_cancelled(served: Client) -> None:
    running = [served.stream("x", max_tokens=60_000) for _ in range(2)]
    for stream in running:
        next(stream)
    waiting = served.stream("x", max_tokens=5)
    waiting.cancel()
    assert [(chunk.text, chunk.finish_reason) for chunk in waiting] == [("", "cancelled")]
    for stream in running:
        stream.close()


def test_an_answer_that_takes_too_long_is_a_deadline_error(served: Client) -> None:
    with pytest.raises(DeadlineError):
        served.generate("x", max_tokens=60_000, timeout=0.3)
    wait_until_idle(served)
    ended = run_client("--connect", served.endpoint, "--prompt", "x", "--max-tokens", 60_000, "--timeout", 1)
    assert ended.status == 3
    assert ended.output.startswith("alpha beta ")
    assert ended.errors.startswith("error: ")
    assert ended.errors.count("\n") == 1


def test_an_answer_is_not_complete_before_its_end(served: Client) -> None:
    with served.stream("x", max_tokens=60_000) as stream:
        next(stream)
        with pytest.raises(OptionError, match="not complete"):
            _ = stream.result


def test_requests_that_cannot_be_right_are_refused_and_the_client_lives_on(served: Client) -> None:
    n_vocab = served.stages[0].n_vocab
    with pytest.raises(RequestError) as caught:
        served.generate(token_ids=[n_vocab])
    assert caught.value.code == "invalid_token"
    with pytest.raises(RequestError, match="exactly one"):
        served.generate("x", token_ids=[1])
    with pytest.raises(RequestError, match="role"):
        served.generate(messages=[{"role": "user"}])
    with pytest.raises(RequestError):
        served.generate(messages=[{"role": "king", "content": "x"}])
    with pytest.raises(RequestError, match="timeout"):
        served.generate("x", timeout=-1.0)
    with pytest.raises(RequestError):
        served.detokenize([n_vocab])
    assert served.detokenize(served.tokenize("hélène")) == "hélène".encode()
    assert served.generate("x", max_tokens=5).text == "alpha"


def test_another_thread_is_refused(served: Client) -> None:
    errors: list[BaseException] = []

    def use() -> None:
        try:
            served.generate("x")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [RuntimeError]


def test_a_closed_client_says_so(served: Client) -> None:
    client = Client(served.endpoint)
    client.close()
    client.close()
    with pytest.raises(OptionError, match="closed"):
        client.generate("x")


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stage_that_dies_fails_the_answer_and_says_which(endless: Parrot, victim: int) -> None:
    options = {**SMALL, "ctx_size": 65536, "lanes": 1, "restart": False}
    with LocalPipeline(endless.path, stages=3, **options) as pipeline, pipeline.client(timeout=1.0) as client:
        stream = client.stream("x", max_tokens=60_000)
        next(stream)
        os.kill(pipeline.process_ids[victim], signal.SIGKILL)
        with pytest.raises(StageLostError):
            for _ in stream:
                pass
        assert f"stage of layers {pipeline.layers[victim]} was killed by signal 9" in pipeline.failure()
