"""A stage that waits handles its last message again, and nothing comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from lane_helpers import recited
from model_files import parrot, tiny
from stage_peers import Asker
from stage_processes import SMALL, StageProcess
from transport_helpers import Transport
from wire_values import BATCH

from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.stage.rehearsal import Rehearsal
from skippy_zmq.testing.link_proxy import LinkProxy
from skippy_zmq.topology import LayerRange
from skippy_zmq.transport import ZERO_COPY_BYTES, Loopback
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode

pytest_plugins = ("transport_fixtures", "stage_fixtures")


def test_a_message_goes_to_oneself(transport: Transport) -> None:
    loopback, other = Loopback(transport.factory), Loopback(transport.factory)
    for frames in ([b"a", b"", b"c" * 1000], [bytes(ZERO_COPY_BYTES)], [b"x"] * 20):
        assert [bytes(frame) for frame in loopback.there_and_back(frames)] == frames
    assert other.there_and_back([b"other"]) == [b"other"]
    for each in (loopback, other, other):
        each.close()


def test_the_last_message_is_rehearsed_now_and_then(transport: Transport, tmp_path: Path) -> None:
    options = StageOptions(ctx_size=64, lanes=1, threads=1, ubatch_size=16, busy_poll_ms=20, warm_bytes=1 << 50)
    model = StageModel(open_model(tiny(tmp_path / "model.gguf")), LayerRange(0, 4), options)
    looks: list[int] = []
    loopback = Loopback(transport.factory)
    rehearsal = Rehearsal(model, loopback, lambda: looks.append(0))
    calls = 3 * (4 << 20) // model.warm() + 3
    for _ in range(calls):
        rehearsal()
    assert not looks, "there is nothing to rehearse yet"
    step = msgspec.structs.replace(BATCH, opens=(), tensors=())
    rehearsal.last = [bytes(frame) for frame in encode(step)]
    for _ in range(calls):
        rehearsal()
    assert len(looks) == 3
    assert decode(rehearsal.last)[0] == step
    size = ZERO_COPY_BYTES
    long = msgspec.structs.replace(step, tensors=(wire.TensorDescriptor("l_out-1", 0, 0, "i8", (size,), size),))
    rehearsal.last = encode(long, [bytes(size)])
    for _ in range(calls):
        rehearsal()
    assert len(looks) == 3
    assert not rehearsal.last, "it would keep the memory of a long prompt"
    loopback.close()


def test_waiting_stages_answer_as_ever(
    start_stage: Callable[..., StageProcess], transport: Transport, socket_dir: Path, tmp_path: Path
) -> None:
    """Over links so long that every step finds stages which have rehearsed."""
    model = parrot(tmp_path / "parrot.gguf", "rehearsed and still right ", end="loop")
    ends = [f"ipc://{socket_dir}/{index}" for index in (0, 1)]
    with (
        LinkProxy(f"ipc://{socket_dir}/to-0", ends[0], delay_s=0.02) as to_first,
        LinkProxy(f"ipc://{socket_dir}/to-1", ends[1], delay_s=0.02) as to_last,
    ):
        options = (*SMALL, "--model", model.path, "--lanes", 2, "--busy-poll-ms", 200, "--warm-bytes", "1T")
        stages = [
            start_stage(*options, "--layers", "0:2", "--bind", ends[0], "--next", to_last.endpoint),
            start_stage(*options, "--layers", "2:4", "--bind", ends[1], "--first", to_first.endpoint),
        ]
        for stage in stages:
            stage.ready()
        asker = Asker(transport, ends[0])
        for _ in range(2):
            assert asker.answer(asker.ask((5, 6), max_tokens=20)).token_ids == recited(model, 20)
        for counters in (peer.stats().counters for peer in (asker.first, asker.last)):
            assert counters["decode_batches"] == 2 * 19
            assert not [name for name in counters if name.startswith("errors.")]
