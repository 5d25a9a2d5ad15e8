"""K01: pages that do not fit are refused with the reason, by every stage, and leave nothing behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from model_files import tiny
from pipeline_helpers import Pipelines
from stage_peers import Peer
from transport_helpers import Transport
from whole_model import Batches

from skippy_zmq import Client
from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.descriptor import PageDescriptor, PageFacts, pack_descriptor
from skippy_zmq.kv.page import KvPage, seal
from skippy_zmq.topology import LayerRange
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.messages import SamplingParams, StageFacts

pytest_plugins = ("pipeline_fixtures", "transport_fixtures")

N_CTX = 256
CHUNKS = {"ctx_size": N_CTX, "chunk_policy": "fixed", "chunk_sizes": (64,)}
PROMPT = tuple((37 * i + 11) % 290 + 4 for i in range(150))
FRESH = tuple((53 * i + 29) % 290 + 4 for i in range(40))
ENDLESS = SamplingParams(ignore_eos=True)
N_FRESH = 4

Pages = Callable[[StageFacts], list[KvPage]]


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A session of two stages, as a client fetched it."""

    name: str
    token_ids: tuple[int, ...]
    n_prompt: int
    answer: tuple[int, ...]
    pages: tuple[KvPage, ...]

    def of(self, stage: StageFacts) -> list[KvPage]:
        """Those of a stage's layers, first tokens first."""
        mine = [page for page in self.pages if page.descriptor.layers[0].layer == stage.layer_start]
        return sorted(mine, key=lambda page: page.descriptor.first)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", hidden=128)


@pytest.fixture(scope="module")
def kept(pipelines: Pipelines, model: Path) -> Kept:
    client = pipelines(model, 2, **CHUNKS)
    answer = client.generate(token_ids=PROMPT, max_tokens=10, sampling=ENDLESS, keep=True)
    pages: list[KvPage] = []
    reply = client.export_pages(answer.session, pages.append)
    return Kept(answer.session, reply.token_ids, reply.n_prompt, answer.token_ids, tuple(pages))


@pytest.fixture(scope="module")
def endpoint(pipelines: Pipelines, model: Path) -> str:
    """Of another pipeline of the same stages, which never had the session."""
    return pipelines(model, 2, split=(2,), **CHUNKS).endpoint


@pytest.fixture
def target(endpoint: str) -> Iterator[Client]:
    """A client of its own: pages that another one brought are not there for it."""
    with Client(endpoint) as client:
        yield client


def assert_unharmed(client: Client, kept: Kept, model: Path, cache_type: str = "f16") -> None:
    """The session is not known, and a fresh prompt gets what llama.cpp with the whole model answers."""
    with pytest.raises(KvPageError, match="not kept here"):
        client.generate(token_ids=PROMPT, session=kept.name, max_tokens=1)
    fresh = client.generate(token_ids=FRESH, max_tokens=N_FRESH, sampling=ENDLESS, logits=True)
    assert fresh.reused_tokens == 0
    batches = Batches()
    batches.prompt(FRESH)
    batches.generated(fresh.token_ids[:-1])
    assert fresh.logits is not None
    assert fresh.logits.tobytes() == batches.logits(model, cache_type, N_CTX).tobytes()


def refused(client: Client, kept: Kept, pages: Pages, words: str) -> None:
    with pytest.raises(KvPageError, match=words) as caught:
        client.import_pages(kept.token_ids, kept.n_prompt, pages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "cache_type", "words"),
    [
        ({"ctx_size": 128}, "f16", r"tokens 128:159: end: wanted at most 128, the context of a lane, got 159"),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, "q8_0", r"layer \d: k_type: wanted q8_0, got f16"),
    ],
    ids=["smaller context", "other cache type"],
)
def test_stages_of_other_settings_refuse_pages(
    one_pipeline: Pipelines, kept: Kept, model: Path, options: dict[str, object], cache_type: str, words: str
) -> None:
    client = one_pipeline(model, 2, **{**CHUNKS, **options})
    refused(client, kept, kept.of, rf"stage of layers \d:\d: .*{words}")
    assert_unharmed(client, kept, model, cache_type)


def test_a_model_of_equal_shape_refuses_pages(one_pipeline: Pipelines, kept: Kept, tmp_path: Path) -> None:
    other = tiny(tmp_path / "other.gguf", hidden=128, seed=1)
    client = one_pipeline(other, 2, **CHUNKS)
    refused(client, kept, kept.of, r"stage of layers \d:\d: .*: model: wanted \w{64}, got \w{64}")
    assert_unharmed(client, kept, other)


