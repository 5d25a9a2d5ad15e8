"""Manifests and parts that lie: refused with words before native code sees anything (cases P03, G01, G02, G04)."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import UINT16, read_raw, scalar
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from model_files import rewrite, tiny
from package_helpers import (
    Content,
    check_stage,
    contents,
    copied,
    edited,
    flip,
    package_of,
    part_of,
    refusal_of,
    sha256,
)
from stage_processes import run_many

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.models import open_model
from skippy_zmq.sources.package.manifest import MAX_MANIFEST_BYTES, parse_manifest
from skippy_zmq.sources.package.opening import PackageModel

MANIFEST = "model-package.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return package_of(tiny(folder / "tiny.gguf", hidden=32, ffn=32, heads=2, kv_heads=1), folder / "package")


def _set(path: str, key: str, value: object) -> Callable[[Content], object]:
    return lambda content: part_of(content, path).update({key: value})


def _drop(path: str, key: str) -> Callable[[Content], object]:
    return lambda content: part_of(content, path).pop(key)


def _tensor(which: str, /, **values: object) -> Callable[[Content], object]:
    return lambda content: next(t for t in content["tensors"] if t["name"] == which).update(values)


_Q = "blk.1.attn_q.weight"
_WRONG: dict[str, tuple[Callable[[Content], object], str]] = {
    "sha of another part": (
        lambda content: part_of(content, "layers/00001.gguf").update(
            sha256=part_of(content, "layers/00002.gguf")["sha256"]
        ),
        "layers/00001.gguf: wanted sha256",
    ),
    "sha missing": (_drop("output.gguf", "sha256"), "parts[6].sha256: field required"),
    "sha empty": (_set("output.gguf", "sha256", ""), "parts[6].sha256"),
    "sha too short": (_set("output.gguf", "sha256", "ab" * 31), "parts[6].sha256"),
    "sha with a newline": (_set("output.gguf", "sha256", "ab" * 32 + "\n"), "parts[6].sha256"),
    "layer absent": (
        lambda content: content["parts"].remove(part_of(content, "layers/00002.gguf")),
        "there is no part for layer 2",
    ),
    "layer twice": (_set("layers/00002.gguf", "layer", 1), "layer 1 has 2 parts"),
    "part twice": (
        lambda content: content["parts"].append(part_of(content, "output.gguf")),
        "path 'output.gguf' appears twice",
    ),
    "one layer more": (lambda content: content.update(n_layers=5), "no part for layer 4"),
    "one layer less": (lambda content: content.update(n_layers=3), "n_layers is 3, but the metadata"),
    "layers as text": (lambda content: content.update(n_layers="4"), "n_layers: input should be a valid integer"),
    "no layers": (lambda content: content.update(n_layers=0), "n_layers"),
    "schema of the future": (lambda content: content.update(schema_version=2), "schema_version: wanted 1, got '2'"),
    "schema as bool": (lambda content: content.update(schema_version=True), "schema_version: wanted 1"),
    "abi of the future": (lambda content: content.update(abi_version=9), "abi_version: wanted 1, got '9'"),
    "abi missing": (lambda content: content.pop("abi_version"), "abi_version: wanted 1, got 'None'"),
    "unknown kind": (_set("output.gguf", "kind", "head"), "parts[6].kind"),
    "layer number of the head": (_set("output.gguf", "layer", 3), "parts[6]: wanted a layer number for parts of kind"),
    "negative size": (_set("output.gguf", "size", -1), "parts[6].size"),
    "huge size": (_set("output.gguf", "size", 2**70), "parts[6].size"),
    "size of the manifest is wrong": (_set("output.gguf", "size", 1000), "output.gguf: size is 1000, but its tensors"),
    "size of the shared part is wrong": (_set("shared.gguf", "size", 1000), "shared.gguf: wanted 1000 bytes"),
    "tensor count": (_set("output.gguf", "tensor_count", 3), "output.gguf: tensor_count is 3, but 2 tensors"),
    "no parts": (lambda content: content.update(parts=[]), "parts: wanted a list of 1 to"),
    "no tensors": (lambda content: content.pop("tensors"), "tensors: wanted a list of 1 to"),
    "tensor in another part": (_tensor(_Q, part="layers/00002.gguf"), f"tensor '{_Q}' is in layers/00002.gguf"),
    "tensor in no part": (_tensor(_Q, part="nowhere.gguf"), f"tensor '{_Q}': 'nowhere.gguf' is no part"),
    "tensor twice": (
        lambda content: content["tensors"].append({**content["tensors"][-1], "part": "layers/00001.gguf"}),
        "appears twice, in 'output.gguf' and in 'layers/00001.gguf'",
    ),
    "tensor of another name": (_tensor(_Q, name="blk.1.attn_x.weight"), "header is not that of split 3"),
    "tensor of a layer too many": (_tensor(_Q, name="blk.7.attn_q.weight"), "wanted it in the part of kind layer 7"),
    "name too long": (_tensor(_Q, name="x" * 64), "wanted a name of 1 to 63 bytes"),
    "name with NUL": (_tensor(_Q, name="blk.1.x\0"), "wanted a name of"),
    "shape that wraps": (_tensor(_Q, shape=[4, 2**30 - 1, 2**30 + 1, 2**10]), "elements, wanted at most"),
    "shape of five": (_tensor(_Q, shape=[1, 1, 1, 1, 1]), "wanted 1 to 4 dimensions, got 5"),
    "shape of none": (_tensor(_Q, shape=[]), "wanted 1 to 4 dimensions, got 0"),
    "shape with zero": (_tensor(_Q, shape=[32, 0]), "wanted dimensions of 1 to"),
    "shape turned": (_tensor("output.weight", shape=[300, 32]), "header is not that of split 6"),
    "type that does not exist": (_tensor(_Q, type="Q9_Z"), "wanted a known tensor type, got 'Q9_Z'"),
    "type as number": (_tensor(_Q, type=0), ".type: input should be a valid string"),
    "type of other blocks": (_tensor(_Q, type="Q4_K"), "must be a multiple of 256"),
    "identity": (lambda content: content.update(identity="x"), "identity"),
}


@pytest.mark.parametrize("name", _WRONG)
def test_manifests_that_lie(sound: Path, tmp_path: Path, name: str) -> None:
    edit, words = _WRONG[name]
    assert words in refusal_of(edited(copied(sound, tmp_path / "package"), edit))


def test_capitals_and_unknown_fields_are_no_fault(sound: Path, tmp_path: Path) -> None:
    folder = copied(sound, tmp_path / "package")

    def edit(content: Content) -> None:
        content["comment"] = {"by": "somebody"}
        content["parts"].reverse()
        for part in content["parts"]:
            part["sha256"] = part["sha256"].upper()
            part["comment"] = 1

    check_stage(edited(folder, edit))


def test_all_problems_of_a_manifest_are_listed(sound: Path, tmp_path: Path) -> None:
    def edit(content: Content) -> None:
        content["n_layers"] = 6
        content["identity"] = 3
        part_of(content, "output.gguf")["sha256"] = ""
        part_of(content, "embeddings.gguf")["path"] = "../e.gguf"
        content["tensors"][5]["type"] = "Q9"

    message = refusal_of(edited(copied(sound, tmp_path / "package"), edit))
    for words in ("identity: ", "parts[6].sha256", "leaves the folder", "tensor type, got 'Q9'", "problems: "):
        assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a JSON document"),
        ("[]", "wanted a JSON object"),
        ("{" * 100_000, "not a JSON document"),
        ("[" * 100_000, "not a JSON document"),
        ('{"schema_version": 1, "schema_version": 1}', "key 'schema_version' appears twice"),
        ('{"schema_version": NaN}', "NaN is no JSON number"),
        ('{"schema_version": 1' + "0" * 5000 + "}", "not a JSON document"),
        ('{"schema_version": 1, "abi_version": 1}', "parts: wanted a list of 1 to 4096 entries, got none"),
        ("\udcff", "not a JSON document"),
        (" " * (MAX_MANIFEST_BYTES + 1), "wanted at most"),
    ],
    ids=["empty", "list", "deep", "deep list", "twice", "nan", "digits", "bare", "no utf-8", "long"],
)
def test_documents_that_are_none(sound: Path, tmp_path: Path, text: str, words: str) -> None:
    folder = copied(sound, tmp_path / "package")
    (folder / MANIFEST).write_text(text, errors="surrogateescape")
    assert words in refusal_of(folder)


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 3, 5, -1, 2**31, 2**63, 2**64 - 1, 2**70]),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["", ".", "..", "../x", "/x", "shared.gguf", "layers/00001.gguf", "layer", "mmproj", "F32", "Q4_K"]
    ),
    st.lists(st.integers(), max_size=5),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@st.composite
def _mutations(draw: st.DrawFn) -> list[tuple[float, str, Any]]:
    kinds = st.sampled_from(["set", "drop", "double", "swap"])
    return draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), kinds, _VALUES), min_size=1, max_size=4))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with each of its keys or indices."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *_places(value[key])]]


@given(_mutations())
@example([(0.0, "set", 1)])
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_manifests_open_as_they_were_or_are_refused(
    sound: Path, mutations: list[tuple[float, str, Any]]
) -> None:
    original = contents(sound)
    content = copy.deepcopy(original)
    for where, kind, value in mutations:
        places = _places(content)
        if not places:
            break
        container, key = places[int(where * len(places))]
        if kind == "set":
            container[key] = value
        elif kind == "drop":
            del container[key]
        elif isinstance(container, list):
            container.insert(0, copy.deepcopy(container[key]) if kind == "double" else container.pop(key))
        else:
            container[key] = copy.deepcopy(content)
    draft = parse_manifest(json.dumps(content).encode(errors="surrogatepass"))
    assert (draft.manifest is None) == bool(draft.problems)
    if draft.manifest is None:
        return
    # What passes describes the same files: nothing that native code will rely on has changed.
    good = parse_manifest(json.dumps(original).encode()).manifest
    assert good is not None
    sizes = [(part.kind, part.layer, part.size, part.tensor_count) for part in good.model_parts[1:]]
    assert [(part.kind, part.layer, part.size, part.tensor_count) for part in draft.manifest.model_parts[1:]] == sizes
    assert sum(tensor.nbytes for tensor in draft.manifest.tensors) == sum(tensor.nbytes for tensor in good.tensors)


def _with_hash(folder: Path, path: str) -> Path:
    """The manifest names what is there now."""

    def edit(content: Content) -> None:
        part_of(content, path).update(sha256=sha256(folder / path), size=(folder / path).stat().st_size)

    return edited(folder, edit)


def test_parts_that_fit_their_hash_but_not_the_package(sound: Path, tmp_path: Path) -> None:
    other = package_of(
        tiny(tmp_path / "other.gguf", n_layers=5, hidden=32, ffn=32, heads=2, kv_heads=1), tmp_path / "other"
    )
    for path in ("layers/00002.gguf", "shared.gguf", "output.gguf"):
        folder = copied(sound, tmp_path / path.replace("/", "-"))
        (folder / path).write_bytes((other / path).read_bytes())
        message = refusal_of(_with_hash(folder, path))
        assert path in message
        assert "build the package again" in message
    folder = copied(sound, tmp_path / "swapped")  # the next layer in place of this one
    (folder / "layers/00001.gguf").write_bytes((sound / "layers/00002.gguf").read_bytes())
    assert "layers/00001.gguf: its header is not that of split 3" in refusal_of(_with_hash(folder, "layers/00001.gguf"))


def test_a_shared_part_with_other_split_numbers_or_tensors(sound: Path, tmp_path: Path) -> None:
    for number, edit in enumerate(
        (
            lambda raw: raw.values.update({"split.count": scalar(UINT16, 9)}),
            lambda raw: raw.values.pop("split.no"),
            lambda raw: raw.tensors.update(dict(list(read_raw(sound / "output.gguf").tensors.items())[:1])),
        )
    ):
        folder = copied(sound, tmp_path / str(number))
        rewrite(sound / "shared.gguf", folder / "shared.gguf", edit)
        message = refusal_of(_with_hash(folder, "shared.gguf"))
        assert "shared.gguf: " in message
        assert "build the package again" in message


def test_parts_cut_short(sound: Path, tmp_path: Path) -> None:
    """Case G01, for parts: also where the manifest names the hash of what is left."""
    size = (sound / "layers/00003.gguf").stat().st_size
    for keep in (0, 3, 8, 24, 300, size - 1):
        folder = copied(sound, tmp_path / str(keep))
        os.truncate(folder / "layers/00003.gguf", keep)
        assert f"layers/00003.gguf: wanted {size} bytes, has {keep}; fetch it again" in refusal_of(folder)
        assert f"size is {keep}, but its tensors make a file of {size}" in refusal_of(
            _with_hash(folder, "layers/00003.gguf")
        )


def test_the_stage_program_refuses_in_one_line(sound: Path, tmp_path: Path) -> None:
    damaged = copied(sound, tmp_path / "damaged")
    flip(damaged / "layers/00001.gguf")
    absent = copied(sound, tmp_path / "absent")
    (absent / "layers/00000.gguf").unlink()
    lying = edited(copied(sound, tmp_path / "lying"), lambda content: content.update(n_layers=7))
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    (hollow / MANIFEST).write_text("{}")
    arguments = ("--layers", "0:2", "--bind", f"ipc://{tmp_path}/s", "--next", "ipc:///nowhere")
    paths = (damaged, absent, lying, hollow, hollow / MANIFEST)
    for path, (code, stderr) in zip(paths, run_many([("--model", str(p), *arguments) for p in paths]), strict=True):
        assert code == 2, stderr
        assert stderr.splitlines()[-1].startswith(f"error: {path}"), stderr
    assert not (tmp_path / "s").exists()


def test_a_package_is_known_by_its_manifest(sound: Path) -> None:
    assert isinstance(open_model(sound), PackageModel)
    with pytest.raises(ModelFileError, match="no such file or folder"):
        open_model(sound / "layers" / MANIFEST)
