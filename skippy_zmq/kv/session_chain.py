"""Links at any position of a saved session, where pages of its own and pages of a plain prompt follow one another."""

from __future__ import annotations

from collections.abc import Sequence

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.chain import ROOT, TokenLinks
from skippy_zmq.kv.sessions import kept_link, session_links


class SessionLinks:
    """As TokenLinks, for a kept session; ``n_prompt`` as in ``sessions.session_links``, None: plain everywhere."""

    def __init__(self, tokens: Sequence[int], page_tokens: int, n_prompt: int | None) -> None:
        self._tokens = tokens
        self._page_tokens = page_tokens
        self._plain = TokenLinks(tokens, page_tokens)  # checks the tokens and their pages, too
        self._kept = None if n_prompt is None else (ROOT, *session_links(tokens, n_prompt, page_tokens))

    def at(self, position: int) -> bytes:
        """The link before the token at ``position``, and so of a session that ends there."""
        if self._kept is None:
            return self._plain.at(position)
        if not 0 <= position <= len(self._tokens):
            raise KvPageError(f"position {position}: wanted 0..{len(self._tokens)}, the number of tokens")
        page, rest = divmod(position, self._page_tokens)
        return kept_link(self._kept[page], self._tokens[position - rest : position]) if rest else self._kept[page]
