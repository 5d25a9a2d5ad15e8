"""What templates of real models render to."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest

from skippy_zmq.chat.renderer import TemplateRenderer
from skippy_zmq.errors import RequestError
from skippy_zmq.wire.messages import ChatMessage

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = """\
{%- set loop_messages = messages %}
{%- for message in loop_messages %}
    {%- set header = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}
    {%- set content = header + message.content | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MESSAGES = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", " Grüezi 🦜 <b>\"'&\n"),
    ChatMessage("assistant", "Hoi!"),
]


def rendered(template: str, messages: list[ChatMessage] = MESSAGES) -> str:
    with TemplateRenderer(template, "<bos>", "<eos>") as renderer:
        return renderer.render(messages)


def test_chatml() -> None:
    assert rendered(CHATML) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n Grüezi 🦜 <b>\"'&\n<|im_end|>\n"
        "<|im_start|>assistant\nHoi!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered(CHATML, [ChatMessage("user", "Hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama_3_headers() -> None:
    assert rendered(HEADERS) == (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nGrüezi 🦜 <b>\"'&<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHoi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<\\n"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "é<\\n"\n}'),
        (
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
            "{{ i }}{% endfor %}",
            "02",
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% generation %}{{ eos_token }}{% endgeneration %}", "<eos>"),
        (
            "{{ tools is none }} {{ documents is none }} {{ custom_tools is defined }} [{{ unknown }}]",
            "True True False []",
        ),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{{ messages[0].role.upper() }}", "<a>USER"),
        ("{{ strftime_now('%Y') | int > 2020 }}", "True"),
        ("{{ 'a b' | wordwrap(1) }}{{ {'a': 1} | pprint }}", "a\nb{'a': 1}"),
        ("", None),
    ],
)
def test_what_templates_expect(template: str, expected: str | None) -> None:
    messages = [ChatMessage("user", "é<\n")]
    if expected is None:
        with pytest.raises(RequestError, match="the model has no chat template: use --prompt") as caught:
            rendered(template, messages)
        assert caught.value.code == "chat_template"
    else:
        assert rendered(template, messages) == expected


def test_strftime_now_is_local_time() -> None:
    before = datetime.now().strftime("%d %b %Y")
    text = rendered("{{ strftime_now('%d %b %Y') }}")
    assert text in (before, datetime.now().strftime("%d %b %Y"))


@pytest.fixture(scope="module")
def chatml() -> Iterator[TemplateRenderer]:
    with TemplateRenderer(CHATML, "", "<|im_end|>") as renderer:
        yield renderer


@pytest.mark.parametrize("size", [1, 70_000, 900_000])
def test_long_messages(chatml: TemplateRenderer, size: int) -> None:
    assert f"user\n{'é' * (size // 2)}<|im_end|>" in chatml.render([ChatMessage("user", "é" * (size // 2))])


def test_messages_are_data_not_templates(chatml: TemplateRenderer) -> None:
    assert "user\n{{ 1 + 1 }}{% raw %}<|im_end|>" in chatml.render([ChatMessage("user", "{{ 1 + 1 }}{% raw %}")])
