"""Projectors: the models that turn images or sound into embeddings, as a package declares them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skippy_zmq.errors import ModelFileError
from skippy_zmq.sources.gguf_header import GgufHeader, parse_header
from skippy_zmq.sources.package.manifest import ProjectorFacts


@dataclass(frozen=True, slots=True)
class Projector:
    """``path``: where its file belongs; ``PackageModel.projector_file`` checks that it is there and sound."""

    path: Path
    size: int
    sha256: str
    tensor_count: int
    type: str | None
    vision: bool
    audio: bool


def projector_facts(header: GgufHeader) -> ProjectorFacts:
    """What the header of a projector says; raise ModelFileError for a file of another kind."""
    architecture = header.scalar("general.architecture")
    if architecture != "clip":
        raise ModelFileError(f"{header.path}: wanted a projector (architecture 'clip'), got {architecture!r:.80}")
    found = (header.scalar(f"clip.{part}projector_type") for part in ("", "vision.", "audio."))
    return ProjectorFacts(
        type=next((name[:512] for name in found if isinstance(name, str)), None),
        vision=header.scalar("clip.has_vision_encoder") is True,
        audio=header.scalar("clip.has_audio_encoder") is True,
    )


def read_projector(path: Path) -> tuple[GgufHeader, ProjectorFacts]:
    """Header and facts of a projector file; raise ModelFileError."""
    header = parse_header(path)
    return header, projector_facts(header)
