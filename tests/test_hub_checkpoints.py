"""A stage of a checkpoint on a hub fetches the files of its own tensors, and outlines of the others."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import safetensors_bytes, wide, write_case
from hub_server import HubServer, blob_id
from hub_user import HubUser
from stage_processes import SMALL, StageProcess

from skippy_zmq import Client, LocalPipeline
from skippy_zmq.errors import ModelFileError, RetryableError
from skippy_zmq.runtime.options import StageOptions
from skippy_zmq.runtime.stage_model import StageModel
from skippy_zmq.sources import hub_outlines
from skippy_zmq.sources.models import open_located, open_model
from skippy_zmq.sources.references import LocatedModel, outline
from skippy_zmq.topology import LayerRange

pytest_plugins = ("hub_fixtures", "transport_fixtures")

LAYERS = 3
OPTIONS = StageOptions(lanes=1, threads=1, ctx_size=64, batch_size=8, ubatch_size=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a file for each layer, one for the embeddings, and one for the output matrix."""
    case = wide(2048, layers=LAYERS)
    path = write_case(case, tmp_path_factory.mktemp("checkpoint"))
    (path / "model.safetensors").unlink()
    tensors = case.tensors()
    weight_map = {}
    for name in tensors:
        layer = name.split(".")[2] if ".layers." in name else ""
        weight_map[name] = f"{'layer' + layer if layer else name.split('.')[-2]}.safetensors"
    for file in set(weight_map.values()):
        chosen = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        (path / file).write_bytes(safetensors_bytes(chosen))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def checkpoint(server: HubServer, folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.repository("o/n", files)
    return files


def whole(server: HubServer, files: dict[str, bytes]) -> set[str]:
    """The weight files that were fetched as they are."""
    return {
        name
        for name in files
        if name.endswith(".safetensors") and any(not request.range for request in server.transfers(name))
    }


def sent_in_parts(server: HubServer, name: str) -> int:
    spans = [request.range.removeprefix("bytes=").split("-") for request in server.transfers(name)]
    return sum(int(end) - int(start) + 1 for start, end in spans)


@pytest.mark.parametrize(
    ("layers", "needed"),
    [
        ("0:1", {"embed_tokens", "layer0", "lm_head"}),  # a tensor of no layer counts as needed at both ends
        ("1:2", {"layer1"}),
        ("1:3", {"layer1", "layer2", "lm_head"}),
    ],
)
def test_a_stage_fetches_its_own_files(
    layers: str, needed: set[str], server: HubServer, user: HubUser, checkpoint: dict[str, bytes], folder: Path
) -> None:
    own = LayerRange.parse(layers)
    located = user.locate("hf://o/n", own)
    small = {name for name in checkpoint if name.endswith(".safetensors") and len(checkpoint[name]) < 1 << 20}
    assert whole(server, checkpoint) == {f"{name}.safetensors" for name in needed} | small
    absent = set(located.outlines)
    assert absent == {f"layer{n}.safetensors" for n in range(LAYERS)} - whole(server, checkpoint)
    for name in absent:
        assert 0 < sent_in_parts(server, name) < len(checkpoint[name]) / 3
        assert located.outlines[name].stat().st_size == len(checkpoint[name])
        assert located.outlines[name].stat().st_blocks * 512 < len(checkpoint[name]) / 3
    source, local = open_located(located), open_model(folder)
    assert source.identity() == local.identity()
    model = StageModel(source, own, OPTIONS)
    assert model.native_model.own_bytes == StageModel(local, own, OPTIONS).native_model.own_bytes


def test_stages_with_caches_of_their_own(
    server: HubServer, checkpoint: dict[str, bytes], folder: Path, socket_dir: Path, tmp_path: Path
) -> None:
    with LocalPipeline(folder, split=(2,), ctx_size=256, lanes=1, threads=1) as pipeline:
        wanted = list(pipeline.generate(token_ids=[5, 6, 7], max_tokens=16).token_ids)
    zero, one = (f"ipc://{socket_dir}/{index}" for index in range(2))
    with contextlib.ExitStack() as stages:
        started = []
        for number, rest in enumerate((("0:2", zero, "--next", one), ("2:3", one, "--first", zero))):
            layers, bind, *link = rest
            environment = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / f"home{number}")}
            command = ["--model", "hf://o/n", *SMALL, "--layers", layers, "--bind", bind, *link]
            started.append(stages.enter_context(StageProcess(*command, **environment)))
        started[0].ready()
        with Client(zero) as client:
            assert list(client.generate(token_ids=[5, 6, 7], max_tokens=16).token_ids) == wanted
    homes = [{path.name for path in (tmp_path / f"home{n}").rglob("snapshots/*/layer*")} for n in range(2)]
    assert homes == [{"layer0.safetensors", "layer1.safetensors"}, {"layer2.safetensors"}]


