"""Fixtures that start pipelines of real processes and stop them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pipeline_helpers import Pipelines


@pytest.fixture(scope="module")
def pipelines() -> Iterator[Pipelines]:
    made = Pipelines()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def one_pipeline() -> Iterator[Pipelines]:
    """For pipelines that no other test asks for: stopped right after the test."""
    made = Pipelines()
    try:
        yield made
    finally:
        made.close()
