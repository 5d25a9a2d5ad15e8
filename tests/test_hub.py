"""Models from a hub: one commit, only what is needed, whole and unharmed, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import safetensors_bytes
from hub_server import HubServer
from hub_user import TOKEN, HubUser

from skippy_zmq.errors import ModelFileError, RetryableError
from skippy_zmq.sources.references import fetch_projectors, local_model, revision_conflict
from skippy_zmq.topology import LayerRange

pytest_plugins = ("hub_fixtures",)


def content(seed: int, nbytes: int = 20_000) -> bytes:
    return bytes((seed * 31 + i * 7) % 251 for i in range(nbytes))


MODEL, OTHER = content(1), content(2)
PACKAGE = {
    "model-package.json": json.dumps(
        {
            "n_layers": 3,
            "parts": [
                {"kind": "shared", "path": "shared.gguf"},
                {"kind": "embeddings", "path": "./embeddings.gguf"},
                *({"kind": "layer", "layer": n, "path": f"layers/{n}.gguf"} for n in range(3)),
                {"kind": "output", "path": "output.gguf"},
            ],
            "tensors": [{"name": "token_embd.weight"}, {"name": "output_norm.weight"}, {"name": "output.weight"}],
        }
    ).encode(),
    "shared.gguf": content(3),
    "embeddings.gguf": content(4),
    **{f"layers/{n}.gguf": content(5 + n) for n in range(3)},
    "output.gguf": content(9),
}


def fetched(server: HubServer) -> set[str]:
    """Names of the files whose bytes were asked for."""
    paths = [r.path.split("/") for r in server.requests if r.method == "GET" and "/api/" not in r.path]
    return {"/".join(path[path.index(next(p for p in path if len(p) == 40)) + 1 :]) for path in paths}


def test_one_file_of_one_commit(server: HubServer, user: HubUser) -> None:
    server.repository("o/n", {"m.gguf": MODEL, "README.md": b"text", "config.json": b"{}"})
    located = user.locate("hf://o/n")
    assert located.path.read_bytes() == MODEL
    assert (located.kind, located.path.name) == ("gguf", "m.gguf")
    commit = server.repositories["o/n"].branches["main"]
    assert located.revision == f"o/n@{commit}"
    assert located.reference == f"hf://o/n@{commit}/m.gguf"
    assert fetched(server) == {"m.gguf"}
    assert user.locate("hf://o/n@main/m.gguf").path == located.path
    assert len(server.transfers("m.gguf")) == 1
    before = len(server.requests)
    assert user.locate(located.reference) == located  # a commit needs no network
    assert len(server.requests) == before


def test_the_token_goes_to_the_hub_alone(server: HubServer, user: HubUser) -> None:
    server.repository("o/n", {"m.gguf": MODEL}).needs_token = TOKEN
    user.locate("hf://o/n")
    assert {(r.host, r.token) for r in server.requests} == {("hub", TOKEN), ("store", "")}
    for wrong in ("hf_other", False):
        with pytest.raises(
            ModelFileError, match=r"hf://o/n@main: .* has no such repository, or HF_TOKEN may not read it"
        ):
            user.locate("hf://o/n", token=wrong, cache=user.directory / "second")


def test_all_shards(server: HubServer, user: HubUser) -> None:
    names = [f"q4/m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    server.repository("o/n", {**{name: content(n) for n, name in enumerate(names)}, "q8/m.gguf": MODEL})
    for reference in ("hf://o/n/q4", f"hf://o/n/{names[1]}"):
        assert user.locate(reference).path.as_posix().endswith(names[0])
    assert fetched(server) == set(names)
    with pytest.raises(ModelFileError, match=r"name one of q4/m-00001-of-00003\.gguf, q8/m\.gguf"):
        user.locate("hf://o/n")
    server.repository("o/half", dict.fromkeys(names[:2], MODEL))
    with pytest.raises(ModelFileError, match=r"not in the repository: q4/m-00003-of-00003\.gguf"):
        user.locate("hf://o/half")


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("0:1", {"embeddings", "layers/0"}),
        ("1:2", {"layers/1"}),
        ("2:3", {"layers/2", "output"}),
        (None, {"embeddings", "layers/0", "layers/1", "layers/2", "output"}),
    ],
)
@pytest.mark.parametrize("folder", ["", "nested/"])
def test_the_parts_of_a_stage(
    server: HubServer, user: HubUser, layers: str | None, names: set[str], folder: str
) -> None:
    server.repository("o/n", {folder + name: data for name, data in PACKAGE.items()} | {"README.md": b"x"})
    located = user.locate(f"hf://o/n/{folder}".rstrip("/"), LayerRange.parse(layers) if layers else None)
    wanted = {"model-package.json", *(f"{name}.gguf" for name in {"shared", *names})}
    assert fetched(server) == {folder + name for name in wanted}
    assert located.kind == "package"
    assert {path.relative_to(located.path).as_posix() for path in located.path.rglob("*.*")} == wanted
    assert (located.path / "model-package.json").read_bytes() == PACKAGE["model-package.json"]


def test_the_projectors_of_a_package(server: HubServer, user: HubUser) -> None:
    """No stage reads them, so they are fetched when somebody asks for them."""
    listed = json.loads(PACKAGE["model-package.json"])
    listed["parts"].append({"kind": "mmproj", "path": "projectors/eye.gguf"})
    files = {**PACKAGE, "model-package.json": json.dumps(listed).encode(), "projectors/eye.gguf": content(11)}
    server.repository("o/n", {f"nested/{name}": data for name, data in files.items()})
    located = user.locate("hf://o/n/nested")
    assert "nested/projectors/eye.gguf" not in fetched(server)
    fetch_projectors(located, open_hub=user.hub)
    assert (located.path / "projectors" / "eye.gguf").read_bytes() == content(11)
    asked = len(server.requests)
    fetch_projectors(located, open_hub=user.hub)
    fetch_projectors(local_model(located.path))
    assert len(server.requests) == asked


def test_a_checkpoint_and_its_weights(server: HubServer, user: HubUser) -> None:
    weight_map = {f"model.layers.{n}.w": f"model-{n}.safetensors" for n in range(3)}
    files = {
        "config.json": b'{"num_hidden_layers": 3}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        **{f"model-{n}.safetensors": safetensors_bytes({"w": ("U8", (4096,), bytes(4096))}) for n in range(3)},
        "pytorch_model.bin": content(9),
        "onnx/model.json": b"{}",
    }
    server.repository("o/n", files)
    located = user.locate("hf://o/n", LayerRange(1, 2))
    metadata = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert (located.kind, fetched(server)) == ("checkpoint", metadata | set(weight_map.values()))
    assert not located.outlines, "such small files are fetched as they are"
    server.repository("o/both", {**files, "m.gguf": MODEL})
    with pytest.raises(ModelFileError, match="has both a checkpoint and GGUF files; name the one to use"):
        user.locate("hf://o/both")
    assert user.locate("hf://o/both/m.gguf").kind == "gguf"
    server.repository("o/single", {"config.json": b"{}", "model.safetensors": MODEL})
    assert user.locate("hf://o/single/model.safetensors").path.read_bytes() == MODEL


@pytest.mark.parametrize("fault", ["cut", "short", "html", "damaged", "longer", 503, 404])
def test_a_transfer_that_fails_once_is_made_again(server: HubServer, user: HubUser, fault: str | int) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    server.faults["m.gguf"] = [fault]
    assert user.locate("hf://o/n").path.read_bytes() == MODEL
    assert user.leftovers() == []


@pytest.mark.parametrize("fault", ["short", "html", "damaged", "longer", 503])
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_a_transfer_that_keeps_failing_leaves_nothing_that_is_taken_for_whole(
    server: HubServer, user: HubUser, fault: str | int, small: bool
) -> None:
    data = MODEL[:1000] if small else MODEL
    server.repository("o/n", {"m.gguf": data})
    server.faults["m.gguf"] = [fault] * 2
    with pytest.raises((ModelFileError, RetryableError), match=r"hf://o/n@[0-9a-f]{40}/m\.gguf: "):
        user.locate("hf://o/n")
    assert user.leftovers() == []
    with pytest.raises(ModelFileError, match=r"not whole in the cache.*m\.gguf"):
        user.locate("hf://o/n", offline=True)
    assert user.locate("hf://o/n").path.read_bytes() == data


def damage(path: Path, how: str) -> None:
    real = path.resolve()
    data = real.read_bytes()
    real.write_bytes({"bit": data[:5] + bytes([data[5] ^ 1]) + data[6:], "short": data[:-1], "empty": b""}[how])


@pytest.mark.parametrize("how", ["bit", "short", "empty"])
@pytest.mark.parametrize("name", ["m.gguf", "small.gguf"])
def test_a_file_of_the_cache_that_was_damaged(server: HubServer, user: HubUser, how: str, name: str) -> None:
    server.repository("o/n", {"m.gguf": MODEL, "small.gguf": MODEL[:1000]})
    located = user.locate(f"hf://o/n/{name}")
    good = located.path.read_bytes()
    damage(located.path, how)
    with pytest.raises(ModelFileError, match=rf"1 of 1 files .* not whole .*{name} \(wanted .*, got "):
        user.locate(f"hf://o/n/{name}", offline=True)
    assert user.locate(f"hf://o/n/{name}").path.read_bytes() == good
    assert user.locate(f"hf://o/n/{name}", offline=True).path.read_bytes() == good


def test_a_file_that_huggingface_hub_left_damaged_is_not_taken_over(server: HubServer, user: HubUser) -> None:
    """What others put into the cache is checked as well, by the name of the blob where nothing else is known."""
    from huggingface_hub import hf_hub_download

    server.repository("o/n", {"m.gguf": MODEL})
    path = Path(
        hf_hub_download("o/n", "m.gguf", cache_dir=user.directory / "hub", endpoint=server.endpoint, token=TOKEN)
    )
    assert user.locate("hf://o/n", offline=True).path == path
    damage(path, "bit")
    with pytest.raises(ModelFileError, match=r"m\.gguf \(wanted sha256"):
        user.locate("hf://o/n", offline=True)


def test_a_branch_that_moves(server: HubServer, user: HubUser, tmp_path: Path) -> None:
    repository = server.repository("o/n", {"m.gguf": MODEL})
    first = user.locate("hf://o/n@main")
    repository.commit({"m.gguf": OTHER})
    other_user = HubUser(server, tmp_path / "other")
    second = other_user.locate("hf://o/n@main")
    assert (first.path.read_bytes(), second.path.read_bytes()) == (MODEL, OTHER)
    assert "start both with one revision" in revision_conflict(first.revision, second.revision)
    pinned = other_user.locate(first.reference)
    assert (pinned.path.read_bytes(), revision_conflict(first.revision, pinned.revision)) == (MODEL, "")


def test_a_branch_that_moves_between_the_manifest_and_the_parts(server: HubServer, user: HubUser) -> None:
    repository = server.repository("o/n", PACKAGE)
    hub = user.hub()
    snapshot = hub.snapshot("o/n")
    hub.fetch(snapshot, ["model-package.json"])
    repository.commit({name: content(99) for name in PACKAGE})
    found = hub.fetch(snapshot, ["shared.gguf", "layers/1.gguf"])
    assert {name: path.read_bytes() for name, path in found.items()} == {
        name: PACKAGE[name] for name in ("shared.gguf", "layers/1.gguf")
    }


def test_offline_after_online(server: HubServer, user: HubUser) -> None:
    repository = server.repository("o/n", PACKAGE)
    commit = repository.branches["main"]
    user.locate("hf://o/n", LayerRange(0, 1))
    repository.commit({"m.gguf": OTHER})
    asked = len(server.requests)
    located = user.locate("hf://o/n", LayerRange(0, 1), offline=True)
    assert located.revision == f"o/n@{commit}"
    assert user.notes == [f"hf://o/n@main: HF_HUB_OFFLINE is set; using the cached commit {commit}"]
    with pytest.raises(ModelFileError, match=r"2 of 3 files that are needed .*: layers/2\.gguf, output\.gguf$"):
        user.locate("hf://o/n", LayerRange(2, 3), offline=True)
    for reference in ("hf://o/n@v2", "hf://o/other"):
        with pytest.raises(RetryableError, match=r"HF_HUB_OFFLINE is set, and the cache in .* does not hold it"):
            user.locate(reference, offline=True)
    assert len(server.requests) == asked


@pytest.mark.parametrize("how", ["closed", 500, 503])
def test_a_hub_that_cannot_be_reached(server: HubServer, user: HubUser, how: str | int, tmp_path: Path) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    first = user.locate("hf://o/n")
    unreachable = {}
    if how == "closed":
        unreachable["endpoint"] = "http://127.0.0.1:1"
        # What a branch is is remembered for each hub; a commit is a commit everywhere.
        assert user.locate(first.reference, **unreachable).path == first.path
        with pytest.raises(RetryableError, match="cannot be reached"):
            user.locate("hf://o/n", **unreachable)
        return
    server.faults["listing"] = [how, how]
    assert user.locate("hf://o/n").path == first.path
    assert f"{server.endpoint} cannot be reached" in user.notes[0]
    with pytest.raises(RetryableError, match=r"cannot be reached .* does not hold it"):
        user.locate("hf://o/n", cache=tmp_path / "empty")


def test_what_the_hub_does_not_have_or_give(server: HubServer, user: HubUser) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    server.repository("o/gated", {"m.gguf": MODEL}).gated = True
    for reference, words in (
        ("hf://o/none", "no such repository"),
        ("hf://o/n@v9", "hf://o/n@v9: the repository has no such revision"),
        (f"hf://o/n@{'a' * 40}", "no such revision"),
        ("hf://o/n/x.gguf", r"no file 'x\.gguf'; name one of m\.gguf"),
        ("hf://o/n/folder", "no such file or folder"),
        ("hf://o/gated", r"hf://o/gated@.{40}/m\.gguf: access is gated: accept its terms on .*, then set HF_TOKEN"),
    ):
        with pytest.raises(ModelFileError, match=words) as caught:
            user.locate(reference)
        assert "\n" not in str(caught.value)
    assert fetched(server) == set()


@pytest.mark.parametrize("name", ["../m.gguf", "/abs/m.gguf", "a/../../m.gguf", "a\\m.gguf", "", ".", "x/", "m\0.gguf"])
def test_names_that_the_hub_lists(server: HubServer, user: HubUser, name: str) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    server.listing = {"siblings": [{"rfilename": "m.gguf"}, {"rfilename": name}]}
    with pytest.raises(ModelFileError, match="file name"):
        user.locate("hf://o/n")
    assert fetched(server) == set()


@pytest.mark.parametrize(
    "listing",
    [b"<html>sign in</html>", b"[]", b"{}", b"", {"sha": None}, {"sha": "main"}, {"sha": "../../x"}, {"siblings": [5]}],
    ids=str,
)
def test_answers_that_are_no_list(server: HubServer, user: HubUser, listing: Any) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    server.listing = listing
    with pytest.raises(ModelFileError, match="hf://o/n@main: "):
        user.locate("hf://o/n")


@pytest.mark.parametrize("size", [-1, "20000", [], 1.5, 2**63])
def test_a_size_that_is_none_is_no_size(server: HubServer, user: HubUser, size: Any) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    server.listing = {"siblings": [{"rfilename": "m.gguf", "size": size, "blobId": 5}]}
    assert user.locate("hf://o/n").path.read_bytes() == MODEL


def test_a_disk_that_is_too_small(server: HubServer, user: HubUser) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    server.listing = {"siblings": [{"rfilename": "m.gguf", "size": 10**18}]}
    with pytest.raises(ModelFileError, match=rf"wanted {10**18} bytes of space in .*, \d+ are free"):
        user.locate("hf://o/n")
    assert fetched(server) == set()


def test_a_disk_that_runs_full(
    server: HubServer,
    user: HubUser,
    ended: Callable[..., str],
) -> None:
    server.repository("o/n", {"m.gguf": content(1, 300_000)})
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    text = ended(user.start("hf://o/n", before=limit))
    assert text.startswith("RetryableError hf://o/n@")
    assert "File too large" in text
    assert user.leftovers() == []
    assert Path(ended(user.start("hf://o/n"))).read_bytes() == content(1, 300_000)


def test_two_at_once(server: HubServer, user: HubUser, ended: Callable[..., str]) -> None:
    server.repository("o/n", {"m.gguf": content(1, 3_000_000)})
    server.held.clear()
    processes = [user.start("hf://o/n") for _ in range(2)]
    assert server.started.acquire(timeout=60)  # one transfers, and the other will find it doing so, or its file
    server.held.set()
    paths = {ended(process) for process in processes}
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == content(1, 3_000_000)
    assert user.leftovers() == []


def test_killed_while_transferring(server: HubServer, user: HubUser, ended: Callable[..., str]) -> None:
    server.repository("o/n", {"m.gguf": MODEL})
    server.held.clear()
    process = user.start("hf://o/n")
    assert server.started.acquire(timeout=60)
    process.kill()
    process.communicate()
    server.held.set()
    assert Path(ended(user.start("hf://o/n"))).read_bytes() == MODEL


def test_the_environment_decides(server: HubServer, user: HubUser, ended: Callable[..., str]) -> None:
    server.repository("o/n", {"m.gguf": MODEL}).needs_token = TOKEN
    path = Path(ended(user.start("hf://o/n")))
    assert path.is_relative_to(user.directory / "hub")
    asked = len(server.requests)
    assert ended(user.start("hf://o/n", HF_HUB_OFFLINE="1")) == str(path)
    assert len(server.requests) == asked
    assert "HF_TOKEN may not read it" in ended(user.start("hf://o/n", HF_TOKEN="hf_other"))
