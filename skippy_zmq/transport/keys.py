"""``python -m skippy_zmq.transport.keys FILE``: make the CURVE keys of a stage or client."""

from __future__ import annotations

import argparse
import sys

from skippy_zmq.errors import SkippyError
from skippy_zmq.transport.security import generate_keys


def main(argv: list[str] | None = None) -> int:
    """Write FILE (secret, mode 0600) and FILE.pub; print the public key; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m skippy_zmq.transport.keys",
        description="Make the CURVE keys of a stage or client: FILE for itself, FILE.pub for its peers.",
    )
    parser.add_argument("file", metavar="FILE", help="where the secret key goes; an existing file is never overwritten")
    try:
        pair = generate_keys(parser.parse_args(argv).file)
    except SkippyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(pair.public.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
