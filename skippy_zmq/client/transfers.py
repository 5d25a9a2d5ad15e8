"""Kept sessions on their way between stages and a client: what to ask for next, and what has to be right.

Pure: a transfer is a generator of steps, which ``Client`` and ``AsyncClient`` carry out and answer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from skippy_zmq.client.outcomes import Outcome, PagesReceived
from skippy_zmq.client.page_window import PageWindow
from skippy_zmq.errors import KvPageError, ProtocolError, RequestError, SkippyError
from skippy_zmq.kv.chain import ROOT
from skippy_zmq.kv.descriptor import PageFacts, check_fits, pack_descriptor, unpack_descriptor
from skippy_zmq.kv.page import KvPage, verify
from skippy_zmq.kv.session_files import SavedSession, SessionWriter
from skippy_zmq.kv.session_manifest import SessionFacts
from skippy_zmq.kv.sessions import session_links, session_name
from skippy_zmq.topology import LayerRange
from skippy_zmq.wire.limits import (
    MAX_HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_PROMPT_TOKENS,
)
from skippy_zmq.wire.messages import (
    KvAdopt,
    KvExport,
    KvImport,
    KvImported,
    KvSession,
    KvSessionReply,
    StageFacts,
    TensorDescriptor,
)

# How long a stage may take for one message of pages.
PAGE_SECONDS = 120.0

KvMessage = KvSession | KvAdopt | KvExport | KvImport
Progress = Callable[[int, int], object]  # pages done, pages in all
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Stages:
    """Step: wait for a ready pipeline; the answer is its stages."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Step: send the message that ``make`` makes of a new request's id, which is the answer; does not wait."""

    make: Callable[[str], KvMessage]
    to: StageFacts | None = None  # None: stage 0
    payloads: tuple[memoryview, ...] = ()
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Await:
    """Step: wait for the next outcome of any question; the answer is its request and the outcome, errors included."""


@dataclass(frozen=True, slots=True)
class Run:
    """Step: ``call``, which may wait for a disk; the answer is what it returns."""

    call: Callable[[], Any]


Step = Stages | Ask | Await | Run
Transfer = Generator[Step, Any, _T]


def export_pages(
    name: str, take: Callable[[KvPage], object], progress: Progress | None = None
) -> Transfer[KvSessionReply]:
    """Fetch all pages of session ``name``; ``take`` gets each, verified, from all stages, first tokens first."""
    reply = yield from _session(name)
    stages = yield Stages()
    yield from _fetch(stages, reply, take, progress)
    return reply


def export_session(
    name: str, directory: Path, token_ids: Sequence[int] | None, progress: Progress | None = None
) -> Transfer[SessionFacts]:
    """Save session ``name``. ``token_ids``: the conversation's, where they go on after those whose state is kept."""
    reply = yield from _session(name)
    stages: tuple[StageFacts, ...] = yield Stages()
    tokens = reply.token_ids if token_ids is None else tuple(token_ids)
    if tokens[: len(reply.token_ids)] != reply.token_ids:
        raise RequestError(f"session {name}: token_ids: wanted them to begin with its {len(reply.token_ids)} tokens")
    first = stages[0]
    facts = SessionFacts(
        name=reply.session,
        model=first.model,
        build=first.build,
        tokens=tokens,
        n_ctx=first.n_ctx,
        page_tokens=reply.page_tokens,
        extra={"model_name": first.model_name},
        n_prompt=min(reply.n_prompt, len(reply.token_ids)),
    )
    writer: SessionWriter = yield Run(lambda: SessionWriter(directory, facts))
    with writer:
        yield from _fetch(stages, reply, partial(_save, writer), progress)
        yield Run(writer.commit)
    return writer.facts


def import_pages(
    token_ids: Sequence[int],
    n_prompt: int,
    pages: Callable[[StageFacts], Iterable[KvPage]],
    progress: Progress | None = None,
) -> Transfer[str]:
    """Send each stage its pages, first tokens first, and have them made a session; the answer is its name."""
    stages: tuple[StageFacts, ...] = yield Stages()
    if not 1 <= len(token_ids) <= MAX_PROMPT_TOKENS:
        raise RequestError(f"token_ids: wanted 1..{MAX_PROMPT_TOKENS}, got {len(token_ids)}")
    if not 0 <= n_prompt <= len(token_ids):
        raise RequestError(f"n_prompt: wanted 0..{len(token_ids)}, the number of tokens, got {n_prompt}")
    name = session_name(session_links(token_ids, n_prompt, page_tokens_of(stages)))
    n_pages = len(stages) * math.ceil(len(token_ids) / page_tokens_of(stages))
    sources = [iter(pages(stage)) for stage in stages]
    window = PageWindow([stage.kv_page_bytes for stage in stages])
    under_way: dict[str, tuple[int, int]] = {}  # stage, number of pages
    done = 0
    while True:
        while (turn := window.next()) is not None:
            index, most = turn
            some: list[KvPage] = yield Run(partial(_some, sources[index], most))
            if not some:
                window.finish(index)
                continue
            request = yield _import_of(some, stages[index])
            under_way[request] = index, len(some)
            window.add(index, len(some))
        if not under_way:
            break
        request, outcome = yield Await()
        index, count = under_way.pop(request)
        _expect(KvImported, outcome, stages[index])
        window.remove(index, count)
        done += count
        if progress is not None:
            progress(done, n_pages)
    yield Ask(partial(KvAdopt, token_ids=tuple(token_ids), n_prompt=n_prompt))
    adopted = (yield from _reply(stages[0])).session
    if adopted != name:
        raise ProtocolError(f"session {name}: stage 0 calls it {adopted}")
    return name


