"""The template engine: jinja2's immutable sandbox with what Hugging Face chat templates expect, and nothing more.

The sandbox keeps templates away from Python's internals; time and memory are bounded by the process around it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skippy_zmq.chat.limits import MAX_ERROR_CHARACTERS, MAX_OUTPUT_BYTES


class ChatTemplateError(Exception):
    """The template cannot be used, or refuses these messages. One line."""


class ChatTemplateMemoryError(ChatTemplateError):
    """The process should not be used again: what the template allocated may not come back."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks assistant turns for training; its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Hugging Face's filter, not jinja2's: no HTML escapes, characters stay as they are.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> jinja2.Template:
    """Compile ``source``; raise ChatTemplateError for a syntax error."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    del environment.globals["lipsum"]
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = _tojson
    with _failures():
        return environment.from_string(source)


def render_template(
    template: jinja2.Template,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    bos: str,
    eos: str,
) -> str:
    """Render; raise ChatTemplateError for what the template does wrong or refuses, and beyond MAX_OUTPUT_BYTES."""
    with _failures():
        parts = []
        size = 0
        for part in template.generate(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            bos_token=bos,
            eos_token=eos,
        ):
            size += len(part) if part.isascii() else len(part.encode())
            if size > MAX_OUTPUT_BYTES:
                raise ChatTemplateError(f"the rendered text is longer than {MAX_OUTPUT_BYTES} bytes")
            parts.append(part)
        return "".join(parts)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn every exception of the template, out-of-memory and recursion included, into a ChatTemplateError."""
    try:
        yield
    except ChatTemplateError:
        raise
    except MemoryError:
        raise ChatTemplateMemoryError("it needs too much memory") from None
    except RecursionError:
        raise ChatTemplateError("it recurses without end") from None
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(one_line(f"syntax error in line {error.lineno}: {error.message}")) from None
    except jinja2.TemplateError as error:
        raise ChatTemplateError(one_line(error.message or type(error).__name__)) from None
    except Exception as error:
        raise ChatTemplateError(one_line(f"{type(error).__name__}: {error}")) from None


def one_line(text: str) -> str:
    """``text`` without control characters and surrogates, cut to MAX_ERROR_CHARACTERS."""
    text = text[: MAX_ERROR_CHARACTERS + 1]
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_ERROR_CHARACTERS else line[:MAX_ERROR_CHARACTERS] + "..."
