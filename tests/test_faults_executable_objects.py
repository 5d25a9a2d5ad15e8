"""Z01: nothing that arrives is ever executed, at a stage or at a client, whatever field it hides in.

The codec alone: test_wire_hostile. One stranger of each sort at three stages: test_stage_abuse.
"""

from __future__ import annotations

import ast
import dataclasses
import marshal
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from fault_helpers import Scene
from model_files import Parrot
from stage_processes import SMALL, StageProcess, error_line
from transport_helpers import PATIENCE, Transport
from wire_values import BATCH, BATCH_PAYLOADS, FACTS

import skippy_zmq
from skippy_zmq import Client
from skippy_zmq.errors import PeerError
from skippy_zmq.transport import Endpoint
from skippy_zmq.wire import messages as wire
from skippy_zmq.wire.codec import decode, encode
from skippy_zmq.wire.limits import MAX_FRAMES
from skippy_zmq.wire.messages import GENERATION, Kind

pytest_plugins = ("transport_fixtures", "stage_fixtures", "fault_fixtures")

Frames = Sequence[bytes | memoryview]


class _Touches:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return open, (self._marker, "w")


def _bombs(marker: Path) -> dict[str, bytes]:
    """Objects that make ``marker`` when something opens them, as bytes."""
    code = compile(f"open({str(marker)!r}, 'w').close()", "bomb", "exec")
    bombs = {f"pickle {n}": pickle.dumps(_Touches(marker), n) for n in range(pickle.HIGHEST_PROTOCOL + 1)}
    return {**bombs, "marshal": marshal.dumps(code), "source": f"open({str(marker)!r}, 'w').close()".encode()}


_EVERY_EXTENSION = range(1, 128)
_BURST = 50


