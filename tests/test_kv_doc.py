"""docs/kv-pages.md says what is true."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import fields
from pathlib import Path

import msgpack
import xxhash
from kv_states import State, plain_layers

from skippy_zmq.kv import limits
from skippy_zmq.kv.chain import ROOT, next_link
from skippy_zmq.kv.descriptor import PageDescriptor

TEXT = (Path(__file__).parents[1] / "docs" / "kv-pages.md").read_text(encoding="utf-8")


def test_every_limit_is_listed_with_its_value() -> None:
    listed = {name: int(value) for name, value in re.findall(r"^\| `(MAX_\w+)` \| (\d+) \|", TEXT, re.M)}
    known = {name: getattr(limits, name) for name in vars(limits) if name.startswith("MAX_")}
    assert listed == {name: value for name, value in known.items() if name in listed}
    assert known.keys() - listed.keys() == {"MAX_POSITION", "MAX_TOKEN_ID"}  # llama.cpp's own, in docs/protocol.md


def test_every_field_of_a_descriptor_is_listed() -> None:
    table = TEXT[TEXT.index("## Descriptor") : TEXT.index("The checksum begins")]
    listed = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert listed == {field.name for field in fields(PageDescriptor)}


def test_the_checksum_and_the_chain_are_as_written() -> None:
    page = State(plain_layers(1, 3), tuple(range(8))).page(4, 8)
    described = page.descriptor
    order = re.findall(r"`(\w+)`", TEXT[TEXT.index("in the order `model`") : TEXT.index("So a\npayload")])
    values = {name: getattr(described, name) for name in order}
    values["layers"] = [[layer, "f16", "f16", 8, 8, False] for layer in (1, 2)]
    values["checksum"] = b""
    assert described.checksum == xxhash.xxh3_128(msgpack.packb(values) + bytes(page.payload)).digest()
    root = re.search(r'root +== sha256\("(.*)"\)'.replace("==", "="), TEXT)
    assert root is not None
    assert hashlib.sha256(root[1].encode()).digest() == ROOT
    assert next_link(ROOT, [5, 6]) == hashlib.sha256(ROOT + struct.pack("<2i", 5, 6)).digest()


def test_the_manifest_has_the_entries_in_the_order_written(tmp_path: Path) -> None:
    from test_kv_sessions import MANIFEST, save

    save(tmp_path)
    section = TEXT[TEXT.index("The manifest has, in this order") : TEXT.index("A changed byte is refused")]
    section = re.sub(r"\(`name`, `bytes`.*?`end`\)", "", section, flags=re.S)
    section = re.sub(r"\((at least|of the chain|tokens whose).*?\)", "", section, flags=re.S)
    assert re.findall(r"`(\w+)`", section) == list(json.loads((tmp_path / MANIFEST).read_text()))
