"""docs/protocol.md and the code name the same kinds, fields, limits and error codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skippy_zmq import errors
from skippy_zmq.wire import limits
from skippy_zmq.wire.messages import GENERATION, MESSAGE_TYPES, Kind
from skippy_zmq.wire.schema import ALL_FIELDS, STRUCTS

TEXT = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """Cells of the table under ``heading``, without its two head lines and without back quotes."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None, f"no section {heading}"
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_generation() -> None:
    assert TEXT.startswith(f"# The wire protocol, generation {GENERATION}\n")


def test_kinds() -> None:
    rows = [(int(byte), kind, fields) for byte, kind, _, fields in table("Kinds")]
    names = {kind: MESSAGE_TYPES[kind].__name__ for kind in Kind}
    assert rows == [(int(kind), kind.name, f"[{name}](#{name.lower()})") for kind, name in names.items()]


@pytest.mark.parametrize("name", [cls.__name__ for cls in STRUCTS])
def test_fields_of(name: str) -> None:
    described = [(f"{name}.{field}", value) for field, value, _ in table(name)]
    assert described == [(key, field.wanted) for key, field in ALL_FIELDS.items() if key.startswith(f"{name}.")]


def test_no_section_describes_what_does_not_exist() -> None:
    assert set(re.findall(r"^### (\w+)$", TEXT, re.MULTILINE)) == {cls.__name__ for cls in STRUCTS}


def test_limits() -> None:
    constants = {name: value for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert {name: int(value) for name, value, _ in table("Limits")} == constants


def test_every_limit_that_is_mentioned_exists() -> None:
    assert set(re.findall(r"\bMAX_[A-Z0-9_]+\b", TEXT)) <= vars(limits).keys()


def test_element_types() -> None:
    rows = {name: int(size) for name, size in table("Types of tensor elements")}
    assert rows == dict(limits.DTYPE_BYTES)


def test_error_codes() -> None:
    codes = {code: (retry, meaning) for code, retry, meaning in table("Error codes")}
    assert codes == {
        code: ("yes" if known.retry else "no", known.meaning) for code, known in limits.ERROR_CODES.items()
    }


def test_every_error_class_has_a_listed_code() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.SkippyError)]
    assert {cls.code for cls in classes} <= limits.ERROR_CODES.keys()