def test_another_start_needs_no_hub_and_a_damaged_outline_is_fetched_again(
    server: HubServer, user: HubUser, checkpoint: dict[str, bytes], folder: Path
) -> None:
    own = LayerRange(1, 2)
    first = user.locate("hf://o/n", own)
    asked = len(server.requests)
    assert user.locate(first.reference, own, offline=True) == first
    assert len(server.requests) == asked
    outline = first.outlines["layer0.safetensors"]
    with outline.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"xyz")
    with pytest.raises(ModelFileError, match=r"not whole in the cache.*: layer0\.safetensors"):
        user.locate(first.reference, own, offline=True)
    assert user.locate("hf://o/n", own) == first
    assert open_located(first).identity() == open_model(folder).identity()
    everything = user.locate("hf://o/n")
    assert not everything.outlines
    assert not user.locate("hf://o/n", own).outlines, "files that are there serve themselves"


def test_a_long_header_is_read_on_and_leftovers_go(
    server: HubServer, user: HubUser, checkpoint: dict[str, bytes], folder: Path
) -> None:
    data = checkpoint["layer0.safetensors"]
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].ljust(length + (200 << 10))
    server.repository(
        "o/long", checkpoint | {"layer0.safetensors": len(header).to_bytes(8, "little") + header + data[8 + length :]}
    )
    located = user.locate("hf://o/long", LayerRange(1, 2))
    assert open_located(located).identity() == open_model(folder).identity()
    outlines = located.outlines["layer0.safetensors"].parent
    old, new = outlines / ".new-old", outlines / ".new-new"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    located.outlines["layer0.safetensors"].unlink()
    assert user.locate("hf://o/long", LayerRange(1, 2)) == located
    assert sorted(outlines.glob(".new-*")) == [new]