def changed(kept: Kept, stage_start: int, number: int, change: Callable[[KvPage], KvPage]) -> Pages:
    """The session with one page of one stage changed."""

    def pages(stage: StageFacts) -> list[KvPage]:
        mine = kept.of(stage)
        if stage.layer_start == stage_start:
            mine[number] = change(mine[number])
        return mine

    return pages


def flip(page: KvPage) -> KvPage:
    payload = bytearray(page.payload)
    payload[len(payload) // 2] ^= 0x10
    return KvPage(page.descriptor, memoryview(payload))


def other_build(page: KvPage) -> KvPage:
    old = page.descriptor
    facts = PageFacts(old.model, old.build + "x", old.layers)
    return seal(facts, old.first, old.end, old.link_before, old.link_after, page.payload)


@pytest.mark.parametrize("stage_start", [0, 2])
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("change", "words"),
    [(flip, "checksum: wanted .*: damaged"), (other_build, "build: wanted .*, got .*x$")],
    ids=["a bit flipped", "another build"],
)
def test_one_stage_that_refuses_a_page_is_enough(
    target: Client,
    kept: Kept,
    model: Path,
    stage_start: int,
    number: int,
    change: Callable[[KvPage], KvPage],
    words: str,
) -> None:
    """The other stages may have all of theirs: the session is nowhere."""
    pages = changed(kept, stage_start, number, change)
    refused(target, kept, pages, rf"stage of layers {stage_start}:{stage_start + 2}: .*{words}")
    assert_unharmed(target, kept, model)


def test_pages_of_other_layers_are_refused(target: Client, kept: Kept, model: Path) -> None:
    swapped: Pages = lambda stage: kept.of(dataclasses.replace(stage, layer_start=2 - stage.layer_start))  # noqa: E731
    refused(target, kept, swapped, r"stage of layers \d:\d: .*: layers: wanted \d:\d, got \d:\d")
    assert_unharmed(target, kept, model)


def test_a_session_with_a_page_missing_is_not_adopted(target: Client, kept: Kept, model: Path) -> None:
    def pages(stage: StageFacts) -> list[KvPage]:
        mine = kept.of(stage)
        return mine if stage.layer_start else [mine[0], mine[2]]

    refused(target, kept, pages, "stage of layers 0:2: .*1 of its 3 pages are here")
    assert_unharmed(target, kept, model)


def test_a_session_whose_pages_one_stage_lacks_is_not_half_restored(
    one_pipeline: Pipelines, kept: Kept, model: Path
) -> None:
    """Stage 0 cannot know what the others have; then all of the prompt is computed, and exact."""
    client = one_pipeline(model, 2, **CHUNKS)
    name = client.import_pages(kept.token_ids, kept.n_prompt, lambda stage: [] if stage.layer_start else kept.of(stage))
    asked = (*kept.token_ids, 7, 8, 9)
    answer = client.generate(token_ids=asked, session=name, max_tokens=2, sampling=ENDLESS, logits=True)
    assert answer.reused_tokens == 0
    batches = Batches()
    batches.prompt(asked)
    batches.generated(answer.token_ids[:-1])
    assert answer.logits is not None
    assert answer.logits.tobytes() == batches.logits(model, "f16", N_CTX).tobytes()


def test_pages_are_their_clients_alone(target: Client, kept: Kept, model: Path) -> None:
    """What one client claims to be the state of a prompt is nothing that others' prompts begin with."""
    with Client(target.endpoint) as other:
        name = other.import_pages(kept.token_ids, kept.n_prompt, kept.of)
        assert other.generate(token_ids=(*kept.token_ids, 7), session=name, max_tokens=1).reused_tokens == 159
        assert target.generate(token_ids=(*kept.token_ids, 7), max_tokens=1).reused_tokens in (0, 128)
        assert_unharmed(target, kept, model)


# Raw messages.


@pytest.fixture
def peer(transport: Transport, endpoint: str) -> Iterator[Peer]:
    peer = Peer(transport, endpoint)
    peer.greet()
    yield peer
    peer.close()


def sent(peer: Peer, descriptor: bytes, payload: bytes) -> wire.Message:
    peer.send(wire.KvImport("r", (descriptor,), (wire.TensorDescriptor.of_page(len(payload)),)), [payload])
    return peer.receive()


def assert_refused(answer: wire.Message, what: object) -> None:
    assert isinstance(answer, wire.Error), (what, answer)
    assert (answer.code, answer.request) == ("kv_page", "r"), (what, answer)


