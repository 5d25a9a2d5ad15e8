"""What a model argument names, and which files of it a stage needs: by names and manifests alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import shards, tiny

from skippy_zmq.errors import ModelFileError, OptionError
from skippy_zmq.sources.gguf_model import open_model
from skippy_zmq.sources.needed_files import (
    checkpoint_shape,
    checkpoint_shards,
    gguf_files,
    package_parts,
    package_projectors,
)
from skippy_zmq.sources.references import HubReference, locate, parse_reference, revision_conflict
from skippy_zmq.sources.relative_names import checked_name
from skippy_zmq.topology import LayerRange

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "repository", "revision", "file"),
    [
        ("hf://org/pkg", "org/pkg", "main", ""),
        ("hf://org/pkg@v1.0", "org/pkg", "v1.0", ""),
        (f"hf://o/n@{COMMIT}", "o/n", COMMIT, ""),
        ("hf://o/n@refs%2Fpr%2f1/a/b.gguf", "o/n", "refs/pr/1", "a/b.gguf"),
        ("hf://o-1/n_2.3/m.gguf", "o-1/n_2.3", "main", "m.gguf"),
        ("hf://o/n/./m.gguf", "o/n", "main", "m.gguf"),
    ],
)
def test_references(text: str, repository: str, revision: str, file: str) -> None:
    reference = parse_reference(text)
    assert reference == HubReference(repository, revision, file)
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://org",
        "hf://org/",
        "hf:///pkg",
        "hf://org/pkg@",
        "hf://org/pkg@/m.gguf",
        "hf://org/pkg/../x@main",
        "hf://org/pkg/x@main",
        "hf://org/pkg/",
        "hf://org/pkg//m.gguf",
        "hf://org/pkg/m\\..\\x",
        "hf://org/pkg@a..b",
        "hf://org/pkg@-x",
        "hf://org/pkg@main x",
        "hf://../pkg",
        "hf://org/..",
        "hf://org/a--b",
        "hf://org/a\0b",
        "hf://ö/pkg",
        "hf:/org/pkg",
        "hf:org/pkg",
        "HF://org/pkg",
        "hf://" + "a" * 200 + "/pkg",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        parse_reference(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["m.gguf", "/abs/m.gguf", "./hf/m.gguf", "half://x", ""])
def test_what_is_a_path(text: str) -> None:
    assert parse_reference(text) is None


@pytest.mark.parametrize("name", ["ok", "./ok", "sub/ok", "sub/./ok", "a b.gguf", "ü.gguf", "..a", "a..b"])
def test_names_inside_a_folder(name: str) -> None:
    assert checked_name(name, "list") == name.replace("./", "")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "./",
        "..",
        "../x",
        "/abs/x",
        "a/../../x",
        "a//b",
        "sub/",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 5000,
        3,
    ],
)
def test_names_that_could_leave_it(name: object) -> None:
    with pytest.raises(ModelFileError, match="list: file name") as caught:
        checked_name(name, "list")
    assert len(str(caught.value)) < 400


def test_kinds_of_local_models(tmp_path: Path) -> None:
    for folder in ("one", "parts"):
        (tmp_path / folder).mkdir()
    model = tiny(tmp_path / "one" / "m.gguf")
    assert locate(model).path == model
    assert locate(tmp_path / "one").path == model  # the only model of a folder
    assert locate(tmp_path / "one").kind == "gguf"
    whole = tiny(tmp_path / "parts" / "m.gguf")
    first = shards(whole, 3)
    whole.unlink()
    assert locate(tmp_path / "parts").path == first
    assert open_model(locate(tmp_path / "parts").path).n_layers == 4
    (tmp_path / "package").mkdir()
    manifest = tmp_path / "package" / "model-package.json"
    manifest.write_text("{}")
    for path in (manifest, manifest.parent):
        located = locate(path)
        assert (located.kind, located.path, located.revision) == ("package", manifest.parent, "")
    (tmp_path / "checkpoint").mkdir()
    weights = tmp_path / "checkpoint" / "model.safetensors"
    for path in (weights, tmp_path / "checkpoint" / "config.json"):
        path.write_bytes(b"{}")
    assert locate(tmp_path / "checkpoint").kind == "checkpoint"
    assert locate(weights).path == weights
    assert locate(weights).kind == "checkpoint"
    assert locate(tmp_path / "checkpoint" / "config.json").path == tmp_path / "checkpoint"
    tiny(tmp_path / "checkpoint" / "made-of-it.gguf")
    assert locate(tmp_path / "checkpoint").kind == "checkpoint"


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    for path, words in (
        (tmp_path / "m.gguf", r"m\.gguf: no such file or folder$"),
        (Path("owner/name"), "owner/name: no such file or folder; a model on a hub is hf://owner/name$"),
        (Path("https://hub/owner/name"), "no such file or folder; wanted hf://owner/name"),
    ):
        with pytest.raises(ModelFileError, match=words):
            locate(path)


def test_a_folder_of_several_models_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "mmproj-b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelFileError, match=r"wanted one GGUF model; name one of a\.gguf, b\.gguf$"):
        locate(tmp_path)


SHARDED = [f"q4/m-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]


def test_gguf_files_of_a_list() -> None:
    names = ["README.md", "m.gguf", *SHARDED, "mmproj-m.gguf"]
    assert gguf_files(names, "here", "m.gguf") == ["m.gguf"]
    for chosen in SHARDED:
        assert gguf_files(names, "here", chosen) == SHARDED
    assert gguf_files(["mmproj-m.gguf"], "here") == ["mmproj-m.gguf"]
    assert gguf_files(["x", *SHARDED], "here") == SHARDED
    with pytest.raises(ModelFileError, match=r"name one of m\.gguf, q4/m-00001-of-00003\.gguf"):
        gguf_files(names, "here")
    with pytest.raises(ModelFileError, match=r"no file 'x\.gguf'"):
        gguf_files(names, "here", "x.gguf")
    with pytest.raises(ModelFileError, match="there is none"):
        gguf_files(["README.md"], "here")


def manifest(*, tied: bool = False, path: object = "shared.gguf") -> bytes:
    parts = [
        {"kind": "embeddings", "path": "embeddings.gguf"},
        {"kind": "shared", "path": path},
        *({"kind": "layer", "layer": layer, "path": f"layers/{layer}.gguf"} for layer in range(4)),
        {"kind": "output", "path": "output.gguf"},
        {"kind": "mmproj", "path": "mmproj.gguf"},
    ]
    names = ["token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", *([] if tied else ["output.weight"])]
    return json.dumps({"n_layers": 4, "parts": parts, "tensors": [{"name": name} for name in names]}).encode()


@pytest.mark.parametrize(
    ("layers", "tied", "wanted"),
    [
        ("0:1", False, ["shared", "embeddings", "layers/0"]),
        ("1:3", False, ["shared", "layers/1", "layers/2"]),
        ("3:4", False, ["shared", "layers/3", "output"]),
        ("3:4", True, ["shared", "embeddings", "layers/3", "output"]),
        ("1:3", True, ["shared", "layers/1", "layers/2"]),
        (None, False, ["shared", "embeddings", "layers/0", "layers/1", "layers/2", "layers/3", "output"]),
    ],
)
def test_parts_of_a_package(layers: str | None, tied: bool, wanted: list[str]) -> None:
    stage = LayerRange.parse(layers) if layers else None
    assert package_parts(manifest(tied=tied), "m", stage) == [f"{name}.gguf" for name in wanted]


def test_projectors_of_a_package_are_no_parts_of_a_stage() -> None:
    assert package_projectors(manifest(), "m") == ["mmproj.gguf"]
    assert package_projectors(b"{}", "m") == []
    with pytest.raises(ModelFileError, match="m: file name"):
        package_projectors(b'{"parts": [{"kind": "mmproj", "path": "../x.gguf"}]}', "m")


def test_parts_of_a_package_that_lead_elsewhere() -> None:
    for path in ("../x.gguf", "/abs/x", "a/../../x", "a\\x", "", ".", "x/", None, 5, "x" * 5000):
        with pytest.raises(ModelFileError, match="m: file name"):
            package_parts(manifest(path=path), "m")
    with pytest.raises(OptionError, match="the model has 4 layers"):
        package_parts(manifest(), "m", LayerRange(3, 5))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"{}", b'{"n_layers": 4, "parts": [3], "tensors": []}', b"[" * 99999]
)
def test_manifests_that_are_none(text: bytes) -> None:
    with pytest.raises(ModelFileError, match=r"^m: "):
        package_parts(text, "m")


def test_weight_files_of_a_checkpoint() -> None:
    weight_map = {f"model.layers.{layer}.mlp.up_proj.weight": f"{layer // 2}.safetensors" for layer in range(6)}
    weight_map |= {"model.embed_tokens.weight": "embed.safetensors", "model.norm.weight": "2.safetensors"}
    index = json.dumps({"weight_map": {**weight_map, "lm_head.weight": "head.safetensors"}}).encode()

    def files(layers: str, index: bytes = index, *, tied: bool = False) -> list[str]:
        stage = LayerRange.parse(layers)
        return [name.split(".")[0] for name in checkpoint_shards(index, "i", stage, n_layers=6, tied=tied)]

    assert files("2:4") == ["1"]
    assert files("0:3") == ["0", "1", "2", "embed", "head"]  # a norm that counts for both ends lies in 2
    assert files("4:6") == ["2", "head"]
    assert files("4:6", tied=True) == ["2", "embed", "head"]
    assert checkpoint_shards(index, "i") == sorted(f"{x}.safetensors" for x in ("0", "1", "2", "embed", "head"))
    endless = json.dumps({"weight_map": {f"model.layers.{'9' * 5000}.w": "9.safetensors"}}).encode()
    assert files("2:4", endless) == []
    for name in ("../0.safetensors", "/0", "", 3):
        with pytest.raises(ModelFileError, match="i: file name"):
            checkpoint_shards(json.dumps({"weight_map": {"a": name}}).encode(), "i")
    for text in (b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"x"):
        with pytest.raises(ModelFileError, match=r"^i: "):
            checkpoint_shards(text, "i")


def test_the_shape_of_a_checkpoint() -> None:
    assert checkpoint_shape(b'{"num_hidden_layers": 6, "tie_word_embeddings": false}', "c") == (6, False)
    assert checkpoint_shape(b'{"text_config": {"num_hidden_layers": 3}}', "c") == (3, True)
    beside = {"num_hidden_layers": 3, "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": None}}
    assert checkpoint_shape(json.dumps(beside).encode(), "c") == (3, False), "as whoever opens it reads it"
    for text in (b"{}", b'{"num_hidden_layers": true}', b'{"num_hidden_layers": 0}', b"[]"):
        with pytest.raises(ModelFileError, match=r"^c: "):
            checkpoint_shape(text, "c")


def test_commits_do_not_mix() -> None:
    other = "f" * 40
    assert revision_conflict(f"o/n@{COMMIT}", f"o/n@{COMMIT}") == ""
    assert revision_conflict("", f"o/n@{COMMIT}") == ""
    assert revision_conflict("", "") == ""
    assert revision_conflict(f"a/n@{COMMIT}", f"b/n@{other}") == ""  # then their contents decide
    text = revision_conflict(f"o/n@{COMMIT}", f"o/n@{other}")
    assert COMMIT in text
    assert other in text
