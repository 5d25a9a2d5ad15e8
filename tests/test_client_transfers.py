"""Sessions between stages and a client: what is asked for and when, what is refused, what a directory then holds."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from conversation_driver import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_states import BUILD, MODEL, State, plain_layers

from skippy_zmq.client.outcomes import Outcome, PagesReceived
from skippy_zmq.client.page_window import (
    ALL_BYTES_UNDER_WAY,
    BYTES_UNDER_WAY,
    MESSAGE_BYTES,
    MESSAGES_UNDER_WAY,
    PageWindow,
)
from skippy_zmq.client.transfers import (
    Ask,
    Run,
    Stages,
    Transfer,
    export_pages,
    export_session,
    import_pages,
    import_session,
)
from skippy_zmq.errors import KvPageError, ProtocolError, RequestError, SkippyError, StageLostError
from skippy_zmq.kv.chain import ROOT
from skippy_zmq.kv.descriptor import PageFacts, pack_descriptor, unpack_descriptor
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.kv.page import KvPage, seal, verify
from skippy_zmq.kv.session_chain import SessionLinks
from skippy_zmq.kv.session_files import SavedSession
from skippy_zmq.kv.sessions import session_links, session_name
from skippy_zmq.wire.limits import LINK_BYTES, MAX_PAGES_AT_ONCE
from skippy_zmq.wire.messages import (
    KvAdopt,
    KvExport,
    KvImport,
    KvImported,
    KvSession,
    KvSessionReply,
    StageFacts,
)

_T = TypeVar("_T")
PAGE_TOKENS, PAGE_BYTES, N_PROMPT = 4, 640, 9  # bytes: of ten layers
STATE = State(plain_layers(0, 30), tuple(range(100, 118)), PAGE_TOKENS)
LINKS = session_links(STATE.tokens, N_PROMPT, PAGE_TOKENS)
NAME = session_name(LINKS)


def stage(start: int, end: int, **changes: Any) -> StageFacts:
    values: dict[str, Any] = {
        "model": MODEL,
        "build": BUILD,
        "kv_page_tokens": PAGE_TOKENS,
        "kv_page_bytes": PAGE_BYTES,
        "n_ctx": 64,
    }
    return dataclasses.replace(facts(start, end, f"tcp://stage-{start}:7700"), **{**values, **changes})


THREE = (stage(0, 10), stage(10, 20), stage(20, 30))
TWO = (stage(0, 15), stage(15, 30))


class Peers:
    """Stages that answer a transfer's questions: at random, but those to one stage in their order."""

    def __init__(self, stages: tuple[StageFacts, ...] = THREE, state: State = STATE, n_prompt: int = N_PROMPT) -> None:
        self.stages = stages
        self.pages: list[dict[bytes, KvPage]] = [{} for _ in stages]
        self.sessions: dict[str, tuple[tuple[int, ...], int]] = {}
        self.reply_name: Callable[[str], str] = lambda name: name
        self.on_pages: Callable[[PagesReceived], Outcome] = lambda pages: pages
        self.on_page: Callable[[KvPage], KvPage] = lambda page: page
        self.most_under_way = 0
        self.most_pages = 0
        self._asked: dict[int, list[tuple[str, Outcome]]] = {}
        self._random = random.Random(7)
        self.keep(state, n_prompt)

    def keep(self, state: State, n_prompt: int) -> str:
        chain = SessionLinks(state.tokens, PAGE_TOKENS, n_prompt)
        for index, one in enumerate(self.stages):
            layers = state.layers[one.layer_start : one.layer_end]
            for first in range(0, len(state.tokens), PAGE_TOKENS):
                end = min(first + PAGE_TOKENS, len(state.tokens))
                payload = state.payload(layers, first, end)
                page = seal(PageFacts(MODEL, BUILD, layers), first, end, chain.at(first), chain.at(end), payload)
                self.pages[index][page.descriptor.link_after] = page
        name = session_name(session_links(state.tokens, n_prompt, PAGE_TOKENS))
        self.sessions[name] = (state.tokens, n_prompt)
        return name

    def run(self, steps: Transfer[_T]) -> _T:
        answer: Any = None
        n_asked = 0
        try:
            while True:
                try:
                    step = steps.throw(answer) if isinstance(answer, SkippyError) else steps.send(answer)
                except StopIteration as stop:
                    result: _T = stop.value
                    return result
                if isinstance(step, Stages):
                    answer = self.stages
                elif isinstance(step, Run):
                    try:
                        answer = step.call()
                    except SkippyError as error:
                        answer = error
                elif isinstance(step, Ask):
                    answer = f"q{n_asked}"
                    n_asked += 1
                    index = 0 if step.to is None else self.stages.index(step.to)
                    outcome = self._outcome(index, step.make(answer), step.payloads)
                    self._asked.setdefault(index, []).append((answer, outcome))
                    self.most_under_way = max(self.most_under_way, sum(map(len, self._asked.values())))
                else:
                    index = self._random.choice([index for index, asked in self._asked.items() if asked])
                    answer = self._asked[index].pop(0)
        finally:
            steps.close()

    def _outcome(self, index: int, message: Any, payloads: tuple[memoryview, ...]) -> Outcome:
        if isinstance(message, KvSession):
            if message.session not in self.sessions:
                return KvPageError("not kept here")
            tokens, n_prompt = self.sessions[message.session]
            return KvSessionReply(message.request, self.reply_name(message.session), tokens, n_prompt, PAGE_TOKENS)
        if isinstance(message, KvExport):
            assert len(message.links) <= LINK_BYTES * MAX_PAGES_AT_ONCE
            pages = []
            for at in range(0, len(message.links), LINK_BYTES):
                page = self.pages[index].get(message.links[at : at + LINK_BYTES])
                if page is None:
                    return KvPageError("not here any more")
                pages.append(self.on_page(page))
            self.most_pages = max(self.most_pages, len(pages))
            descriptors = tuple(pack_descriptor(page.descriptor) for page in pages)
            return self.on_pages(PagesReceived(descriptors, tuple(page.payload for page in pages)))
        if isinstance(message, KvImport):
            assert len(payloads) <= MAX_PAGES_AT_ONCE
            for descriptor, payload in zip(message.descriptors, payloads, strict=True):
                page = KvPage(unpack_descriptor(descriptor), payload)
                verify(page)
                before = page.descriptor.link_before
                assert before == ROOT or before in self.pages[index], "a page before the one it follows"
                layers = [rows.layer for rows in page.descriptor.layers]
                assert layers == list(range(self.stages[index].layer_start, self.stages[index].layer_end))
                self.pages[index][page.descriptor.link_after] = page
            return KvImported(message.request)
        assert isinstance(message, KvAdopt)
        name = session_name(session_links(message.token_ids, message.n_prompt, PAGE_TOKENS))
        self.sessions[name] = (message.token_ids, message.n_prompt)
        return KvSessionReply(message.request, self.reply_name(name), message.token_ids, message.n_prompt, PAGE_TOKENS)


