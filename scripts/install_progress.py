"""Show a long `pip install -v` as one moving line: what ninja is compiling, out of how many files."""

from __future__ import annotations

import re
import sys

_STEP = re.compile(r"\[(\d+)/(\d+)\]")
_NOTABLE = ("Successfully installed", "ERROR", "error:", "Building wheel", "Requirement already satisfied: llama")


def main() -> int:
    """Read pip's output from standard input; return 1 where it did not end well."""
    moving = sys.stdout.isatty()
    tail: list[str] = []
    installed = False
    shown = -1
    for line in sys.stdin:
        line = line.rstrip()
        tail = [*tail[-40:], line]
        step = _STEP.search(line)
        if step:
            done, total = int(step[1]), int(step[2])
            tenth = done * 10 // max(total, 1)
            if moving:
                print(f"\r  compiling llama.cpp: {done}/{total}", end="", flush=True)
            elif tenth != shown:
                print(f"  compiling llama.cpp: {done}/{total}", flush=True)
            shown = tenth
        elif line.startswith(_NOTABLE) or line.lstrip().startswith(_NOTABLE):
            print(("\n" if moving and shown >= 0 else "") + "  " + line.strip(), flush=True)
            if "llama" in line and not line.startswith(" "):  # indented lines are of pip's build environment
                installed = "Successfully installed" in line or "already satisfied" in line
            shown = -1
    if not installed:
        print("\n".join(tail), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
