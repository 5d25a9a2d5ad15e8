"""Pages in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from skippy_zmq.kv.held_page import HeldPage
from skippy_zmq.kv.page import KvPage


class PinnedPages:
    """The leading pages of a prompt; they stay in their store until ``release``. A context manager."""

    def __init__(
        self,
        pages: Sequence[HeldPage],
        load: Callable[[bytes], KvPage | None],
        release: Callable[[Sequence[HeldPage]], None],
    ) -> None:
        self._pages = pages
        self._load = load
        self._release = release
        self.links = tuple(held.link for held in pages)
        for held in pages:
            held.pins += 1

    def __len__(self) -> int:
        return len(self.links)

    def __enter__(self) -> PinnedPages:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def load(self) -> list[KvPage]:
        """The pages, read and verified; fewer, up to the first one that turns out damaged."""
        loaded: list[KvPage] = []
        for link in self.links:
            page = self._load(link)
            if page is None:
                break
            loaded.append(page)
        return loaded

    def release(self) -> None:
        """Let them go; once is enough, again does nothing."""
        pages, self._pages = self._pages, ()
        self._release(pages)
