"""A page: a descriptor and its bytes; making, verifying, cutting and joining pages.

The checksum is XXH3 with 128 bits, about as fast as memory can be read. It tells a page that was damaged on its way or
on a disk; against somebody who means to deceive it proves nothing, as anyone can compute it: who may send pages is the
keys' matter. Hashing releases the interpreter's lock. Pages in memory are not hashed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.blocks import Block, blocks, copy_tokens, payload_size
from skippy_zmq.kv.descriptor import CHECKSUM_BYTES, PageDescriptor, PageFacts, layer_text, sealed_fields
from skippy_zmq.kv.layout import LayerRows
from skippy_zmq.topology import LayerRange


@dataclass(frozen=True, slots=True)
class KvPage:
    """``payload``: contiguous bytes, laid out as ``layout`` says; borrowed, so its owner must not change it.

    Raises KvPageError where the payload has not the size that the descriptor states. Its bytes are ``verify``'s matter.
    """

    descriptor: PageDescriptor
    payload: memoryview

    def __post_init__(self) -> None:
        view = memoryview(self.payload)
        if not view.c_contiguous:
            raise KvPageError(f"{self.descriptor}: payload: wanted contiguous bytes, got a view with gaps")
        view = view.cast("B")
        if view.nbytes != self.descriptor.payload_bytes:
            raise KvPageError(
                f"{self.descriptor}: payload: wanted {self.descriptor.payload_bytes} bytes, got {view.nbytes}"
            )
        object.__setattr__(self, "payload", view)


def seal(
    facts: PageFacts,
    first: int,
    end: int,
    link_before: bytes,
    link_after: bytes,
    payload: bytes | bytearray | memoryview,
) -> KvPage:
    """The page of a payload that was just exported or joined, with its checksum; no copy."""
    unsealed = PageDescriptor(
        model=facts.model,
        build=facts.build,
        layers=facts.layers,
        first=first,
        end=end,
        link_before=link_before,
        link_after=link_after,
        payload_bytes=memoryview(payload).nbytes,
        checksum=bytes(CHECKSUM_BYTES),
    )
    page = KvPage(unsealed, memoryview(payload))
    return KvPage(replace(unsealed, checksum=checksum(page)), page.payload)


def checksum(page: KvPage) -> bytes:
    """What ``page.descriptor.checksum`` has to be."""
    digest = checksum_of_fields(page.descriptor)
    digest.update(page.payload)
    return digest.digest()


def checksum_of_fields(descriptor: PageDescriptor) -> xxhash.xxh3_128:
    """The checksum's beginning; the payload is still to be added to it."""
    return xxhash.xxh3_128(sealed_fields(descriptor))


def verify(page: KvPage) -> None:
    """Raise KvPageError where a bit of the descriptor or of the payload is not what it was when the page was made."""
    found = checksum(page)
    if found != page.descriptor.checksum:
        raise KvPageError(
            f"{page.descriptor}: checksum: wanted {page.descriptor.checksum.hex()}, got {found.hex()}: damaged"
        )


def cut(
    page: KvPage,
    layers: LayerRange | None = None,
    tokens: tuple[int, int] | None = None,
    links: tuple[bytes, bytes] | None = None,
) -> KvPage:
    """The part of a page with its layers in ``layers`` and its tokens ``first`` to ``end``, absolute and half-open.

    Layers alone are cut without a copy. A page cannot know the token chain inside itself: ``links``, at the new ends,
    are wanted where tokens are cut. KvPageError where nothing would be left.
    """
    descriptor = page.descriptor
    kept = tuple(rows for rows in descriptor.layers if layers is None or layers.start <= rows.layer < layers.end)
    if not kept:
        raise KvPageError(f"{descriptor}: layers: wanted some of {layers}, got none")
    first, end = tokens or (descriptor.first, descriptor.end)
    return join([page], kept, first, end, links)


def join(
    pages: Sequence[KvPage],
    layers: tuple[LayerRows, ...],
    first: int,
    end: int,
    links: tuple[bytes, bytes] | None = None,
) -> KvPage:
    """One page of ``layers`` and of tokens ``first`` to ``end``, out of pages of any splits and token ranges.

    ``links``: the token chain's at ``first`` and ``end``; wanted where no page begins or ends there. Otherwise as
    ``join_payload``.
    """
    payload = join_payload(pages, layers, first, end)
    whole = pages[0].descriptor
    if (whole.layers, whole.first, whole.end) == (layers, first, end) and links in (
        None,
        (whole.link_before, whole.link_after),
    ):
        return pages[0]
    known = _chain_links(pages)
    for position, link in zip((first, end), links or (), strict=False):
        if known.setdefault(position, link) != link:
            raise KvPageError(f"KV pages: token chain at {position}: wanted {link.hex()}, got {known[position].hex()}")
    for position in (first, end):
        if position not in known:
            raise KvPageError(f"KV pages: token chain at {position}: wanted its link, as no page begins or ends there")
    facts = PageFacts(pages[0].descriptor.model, pages[0].descriptor.build, layers)
    return seal(facts, first, end, known[first], known[end], payload)


