"""What a ``--model`` argument may name: a file, the first of its shards, a package, a checkpoint, or ``hf://...``.

``hf://owner/name[@revision][/file]`` is resolved to one commit; what a stage needs of it is fetched, the rest is not.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from skippy_zmq.errors import ModelFileError, RetryableError, UserError
from skippy_zmq.sources.gguf_header import MAX_HEADER_BYTES, parse_header
from skippy_zmq.sources.gguf_values import shown
from skippy_zmq.sources.hub import DEFAULT_REVISION, Hub, Snapshot
from skippy_zmq.sources.hub_outlines import outline_of
from skippy_zmq.sources.needed_files import (
    CHECKPOINT_CONFIG,
    CHECKPOINT_INDEX,
    CHECKPOINT_SINGLE,
    PACKAGE_MANIFEST,
    checkpoint_metadata,
    checkpoint_shape,
    checkpoint_shards,
    gguf_files,
    gguf_models,
    is_checkpoint,
    package_parts,
    package_projectors,
)
from skippy_zmq.sources.relative_names import checked_name
from skippy_zmq.topology import LayerRange

SCHEME = "hf://"
_WANTED = "wanted hf://owner/name, with @revision and /file where need be"
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?\Z")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.+-]|%2[Ff]){0,200}\Z")
_WEIGHT_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.safetensors\Z")
_FIRST_HEAD_BYTES = 4 << 20
_MAX_SAFETENSORS_HEADER = 100 << 20

Kind = Literal["gguf", "package", "checkpoint"]


@dataclass(frozen=True, slots=True)
class HubReference:
    """``file``: a path in the repository, or empty. ``revision``: a branch, a tag or a commit."""

    repository: str
    revision: str = DEFAULT_REVISION
    file: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else "@" + self.revision.replace("/", "%2F")
        return f"{SCHEME}{self.repository}{revision}" + (f"/{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """``path``: what to open on this machine. ``revision``: repository and commit, empty for a local path.

    ``reference``: the same model for another process, which will not resolve a branch once more. ``outlines``: of a
    checkpoint of which only a stage's weight files were fetched, by name, what stands for the others.
    """

    path: Path
    kind: Kind
    reference: str
    revision: str = ""
    outlines: Mapping[str, Path] = field(default_factory=dict)


def parse_reference(text: str) -> HubReference | None:
    """The parts of an ``hf://`` reference; None for a local path. Raises ModelFileError for one that is malformed."""
    if not text.lower().startswith("hf:"):
        return None
    if not text.startswith(SCHEME):
        raise ModelFileError(f"{shown(text)}: {_WANTED}")
    owner, _, rest = text.removeprefix(SCHEME).partition("/")
    repository, slash, file = rest.partition("/")
    name, at, revision = repository.partition("@")
    for part in (owner, name):
        if not _NAME.match(part) or ".." in part or "--" in part:
            raise ModelFileError(f"{shown(text)}: {_WANTED}; got {shown(part)}")
    if at and (not _REVISION.match(revision) or ".." in revision):
        raise ModelFileError(f"{shown(text)}: wanted a revision after @, / in it as %2F; got {shown(revision)}")
    if slash:
        file = checked_name(file, text)
        if "@" in file:
            raise ModelFileError(f"{shown(text)}: the revision stands behind the name of the repository; {_WANTED}")
    revision = revision.replace("%2f", "%2F").replace("%2F", "/")
    return HubReference(f"{owner}/{name}", revision or DEFAULT_REVISION, file)


