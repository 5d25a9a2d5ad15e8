"""Templates that attack: each gives one clean error, touches nothing, the next one still renders (G07)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skippy_zmq.chat.limits import MAX_ERROR_CHARACTERS, MAX_MESSAGES_BYTES, MAX_OUTPUT_BYTES, MAX_TEMPLATE_CHARACTERS
from skippy_zmq.chat.renderer import TemplateRenderer
from skippy_zmq.errors import RequestError
from skippy_zmq.wire.messages import ChatMessage

MESSAGES = [ChatMessage("user", "hi")]
CONDITIONAL = "{% if messages[0].content == 'hi' %}POISON{% else %}good: {{ messages[0].content }}{% endif %}"

CLIMBS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ lipsum.__globals__['os'].popen('touch MARKER').read() }}",
    "{{ joiner.__init__.__globals__.__builtins__.open('MARKER', 'w') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch MARKER') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARKER', 'w') }}",
    "{{ strftime_now.__globals__.keys() }}",
    "{{ messages.__class__ }}{{ (messages | attr('__class__')).__base__.__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}{{ ('{0.__class__.__base__.__subclasses__}'.format)('') }}",
    "{{ {}|map(attribute='__class__')|list }}{{ [''] | map(attribute='__class__.__mro__') | list | first | last }}"
    "{{ ([''] | map(attribute='__class__') | list)[0].__subclasses__() }}",
    "{% set f = ''.format_map %}{{ f({'x': 1}).__class__.__subclasses__() }}",
    "{{ messages.append({'role': 'x'}) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch MARKER') }}",
    "{% extends 'base.html' %}",
    "{% from 'MARKER' import x %}",
]
ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro g(n) %}{% if n < 40 %}{{ g(n + 1) }}{{ g(n + 1) }}{% endif %}{% endmacro %}{{ g(0) }}",
    "{{ 10 ** (10 ** 9) }}",
    "{% set n = 10 ** 9 %}{{ 7 ** n }}",
]
GREEDY = [
    "{{ 'x' * 2 ** 30 }}",
    "{% set x = 'x' * 2 ** 30 %}ok",
    "{% set n = 2 ** 30 %}{{ ('%' ~ n ~ 'd') | format(1) }}",
    "{{ '%1073741824d' % 1 }}",
    "{{ '{:1073741824}'.format(1) }}",
    "{{ messages[0].content.ljust(2 ** 31) }}",
    "{% set ns = namespace(x='x') %}{% for i in range(31) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}ok",
    "{{ range(99999) | map('string') | join('y' * 99999) }}",
    "{{ ('x ' * 9999) | wordwrap(1) | indent(99999) }}",
    "{{ 'a' | center(2 ** 31) }}",
]
WORDY = [
    "{{ 'x' * " + str(MAX_OUTPUT_BYTES + 1) + " }}",
    "{{ 'é' * " + str(MAX_OUTPUT_BYTES // 2 + 1) + " }}",
    "{% for i in range(99999) %}{{ 'x' * 99 }}{% endfor %}",
    "{{ lipsum(n=9) }}",
]
REFUSING = [
    ("{{ raise_exception('only user and assistant\nroles!') }}", "only user and assistant roles!"),
    ("{% if %}", "syntax error in line 1"),
    ("\n\n{{ 'x' ", "syntax error in line 3"),
    ("{{ messages[0].tool_calls.name }}", "has no attribute 'tool_calls'"),
    ("{{ nothing.at.all }}", "'nothing' is undefined"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ messages['x' + 1] }}", "can only concatenate str"),
    ("{{ 'x' | no_such_filter }}", "No filter named 'no_such_filter'"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end"),
    ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "recurses without end"),
    ("{{ " + "(" * 5000 + ")" * 5000 + " }}", ""),
    ("{{ " + "[" * 300 + "]" * 300 + " }}", ""),
    ("{% if 1 %}" * 300 + "{% endif %}" * 300, ""),
    ("{{ '\\ud83d' }}", "surrogate"),
    ("{{ raise_exception('\\ud83d\\x1b[31m' ~ 'x' * 99999) }}", "[31mxxx"),
]


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Renders a template that must fail; checks that nothing happened and that others render; returns the error."""
    monkeypatch.chdir(tmp_path)

    def render(template: str, render_seconds: float = 20.0) -> str:
        source = template.replace("MARKER", str(tmp_path / "marker"))
        with (
            TemplateRenderer(source, "", "", render_seconds=render_seconds) as hostile,
            TemplateRenderer(CONDITIONAL, "", "") as good,
        ):
            with pytest.raises(RequestError) as caught:
                hostile.render(MESSAGES)
            assert good.render([ChatMessage("user", "you")]) == "good: you"
        assert not list(tmp_path.iterdir())
        message = str(caught.value)
        assert caught.value.code == "chat_template"
        assert message.startswith("chat template: ")
        assert message.isprintable()
        assert len(message) < MAX_ERROR_CHARACTERS + 50
        return message

    return render


@pytest.mark.parametrize("template", CLIMBS)
def test_climbing_out_of_the_sandbox(refusal: Callable[..., str], template: str) -> None:
    refusal(template)


@pytest.mark.parametrize("template", ENDLESS)
def test_endless_templates_are_killed(refusal: Callable[..., str], template: str) -> None:
    assert "not rendered within 0.3 s" in refusal(template, render_seconds=0.3)


@pytest.mark.parametrize("template", GREEDY)
def test_memory_is_bounded(refusal: Callable[..., str], template: str) -> None:
    message = refusal(template)
    assert any(reason in message for reason in ("too much memory", "MemoryError", "Range too big", "process", "longer"))


@pytest.mark.parametrize("template", WORDY)
def test_output_is_bounded(refusal: Callable[..., str], template: str) -> None:
    message = refusal(template)
    assert "longer than 1048576 bytes" in message or "'lipsum' is undefined" in message


@pytest.mark.parametrize(("template", "reason"), REFUSING)
def test_the_reason_is_told(refusal: Callable[..., str], template: str, reason: str) -> None:
    assert reason in refusal(template)


def test_output_may_be_as_long_as_the_limit() -> None:
    with TemplateRenderer("{{ 'é' * " + str(MAX_OUTPUT_BYTES // 2) + " }}", "", "") as renderer:
        assert renderer.render(MESSAGES) == "é" * (MAX_OUTPUT_BYTES // 2)


def test_oversized_input_is_refused_at_once() -> None:
    with TemplateRenderer("x" * (MAX_TEMPLATE_CHARACTERS + 1), "", "") as renderer:
        renderer.start()
        with pytest.raises(RequestError, match="524289 characters"):
            renderer.submit("a", MESSAGES)
    with TemplateRenderer("x", "", "") as renderer, pytest.raises(RequestError, match=r"messages: \d+ bytes"):
        renderer.submit("a", [ChatMessage("user", "x" * MAX_MESSAGES_BYTES)])


@pytest.mark.parametrize("poison", [ENDLESS[0], GREEDY[1], CLIMBS[0], "{{ raise_exception('no') }}", WORDY[0]])
def test_the_same_model_renders_after_a_bad_request(poison: str) -> None:
    source = CONDITIONAL.replace("POISON", poison)
    with TemplateRenderer(source, "", "", render_seconds=1.0) as renderer:
        for _ in range(2):
            with pytest.raises(RequestError):
                renderer.render(MESSAGES)
            assert renderer.render([ChatMessage("user", "you")]) == "good: you"
