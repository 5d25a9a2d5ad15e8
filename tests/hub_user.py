"""Somebody who uses a hub: in this process, and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hub_server import HubServer

from skippy_zmq.sources.hub import Hub
from skippy_zmq.sources.references import LocatedModel, locate

ROOT = Path(__file__).parent.parent
TOKEN = "hf_secret"


class HubUser:
    """Somebody with a cache of their own. ``notes``: what they were told."""

    def __init__(self, server: HubServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.notes: list[str] = []

    def hub(self, **arguments: Any) -> Hub:
        values = {"endpoint": self.server.endpoint, "cache": self.directory / "hub", "token": TOKEN}
        return Hub(**{**values, "progress": False, "note": self.notes.append, **arguments})

    def locate(self, model: str, layers: Any = None, **hub: Any) -> LocatedModel:
        return locate(model, layers, open_hub=lambda: self.hub(**hub))

    def environment(self, **more: str) -> dict[str, str]:
        own = {"HF_ENDPOINT": self.server.endpoint, "HF_HOME": str(self.directory), "HF_TOKEN": TOKEN}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
        return {**inherited, "XDG_CACHE_HOME": str(self.directory / "xdg"), **own, **more}

    def start(self, model: str, *, before: str = "", **environment: str) -> subprocess.Popen[str]:
        """A process that locates ``model`` and prints where it is, or what is wrong."""
        program = (
            "import sys\nfrom skippy_zmq.errors import SkippyError\nfrom skippy_zmq.sources.references import locate\n"
            f"{before}\n"
            "try:\n    print(locate(sys.argv[1]).path)\n"
            "except SkippyError as error:\n    print(type(error).__name__, error)\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", program, model],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment(**environment),
            cwd=ROOT,
        )

    def leftovers(self) -> list[Path]:
        """Parts of files in the cache."""
        return sorted(self.directory.rglob("*.incomplete"))