def locate(
    model: str | Path,
    layers: LayerRange | None = None,
    *,
    open_hub: Callable[[], Hub] = Hub,
    beside: str = "",
) -> LocatedModel:
    """The model as files on this machine, fetched if need be.

    ``layers``: only the files of that stage: of a package its parts; of a checkpoint its weight files, and outlines of
    the others. ``beside``: a further file to fetch where the checkpoint has it, relative to its folder (an importance
    matrix). Raises ModelFileError for a reference or model that is none, RetryableError where the network failed.
    """
    reference = parse_reference(str(model))
    if reference is None:
        return local_model(Path(model))
    hub = open_hub()
    snapshot = hub.snapshot(reference.repository, reference.revision)
    kind, main = _meant_file(hub, snapshot, reference)
    prefix = _prefix(kind, main)
    if kind == "gguf":
        files = gguf_files(snapshot.names, str(reference), main)
    elif kind == "package":
        manifest = hub.fetch(snapshot, [main])[main].read_bytes()
        files = [prefix + part for part in package_parts(manifest, f"{snapshot}/{main}", layers)]
    else:
        files = _fetch_metadata(hub, snapshot, prefix, beside) + _weights(snapshot, main, prefix, layers)
        outlines: dict[str, Path] = {}
        for name in sorted(set(_weights(snapshot, main, prefix, None)) - set(files)):
            if hub.cached(snapshot, name):
                continue
            outlined = outline_of(hub, snapshot, name)
            if outlined is None:
                files.append(name)
            else:
                outlines[name.removeprefix(prefix)] = outlined
        hub.fetch(snapshot, files)
        return replace(_located(snapshot, kind, main), outlines=outlines)
    hub.fetch(snapshot, files)
    return _located(snapshot, kind, main)


@contextmanager
def outline(model: str | Path, *, open_hub: Callable[[], Hub] = Hub, beside: str = "") -> Iterator[LocatedModel]:
    """As ``locate``, but only what describes the model: of files that are not here yet, headers.

    In what this yields weights are holes; it is for reading tensor tables and metadata, and gone afterwards.
    """
    reference = parse_reference(str(model))
    if reference is None:
        yield local_model(Path(model))
        return
    hub = open_hub()
    snapshot = hub.snapshot(reference.repository, reference.revision)
    kind, main = _meant_file(hub, snapshot, reference)
    prefix = _prefix(kind, main)
    located = _located(snapshot, kind, main)
    metadata: list[str] = []
    if kind == "package":
        manifest = hub.fetch(snapshot, [main])[main].read_bytes()
        parts = package_parts(manifest, f"{snapshot}/{main}")
        hub.fetch(snapshot, [prefix + part for part in parts[:1]])  # the shared one
        yield located
        return
    if kind == "gguf":
        weights = gguf_files(snapshot.names, str(reference), main)
    else:
        metadata = _fetch_metadata(hub, snapshot, prefix, beside)
        weights = _weights(snapshot, main, prefix, None)
    if all(hub.cached(snapshot, name) for name in weights):
        yield located
        return
    with tempfile.TemporaryDirectory(prefix="skippy-outline-") as directory:
        for name in metadata:
            target = Path(directory) / name.removeprefix(prefix)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(snapshot.folder / name, target)
        for name in weights:
            _write_outline(hub, snapshot, name, Path(directory) / name.removeprefix(prefix), kind)
        folder = kind == "checkpoint" and not main.endswith((".safetensors", ".index.json"))
        path = Path(directory) if folder else Path(directory) / main.removeprefix(prefix)
        yield LocatedModel(path, kind, located.reference, located.revision)


def fetch_projectors(package: LocatedModel, *, open_hub: Callable[[], Hub] = Hub) -> None:
    """Fetch what ``locate`` leaves out of a package on a hub, because no stage reads it; errors as of ``locate``.

    Nothing is to be done for a package on this machine.
    """
    reference = parse_reference(package.reference)
    if reference is None:
        return
    manifest = (package.path / PACKAGE_MANIFEST).read_bytes()
    prefix = f"{reference.file}/" if reference.file else ""
    files = [prefix + path for path in package_projectors(manifest, f"{package.reference}/{PACKAGE_MANIFEST}")]
    if files:
        hub = open_hub()
        hub.fetch(hub.snapshot(reference.repository, reference.revision), files)


def revision_conflict(one: str, other: str) -> str:
    """Why two stages whose models come from ``one`` and ``other`` may not work together; empty where they may.

    Both are ``LocatedModel.revision``. Where a revision is empty, or of another repository, the contents decide.
    """
    ours, _, our_commit = one.partition("@")
    theirs, _, their_commit = other.partition("@")
    if ours != theirs or our_commit == their_commit:
        return ""
    return f"{ours} at commit {our_commit} on one stage, at {their_commit} on the other: start both with one revision"