def empty(stages: tuple[StageFacts, ...]) -> Peers:
    peers = Peers(stages)
    for pages in peers.pages:
        pages.clear()
    peers.sessions.clear()
    return peers


def saved(directory: Path) -> Path:
    Peers().run(export_session(NAME, directory, None))
    return directory


def state_of(peers: Peers, layer: int) -> bytes:
    """K and V of all tokens of a layer, as the stages hold them."""
    index = next(i for i, one in enumerate(peers.stages) if one.layer_start <= layer < one.layer_end)
    offset = layer - peers.stages[index].layer_start
    pages = [peers.pages[index][link] for link in LINKS]
    keys, values = [], []
    for page in pages:
        size = 8 * page.descriptor.n_tokens
        start = offset * 2 * size
        keys.append(bytes(page.payload[start : start + size]))
        values.append(bytes(page.payload[start + size : start + 2 * size]))
    return b"".join(keys + values)


def test_a_session_saved_under_one_split_is_loaded_under_another(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    tokens = (*STATE.tokens, 999)  # one that no stage has run
    known = Peers().run(export_session(NAME, tmp_path / "s", tokens, lambda *counts: reports.append(counts)))
    assert reports == [(5, 15), (10, 15), (15, 15)]  # of each stage all in one message
    assert (known.tokens, known.n_prompt, known.name) == (tokens, N_PROMPT, NAME)
    assert SavedSession(tmp_path / "s").manifest.n_cached == len(STATE.tokens)
    reports.clear()
    peers = empty(TWO)
    assert peers.run(import_session(tmp_path / "s", lambda *counts: reports.append(counts))) == NAME
    assert reports == [(5, 10), (10, 10)]
    assert peers.sessions == {NAME: (STATE.tokens, N_PROMPT)}
    for rows in STATE.layers:
        assert state_of(peers, rows.layer) == STATE.payload((rows,), 0, len(STATE.tokens))


def test_pages_may_say_more_of_their_build_than_the_stages(tmp_path: Path) -> None:
    """As those of models whose rotary factors depend on the context do."""
    peers = Peers()
    peers.on_page = lambda page: other_facts(page, MODEL, f"{BUILD}, long rope factors")
    assert peers.run(export_session(NAME, tmp_path / "s", None)).build == f"{BUILD}, long rope factors"
    assert SavedSession(tmp_path / "s").facts.build == f"{BUILD}, long rope factors"
    assert empty(TWO).run(import_session(tmp_path / "s")) == NAME
    pages = iter(range(100))
    peers.on_page = lambda page: other_facts(page, MODEL, f"{BUILD}, {'long' if next(pages) else 'short'} rope factors")
    refused(peers, export_session(NAME, tmp_path / "s", None), KvPageError, "build: wanted .* factors, got .* factors")


def test_pages_come_verified_and_go_to_other_stages_without_a_directory() -> None:
    taken: list[KvPage] = []
    reply = Peers().run(export_pages(NAME, taken.append))
    assert len(taken) == 15
    assert (reply.token_ids, reply.n_prompt) == (STATE.tokens, N_PROMPT)

    def pages(wanted: StageFacts) -> list[KvPage]:
        mine = [page for page in taken if page.descriptor.layers[0].layer == wanted.layer_start]
        return sorted(mine, key=lambda page: page.descriptor.first)

    peers = empty(THREE)
    assert peers.run(import_pages(reply.token_ids, reply.n_prompt, pages)) == NAME
    assert peers.pages == Peers().pages


@pytest.mark.parametrize("n_prompt", [0, 1, 4, 5, 8, 16, 17, 18])
def test_names_of_pages_say_whether_anybody_may_use_them(n_prompt: int) -> None:
    """A page belongs to everybody where the prompt fills it; the saved chain agrees with the stages' at every page."""
    tokens = STATE.tokens
    chain = SessionLinks(tokens, PAGE_TOKENS, n_prompt)
    plain = SessionLinks(tokens, PAGE_TOKENS, None)
    ends = [4, 8, 12, 16, 18]
    assert [chain.at(end) for end in ends] == list(session_links(tokens, n_prompt, PAGE_TOKENS))
    assert [chain.at(end) == plain.at(end) for end in ends] == [end <= n_prompt and end % 4 == 0 for end in ends]
    for end in range(1, len(tokens) + 1):
        assert chain.at(end) == session_links(tokens[:end], n_prompt, PAGE_TOKENS)[-1]


def test_few_pages_are_under_way_at_once() -> None:
    long = State(plain_layers(0, 30), tuple(range(400)), PAGE_TOKENS)
    peers = Peers()
    name = peers.keep(long, 9)
    peers.run(export_pages(name, lambda page: None))
    assert 2 * MESSAGES_UNDER_WAY < peers.most_under_way <= 3 * MESSAGES_UNDER_WAY
    assert peers.most_pages == MAX_PAGES_AT_ONCE


@settings(max_examples=200)
@given(data=st.data())
def test_the_window_is_within_its_limits_and_never_stuck(data: st.DataObject) -> None:
    """Whatever pages have, as long as those of one stage are alike."""
    n_stages = data.draw(st.integers(1, 6))
    sizes = [data.draw(st.integers(1, 128 << 20)) for _ in range(n_stages)]
    left = [data.draw(st.integers(0, 12)) for _ in range(n_stages)]
    window = PageWindow(sizes)
    under_way = [0] * n_stages
    messages: list[list[int]] = [[] for _ in range(n_stages)]
    while True:
        while (turn := window.next()) is not None:
            index, most = turn
            n_pages = min(most, left[index])
            if n_pages == 0:
                window.finish(index)
                continue
            assert n_pages == 1 or n_pages * sizes[index] <= MESSAGE_BYTES
            left[index] -= n_pages
            messages[index].append(n_pages)
            under_way[index] += n_pages
            window.add(index, n_pages)
            assert len(messages[index]) <= MESSAGES_UNDER_WAY
            assert under_way[index] == 1 or under_way[index] * sizes[index] <= BYTES_UNDER_WAY
            total = sum(n * size for n, size in zip(under_way, sizes, strict=True))
            assert total <= ALL_BYTES_UNDER_WAY or sum(under_way) == 1
        if not any(under_way):
            break
        index = data.draw(st.sampled_from([index for index, n in enumerate(under_way) if n]))
        n_pages = messages[index].pop(0)
        under_way[index] -= n_pages
        window.remove(index, n_pages)
    assert left == [0] * n_stages


# What is refused.


def refused(peers: Peers, steps: Transfer[Any], kind: type[SkippyError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        peers.run(steps)
    assert "\n" not in str(caught.value)


def test_a_session_that_is_not_there(tmp_path: Path) -> None:
    refused(Peers(), export_session("5e" * 32, tmp_path / "s", None), KvPageError, "stage 0: not kept here")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "\ud800"])
def test_a_name_that_cannot_be_one(tmp_path: Path, name: str) -> None:
    refused(Peers(), export_session(name, tmp_path / "s", None), RequestError, "session: wanted a name")


def test_tokens_that_are_not_the_sessions(tmp_path: Path) -> None:
    refused(Peers(), export_session(NAME, tmp_path / "s", (1, 2)), RequestError, "to begin with its 18 tokens")


def test_stage_0_with_tokens_of_another_session(tmp_path: Path) -> None:
    peers = Peers()
    peers.sessions[NAME] = (STATE.tokens[:-1], N_PROMPT)
    refused(peers, export_session(NAME, tmp_path / "s", None), ProtocolError, "tokens of another session")


def test_a_session_that_was_adopted_under_another_name(tmp_path: Path) -> None:
    peers = empty(TWO)
    peers.reply_name = lambda name: "5e"
    refused(peers, import_session(saved(tmp_path / "s")), ProtocolError, "stage 0 calls it 5e")


def flipped(received: PagesReceived, at: int) -> PagesReceived:
    payload = bytearray(received.payloads[-1])
    payload[at] ^= 1
    return PagesReceived(received.descriptors, (*received.payloads[:-1], memoryview(payload)))


def other_facts(page: KvPage, model: str, build: str) -> KvPage:
    old = page.descriptor
    return seal(PageFacts(model, build, old.layers), old.first, old.end, old.link_before, old.link_after, page.payload)


def last_other(received: PagesReceived, model: str, build: str) -> PagesReceived:
    page = KvPage(unpack_descriptor(received.descriptors[-1]), received.payloads[-1])
    packed = pack_descriptor(other_facts(page, model, build).descriptor)
    return PagesReceived((*received.descriptors[:-1], packed), received.payloads)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: flipped(p, 0), "checksum: wanted .*: damaged"),
        (lambda p: flipped(p, -1), "checksum: wanted .*: damaged"),
        (lambda p: PagesReceived(p.descriptors, (*p.payloads[:-1], p.payloads[-1][:-1])), "payload: wanted"),
        (lambda p: PagesReceived((*p.descriptors[:-1], p.descriptors[-1][:-1]), p.payloads), "not msgpack"),
        (lambda p: PagesReceived((b"", *p.descriptors[1:]), p.payloads), "not msgpack"),
        (lambda p: PagesReceived(p.descriptors[1:], p.payloads[1:]), r"wanted \d pages, got \d"),
        (lambda p: PagesReceived(p.descriptors[::-1], p.payloads[::-1]), "first: wanted"),
        (lambda p: last_other(p, "cd" * 32, BUILD), "model: wanted abab"),
        (lambda p: last_other(p, MODEL, "llama.cpp 0.5.1"), "build: wanted llama.cpp 0.5.0, got llama.cpp 0.5.1"),
        (lambda p: StageLostError("connection lost"), "connection lost"),
        (lambda p: KvImported("q"), "wanted PagesReceived, got KvImported"),
    ],
)
def test_a_page_that_is_wrong_leaves_the_session_saved_before(
    tmp_path: Path, change: Callable[[PagesReceived], Outcome], words: str
) -> None:
    before = SavedSession(saved(tmp_path / "s")).manifest
    names = {path.name for path in (tmp_path / "s").iterdir()}
    peers = Peers()
    messages = iter(range(100))
    peers.on_pages = lambda pages: change(pages) if next(messages) == 1 else pages
    refused(peers, export_session(NAME, tmp_path / "s", None), SkippyError, rf"stage of layers \d+:\d+: .*{words}")
    assert SavedSession(tmp_path / "s").manifest == before
    assert {path.name for path in (tmp_path / "s").iterdir()} == names


