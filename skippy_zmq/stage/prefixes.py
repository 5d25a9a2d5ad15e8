"""Stage 0's search for state to begin a request with, and what becomes of sessions that are to be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.chain import prompt_links
from skippy_zmq.kv.sessions import session_name
from skippy_zmq.stage.kept_sessions import KeptSession, KeptSessions
from skippy_zmq.stage.pages import LanePages
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.limits import MAX_PAGES

AskRing = Callable[[wire.KvMatch | wire.KvKeep], None]


@dataclass(frozen=True, slots=True)
class Prefix:
    """``tokens`` that a lane begins with; ``plain`` of them from pages that anybody may use."""

    tokens: tuple[int, ...] = ()
    plain: int = 0

    @property
    def packed(self) -> bytes:
        return np.array(self.tokens, "<i4").tobytes()


@dataclass(frozen=True, slots=True)
class _Search:
    tokens: tuple[int, ...]  # the most that could be restored
    n_prompt: int  # tokens in plain pages


@dataclass(frozen=True, slots=True)
class _Keeping:
    client: bytes
    request: str
    tokens: tuple[int, ...]
    n_prompt: int
    n_pages: int
    owner: bytes


class Prefixes:
    """``ask_ring`` sends a question through this stage and all behind it, in line with batches.

    Nothing is looked for where a stage keeps no pages, or pages of another size.
    """

    def __init__(self, pages: LanePages, send: Callable[[bytes, wire.Message], bool], ask_ring: AskRing) -> None:
        self._pages = pages
        self._send = send
        self._ask_ring = ask_ring
        self._everywhere = False
        self._searches: dict[str, _Search] = {}
        self._keeping: dict[str, _Keeping] = {}
        self._avoiding: set[str] = set()
        self._sessions = KeptSessions()

    def join(self, stages: Sequence[wire.StageFacts]) -> None:
        """The pipeline is known."""
        sizes = {facts.kv_page_tokens for facts in stages}
        self._everywhere = len(sizes) == 1 and 0 not in sizes

    def check(self, client: bytes, ask: wire.Generate) -> None:
        """Raise KvPageError where a request names a session that is not known."""
        if ask.session:
            self._sessions.find(client, ask.session)

    # ---- before a request runs

    def look_for(self, client: bytes, ask: wire.Generate, prompt: tuple[int, ...], session: str) -> Prefix | None:
        """What to begin with, or None where all stages have been asked: ``found`` tells then."""
        size = self._pages.page_tokens
        if not self._everywhere or session in self._avoiding:
            return Prefix()
        most = len(prompt) - 1  # the last token is computed in any case, for its logits
        links = prompt_links(prompt[: most // size * size], size)[:MAX_PAGES]
        tokens, n_prompt, owner = prompt[: len(links) * size], len(prompt), b""
        held = self._pages.held(links)
        if ask.session and (kept := self._kept(client, ask.session)) is not None:
            common = _common(kept.tokens, prompt[:most])
            if common > held * size:
                links = self._pages.links(kept.tokens, kept.n_prompt)[: -(-common // size)]
                tokens, n_prompt, owner = prompt[:common], kept.n_prompt, kept.owner
                held = self._pages.held(links, owner)
        if held == 0:
            return Prefix()
        self._searches[session] = _Search(tokens, n_prompt)
        self._ask_ring(wire.KvMatch(session, b"".join(links[:held]), held, owner))
        return None

    def _kept(self, client: bytes, name: str) -> KeptSession | None:
        try:
            return self._sessions.find(client, name)
        except KvPageError:
            return None  # forgotten while the request waited

    def found(self, session: str, pages: int) -> Prefix:
        """What every stage can restore, now that ``pages`` are known to be everywhere."""
        search = self._searches.pop(session)
        size = self._pages.page_tokens
        tokens = search.tokens[: pages * size]
        return Prefix(tokens, min(len(tokens) // size, search.n_prompt // size) * size)

    def avoid(self, session: str) -> None:
        """Compute all of this one: its pages could not be restored."""
        self._avoiding.add(session)

    def forget(self, session: str) -> None:
        self._searches.pop(session, None)
        self._avoiding.discard(session)

    # ---- after it

    def keep(self, client: bytes, request: str, session: str, lane: int, tokens: tuple[int, ...]) -> None:
        """Have all stages keep a session that is about to end; its client is told what came of it."""
        size = self._pages.page_tokens
        if not self._everywhere or len(tokens) > MAX_PAGES * size:
            self._send(client, wire.Kept(request, "", 0))
            return
        n_pages = -(-len(tokens) // size)
        plain, owner = self._pages.plain_tokens(session), self._pages.owner(session)
        self._keeping[session] = _Keeping(client, request, tokens, plain, n_pages, owner)
        self._ask_ring(wire.KvKeep(session, lane, n_pages))

    def kept(self, answer: wire.KvAnswer) -> None:
        keeping = self._keeping.pop(answer.session, None)
        if keeping is None:
            return
        if answer.pages < keeping.n_pages:
            self._send(keeping.client, wire.Kept(keeping.request, "", 0))
            return
        name = session_name(self._pages.links(keeping.tokens, keeping.n_prompt))
        self._sessions.add(KeptSession(name, keeping.tokens, keeping.n_prompt, keeping.owner))
        self._send(keeping.client, wire.Kept(keeping.request, name, len(keeping.tokens)))

    def forget_all(self) -> None:
        """The ring broke: no answer to what was asked will come."""
        self._searches.clear()
        for keeping in self._keeping.values():
            self._send(keeping.client, wire.Kept(keeping.request, "", 0))
        self._keeping.clear()

    def forget_client(self, client: bytes) -> None:
        """The pages that it brought are given up."""
        self._sessions.forget_owner(client)

    def reply(self, client: bytes, asked: wire.KvSession | wire.KvAdopt) -> wire.KvSessionReply:
        """Raise KvPageError for a session that is not known, or whose pages are not here."""
        if isinstance(asked, wire.KvSession):
            kept = self._sessions.find(client, asked.session)
        else:
            links = self._pages.links(asked.token_ids, asked.n_prompt)
            held = self._pages.held(links, client)
            if not links or held < len(links):
                why = self._pages.why_not or f"{held} of its {len(links)} pages are here"
                raise KvPageError(f"the session cannot be adopted: {why}")
            kept = KeptSession(session_name(links), asked.token_ids, asked.n_prompt, client)
            self._sessions.add(kept)
        return wire.KvSessionReply(asked.request, kept.name, kept.tokens, kept.n_prompt, self._pages.page_tokens)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differ[0]) if differ.size else length
