"""A hub of the test's own, and somebody who uses it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, hub_server
from hub_user import HubUser


@pytest.fixture
def server() -> Iterator[HubServer]:
    with hub_server() as running:
        yield running


@pytest.fixture
def user(server: HubServer, tmp_path: Path) -> HubUser:
    return HubUser(server, tmp_path / "user")


@pytest.fixture
def ended() -> Iterator[Callable[[subprocess.Popen[str]], str]]:
    """Waits for a process and returns what it printed; none outlives the test."""
    seen: list[subprocess.Popen[str]] = []

    def wait(process: subprocess.Popen[str]) -> str:
        seen.append(process)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return output.strip()

    yield wait
    for process in seen:
        if process.poll() is None:
            process.kill()
            process.communicate()