def local_model(path: Path) -> LocatedModel:
    """What lies at ``path``; of a folder with one GGUF model, that. Raises ModelFileError for a folder without one."""
    kind: Kind = "gguf"
    if path.name == CHECKPOINT_CONFIG:
        path = path.parent
    if not os.path.lexists(path):
        raise ModelFileError(f"{path}: no such file or folder{_meant(path)}")
    if path.name.endswith((".safetensors", ".safetensors.index.json")):
        kind = "checkpoint"
    elif path.name == PACKAGE_MANIFEST:
        kind, path = "package", path.parent
    elif path.is_dir():
        try:
            names = sorted(entry.name for entry in path.iterdir())
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
        if is_checkpoint(names) and PACKAGE_MANIFEST not in names:
            kind = "checkpoint"  # also where somebody keeps what was made of it in the same folder
        else:
            kind, main = _choose(names, "", str(path))
            path = path / main if kind == "gguf" else path
    return LocatedModel(path, kind, str(path))


def _meant(path: Path) -> str:
    """What somebody may have meant who named a path that is not there."""
    parts = path.parts
    if parts[:1] in (("https:",), ("http:",)):
        return f"; {_WANTED}"
    return f"; a model on a hub is {SCHEME}{path}" if len(parts) == 2 and all(map(_NAME.match, parts)) else ""


def _choose(names: Sequence[str], chosen: str, where: str) -> tuple[Kind, str]:
    """What kind of model is meant, and the file that stands for it: for a checkpoint as a folder, its config.json."""
    base = chosen.rsplit("/", 1)[-1]
    if base.endswith(".gguf"):
        return "gguf", gguf_files(names, where, chosen)[0]
    if base == PACKAGE_MANIFEST or base.endswith((".safetensors", ".safetensors.index.json")):
        if chosen not in names:
            raise ModelFileError(f"{where}: no such file")
        return ("package" if base == PACKAGE_MANIFEST else "checkpoint"), chosen
    if base == CHECKPOINT_CONFIG and chosen in names:
        chosen = chosen.rpartition("/")[0]
    prefix = f"{chosen}/" if chosen else ""
    here = [name for name in names if name.startswith(prefix)]
    if not here:
        raise ModelFileError(f"{where}: no such file or folder" if chosen else f"{where}: has no files")
    if prefix + PACKAGE_MANIFEST in here:
        return "package", prefix + PACKAGE_MANIFEST
    models = gguf_models(here)
    if is_checkpoint(here, prefix):
        if models:
            raise ModelFileError(
                f"{where}: has both a checkpoint and GGUF files; name the one to use, for example "
                f"{next(name for name in here if name.endswith('.safetensors'))} or {next(iter(models))}"
            )
        return "checkpoint", prefix + CHECKPOINT_CONFIG
    if not models:
        raise ModelFileError(
            f"{where}: no model: wanted a GGUF file, {PACKAGE_MANIFEST}, or {CHECKPOINT_CONFIG} beside safetensors"
        )
    return "gguf", gguf_files(here, where)[0]


def _meant_file(hub: Hub, snapshot: Snapshot, reference: HubReference) -> tuple[Kind, str]:
    """As ``_choose``; for a weight file that an index lists, that index, as a path of the kind means the whole."""
    kind, main = _choose(snapshot.names, reference.file, str(reference))
    if kind != "checkpoint" or not main.endswith(".safetensors"):
        return kind, main
    prefix = _prefix(kind, main)
    index = prefix + CHECKPOINT_INDEX
    if index in snapshot.names:
        text = hub.fetch(snapshot, [index])[index].read_bytes()
        if main.removeprefix(prefix) in checkpoint_shards(text, f"{snapshot}/{index}"):
            return kind, index
    count = _WEIGHT_SHARD.search(main)
    if count is not None and int(count[1]) > 1:
        raise ModelFileError(f"{reference}: is one of {int(count[1])} files, and no {CHECKPOINT_INDEX} lists it")
    return kind, main


def _prefix(kind: Kind, main: str) -> str:
    folder = main.rpartition("/")[0]
    return f"{folder}/" if folder and kind != "gguf" else ""


