"""Pages that a client brought stay as long as it does, and over a short absence."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lane_helpers import StageWatch
from model_files import tiny
from stage_peers import Peer
from stage_processes import PATIENCE, StagePipeline
from transport_helpers import Transport

from skippy_zmq import Client
from skippy_zmq.kv.descriptor import pack_descriptor
from skippy_zmq.kv.page import KvPage
from skippy_zmq.stage.absences import LOSS_SETTLES_SECONDS, Absences
from skippy_zmq.wire import messages as wire

pytest_plugins = ("transport_fixtures", "stage_fixtures")

OPTIONS = ("--lanes", "2", "--ctx-size", "256")
PROMPT = [(37 * i + 11) % 290 + 4 for i in range(100)]
IMPORTED = "now.kv_imported_bytes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_what_closed_clients_brought_is_given_up(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path, tmp_path: Path
) -> None:
    pipeline = make_pipeline(model, "0:2 2:4", *OPTIONS).start_all()
    watch = StageWatch(transport, pipeline)
    with Client(pipeline.endpoint, timeout=PATIENCE) as client:
        kept = client.generate(token_ids=PROMPT, max_tokens=10, keep=True)
        client.export_session(kept.session, tmp_path / "talk")
    one, other = (Client(pipeline.endpoint, timeout=PATIENCE) for _ in range(2))
    with other:
        with one:
            for client in (one, other):
                assert client.import_session(tmp_path / "talk") == kept.session
            both = [watch.counters(index)[IMPORTED] for index in range(2)]
            assert min(both) > 0
        for index in range(2):
            watch.until(lambda counters, n=both[index] // 2: counters[IMPORTED] == n, index=index)
        again = other.generate(token_ids=(*PROMPT, *kept.token_ids, 5), session=kept.session, max_tokens=3)
        assert again.reused_tokens >= len(PROMPT)
    for index in range(2):
        watch.until(lambda counters: counters[IMPORTED] == 0, index=index)


def test_a_client_that_comes_back_finds_its_pages(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path
) -> None:
    """Those of another one that left at the same moment are given up."""
    pipeline = make_pipeline(model, "0:4", *OPTIONS, "--recover-seconds", "1").start_all()
    watch = StageWatch(transport, pipeline)
    pages: list[KvPage] = []
    with Client(pipeline.endpoint, timeout=PATIENCE) as client:
        kept = client.generate(token_ids=PROMPT, max_tokens=40, keep=True)
        client.export_pages(kept.session, pages.append)
    peers = [Peer(transport, pipeline.endpoint) for _ in range(2)]
    for peer in peers:
        peer.greet()
        for page in pages:
            tensor = wire.TensorDescriptor.of_page(page.payload.nbytes)
            peer.send(wire.KvImport("i", (pack_descriptor(page.descriptor),), (tensor,)), [page.payload])
            peer.until(wire.KvImported)
    both = watch.counters()[IMPORTED]
    for peer in peers:
        peer.close()
    back = Peer(transport, pipeline.endpoint, identity=peers[0].identity)
    back.greet()
    watch.until(lambda counters: counters[IMPORTED] == both // 2)
    tokens = (*PROMPT, *kept.token_ids[:-1])
    back.send(wire.KvAdopt("a", tokens, len(PROMPT)))
    assert back.until(wire.KvSessionReply).session == kept.session


def test_pages_that_are_read_after_their_client_was_lost(
    make_pipeline: Callable[..., StagePipeline], transport: Transport, model: Path
) -> None:
    pipeline = make_pipeline(model, "0:2 2:4", *OPTIONS, "--recover-seconds", "1").start_all()
    pages: list[KvPage] = []
    with Client(pipeline.endpoint, timeout=PATIENCE) as client:
        kept = client.generate(token_ids=PROMPT, max_tokens=4, keep=True)
        client.export_pages(kept.session, pages.append)
    watch = Peer(transport, pipeline.endpoint)
    watch.greet()
    pipeline[1].kill()
    while watch.ready():
        pass
    peer = Peer(transport, pipeline.endpoint)
    peer.greet()
    page = next(page for page in pages if page.descriptor.layers[0].layer == 0)
    tensor = wire.TensorDescriptor.of_page(page.payload.nbytes)
    pipeline[0].send_signal(signal.SIGSTOP)
    for _ in range(800):  # not answered as long as the ring is broken, and more than are read at once
        peer.send(wire.Resume("r", 0))
    peer.send(wire.KvImport("i", (pack_descriptor(page.descriptor),), (tensor,)), [page.payload])
    transport.drop(peer.link, drain_seconds=PATIENCE)
    pipeline[0].send_signal(signal.SIGCONT)
    for condition in (lambda held: held > 0, lambda held: held == 0):
        transport.settled(lambda condition=condition: condition(watch.stats().counters[IMPORTED]))


@given(st.lists(st.tuples(st.integers(0, 30), st.frozensets(st.sampled_from(b"abc"))), max_size=20))
def test_who_is_gone_for_longer_than_patience_is_given_up_once(steps: list[tuple[int, frozenset[int]]]) -> None:
    """``steps``: seconds until somebody's connection ends, and who is there then."""
    patience = 10.0
    absences = Absences(patience)
    holders = set(b"abc")
    there = set(holders)
    now = 0.0
    last_seen = dict.fromkeys(holders, 0.0)  # at a look, as far as the stage can tell

    def look() -> None:
        over = {client[0] for client in absences.look(now, [bytes([h]) for h in holders], lambda c: c[0] in there)}
        for holder in holders & there:
            last_seen[holder] = now
        assert not over & there
        assert all(now - last_seen[holder] >= patience for holder in over)
        holders.difference_update(over)

    for seconds, present in steps:
        until = now + seconds
        while (due := absences.due) is not None and due <= until:
            now = max(now, due)
            look()
        now, there = until, set(present)
        absences.connection_ended(now)
        assert absences.due is not None
        assert absences.due <= now + LOSS_SETTLES_SECONDS
    while (due := absences.due) is not None:
        now = max(now, due)
        look()
    assert not steps or holders <= there


def test_a_connection_that_ends_just_before_a_look_is_looked_at_again() -> None:
    """Sending to its peer may go well until then, and nothing else would ever tell."""
    absences = Absences(0.0)
    absences.connection_ended(10.0)
    late = 10.0 + 0.9 * LOSS_SETTLES_SECONDS
    absences.connection_ended(late)
    assert absences.due is not None
    assert absences.look(absences.due, [b"a", b"b"], lambda client: client != b"a") == [b"a"]
    assert absences.due == late + LOSS_SETTLES_SECONDS
    assert absences.look(absences.due, [b"b"], lambda client: False) == [b"b"]
    assert absences.due is None


def test_every_absence_counts_for_itself() -> None:
    absences = Absences(10.0)
    absences.connection_ended(0.0)
    assert not absences.look(1.0, [b"a"], lambda client: False)
    absences.is_back(b"a")
    assert absences.due is None
    absences.connection_ended(9.0)
    assert not absences.look(9.5, [b"a"], lambda client: False)
    assert absences.due == 19.5
    assert absences.look(19.5, [b"a"], lambda client: False) == [b"a"]
