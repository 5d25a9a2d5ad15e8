"""A process that keeps pages in a folder: ``kv_process.py DIRECTORY LAYER_START LAYER_END``; it ends when stdin does.

It says on stdout what it was told by the store, and the number of each page that is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kv_states import BUILD, MODEL, State, plain_layers

from skippy_zmq.kv.descriptor import PageFacts
from skippy_zmq.kv.store import PageStore

N_PAGES = 40


def process_pages(start: int, end: int) -> State:
    return State(plain_layers(start, end), tuple(range(4 * N_PAGES)))


def main() -> None:
    start, end = int(sys.argv[2]), int(sys.argv[3])
    state = process_pages(start, end)

    def say(text: object) -> None:
        print(text, flush=True)

    facts = PageFacts(MODEL, BUILD, state.layers)
    with PageStore(facts, 1 << 20, Path(sys.argv[1]), report=lambda text: say(f"report {text}")) as store:
        for number, page in enumerate(state.pages()):
            store.put(page)
            say(f"kept {number}")
        store.flush(60)
        say(f"written {store.counters().disk_pages}")
        sys.stdin.read()


if __name__ == "__main__":
    main()