def test_samples_beyond_what_memory_should_hold(
    server: HubServer, user: HubUser, checkpoint: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many small tensors nearly all bytes are read; a header of 256 KiB makes an outline pay nevertheless."""
    small = safetensors_bytes({f"{n}": ("U8", (100_000,), bytes(100_000)) for n in range(20)})
    length = int.from_bytes(small[:8], "little")
    header = small[8 : 8 + length].ljust(256 << 10)
    data = len(header).to_bytes(8, "little") + header + small[8 + length :]
    for limit, outlined in ((2 << 20, True), (1 << 20, False)):
        monkeypatch.setattr(hub_outlines, "_MOST_SAMPLED_BYTES", limit)
        server.repository(f"o/{limit}", checkpoint | {"layer0.safetensors": data})
        assert ("layer0.safetensors" in user.locate(f"hf://o/{limit}", LayerRange(1, 2)).outlines) is outlined


def test_files_in_folders_are_planned_and_opened(
    server: HubServer, user: HubUser, checkpoint: dict[str, bytes], folder: Path
) -> None:
    files = {f"parts/{name}" if name.endswith(".safetensors") else name: data for name, data in checkpoint.items()}
    weight_map = json.loads(files["model.safetensors.index.json"])["weight_map"]
    files["model.safetensors.index.json"] = json.dumps(
        {"weight_map": {tensor: f"parts/{name}" for tensor, name in weight_map.items()}}
    ).encode()
    server.repository("o/folders", {f"model/{name}": data for name, data in files.items()})
    with outline("hf://o/folders/model", open_hub=user.hub) as planned:
        names = {tensor.name for tensor in open_located(planned).tensors}
    located = user.locate("hf://o/folders/model", LayerRange(1, 2))
    assert set(located.outlines) == {"parts/layer0.safetensors", "parts/layer2.safetensors"}
    source = open_located(located)
    assert names == {tensor.name for tensor in source.tensors}
    assert source.identity() == open_model(folder).identity()


def test_rows_of_an_outline_are_refused(user: HubUser, checkpoint: dict[str, bytes]) -> None:
    source = open_located(user.locate("hf://o/n", LayerRange(1, 2)))
    with pytest.raises(ModelFileError, match=r"'model\.layers\.2\..*': only the outline of this file was fetched"):
        StageModel(source, LayerRange(2, 3), OPTIONS)


def test_a_hub_that_sends_whole_files_only(server: HubServer, user: HubUser, checkpoint: dict[str, bytes]) -> None:
    server.sends_parts = False
    located = user.locate("hf://o/n", LayerRange(1, 2))
    assert not located.outlines
    assert whole(server, checkpoint) == {name for name in checkpoint if name.endswith(".safetensors")}


def _long_header(data: bytes) -> bytes:
    return (len(data) * 2).to_bytes(8, "little") + data[8:]


def _no_table(data: bytes) -> bytes:
    return data[:8] + b"[" + data[9:]


@pytest.mark.parametrize(
    ("change", "problem"), [(_long_header, "wanted a header of at most"), (_no_table, "wanted it to start with")]
)
def test_a_file_that_is_none_is_said(
    change: Callable[[bytes], bytes],
    problem: str,
    server: HubServer,
    user: HubUser,
    checkpoint: dict[str, bytes],
) -> None:
    server.repository("o/bad", checkpoint | {"layer2.safetensors": change(checkpoint["layer2.safetensors"])})
    with pytest.raises(ModelFileError, match=rf"^hf://o/bad@[0-9a-f]+/layer2\.safetensors: .*{problem}"):
        user.locate("hf://o/bad", LayerRange(0, 1))
    assert not list(user.directory.rglob(".new-*"))


@pytest.mark.parametrize("size", [2**63 - 1, 2**63])
def test_sizes_that_no_file_can_have(size: int, server: HubServer, user: HubUser, checkpoint: dict[str, bytes]) -> None:
    sizes = {name: len(data) for name, data in checkpoint.items()} | {"layer0.safetensors": size}
    server.listing = {
        "siblings": [
            {"rfilename": name, "size": sizes[name], "blobId": blob_id(data)} for name, data in checkpoint.items()
        ]
    }
    with (
        pytest.raises(ModelFileError, match=r"or its size is not known|no outline can be kept in"),
        outline("hf://o/n", open_hub=user.hub),
    ):
        pass
    own = LayerRange(1, 2)
    if size == 2**63:
        assert "layer0.safetensors" not in user.locate("hf://o/n", own).outlines
    else:
        with pytest.raises(ModelFileError, match=r"wanted 9\d{18} bytes of space"):
            user.locate("hf://o/n", own)


def test_a_hub_that_fails_meanwhile(server: HubServer, user: HubUser, checkpoint: dict[str, bytes]) -> None:
    server.faults["layer0.safetensors"] = [503]
    once: LocatedModel = user.locate("hf://o/n", LayerRange(1, 2))
    assert set(once.outlines) == {"layer0.safetensors", "layer2.safetensors"}
    server.repository("o/again", checkpoint)
    server.faults["layer0.safetensors"] = [503] * 40
    other = HubUser(server, user.directory / "other")
    with pytest.raises(RetryableError, match=r"layer0\.safetensors: .* answered"):
        other.locate("hf://o/again", LayerRange(1, 2))
    assert not list(other.directory.rglob(".new-*"))


def test_one_of_several_weight_files_means_the_whole(
    server: HubServer, user: HubUser, checkpoint: dict[str, bytes], folder: Path
) -> None:
    """As the path of such a file does, also for a stage that does not need this one."""
    own = LayerRange(1, 2)
    located = user.locate("hf://o/n/layer0.safetensors", own)
    assert set(located.outlines) == {"layer0.safetensors", "layer2.safetensors"}
    assert open_located(located).identity() == open_model(folder / "layer0.safetensors").identity()
    assert user.locate(located.reference, own, offline=True) == located
    with outline("hf://o/n/layer0.safetensors", open_hub=HubUser(server, user.directory / "other").hub) as planned:
        assert len(open_located(planned).tensors) == len(open_model(folder).tensors)
    server.repository("o/both", checkpoint | {"m.gguf": b"GGUF"})
    with pytest.raises(ModelFileError, match=r"for example \w+\.safetensors or m\.gguf"):
        user.locate("hf://o/both")
    both = user.locate("hf://o/both/layer0.safetensors", own)
    assert user.locate(both.reference, own) == both, "no more in doubt"


def test_the_configuration_means_its_folder(server: HubServer, user: HubUser, checkpoint: dict[str, bytes]) -> None:
    server.repository("o/folder", {f"model/{name}": data for name, data in checkpoint.items()})
    for repository, folder in (("o/n", ""), ("o/folder", "/model")):
        located = user.locate(f"hf://{repository}{folder}/config.json", LayerRange(1, 2))
        assert located == user.locate(f"hf://{repository}{folder}", LayerRange(1, 2))


def test_one_file_beside_an_index_that_does_not_list_it(
    server: HubServer, user: HubUser, checkpoint: dict[str, bytes], folder: Path
) -> None:
    """Is refused as in a folder, whatever the cache holds already."""
    server.repository("o/both", checkpoint | {"model.safetensors": checkpoint["layer0.safetensors"]})
    with pytest.raises(
        ModelFileError, match="an index that does not list it may hold the weights; name the one"
    ) as refusal:
        user.locate("hf://o/both", LayerRange(1, 2))
    assert not whole(server, checkpoint)
    located = user.locate(str(refusal.value).split()[-1])
    assert open_located(located).identity() == open_model(folder).identity()
    assert user.locate("hf://o/both/model.safetensors").path.name == "model.safetensors"


def test_one_of_several_weight_files_without_an_index_is_refused_before_it_is_fetched(
    server: HubServer, user: HubUser, checkpoint: dict[str, bytes]
) -> None:
    part, only = "model-00001-of-00002.safetensors", "model-00001-of-00001.safetensors"
    server.repository("o/parts", {"config.json": b"{}", part: checkpoint["layer0.safetensors"]})
    with pytest.raises(ModelFileError, match=rf"^hf://o/parts/{part}: is one of 2 files, and no .*\.json lists it$"):
        user.locate(f"hf://o/parts/{part}", LayerRange(0, 1))
    assert not server.transfers(part)
    server.repository("o/other", checkpoint | {part: checkpoint["layer0.safetensors"]})
    with pytest.raises(ModelFileError, match="is one of 2 files"):
        user.locate(f"hf://o/other/{part}")
    server.repository("o/only", {"config.json": b"{}", only: checkpoint["layer0.safetensors"]})
    assert user.locate(f"hf://o/only/{only}").path.name == only
