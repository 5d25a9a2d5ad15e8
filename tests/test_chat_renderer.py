"""The renderer in an event loop, and the life of its process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pipeline_helpers import child_processes

from skippy_zmq.chat.limits import MAX_WAITING
from skippy_zmq.chat.renderer import Failed, Rendered, TemplateRenderer
from skippy_zmq.errors import DeadlineError, RequestError
from skippy_zmq.wire.messages import ChatMessage

TEMPLATE = """\
{%- if messages[0].content == 'loop' %}
    {%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- endif %}
{{- messages[0].content }}{{ '!' if add_generation_prompt }}"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would list its own descriptor too


def ask(renderer: TemplateRenderer, request: str, content: str, **options: float | bool | None) -> None:
    renderer.submit(request, [ChatMessage("user", content)], **options)  # type: ignore[arg-type]


def outcomes(renderer: TemplateRenderer, n: int) -> list[Rendered | Failed]:
    """Runs the loop that a stage runs until ``n`` requests have an outcome."""
    poller = select.poll()
    poller.register(renderer.fileno(), select.POLLIN)
    found: list[Rendered | Failed] = []
    while len(found) < n:
        assert poller.poll(60_000)
        found += renderer.poll()
    return found


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    with TemplateRenderer(TEMPLATE, "", "") as renderer:
        yield renderer


def test_outcomes_come_in_order(renderer: TemplateRenderer) -> None:
    for i in range(20):
        ask(renderer, f"r{i}", f"text {i}", add_generation_prompt=i % 2 == 0)
    assert outcomes(renderer, 20) == [Rendered(f"r{i}", f"text {i}" + "!" * (i % 2 == 0)) for i in range(20)]
    assert renderer.next_deadline() is None
    assert renderer.poll() == []


def test_nothing_runs_before_it_is_needed() -> None:
    before = child_processes()
    with TemplateRenderer(TEMPLATE, "", "") as renderer:
        assert child_processes() == before
        assert renderer.poll() == []
        assert renderer.next_deadline() is None
        assert not select.select([renderer.fileno()], [], [], 0)[0]
        renderer.start()
        renderer.start()
        assert len(child_processes() - before) == 1
        assert renderer.next_deadline() is not None
    assert child_processes() == before


def test_a_template_without_end_is_killed_at_its_deadline_and_the_others_go_on() -> None:
    clock = Clock()
    with TemplateRenderer(TEMPLATE, "", "", clock=clock) as renderer:
        number = renderer.fileno()
        ask(renderer, "a", "before")
        assert outcomes(renderer, 1) == [Rendered("a", "before!")]
        ask(renderer, "b", "loop")
        ask(renderer, "c", "after")
        assert renderer.next_deadline() == 1002.0
        assert renderer.expire(1001.9) == []
        clock.now = 1002.0
        failed, *rest = renderer.expire(clock.now)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, RequestError)
        assert (failed.request, str(failed.error)) == ("b", "chat template: not rendered within 2 s")
        assert rest == []
        assert renderer.fileno() == number
        assert outcomes(renderer, 1) == [Rendered("c", "after!")]


def test_a_request_that_waits_too_long_for_its_turn() -> None:
    clock = Clock()
    with TemplateRenderer(TEMPLATE, "", "", clock=clock) as renderer:
        ask(renderer, "a", "first", deadline=1000.5)
        ask(renderer, "b", "second")
        assert renderer.next_deadline() == 1000.5
        (failed,) = renderer.expire(1000.5)
        assert isinstance(failed, Failed)
        assert failed.request == "a"
        assert isinstance(failed.error, DeadlineError)
        assert outcomes(renderer, 1) == [Rendered("b", "second!")]