def _located(snapshot: Snapshot, kind: Kind, main: str) -> LocatedModel:
    path = snapshot.folder / main
    folder = main.rpartition("/")[0]
    if kind == "package" or (kind == "checkpoint" and main.endswith(CHECKPOINT_CONFIG)):
        path = path.parent
        main = folder
    reference = HubReference(snapshot.repository, snapshot.commit, main)
    return LocatedModel(path, kind, str(reference), snapshot.revision)


def _fetch_metadata(hub: Hub, snapshot: Snapshot, prefix: str, beside: str) -> list[str]:
    names = checkpoint_metadata(snapshot.names, prefix)
    further = prefix + beside.removeprefix("./")
    if beside and further in snapshot.names and further not in names:
        names.append(further)
    hub.fetch(snapshot, names)
    return names


def _weights(snapshot: Snapshot, main: str, prefix: str, layers: LayerRange | None) -> list[str]:
    """The weight files of a checkpoint whose metadata is here."""
    index = main if main.endswith(".index.json") else prefix + CHECKPOINT_INDEX
    if main.endswith(".safetensors") or index not in snapshot.names:
        single = main if main.endswith(".safetensors") else prefix + CHECKPOINT_SINGLE
        if single not in snapshot.names:
            raise ModelFileError(f"{snapshot}: wanted {CHECKPOINT_SINGLE} or {CHECKPOINT_INDEX}, found neither")
        return [single]
    config = snapshot.folder / f"{prefix}{CHECKPOINT_CONFIG}"
    n_layers, tied = 0, False
    if layers is not None:
        n_layers, tied = checkpoint_shape(config.read_bytes(), str(config))
        layers = layers.within(n_layers)
    text = (snapshot.folder / index).read_bytes()
    single, where = prefix + CHECKPOINT_SINGLE, f"{snapshot}/{index}"
    has_both = single in snapshot.names and CHECKPOINT_SINGLE not in checkpoint_shards(text, where)
    if has_both and main.endswith(CHECKPOINT_CONFIG):
        raise ModelFileError(
            f"{snapshot}: both {single} and an index that does not list it may hold the weights; "
            f"name the one to use, for example {where}"
        )
    return [prefix + name for name in checkpoint_shards(text, where, layers, n_layers=n_layers, tied=tied)]


def _write_outline(hub: Hub, snapshot: Snapshot, name: str, path: Path, kind: Kind) -> None:
    """A file as long as ``name`` that holds its header; the rest is a hole."""
    size = next((file.size for file in snapshot.files if file.name == name), None)
    if size is None:
        raise ModelFileError(f"{snapshot}: {name}: not in the repository, or its size is not known")
    if kind == "checkpoint":
        _write_head(hub, snapshot, name, path, size, 8)
        length = 8 + int.from_bytes(_first(path, 8), "little")
        if length > min(size, _MAX_SAFETENSORS_HEADER):
            raise ModelFileError(f"{snapshot}: {name}: wanted a header of at most {size} bytes, got {length}")
        _write_head(hub, snapshot, name, path, size, length)
        return
    length = _FIRST_HEAD_BYTES
    while True:
        _write_head(hub, snapshot, name, path, size, length)
        try:
            header = parse_header(path)
            if header.data_start <= length:
                return
            problem: UserError = ModelFileError(f"{snapshot}: {name}: the header has {header.data_start} bytes")
        except UserError as error:
            problem = error
        if length >= min(size, MAX_HEADER_BYTES):
            raise problem
        length = min(4 * length, MAX_HEADER_BYTES)


def _write_head(hub: Hub, snapshot: Snapshot, name: str, path: Path, size: int, length: int) -> None:
    data = hub.head(snapshot, name, min(length, size))
    if len(data) != min(length, size):
        raise RetryableError(f"{snapshot}/{name}: wanted its first {min(length, size)} bytes, got {len(data)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data)
            file.truncate(size)
    except OSError as error:
        raise ModelFileError(f"{snapshot}/{name}: no outline can be kept in {path.parent}: {error.strerror}") from None


def _first(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        return file.read(length)