def join_payload(pages: Sequence[KvPage], layers: tuple[LayerRows, ...], first: int, end: int) -> memoryview:
    """The payload of ``layers`` and tokens ``first`` to ``end``, out of pages of any splits and token ranges.

    Where pages overlap they hold the same, as their chains agree, and either is taken. A run of one page's layers with
    just its tokens is a view of that page's payload; else the bytes are copied once. KvPageError where pages belong to
    different models, builds or texts, where a layer's rows differ from those wanted, and where something is missing.
    """
    if not pages or first >= end or not layers:
        raise KvPageError(
            f"KV pages: wanted some of layers {layer_text(layers)}, tokens {first}:{end}, from {len(pages)}"
        )
    _check_alike(pages, layers)
    _chain_links(pages)
    view = _view(pages[0], layers, first, end)
    if view is not None:
        return view
    target = np.empty(payload_size(layers, end - first), np.uint8).data
    sources = _Sources(pages)
    for block in blocks(layers, end - first):
        at = first
        while at < end:
            page, source = sources.holding(block, at)
            until = min(end, page.descriptor.end)
            copy_tokens(page.payload, source, target, block, (at - page.descriptor.first, at - first, until - at))
            at = until
    return target


class _Sources:
    """Blocks of several pages by layer and part, each list by first token."""

    def __init__(self, pages: Iterable[KvPage]) -> None:
        self._blocks: dict[tuple[int, str], list[tuple[KvPage, Block]]] = {}
        for page in sorted(pages, key=lambda page: page.descriptor.first):
            for block in blocks(page.descriptor.layers, page.descriptor.n_tokens):
                self._blocks.setdefault((block.layer, block.part), []).append((page, block))

    def holding(self, wanted: Block, token: int) -> tuple[KvPage, Block]:
        """Of the pages that hold ``token`` of the block's layer, the one that goes on longest."""
        found = None
        for page, block in self._blocks.get((wanted.layer, wanted.part), ()):
            if page.descriptor.first > token:
                break
            if page.descriptor.end > token and (found is None or page.descriptor.end > found[0].descriptor.end):
                found = page, block
        if found is None:
            raise KvPageError(f"KV pages: layer {wanted.layer}, token {token}: no page holds it")
        return found


def _view(page: KvPage, layers: tuple[LayerRows, ...], first: int, end: int) -> memoryview | None:
    held = page.descriptor.layers
    if (page.descriptor.first, page.descriptor.end) != (first, end) or layers[0] not in held:
        return None
    index = held.index(layers[0])
    if held[index : index + len(layers)] != layers:
        return None
    start = payload_size(held[:index], end - first)
    return page.payload[start : start + payload_size(layers, end - first)]


def _check_alike(pages: Sequence[KvPage], layers: tuple[LayerRows, ...]) -> None:
    wanted = PageFacts(pages[0].descriptor.model, pages[0].descriptor.build, layers)
    by_number = {rows.layer: rows for rows in layers}
    for page in pages:
        for name in ("model", "build"):
            if getattr(page.descriptor, name) != getattr(wanted, name):
                raise KvPageError(
                    f"{page.descriptor}: {name}: wanted {getattr(wanted, name)} as the other pages, "
                    f"got {getattr(page.descriptor, name)}"
                )
        for rows in page.descriptor.layers:
            if by_number.get(rows.layer, rows) != rows:
                raise KvPageError(f"{page.descriptor}: wanted {by_number[rows.layer]}, got {rows}")


def _chain_links(pages: Iterable[KvPage]) -> dict[int, bytes]:
    """The token chain at all ends of pages; KvPageError where two pages disagree."""
    known: dict[int, bytes] = {}
    for page in pages:
        for position, link in (
            (page.descriptor.first, page.descriptor.link_before),
            (page.descriptor.end, page.descriptor.link_after),
        ):
            if known.setdefault(position, link) != link:
                raise KvPageError(
                    f"{page.descriptor}: token chain at {position}: wanted {known[position].hex()} as the other pages, "
                    f"got {link.hex()}: it belongs to other tokens"
                )
    return known
