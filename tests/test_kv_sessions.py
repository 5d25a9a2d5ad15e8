"""Saved sessions: written page by page, read in any split, refused by name where anything is wrong."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_states import BUILD, MODEL, State, plain_layers, states, tiles
from safetensors.numpy import load_file

from skippy_zmq.errors import KvPageError
from skippy_zmq.kv.page import verify
from skippy_zmq.kv.session_files import SavedSession, SessionWriter
from skippy_zmq.kv.session_manifest import MANIFEST, SessionFacts
from skippy_zmq.topology import LayerRange

STATE = State(plain_layers(0, 6), tuple(range(100, 110)))
EXTRA = {"temperature": 0.7, "text": "été \U0001f600", "history": [1, {"a": None}]}


def facts_of(state: State, **changes: Any) -> SessionFacts:
    return dataclasses.replace(
        SessionFacts("a talk", MODEL, BUILD, state.tokens, 64, state.page_tokens, EXTRA), **changes
    )


def save(directory: Path, state: State = STATE, split: tuple[int, ...] = (3,), **changes: Any) -> None:
    edges = [0, *split, len(state.layers)]
    with SessionWriter(directory, facts_of(state, **changes)) as writer:
        for low, high in itertools.pairwise(edges):
            for page in state.pages(state.layers[low:high]):
                writer.add(page)
        writer.commit()


@settings(max_examples=60)
@given(data=st.data())
def test_a_session_is_read_in_any_split(data: st.DataObject) -> None:
    state = data.draw(states(max_tokens=12))
    n, n_layers = len(state.tokens), len(state.layers)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "talk"
        with SessionWriter(directory, facts_of(state)) as writer:
            pages = [
                state.page(first, end, state.layers[low:high])
                for low, high in data.draw(tiles(n_layers))
                for first, end in data.draw(tiles(n))
            ]
            for page in data.draw(st.permutations(pages)):
                writer.add(page)
            writer.commit()
        saved = SavedSession(directory)
        saved.verify()
        assert saved.facts == facts_of(state)
        assert (saved.manifest.layers, saved.manifest.n_cached) == (state.layers, n)
        for low, high in data.draw(tiles(10)):
            wanted = tuple(rows for rows in state.layers if low <= rows.layer < high)
            page_tokens = data.draw(st.none() | st.integers(1, 5))
            read = list(saved.pages(LayerRange(low, high), page_tokens))
            assert [page.descriptor.first for page in read] == ([0, *(p.descriptor.end for p in read)][:-1])
            assert sum(page.descriptor.n_tokens for page in read) == (n if wanted else 0)
            for page in read:
                verify(page)
                assert page.descriptor.layers == wanted
                assert bytes(page.payload) == state.payload(wanted, page.descriptor.first, page.descriptor.end)
                assert page_tokens is None or page.descriptor.n_tokens <= page_tokens


def test_the_files_are_safetensors_and_the_manifest_says_what_they_are(tmp_path: Path) -> None:
    save(tmp_path / "talk")
    manifest = json.loads((tmp_path / "talk" / MANIFEST).read_text())
    assert manifest["extra"] == EXTRA
    assert manifest["tokens"] == list(STATE.tokens)
    assert manifest["link_after"] == STATE.links.at(10).hex()
    for entry in manifest["files"]:
        path = tmp_path / "talk" / entry["name"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        assert path.stat().st_size == entry["bytes"]
        tensors = load_file(path)
        assert set(tensors) == {
            f"layers.{layer}.{part}" for layer in range(entry["layer_start"], entry["layer_end"]) for part in "kv"
        }
        for layer in range(entry["layer_start"], entry["layer_end"]):
            assert (tensors[f"layers.{layer}.k"] == STATE.k[layer][entry["first"] : entry["end"]]).all()
    assert {path.name for path in (tmp_path / "talk").iterdir()} == {
        MANIFEST,
        *(entry["name"] for entry in manifest["files"]),
    }


def test_the_last_token_may_have_no_state_yet(tmp_path: Path) -> None:
    longer = facts_of(STATE, tokens=(*STATE.tokens, 7))
    with SessionWriter(tmp_path, longer) as writer:
        for page in STATE.pages():
            writer.add(page)
        writer.commit()
    saved = SavedSession(tmp_path)
    assert (saved.manifest.n_cached, saved.facts.tokens[-1]) == (10, 7)


def test_a_saved_session_is_replaced_whole(tmp_path: Path) -> None:
    save(tmp_path)
    other = State(STATE.layers, tuple(range(5)))
    with SessionWriter(tmp_path, facts_of(other)) as writer:
        for page in other.pages():
            writer.add(page)
        assert SavedSession(tmp_path).facts == facts_of(STATE)  # until the moment of the commit
        SavedSession(tmp_path).verify()
        writer.commit()
    saved = SavedSession(tmp_path)
    saved.verify()
    assert saved.facts == facts_of(other)
    assert len(list(tmp_path.iterdir())) == 1 + len(other.pages())


def test_a_save_that_is_given_up_leaves_what_was_there(tmp_path: Path) -> None:
    save(tmp_path / "old")
    before = {path: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    for name in ("old", "new"):
        with SessionWriter(tmp_path / name, facts_of(STATE)) as writer:
            writer.add(STATE.pages()[0])
    assert {path: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_what_a_save_that_was_killed_left_is_no_session_and_no_obstacle(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / MANIFEST).rename(tmp_path / f".new-{MANIFEST}")
    with pytest.raises(KvPageError, match=r"session .*: session.json: No such file or directory"):
        SavedSession(tmp_path)
    save(tmp_path, split=(2, 4))
    SavedSession(tmp_path).verify()
    assert len(list(tmp_path.iterdir())) == 1 + 3 * len(STATE.pages())


def _letter(directory: Path) -> None:
    (directory / "letter.txt").write_text("dear")


def _other_json(directory: Path) -> None:
    (directory / MANIFEST).write_text('{"kind": "cookies"}')


def _link(directory: Path) -> None:
    (directory / MANIFEST).symlink_to("/dev/null")


def _folder(directory: Path) -> None:
    (directory / MANIFEST).mkdir()


@pytest.mark.parametrize("fill", [_letter, _other_json, _link, _folder])
def test_what_is_no_saved_session_is_not_overwritten(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    fill(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KvPageError, match="not overwritten"):
        SessionWriter(tmp_path, facts_of(STATE))
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_in_the_directorys_place_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "talk").write_text("dear")
    with pytest.raises(KvPageError, match="File exists"):
        SessionWriter(tmp_path / "talk", facts_of(STATE))
    with pytest.raises(KvPageError, match="Not a directory"):
        SavedSession(tmp_path / "talk")


def test_two_saves_at_once_are_refused(tmp_path: Path) -> None:
    with (
        SessionWriter(tmp_path, facts_of(STATE)),
        pytest.raises(KvPageError, match="another save into it is under way"),
    ):
        SessionWriter(tmp_path, facts_of(STATE))
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again
    os.close(handle)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = SessionWriter(tmp_path / "talk", facts_of(STATE))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with writer, pytest.raises(KvPageError, match="File too large"):
            writer.add(STATE.pages()[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "talk").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "cd" * 32}, "model: wanted cdcd"),
        ({"build": "b"}, "build: wanted b, got llama.cpp 0.5.0"),
        ({"tokens": (1, *STATE.tokens[1:])}, "link_after: wanted"),
        ({"tokens": STATE.tokens[:3]}, r"end: wanted at most 3"),
        ({"n_ctx": 3}, "end: wanted at most 3, the context of a lane, got 4"),
    ],
)
def test_a_page_of_something_else_is_not_saved(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with SessionWriter(tmp_path, facts_of(STATE, **changes)) as writer, pytest.raises(KvPageError, match=message):
        writer.add(STATE.pages()[0])


def test_an_incomplete_session_is_not_saved(tmp_path: Path) -> None:
    pages = STATE.pages()
    with SessionWriter(tmp_path, facts_of(STATE)) as writer:
        with pytest.raises(KvPageError, match="no page was added"):
            writer.commit()
        writer.add(pages[0])
        writer.add(pages[2])
        with pytest.raises(KvPageError, match="added twice"):
            writer.add(pages[0])
        with pytest.raises(KvPageError, match="layer 0, token 4: no file holds it"):
            writer.commit()
        writer.add(STATE.page(4, 8, STATE.layers[:3]))
        with pytest.raises(KvPageError, match="layer 3, token 4: no file holds it"):
            writer.commit()
        writer.add(STATE.page(4, 8, STATE.layers[3:]))
        writer.commit()
    SavedSession(tmp_path).verify()


def read_all(directory: Path) -> None:
    saved = SavedSession(directory)
    for _ in saved.pages(LayerRange(0, 6)):
        pass


@settings(max_examples=80)
@given(data=st.data())
def test_any_flipped_or_missing_byte_is_refused_by_name(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save(directory)
        path = data.draw(st.sampled_from(sorted(directory.iterdir(), key=lambda path: path.name.split(".")[:2])))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] ^= data.draw(st.integers(1, 255))
        else:
            del content[at:]
        path.write_bytes(content)
        with pytest.raises(KvPageError, match=f"session {directory}: {path.name}"):
            read_all(directory)


def test_a_missing_file_and_one_more_byte_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    save(tmp_path)
    path = max(tmp_path.glob("*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    with pytest.raises(KvPageError, match=f"{path.name}: wanted {len(data)} bytes, got {len(data) + 1}"):
        SavedSession(tmp_path)
    path.unlink()
    with pytest.raises(KvPageError, match=f"{path.name}: No such file"):
        SavedSession(tmp_path)


def test_a_file_swapped_for_another_page_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    one, two = sorted(tmp_path.glob("layers-0000-0003.tokens-*"))[:2]
    one.write_bytes(two.read_bytes())
    with pytest.raises(KvPageError, match=rf"{one.name}: .*(SHA-256|bytes)"):
        read_all(tmp_path)


def rewritten(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest that somebody changed, with the checksum that fits."""
    values = json.loads((directory / MANIFEST).read_text())
    change(values)
    values.pop("checksum", None)
    values["checksum"] = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    (directory / MANIFEST).write_text(json.dumps(values))


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/abs/x", "a/../../x", "sub/ok", "a\\b", "", ".", "..", "a\0b", "x" * 5000, "x/", None, 7],
)
def test_file_names_do_not_leave_the_directory(tmp_path: Path, name: object) -> None:
    save(tmp_path)
    rewritten(tmp_path, lambda values: values["files"][0].update(name=name))
    with pytest.raises(KvPageError, match=r"files: name: wanted the name of a page file of a session, got ") as caught:
        SavedSession(tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_ordinary_files_are_opened(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "talk")
    path = next((tmp_path / "talk").glob("*.safetensors"))
    path.rename(tmp_path / "outside")
    {"link": lambda: path.symlink_to(tmp_path / "outside"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    with pytest.raises(KvPageError, match=f"{path.name}: wanted an ordinary file"):
        SavedSession(tmp_path / "talk")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format=2), "format: wanted 1, got 2"),
        (lambda v: v.update(kind="x"), "kind: wanted"),
        (lambda v: v.pop("tokens"), "tokens: missing"),
        (lambda v: v.update(more=1), "more: not known in format 1"),
        (lambda v: v.update(tokens="1 2"), "tokens: wanted an array"),
        (lambda v: v.update(tokens=[1, -2]), "tokens: wanted ids of 0..2147483647, got -2"),
        (lambda v: v.update(tokens=[1.5] * 10), "tokens: wanted ids"),
        (lambda v: v.update(tokens=[1] * 10), "link_after or checksum does not fit"),
        (lambda v: v.update(name=""), "name: wanted a text"),
        (lambda v: v.update(n_ctx=0), "n_ctx: wanted 1.."),
        (lambda v: v.update(n_ctx=9), "n_cached: wanted 1..9, got 10"),
        (lambda v: v.update(n_cached=11), "n_cached: wanted 1..10, got 11"),
        (lambda v: v.update(n_cached=9), "end: wanted at most 9, got 10"),
        (lambda v: v.update(page_tokens=True), "page_tokens: wanted"),
        (lambda v: v.update(link_after="zz"), "link_after or checksum does not fit"),
        (lambda v: v.update(extra=[1]), "extra: wanted a JSON object"),
        (lambda v: v.update(extra={"x": "y" * (1 << 20)}), "extra: wanted at most 1048576 bytes"),
        (lambda v: v.update(extra={"x": float("nan")}), "extra: wanted a JSON object"),
        (lambda v: v.update(layers=v["layers"][:3]), "wanted some of the session's layers, got 3:6"),
        (lambda v: v["layers"].append([9, "f16", "f16", 8, 8, False]), "layer 9, token 0: no file holds it"),
        (lambda v: v.update(files=[]), "files: wanted 1..65536"),
        (lambda v: v["files"].append(v["files"][0]), "wanted each name once"),
        (lambda v: v["files"].pop(), "layer 3, token 8: no file holds it"),
        (lambda v: v["files"][0].update(sha256="ab"), "sha256: wanted 32 bytes"),
        (lambda v: v["files"][0].update(bytes=-1), "bytes: wanted 1.."),
        (lambda v: v["files"][0].update(first=4), "end: wanted 5.."),
        (lambda v: v["files"][0].update(layer_end=0), "layer_end: wanted 1..1024"),
        (lambda v: v["files"][0].pop("end"), "end: missing"),
        (lambda v: v["files"].__setitem__(0, 5), "files: wanted objects, got 5"),
    ],
)
def test_no_entry_of_a_manifest_is_trusted(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    save(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(KvPageError) as caught:
        SavedSession(tmp_path)
    assert str(caught.value).startswith(f"session {tmp_path}: session.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"[]", b"7", b'{"kind": "a", "kind": "b"}', b"\xff\xfe", b"1" * 9000]
)
def test_any_bytes_in_the_manifests_place_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    with pytest.raises(KvPageError, match=r"session.json: "):
        SavedSession(tmp_path)


def test_files_that_do_not_hold_what_the_manifest_says_are_refused(tmp_path: Path) -> None:
    save(tmp_path)

    def exchange(values: dict[str, Any]) -> None:
        first, second = values["files"][0], values["files"][1]
        for key in ("first", "end"):
            first[key], second[key] = second[key], first[key]

    rewritten(tmp_path, exchange)
    with pytest.raises(KvPageError, match=r"safetensors: KV page .*: first: wanted 0, got 4"):
        read_all(tmp_path)