def import_session(directory: Path, progress: Progress | None = None) -> Transfer[str]:
    """Send a saved session to the stages, whatever split it was saved under; the answer is its name."""
    saved: SavedSession = yield Run(lambda: SavedSession(directory))
    stages: tuple[StageFacts, ...] = yield Stages()
    check_saved(saved, stages)
    facts = saved.facts
    tokens = facts.tokens[: saved.manifest.n_cached]

    def pages(stage: StageFacts) -> Iterator[KvPage]:
        return saved.pages(LayerRange(stage.layer_start, stage.layer_end), facts.page_tokens)

    return (yield from import_pages(tokens, min(facts.n_prompt or 0, len(tokens)), pages, progress))


def page_tokens_of(stages: Sequence[StageFacts]) -> int:
    """Tokens of a page; raise KvPageError where a stage keeps none or where they differ."""
    wanted = stages[0].kv_page_tokens
    for stage in stages:
        if stage.kv_page_tokens == 0:
            raise KvPageError(
                f"{_named(stage)} keeps no pages of attention state: its model has none, or --kv-cache-bytes is 0"
            )
        if stage.kv_page_tokens != wanted:
            raise KvPageError(f"{_named(stage)}: wanted pages of {wanted} tokens, got {stage.kv_page_tokens}")
    return wanted


def check_saved(saved: SavedSession, stages: Sequence[StageFacts]) -> None:
    """Raise KvPageError, naming what does not fit, unless the stages can go on with the saved session."""
    facts, first = saved.facts, stages[0]
    what = f"session {saved.directory}"
    page_tokens = page_tokens_of(stages)
    if facts.model != first.model:
        name = facts.extra.get("model_name", "")
        theirs, ours = f"{name} {facts.model}".strip(), f"{first.model_name} {first.model}"
        raise KvPageError(f"{what}: it is of another model: wanted {ours}, got {theirs}")
    if not _is_build(facts.build, first.build):
        raise KvPageError(f"{what}: it is of another build of llama.cpp: wanted {first.build}, got {facts.build}")
    if facts.page_tokens != page_tokens:
        raise KvPageError(
            f"{what}: wanted pages of {page_tokens} tokens, the stages' --kv-page-tokens, got {facts.page_tokens}"
        )
    if facts.n_prompt is None:
        raise KvPageError(f"{what}: it was not saved by a client: its n_prompt is missing")
    for rows in saved.manifest.layers:
        stage = next((stage for stage in stages if stage.layer_start <= rows.layer < stage.layer_end), None)
        if stage is None:
            raise KvPageError(f"{what}: layer {rows.layer}: wanted 0 to {first.n_layers - 1}")
        for part, wanted, got in (("K", stage.cache_type_k, rows.k_type), ("V", stage.cache_type_v, rows.v_type)):
            if wanted != got and (part == "K" or rows.v_row_bytes):
                raise KvPageError(f"{what}: {part} cache of layer {rows.layer}: wanted {wanted}, got {got}")
    if saved.manifest.n_cached >= first.n_ctx:
        raise KvPageError(
            f"{what}: it has {saved.manifest.n_cached} tokens, and a lane holds {first.n_ctx} with those to come"
        )


def _session(name: str) -> Transfer[KvSessionReply]:
    if not (isinstance(name, str) and name.isprintable() and 1 <= len(name.encode()) <= MAX_NAME_BYTES):
        raise RequestError(f"session: wanted a name of 1..{MAX_NAME_BYTES} bytes, got {str(name)[:MAX_NAME_BYTES]!a}")
    yield Ask(partial(KvSession, session=name))
    return (yield from _reply(None))


def _reply(stage: StageFacts | None) -> Transfer[KvSessionReply]:
    _, outcome = yield Await()
    return _expect(KvSessionReply, outcome, stage)


