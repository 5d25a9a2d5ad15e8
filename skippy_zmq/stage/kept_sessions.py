"""Stage 0's list of sessions whose pages all stages have: kept at the end of a request, or brought by a client."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from skippy_zmq.errors import KvPageError

MAX_KEPT = 1024  # names remembered; their pages may be gone sooner, as others need the room


@dataclass(frozen=True, slots=True)
class KeptSession:
    """``n_prompt``: tokens in plain pages. ``owner``: the client that brought it; empty for one that ran here."""

    name: str
    tokens: tuple[int, ...]
    n_prompt: int
    owner: bytes = b""


class KeptSessions:
    def __init__(self) -> None:
        self._by_name: OrderedDict[tuple[bytes, str], KeptSession] = OrderedDict()

    def add(self, kept: KeptSession) -> None:
        key = (kept.owner, kept.name)
        self._by_name[key] = kept
        self._by_name.move_to_end(key)
        if len(self._by_name) > MAX_KEPT:
            self._by_name.popitem(last=False)

    def forget_owner(self, owner: bytes) -> None:
        for key in [key for key in self._by_name if key[0] == owner]:
            del self._by_name[key]

    def find(self, client: bytes, name: str) -> KeptSession:
        """What ``client`` means by ``name``: what it brought itself, else what ran here. KvPageError for neither."""
        for key in ((client, name), (b"", name)):
            if key in self._by_name:
                self._by_name.move_to_end(key)
                return self._by_name[key]
        raise KvPageError(f"session {name[:16]}...: not kept here, or not any more")
