"""End with 0 where the installed llama.cpp's kernels run on this processor; else say what does not, and end with 1."""

from __future__ import annotations

import sys

from skippy_zmq import _native


def main() -> int:
    if fault := _native.amx_fault():
        print(fault, file=sys.stderr)
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
