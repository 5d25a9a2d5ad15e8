"""The bytes of a generation do not change. Run this file with --write to record them after a change of generation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from wire_values import EXAMPLES, example_payloads

from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.messages import Kind

FOLDER = Path(__file__).parent / "data" / "wire"


def vector(kind: Kind) -> str:
    """One line of hex per frame."""
    frames = encode(EXAMPLES[kind], example_payloads(kind))
    return "".join(bytes(frame).hex() + "\n" for frame in frames)


def write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for kind in Kind:
        (FOLDER / f"{kind.name.lower()}.hex").write_text(vector(kind))


@pytest.mark.parametrize("kind", Kind)
def test_bytes_are_the_recorded_ones(kind: Kind) -> None:
    recorded = (FOLDER / f"{kind.name.lower()}.hex").read_text()
    assert vector(kind) == recorded
    frames = [bytes.fromhex(line) for line in recorded.splitlines()]
    assert decode(frames)[0] == EXAMPLES[kind]


def test_no_vector_is_left_over() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == {kind.name.lower() for kind in Kind}


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    write()
