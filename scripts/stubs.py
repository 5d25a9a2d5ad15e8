"""Write skippy_zmq/_native.pyi from the built extension, or check that it is up to date (--check)."""

from __future__ import annotations

import sys
from pathlib import Path

from nanobind.stubgen import StubGen

import skippy_zmq._native

TARGET = Path(__file__).parent.parent / "skippy_zmq" / "_native.pyi"


def main() -> int:
    """Return 1 where the committed stub differs."""
    generator = StubGen(skippy_zmq._native)
    generator.put(skippy_zmq._native)
    text = generator.get()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if TARGET.read_text(encoding="utf-8") != text:
        print(f"{TARGET.name} is out of date: make stubs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
