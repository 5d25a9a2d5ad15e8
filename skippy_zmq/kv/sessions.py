"""The pages of a kept session: those of its prompt that anybody may use, and those that are its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from skippy_zmq.kv.chain import ROOT, next_link

_KEPT = b"skippy-zmq kept"


def kept_link(before: bytes, tokens: Sequence[int]) -> bytes:
    """The link after a page that only who names its session may use: generated, or not computed in whole chunks."""
    return next_link(hashlib.sha256(_KEPT + before).digest(), tokens)


def session_links(tokens: Sequence[int], n_prompt: int, page_tokens: int) -> tuple[bytes, ...]:
    """The link after each page of a session, the last of which may be shorter.

    Full pages within the first ``n_prompt`` tokens have the plain chain's links, all others ``kept_link``'s.
    """
    links: list[bytes] = []
    before = ROOT
    for first in range(0, len(tokens), page_tokens):
        end = first + page_tokens
        page = tokens[first:end]
        before = next_link(before, page) if end <= min(n_prompt, len(tokens)) else kept_link(before, page)
        links.append(before)
    return tuple(links)


def session_name(links: Sequence[bytes]) -> str:
    """How clients and stage 0 call a session of these links."""
    return links[-1].hex() if links else ""
