"""Pages of this stage's lanes: kept as prompts are computed, found again, put back into lanes.

Every stage sees the same batches, so all of them keep the same pages, and agree on their names, without talking.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from skippy_zmq.errors import KvPageError, NativeError
from skippy_zmq.kv.chain import ROOT, next_link
from skippy_zmq.kv.descriptor import PageFacts
from skippy_zmq.kv.imports import ImportedPages
from skippy_zmq.kv.page import KvPage, join_payload, seal
from skippy_zmq.kv.pinned_pages import PinnedPages
from skippy_zmq.kv.sessions import kept_link, session_links
from skippy_zmq.kv.store import PageStore
from skippy_zmq.runtime.stage_model import LLAMA_CPP_BUILD, StageModel, Tokens
from skippy_zmq.schedule.chunks import CHUNK_STEP
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.limits import LINK_BYTES, MAX_LANES

log = logging.getLogger("skippy_zmq.stage")


@dataclass(slots=True)
class _Session:
    """``links`` are those of the full pages so far, ``tail`` the tokens since. ``plain``: tokens in plain pages.

    ``owner``: the client with whose pages it began; pages of it are that client's too.
    """

    lane: int
    keep: bool
    links: list[bytes]
    tail: list[int]
    plain: int
    whole_chunks: bool  # all rows so far came in chunks of whole steps, or from plain pages
    stored: bool = True  # every page so far is kept
    owner: bytes = b""

    @property
    def last_link(self) -> bytes:
        return self.links[-1] if self.links else ROOT


@dataclass(slots=True)
class _Found:
    """What KV_MATCH found for a session that has not begun yet: read and verified, so that it can be counted on."""

    pages: list[KvPage]
    pinned: PinnedPages | None = None  # None: of a client's import
    owner: bytes = b""

    def release(self) -> None:
        if self.pinned is not None:
            self.pinned.release()


class LanePages:
    """``page_tokens`` is 0 where this stage keeps no pages: then nothing is ever found, kept or taken."""

    def __init__(self, model: StageModel, identity: str) -> None:
        options = model.options
        self._model = model
        self._sessions: dict[str, _Session] = {}
        self._found: dict[str, _Found] = {}
        self.restored_tokens = 0
        self.page_tokens = 0
        self.why_not = ""
        if options.kv_cache_bytes == 0:
            self.why_not = "--kv-cache-bytes is 0"
        elif model.kv_refusal:
            self.why_not = model.kv_refusal
        elif not model.kv_layers:
            self.why_not = f"layers {model.layers} have no attention state"
        else:
            self.page_tokens = options.kv_page_tokens
            # On some models the context's size decides which rotary factors a key was turned by.
            rope = f", {model.kv_rope_factors} rope factors" if model.kv_rope_factors else ""
            facts = PageFacts(identity, LLAMA_CPP_BUILD + rope, model.kv_layers)
            self._store = PageStore(
                facts,
                options.kv_cache_bytes,
                Path(options.kv_cache_dir) if options.kv_cache_dir else None,
                settings=_settings(model),
                report=log.warning,
            )
            self._imported = ImportedPages(facts, model.n_ctx, options.kv_cache_bytes)
        if self.why_not and options.kv_cache_dir:
            log.warning("KV pages are not kept: %s", self.why_not)

    # ---- a session's life

    def open(self, opened: wire.SessionOpen) -> None:
        """A session begins, its lane with the tokens of its prefix.

        Raises KvPageError or NativeError where that cannot be; the lane is empty then.
        """
        prefix = np.frombuffer(opened.prefix, "<i4")
        found = self._found.pop(opened.session, None)
        try:
            if self.page_tokens == 0:
                if prefix.size:
                    raise KvPageError(f"session {opened.session}: this stage keeps no pages: {self.why_not}")
                return
            session = _Session(opened.lane, opened.keep, [], [], opened.plain, opened.plain == prefix.size)
            if prefix.size:
                pages = found.pages if found is not None else []
                self._restore(opened, pages, prefix.size)
                n_full = prefix.size // self.page_tokens
                session.links = [page.descriptor.link_after for page in pages[:n_full]]
                session.tail = prefix[n_full * self.page_tokens :].tolist()
                session.stored = found is not None
                session.owner = found.owner if found is not None else b""
            self._sessions[opened.session] = session
        finally:
            if found is not None:
                found.release()

    def _restore(self, opened: wire.SessionOpen, pages: Sequence[KvPage], n_tokens: int) -> None:
        payloads, counts = [], []
        end = 0
        for page in pages:
            if end >= n_tokens:
                break
            count = min(page.descriptor.end, n_tokens) - end
            payloads.append(page.payload if count == page.descriptor.n_tokens else _first_tokens(page, count))
            counts.append(count)
            end += count
        if end != n_tokens:
            raise KvPageError(f"session {opened.session}: wanted pages of {n_tokens} tokens, {end} are left of them")
        self._model.import_kv(opened.lane, payloads, counts)
        self.restored_tokens += n_tokens

    def ran(self, message: wire.Activations, tokens: Tokens) -> None:
        """A batch has run and its results are on their way: keep what became complete."""
        first = 0
        for rows in message.rows:
            session = self._sessions.get(rows.session)
            if session is not None:
                in_steps = message.phase == "prefill" and rows.n_rows % CHUNK_STEP == 0
                session.whole_chunks &= in_steps and rows.position % CHUNK_STEP == 0
                if session.keep or session.whole_chunks:
                    self._extend(session, rows.position, tokens[first : first + rows.n_rows])
            first += rows.n_rows

    def _extend(self, session: _Session, position: int, tokens: Tokens) -> None:
        at = len(session.links) * self.page_tokens
        if position != at + len(session.tail):
            session.keep = session.whole_chunks = False  # it does not go on where it stood
            return
        session.tail += tokens.tolist()
        while len(session.tail) >= self.page_tokens:
            page, session.tail = session.tail[: self.page_tokens], session.tail[self.page_tokens :]
            before = session.last_link
            # Once a page was not plain, none after it is: their names hang from its name.
            plain = session.whole_chunks and session.plain == at
            link = next_link(before, page) if plain else kept_link(before, page)
            session.plain += self.page_tokens if plain else 0
            session.stored = self._store_page(session, at, at + self.page_tokens, before, link) and session.stored
            session.links.append(link)
            at += self.page_tokens

    def _store_page(self, session: _Session, first: int, end: int, before: bytes, link: bytes) -> bool:
        store = self._store
        if session.owner:
            return session.keep and self._give_page(session, first, end, before, link)
        if link in store:
            store.match([link])  # used just now
            return True
        if before != ROOT and before not in store:
            return False
        try:
            return store.put(self._cut(session, first, end, before, link))
        except (KvPageError, NativeError) as error:
            log.warning("a page was not kept: %s", error)
            return False

    def _give_page(self, session: _Session, first: int, end: int, before: bytes, link: bytes) -> bool:
        """Hold a page of a session that began with a client's pages for that client: nobody else vouches for them."""
        imported = self._imported
        if imported.leading(session.owner, [link]):
            return True
        if before != ROOT and not imported.leading(session.owner, [before]):
            return False
        try:
            imported.put(session.owner, [self._cut(session, first, end, before, link)])
        except (KvPageError, NativeError) as error:
            log.warning("a page was not kept: %s", error)
            return False
        return True

    def _cut(self, session: _Session, first: int, end: int, before: bytes, link: bytes) -> KvPage:
        payload = self._model.export_kv(session.lane, first, end)
        return seal(self._store.facts, first, end, before, link, payload.tobytes())

    def keep(self, session: str) -> int:
        """Keep the last, shorter page of a session too; how many pages it has now, 0 where one is missing."""
        found = self._sessions.get(session)
        if found is None or not found.keep or not found.stored:
            return 0
        first = len(found.links) * self.page_tokens
        if found.tail:
            before = found.last_link
            link = kept_link(before, found.tail)
            if not self._store_page(found, first, first + len(found.tail), before, link):
                return 0
            found.links.append(link)
            found.tail = []
        return len(found.links)

    def plain_tokens(self, session: str) -> int:
        found = self._sessions.get(session)
        return found.plain if found is not None else 0

    def owner(self, session: str) -> bytes:
        found = self._sessions.get(session)
        return found.owner if found is not None else b""

    def end(self, session: str) -> None:
        self._sessions.pop(session, None)
        if (found := self._found.pop(session, None)) is not None:
            found.release()

    def end_all(self) -> None:
        self._sessions.clear()
        for found in self._found.values():
            found.release()
        self._found.clear()

    # ---- finding pages

    def match(self, session: str, links: bytes, most: int, owner: bytes) -> int:
        """How many pages of ``links``, at most ``most``, are here; they stay until the session opens or ends."""
        if self.page_tokens == 0:
            return 0
        self.end(session)
        while len(self._found) >= MAX_LANES:  # more than can ever begin: whoever asked first has forgotten to
            self.end(next(iter(self._found)))
        wanted = [links[at : at + LINK_BYTES] for at in range(0, most * LINK_BYTES, LINK_BYTES)]
        if owner:
            pages = self._imported.leading(owner, wanted)
            self._found[session] = _Found(pages, owner=owner)
            return len(pages)
        pinned = self._store.pin(wanted)
        found = self._found[session] = _Found(pinned.load(), pinned)
        return len(found.pages)

    def held(self, links: Sequence[bytes], owner: bytes = b"") -> int:
        """How many of ``links`` are here, from the first on."""
        if self.page_tokens == 0:
            return 0
        return len(self._imported.leading(owner, links)) if owner else self._store.match(links)

    def links(self, tokens: Sequence[int], n_prompt: int) -> tuple[bytes, ...]:
        return session_links(tokens, n_prompt, self.page_tokens) if self.page_tokens else ()

    # ---- for clients

    def page(self, client: bytes, link: bytes) -> KvPage:
        """A page by its name; raise KvPageError where it is not here."""
        page = None
        if self.page_tokens:
            page = self._store.page(link)
            if page is None:
                page = next(iter(self._imported.leading(client, [link])), None)
        if page is None:
            raise KvPageError(f"page {link.hex()} is not here" + (f": {self.why_not}" if self.why_not else ""))
        return page

    def take(self, client: bytes, pages: Sequence[KvPage]) -> None:
        """Hold a client's pages; raise KvPageError, and hold none of them, where one does not fit."""
        if self.page_tokens == 0:
            raise KvPageError(f"this stage keeps no pages: {self.why_not}")
        self._imported.put(client, pages)

    @property
    def importers(self) -> tuple[bytes, ...]:
        """Clients whose pages are here."""
        return self._imported.owners if self.page_tokens else ()

    def forget_client(self, client: bytes) -> None:
        """Give up the pages that a client brought."""
        if self.page_tokens:
            self._imported.drop(client)

    def counters(self) -> dict[str, int]:
        """Its part of STATS_REPLY."""
        if self.page_tokens == 0:
            return {}
        counts = self._store.counters()
        return {
            "now.kv_pages": counts.pages,
            "now.kv_page_bytes": counts.memory_bytes,
            "now.kv_disk_bytes": counts.disk_bytes,
            "now.kv_imported_bytes": self._imported.nbytes,
            "now.kv_pinned_sessions": len(self._found),
            "kv_evictions": counts.evictions,
            "kv_damaged": counts.damaged,
            "kv_restored_tokens": self.restored_tokens,
        }

    def close(self) -> None:
        self.end_all()
        if self.page_tokens:
            self._store.close()


def _first_tokens(page: KvPage, count: int) -> memoryview:
    first = page.descriptor.first
    return join_payload([page], page.descriptor.layers, first, first + count)


def _settings(model: StageModel) -> str:
    """What decides about the bits of a prompt's state besides the model, the build and the caches' types."""
    options = model.options
    gpus = ",".join(options.device)
    return f"{platform.machine()} fa={options.flash_attn} weights={model.weight_layout} gpu={gpus}"