def test_a_process_that_does_not_start_fails_what_waits_for_it() -> None:
    clock = Clock()
    with TemplateRenderer(TEMPLATE, "", "", clock=clock) as renderer:
        ask(renderer, "a", "first")
        ask(renderer, "b", "second")
        deadline = renderer.next_deadline()
        assert deadline == 1020.0
        failed = renderer.expire(deadline)
        assert [f.request for f in failed] == ["a", "b"]
        assert all(isinstance(f, Failed) and f.error.code == "chat_template" for f in failed)
        ask(renderer, "c", "third")
        assert outcomes(renderer, 1) == [Rendered("c", "third!")]


def test_a_killed_process_is_replaced(renderer: TemplateRenderer) -> None:
    before = child_processes()
    ask(renderer, "a", "first")
    assert outcomes(renderer, 1) == [Rendered("a", "first!")]
    (pid,) = child_processes() - before
    ask(renderer, "b", "loop")
    os.kill(pid, signal.SIGKILL)
    (failed,) = outcomes(renderer, 1)
    assert isinstance(failed, Failed)
    assert str(failed.error) == "chat template: the process that renders it ended"
    ask(renderer, "c", "third")
    assert outcomes(renderer, 1) == [Rendered("c", "third!")]
    assert pid not in child_processes()


def test_an_idle_process_that_ends_is_replaced(renderer: TemplateRenderer) -> None:
    before = child_processes()
    assert renderer.render([ChatMessage("user", "x")]) == "x!"
    (pid,) = child_processes() - before
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([process], [], [], 60)[0]
    os.close(process)
    assert renderer.poll() == []
    assert renderer.render([ChatMessage("user", "y")]) == "y!"


def test_nothing_is_left_behind() -> None:
    before = descriptors(), child_processes()
    for _ in range(3):
        renderer = TemplateRenderer(TEMPLATE, "", "", render_seconds=0.2)
        assert renderer.render([ChatMessage("user", "x")]) == "x!"
        with pytest.raises(RequestError):
            renderer.render([ChatMessage("user", "loop")])
        assert renderer.render([ChatMessage("user", "x")]) == "x!"
        ask(renderer, "dropped", "loop")
        renderer.close()
        renderer.close()
    assert (descriptors(), child_processes()) == before


def test_the_queue_is_bounded(renderer: TemplateRenderer) -> None:
    for i in range(MAX_WAITING):
        ask(renderer, str(i), "x")
    with pytest.raises(RequestError, match="1024 requests wait"):
        ask(renderer, "one too many", "x")
    assert len(outcomes(renderer, MAX_WAITING)) == MAX_WAITING


def test_render_waits_for_nobody_else(renderer: TemplateRenderer) -> None:
    ask(renderer, "a", "x")
    with pytest.raises(RuntimeError, match="beside submitted requests"):
        renderer.render([ChatMessage("user", "y")])


def test_the_process_ends_with_its_parent() -> None:
    program = (
        "import os, sys; from pathlib import Path; from skippy_zmq.chat.renderer import TemplateRenderer;"
        "from skippy_zmq.wire.messages import ChatMessage;"
        "r = TemplateRenderer('x', '', ''); r.render([ChatMessage('user', 'x')]);"
        "print(Path('/proc/self/task', str(os.getpid()), 'children').read_text(), flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        worker = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([worker], [], [], 60)[0]
        os.close(worker)


def test_the_worker_sees_no_environment_and_opens_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")
    before = child_processes()
    with TemplateRenderer(TEMPLATE, "", "") as renderer:
        renderer.render([ChatMessage("user", "x")])
        (pid,) = child_processes() - before
        assert b"SECRET_OF_THE_PARENT" not in Path(f"/proc/{pid}/environ").read_bytes()
        limits = Path(f"/proc/{pid}/limits").read_text()
        values = {line[:26].strip(): line[26:].split()[0] for line in limits.splitlines()[1:]}
        assert values["Max open files"] == "3"
        assert values["Max file size"] == "0"
        assert values["Max processes"] == "0"
        assert int(values["Max address space"]) <= 512 << 20