def test_a_page_with_any_byte_flipped_is_refused(peer: Peer, target: Client, kept: Kept, model: Path) -> None:
    page = kept.of(target.stages[0])[0]
    descriptor, payload = pack_descriptor(page.descriptor), bytes(page.payload)
    for at in range(len(descriptor)):
        broken = bytearray(descriptor)
        broken[at] ^= 1 << at % 8
        assert_refused(sent(peer, bytes(broken), payload), f"descriptor byte {at}")
    for at in (*range(0, len(payload), 211), len(payload) - 1):
        broken = bytearray(payload)
        broken[at] ^= 1 << at % 8
        assert_refused(sent(peer, descriptor, bytes(broken)), f"payload byte {at}")
    assert_unharmed(target, kept, model)
    assert isinstance(sent(peer, descriptor, payload), wire.KvImported)


def test_a_page_that_is_cut_or_of_another_descriptor_is_refused(
    peer: Peer, target: Client, kept: Kept, model: Path
) -> None:
    first, second, last = kept.of(target.stages[0])
    descriptor, payload = pack_descriptor(first.descriptor), bytes(first.payload)
    for size in (1, 64, len(payload) // 2, len(payload) - 1):
        assert_refused(sent(peer, descriptor, payload[:size]), size)
    assert_refused(sent(peer, descriptor, payload + b"\0"), "longer")
    for size in (1, 20, len(descriptor) - 1):
        assert_refused(sent(peer, descriptor[:size], payload), size)
    assert_refused(sent(peer, pack_descriptor(second.descriptor), payload), "the next page's")
    assert_refused(sent(peer, pack_descriptor(last.descriptor), payload), "the last page's")
    assert_unharmed(target, kept, model)


def resealed(page: KvPage, **changes: object) -> tuple[bytes, bytes]:
    """A page that is right in itself, and says other things."""
    values: PageDescriptor = dataclasses.replace(page.descriptor, **changes)  # type: ignore[arg-type]
    facts = PageFacts(values.model, values.build, values.layers)
    again = seal(facts, values.first, values.end, values.link_before, values.link_after, page.payload)
    return pack_descriptor(again.descriptor), bytes(page.payload)


def test_a_page_that_is_sealed_anew_with_other_facts_is_refused(
    peer: Peer, target: Client, kept: Kept, model: Path
) -> None:
    page = kept.of(target.stages[0])[0]
    layers = page.descriptor.layers
    moved = tuple(dataclasses.replace(rows, layer=rows.layer + 2) for rows in layers)
    transposed = tuple(dataclasses.replace(rows, v_transposed=True) for rows in layers)
    swapped = tuple(
        dataclasses.replace(rows, k_row_bytes=rows.k_row_bytes // 2, v_row_bytes=rows.v_row_bytes * 3 // 2)
        for rows in layers
    )
    for changes, words in (
        ({"model": "0" * 64}, "model: wanted"),
        ({"build": "llama.cpp 0"}, "build: wanted"),
        ({"layers": moved}, "layers: wanted 0:2, got 2:4"),
        ({"layers": transposed}, "v_transposed"),
        ({"layers": swapped}, "row_bytes"),
    ):
        answer = sent(peer, *resealed(page, **changes))
        assert_refused(answer, changes)
        assert isinstance(answer, wire.Error)
        assert words in answer.message
    assert LayerRange(0, 2) == LayerRange(target.stages[0].layer_start, target.stages[0].layer_end)
    assert_unharmed(target, kept, model)


def test_values_that_are_no_numbers_are_refused_when_they_are_used(
    one_pipeline: Pipelines, kept: Kept, model: Path
) -> None:
    """A client may seal what it likes: it gets no answer made of it, and everything else goes on."""
    client = one_pipeline(model, 2, **CHUNKS)

    def poison(page: KvPage) -> KvPage:
        old = page.descriptor
        facts = PageFacts(old.model, old.build, old.layers)
        return seal(facts, old.first, old.end, old.link_before, old.link_after, b"\xff" * old.payload_bytes)

    name = client.import_pages(kept.token_ids, kept.n_prompt, changed(kept, 2, 1, poison))
    asked = (*kept.token_ids, 7)
    answer = client.generate(token_ids=asked, session=name, max_tokens=2, sampling=ENDLESS, logits=True)
    batches = Batches()
    batches.prompt(asked)
    batches.generated(answer.token_ids[:-1])
    assert answer.logits is not None
    assert answer.logits.tobytes() == batches.logits(model, "f16", N_CTX).tobytes()


def test_a_page_that_nobody_keeps(peer: Peer) -> None:
    peer.send(wire.KvExport("r", bytes(32)))
    assert_refused(peer.receive(), "no such page")
    peer.send(wire.KvSession("r", "5e" * 32))
    assert_refused(peer.receive(), "no such session")
    peer.send(wire.KvAdopt("r", (1, 2, 3), 0))
    assert_refused(peer.receive(), "no such pages")