def _objects(bomb: bytes, extensions: Sequence[int]) -> dict[str, object]:
    """What a helpful decoder might take for an object that is to be opened."""
    return {
        "an array of objects": {"nd": True, "type": "O", "kind": "O", "shape": [1], "data": bomb},
        "an array of objects, by bytes": {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": (1,), b"data": bomb},
        "a class by name": {"__class__": "builtins.eval", "__reduce__": bomb},
        "a timestamp": msgpack.Timestamp(1, 2),
        **{f"extension {code}": msgpack.ExtType(code, bomb) for code in extensions},
    }


def _attacks(bomb: bytes, extensions: Sequence[int] = (1, 5, 127)) -> Iterator[tuple[str, Frames]]:
    """The bomb, and what holds it, as header, field, tensor descriptor and payload of messages of many kinds."""
    for kind in (Kind.PING, Kind.GENERATE, Kind.ACTIVATIONS, Kind.WELCOME, Kind.TOKENS):
        prefix = bytes((GENERATION, kind))
        yield f"{kind.name}: header", [prefix, bomb]
        for name, value in _objects(bomb, extensions).items():
            yield f"{kind.name}: {name} as header", [prefix, msgpack.packb(value)]
            yield f"{kind.name}: {name} in header", [prefix, msgpack.packb([value])]
    prefix, header, *payloads = encode(BATCH, BATCH_PAYLOADS)
    fields = msgpack.unpackb(header)
    for name, value in (*_objects(bomb, extensions).items(), ("the bomb", bomb)):
        fields[7] = [value, *fields[7][1:]]
        yield f"{name} as descriptor", [prefix, msgpack.packb(fields), *payloads]
    for dtype in ("O", "|O", "object", "pickle"):
        descriptor = ["l_out-14", 0, 0, dtype, [len(bomb)], len(bomb)]
        fields[7] = [descriptor, *fields[7][1:]]
        yield f"dtype {dtype}", [prefix, msgpack.packb(fields), bomb, payloads[1]]
    yield "prefix", [bomb, header]
    yield "everywhere", [bomb, bomb, bomb]


def test_the_bombs_work(tmp_path: Path) -> None:
    """So that their silence means something."""
    for number, name in enumerate(_bombs(tmp_path)):
        marker = tmp_path / f"marker-{number}"
        bomb = _bombs(marker)[name]
        if name.startswith("pickle"):
            pickle.loads(bomb).close()
        else:
            exec(marshal.loads(bomb) if name == "marshal" else bomb)
        assert marker.exists()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("greeted", [False, True])
def test_a_stage_executes_nothing(greeted: bool, index: int, ipc_scene: Scene, tmp_path: Path) -> None:
    """Each message is answered by one protocol error, and the next good request works."""
    marker = tmp_path / "marker"
    peer = ipc_scene.peer(index, greeted=greeted)
    attacks = [attack for bomb in _bombs(marker).values() for attack in _attacks(bomb)]
    attacks += _attacks(_bombs(marker)["pickle 4"], _EVERY_EXTENSION)
    for start in range(0, len(attacks), _BURST):
        burst = attacks[start : start + _BURST]
        for _, frames in burst:
            peer.send_frames(frames)
        for name, _ in burst:
            error = peer.expect(wire.Error)
            wanted = "generation_mismatch" if name in ("prefix", "everywhere") else "protocol"
            assert (name, error.code, error.retry) == (name, wanted, False)
    peer.greet()  # and nothing else was on its way
    assert peer.ready()
    assert not marker.exists()


@pytest.mark.parametrize("index", [0, 1])
def test_a_bomb_in_a_field_of_bytes_is_bytes(index: int, ipc_scene: Scene, tmp_path: Path) -> None:
    """Token ids and texts may be any bytes of the right length; they are numbers and texts, and nothing more."""
    marker = tmp_path / "marker"
    peer = ipc_scene.peer(index)
    for bomb in _bombs(marker).values():
        text = bomb.decode("latin-1")
        ids = bomb + bytes(-len(bomb) % 4)
        header = msgpack.unpackb(encode(wire.Generate("bytes", 5, token_ids=(5,)))[1])
        header[4] = ids
        peer.send_frames([bytes((GENERATION, Kind.GENERATE)), msgpack.packb(header)])
        assert peer.expect(wire.Error).code in ("protocol", "invalid_token")
        peer.send(wire.Generate("grammar", 5, token_ids=(5,), sampling=wire.SamplingParams(grammar=text)))
        assert peer.expect(wire.Error).code == ("protocol" if index else "grammar")
        peer.send(wire.Generate("text", 1, prompt=text))
        if index:
            assert peer.expect(wire.Error).code == "protocol"
            continue
        assert b"".join(map(bytes, [[token - 4 for token in peer.until(wire.Accepted).prompt_token_ids]])) == (
            text.encode()
        )
        assert peer.expect(wire.Error).code == "stage_lost"  # this client does not listen at the last stage
    assert not marker.exists()


def test_a_stage_executes_nothing_of_the_stage_behind(
    transport: Transport, start_stage: Callable[..., StageProcess], socket_dir: Path, model: Parrot, tmp_path: Path
) -> None:
    """A stage whose next stage answers HELLO so has no neighbour to work with: it ends with one line that says why."""
    marker = tmp_path / "marker"
    bombs = _bombs(marker)
    for number, frames in enumerate(
        (
            [bytes((GENERATION, Kind.WELCOME)), bombs["pickle 4"]],
            [bytes((GENERATION, Kind.WELCOME)), msgpack.packb([[msgpack.ExtType(5, bombs["pickle 4"])], True])],
        )
    ):
        behind = f"ipc://{socket_dir}/behind-{number}"
        server = transport.server(behind, max_frames=MAX_FRAMES)
        stage = start_stage(
            "--model", model.path, "--layers", "0:2", "--bind", f"ipc://{socket_dir}/{number}", "--next", behind, *SMALL
        )
        hello = transport.message(server)
        server.send(hello.peer, frames)
        assert stage.wait() == 1
        assert "not a msgpack header" in error_line(_without_log(stage.stderr()))
    assert not marker.exists()


def _without_log(stderr: str) -> str:
    return "\n".join(line for line in stderr.splitlines() if line.startswith("error: ") or "Traceback" in line)


class FakeStage:
    """A whole pipeline in a thread: welcomes everybody, and answers each request with the next of what it is given."""

    def __init__(self, endpoint: str, model: Parrot) -> None:
        self._model = model
        self._facts = dataclasses.replace(
            FACTS, endpoint=endpoint, layer_start=0, layer_end=30, n_vocab=model.token_ids[-1] + 1, offered=()
        )
        self.answers: queue.Queue[Frames] = queue.Queue()
        self._transport = Transport()
        self._server = self._transport.server(endpoint, max_frames=MAX_FRAMES)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="fake-stage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            self._transport.loop.wait(PATIENCE)
            while (incoming := self._server.receive()) is not None:
                message, _ = decode(incoming.frames)
                if isinstance(message, wire.Hello):
                    self._server.send(incoming.peer, encode(wire.Welcome((self._facts,), True)))
                elif isinstance(message, wire.Generate):
                    if self.answers.empty():
                        self._answer_well(incoming.peer, message)
                    else:
                        self._server.send(incoming.peer, self.answers.get())

    def _answer_well(self, peer: bytes, message: wire.Generate) -> None:
        ids = self._model.token_ids[: message.max_tokens]
        self._server.send(peer, encode(wire.Accepted(message.request, message.token_ids or (5,))))
        self._server.send(peer, encode(wire.Tokens(message.request, 0, ids, "piece", "length")))

    def close(self) -> None:
        self._stopping = True
        self._transport.loop.wake()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._transport.close()


@pytest.fixture
def fake_stage(leak_check: None, socket_dir: Path, model: Parrot) -> Iterator[FakeStage]:
    stage = FakeStage(str(Endpoint.parse(f"ipc://{socket_dir}/fake")), model)
    yield stage
    stage.close()


def test_a_client_executes_nothing(fake_stage: FakeStage, socket_dir: Path, model: Parrot, tmp_path: Path) -> None:
    """Its request fails with the peer's fault named, and the next one works on the same connection."""
    marker = tmp_path / "marker"
    with Client(f"ipc://{socket_dir}/fake", timeout=PATIENCE) as client:
        for name, frames in _attacks(_bombs(marker)["pickle 4"], _EVERY_EXTENSION):
            fake_stage.answers.put(frames)
            with pytest.raises(PeerError) as caught:
                client.generate(token_ids=(5,), max_tokens=5)
            assert caught.value.code in ("protocol", "generation_mismatch"), name
            assert "\n" not in str(caught.value)
        for bomb in _bombs(marker).values():
            fake_stage.answers.put([bytes((GENERATION, Kind.TOKENS)), bomb])
            with pytest.raises(PeerError):
                client.generate(token_ids=(5,), max_tokens=5)
            assert client.generate(token_ids=(5,), max_tokens=5).token_ids == model.token_ids[:5]
    assert not marker.exists()


# ---- the source

_MODULES = {
    "pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "multiprocessing"
}  # fmt: skip
_CALLS = {"eval", "exec", "compile", "__import__"}
_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "Unpickler", "allow_pickle"}


def _offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in _MODULES)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in _MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                yield f"{name}()"
            case ast.Attribute(attr=name) if name in _ATTRIBUTES:
                yield name
            case ast.keyword(arg="allow_pickle", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    yield "allow_pickle"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load"), keywords=keywords):
                if not any(keyword.arg == "allow_pickle" for keyword in keywords):
                    yield "np.load without allow_pickle=False"


def test_the_source_has_nothing_that_could() -> None:
    package = Path(skippy_zmq.__file__).parent
    paths = sorted(package.rglob("*.py"))
    assert package / "wire" / "codec.py" in paths
    found = {path.name: list(_offences(ast.parse(path.read_bytes()))) for path in paths}
    assert {name: offences for name, offences in found.items() if offences} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "socket.recv_pyobj()",
        "np.load('x')",
        "np.load('x', allow_pickle=True)",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert len(list(_offences(ast.parse(source)))) == 1