def _fetch(
    stages: Sequence[StageFacts], reply: KvSessionReply, take: Callable[[KvPage], object], progress: Progress | None
) -> Transfer[None]:
    page_tokens = page_tokens_of(stages)
    links = session_links(reply.token_ids, reply.n_prompt, reply.page_tokens)
    if reply.page_tokens != page_tokens or session_name(links) != reply.session:
        raise ProtocolError(f"session {reply.session}: stage 0 sent tokens of another session")
    expected = [
        _Expected(number * page_tokens, min((number + 1) * page_tokens, len(reply.token_ids)), before, after)
        for number, (before, after) in enumerate(itertools.pairwise((ROOT, *links)))
    ]
    facts: dict[int, PageFacts] = {}
    next_page = [0] * len(stages)
    window = PageWindow([stage.kv_page_bytes for stage in stages])
    under_way: dict[str, tuple[int, range]] = {}  # stage, numbers of pages
    done = 0
    while True:
        while (turn := window.next()) is not None:
            index, most = turn
            some = range(next_page[index], min(next_page[index] + most, len(links)))
            if not some:
                window.finish(index)
                continue
            asked = b"".join(links[some.start : some.stop])
            request = yield Ask(partial(KvExport, links=asked), stages[index], seconds=PAGE_SECONDS)
            under_way[request] = index, some
            next_page[index] = some.stop
            window.add(index, len(some))
        if not under_way:
            return
        request, outcome = yield Await()
        index, some = under_way.pop(request)
        received = _expect(PagesReceived, outcome, stages[index])
        window.remove(index, len(some))
        yield Run(partial(_take, received, stages[index], facts, expected[some.start : some.stop], take))
        done += len(some)
        if progress is not None:
            progress(done, len(links) * len(stages))


def _save(writer: SessionWriter, page: KvPage) -> None:
    if writer.facts.build != page.descriptor.build and writer.n_pages == 0:
        writer.facts = replace(writer.facts, build=page.descriptor.build)
    writer.add(page)


def _is_build(pages: str, stages: str) -> bool:
    """Whether pages are of the stages' build; some models' say more, such as which rotary factors turned their keys."""
    return pages == stages or pages.startswith(f"{stages}, ")


@dataclass(frozen=True, slots=True)
class _Expected:
    """What is known of a page before it has come; the names are a descriptor's."""

    first: int
    end: int
    link_before: bytes
    link_after: bytes


def _take(
    received: PagesReceived,
    stage: StageFacts,
    known: dict[int, PageFacts],
    expected: Sequence[_Expected],
    take: Callable[[KvPage], object],
) -> None:
    """Hand over the pages as the stage should have sent them; raise KvPageError for another one, or a damaged one.

    ``known``: what the pages of each stage have in common, by its first layer; learnt from the first of them.
    """
    if len(received.descriptors) != len(expected):
        raise ProtocolError(f"{_named(stage)}: wanted {len(expected)} pages, got {len(received.descriptors)}")
    for packed, payload, wanted in zip(received.descriptors, received.payloads, expected, strict=True):
        take(_checked(packed, payload, stage, known, wanted))


def _checked(
    packed: bytes, payload: memoryview, stage: StageFacts, known: dict[int, PageFacts], expected: _Expected
) -> KvPage:
    try:
        descriptor = unpack_descriptor(packed)
        layers = descriptor.layers
        facts = known.get(stage.layer_start)
        if facts is None:
            if not stage.layer_start <= layers[0].layer or not layers[-1].layer < stage.layer_end:
                raise KvPageError(f"{descriptor}: layers: wanted some of {stage.layer_start}:{stage.layer_end}")
            build = descriptor.build if _is_build(descriptor.build, stage.build) else stage.build
            facts = known[stage.layer_start] = PageFacts(stage.model, build, layers)
        check_fits(
            descriptor,
            facts,
            first=expected.first,
            end=expected.end,
            link_before=expected.link_before,
            link_after=expected.link_after,
        )
        page = KvPage(descriptor, payload)
        verify(page)
    except KvPageError as error:
        raise KvPageError(f"{_named(stage)}: {error}") from None
    return page


def _some(pages: Iterator[KvPage], most: int) -> list[KvPage]:
    return list(itertools.islice(pages, most))


def _import_of(pages: Sequence[KvPage], stage: StageFacts) -> Ask:
    for page in pages:
        size = page.descriptor.payload_bytes
        # Together they can only be too large where they are far larger than the stage's own.
        if size > MAX_PAYLOAD_BYTES or size * len(pages) > MAX_MESSAGE_BYTES - MAX_HEADER_BYTES:
            raise KvPageError(f"{page.descriptor}: {_named(stage)} can take {MAX_PAYLOAD_BYTES} bytes, got {size}")
    descriptors = tuple(pack_descriptor(page.descriptor) for page in pages)
    tensors = tuple(TensorDescriptor.of_page(page.payload.nbytes) for page in pages)
    make = partial(KvImport, descriptors=descriptors, tensors=tensors)
    return Ask(make, stage, tuple(page.payload for page in pages), PAGE_SECONDS)


def _expect(kind: type[_T], outcome: Outcome, stage: StageFacts | None) -> _T:
    where = "stage 0" if stage is None else _named(stage)
    if isinstance(outcome, SkippyError):
        raise type(outcome)(f"{where}: {outcome}", code=outcome.code)
    if not isinstance(outcome, kind):
        raise ProtocolError(f"{where}: wanted {kind.__name__}, got {type(outcome).__name__}")
    return outcome


def _named(stage: StageFacts) -> str:
    return f"stage of layers {stage.layer_start}:{stage.layer_end}"
