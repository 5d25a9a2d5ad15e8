"""Fixtures for tests over real sockets. What a test leaves open fails it."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from transport_helpers import Transport


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="skz") as directory:
        yield Path(directory)


def _n_descriptors() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208 - Path.iterdir would hold one more open


@pytest.fixture
def leak_check() -> Iterator[None]:
    """Fails a test that leaves threads or file descriptors behind; ask for it before the fixtures it is to watch."""
    zmq.Frame(bytes(1 << 20), copy=False)  # starts pyzmq's collector thread, which stays
    gc.collect()
    threads, descriptors = set(threading.enumerate()), _n_descriptors()
    yield
    gc.collect()
    assert set(threading.enumerate()) <= threads
    assert _n_descriptors() <= descriptors


@pytest.fixture
def make_transport(leak_check: None) -> Iterator[Callable[..., Transport]]:
    made: list[Transport] = []

    def make(**options: object) -> Transport:
        made.append(Transport(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def transport(make_transport: Callable[..., Transport]) -> Transport:
    return make_transport()
