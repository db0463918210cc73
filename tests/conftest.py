"""Settings of all tests, and what was recorded for them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no failure of a law.
settings.register_profile("sidelight", deadline=None)
settings.load_profile("sidelight")

# looptime asks the policy for "the" loop around synchronous tests too, and a policy that was never told otherwise makes
# one that nobody closes: a ResourceWarning, hence an error. Told that there is none, it makes none.
asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory of research and recorded fixtures; what needs it is skipped where it is absent."""
    path = Path(os.environ.get("SIDELIGHT_SHARED", Path(__file__).parents[2] / "shared"))
    if not (path / "fixtures").is_dir():
        pytest.skip(f"no recorded fixtures at {path}")
    return path
