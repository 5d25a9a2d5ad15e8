"""Hash chains of token ids: what came before a position, in 32 bytes.

The root is ``sha256(DOMAIN)``. The link after tokens is ``sha256(link before + their ids as little-endian int32)``,
taken page by page: every ``page_tokens`` tokens, and for a position inside a page over the tokens since its start. Two
sessions whose chains agree at a position have, as far as SHA-256 can tell, the same tokens before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.limits import MAX_PAGE_TOKENS, MAX_TOKEN_ID, PAGE_TOKENS

DOMAIN = b"skippy-zmq token chain 1"
LINK_BYTES = hashlib.sha256().digest_size
ROOT = hashlib.sha256(DOMAIN).digest()


def next_link(before: bytes, tokens: Sequence[int]) -> bytes:
    """The link after ``tokens`` that follow ``before``; KvPageError where a token is not an id of llama.cpp."""
    ids = np.asarray(tokens if len(tokens) else (), dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() > MAX_TOKEN_ID):
        wrong = next(token for token in tokens if not 0 <= token <= MAX_TOKEN_ID)
        raise KvPageError(f"token id {wrong}: wanted 0..{MAX_TOKEN_ID}")
    return hashlib.sha256(before + ids.astype("<i4").tobytes()).digest()


def prompt_links(tokens: Sequence[int], page_tokens: int = PAGE_TOKENS) -> tuple[bytes, ...]:
    """The link after each full page of ``tokens``, first page first."""
    return PromptChain(tokens, page_tokens).links


class PromptChain:
    """The chain of a growing sequence of tokens. Keeps the links and the tokens of the unfinished page only."""

    def __init__(self, tokens: Iterable[int] = (), page_tokens: int = PAGE_TOKENS) -> None:
        if not 1 <= page_tokens <= MAX_PAGE_TOKENS:
            raise KvPageError(f"pages of {page_tokens} tokens: wanted 1..{MAX_PAGE_TOKENS}")
        self.page_tokens = page_tokens
        self._links: list[bytes] = []
        self._tail: list[int] = []
        self.extend(tokens)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._links) * self.page_tokens + len(self._tail)

    @property
    def links(self) -> tuple[bytes, ...]:
        """The link after each full page."""
        return tuple(self._links)

    @property
    def last(self) -> bytes:
        """The link after all tokens, an unfinished page included."""
        before = self._links[-1] if self._links else ROOT
        return next_link(before, self._tail) if self._tail else before

    def append(self, token: int) -> bytes | None:
        """Add one token; the new link where it finished a page."""
        if not 0 <= token <= MAX_TOKEN_ID:
            raise KvPageError(f"token id {token}: wanted 0..{MAX_TOKEN_ID}")
        self._tail.append(token)
        if len(self._tail) < self.page_tokens:
            return None
        self._links.append(next_link(self._links[-1] if self._links else ROOT, self._tail))
        self._tail.clear()
        return self._links[-1]

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)


class TokenLinks:
    """Links at any position of known tokens; the pages' own are computed once."""

    def __init__(self, tokens: Sequence[int], page_tokens: int = PAGE_TOKENS) -> None:
        self._tokens = tokens
        self._chain = PromptChain(tokens, page_tokens)
        self._links = (ROOT, *self._chain.links)

    def at(self, position: int) -> bytes:
        """The link before the token at ``position``, 0 to the number of tokens."""
        if not 0 <= position <= len(self._tokens):
            raise KvPageError(f"position {position}: wanted 0..{len(self._tokens)}, the number of tokens")
        page, rest = divmod(position, self._chain.page_tokens)
        if rest == 0:
            return self._links[page]
        return next_link(self._links[page], self._tokens[position - rest : position])