def test_a_page_of_other_tokens_layers_or_place() -> None:
    other = Peers(state=dataclasses.replace(STATE, tokens=tuple(range(18))))
    for wrong, words in (
        (other.pages[0][session_links(tuple(range(18)), N_PROMPT, PAGE_TOKENS)[0]], "link_after: wanted"),
        (Peers().pages[1][LINKS[0]], "layers: wanted some of 0:10"),
        (Peers().pages[0][LINKS[1]], "first: wanted 0, got 4"),
    ):
        peers = Peers((stage(0, 10),), State(plain_layers(0, 10), STATE.tokens, PAGE_TOKENS))
        peers.pages[0][LINKS[0]] = wrong
        refused(peers, export_pages(NAME, lambda page: None), KvPageError, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "cd" * 32}, "it is of another model: wanted tiny cdcd.*, got tiny abab"),
        ({"build": "llama.cpp 0.5.1"}, "another build of llama.cpp: wanted llama.cpp 0.5.1, got llama.cpp 0.5.0"),
        ({"cache_type_k": "q8_0"}, "K cache of layer 0: wanted q8_0, got f16"),
        ({"cache_type_v": "f32"}, "V cache of layer 0: wanted f32, got f16"),
        ({"kv_page_tokens": 64}, "wanted pages of 64 tokens.*got 4"),
        ({"kv_page_tokens": 0}, "stage of layers 0:10 keeps no pages"),
        ({"n_ctx": 18}, "it has 18 tokens, and a lane holds 18"),
    ],
)
def test_stages_that_a_saved_session_does_not_fit(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    peers = empty(tuple(dataclasses.replace(one, **changes) for one in THREE))
    refused(peers, import_session(saved(tmp_path / "s")), KvPageError, words)
    assert peers.sessions == {}
    assert not any(peers.pages)


def test_stages_that_differ_in_their_pages(tmp_path: Path) -> None:
    peers = empty((THREE[0], THREE[1], dataclasses.replace(THREE[2], kv_page_tokens=8)))
    refused(peers, import_session(saved(tmp_path / "s")), KvPageError, "layers 20:30: wanted pages of 4 tokens, got 8")


def test_a_model_with_fewer_layers(tmp_path: Path) -> None:
    peers = empty((stage(0, 15, n_layers=15),))
    refused(peers, import_session(saved(tmp_path / "s")), KvPageError, "layer 15: wanted 0 to 14")


def test_a_damaged_file_is_named_and_nothing_is_adopted(tmp_path: Path) -> None:
    directory = saved(tmp_path / "s")
    path = sorted(directory.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    peers = empty(TWO)
    refused(peers, import_session(directory), KvPageError, path.name)
    assert peers.sessions == {}


def test_a_directory_that_is_no_saved_session(tmp_path: Path) -> None:
    refused(empty(TWO), import_session(tmp_path), KvPageError, "session.json")
    (tmp_path / "other.txt").touch()
    refused(Peers(), export_session(NAME, tmp_path, None), KvPageError, "not overwritten: other.txt")


@pytest.mark.parametrize("n_prompt", [-1, 19])
def test_a_prompt_longer_than_the_session(n_prompt: int) -> None:
    refused(empty(TWO), import_pages(STATE.tokens, n_prompt, lambda one: []), RequestError, "n_prompt: wanted 0..18")


def test_pages_far_larger_than_the_stages_own_are_refused_by_name() -> None:
    """The number of pages in a message goes by what the stage says of its own."""
    layers = (LayerRows(0, "f16", "f16", 2 << 20, 2 << 20),)
    tokens = tuple(range(16 * PAGE_TOKENS))
    links = (ROOT, *session_links(tokens, 0, PAGE_TOKENS))
    payload = memoryview(bytes(PAGE_TOKENS * (4 << 20)))
    large = [
        seal(PageFacts(MODEL, BUILD, layers), PAGE_TOKENS * i, PAGE_TOKENS * (i + 1), before, after, payload)
        for i, (before, after) in enumerate(itertools.pairwise(links))
    ]
    refused(empty(TWO), import_pages(tokens, 0, lambda wanted: large), KvPageError, "stage of layers 0:15 can take")
