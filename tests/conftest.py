"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # no test asserts how fast a machine is
settings.load_profile("untimed")
