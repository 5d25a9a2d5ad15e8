"""``python -m skippy_zmq.plan``: where to cut a model, and the commands that run it so."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from functools import partial

from skippy_zmq.errors import SkippyError
from skippy_zmq.plan.arguments import parse_request
from skippy_zmq.plan.planner import plan_stages
from skippy_zmq.plan.report import plan_json, plan_text
from skippy_zmq.runtime.opening import open_with_options
from skippy_zmq.sources.hub import Hub
from skippy_zmq.sources.references import outline


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; return the exit code."""
    try:
        logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(message)s")
        request = parse_request(argv)
        open_hub = partial(Hub, progress=request.progress)
        with outline(request.model, open_hub=open_hub, beside=request.options.imatrix) as located:
            source = open_with_options(located, request.options)
            plan = plan_stages(source, request.machines, request.options, decode_share=request.decode_share)
            if request.as_json:
                print(plan_json(plan, request, located.reference, located.revision))
            else:
                print(plan_text(plan, request, located.reference, source.n_layers))
    except SkippyError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
