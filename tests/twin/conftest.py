"""Runs of an engine whose speed is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from played_runs import arrivals, engine, lengths, run, simulated, write

from sidelight.twin.engine.steps import StreamedRequests


@pytest.fixture(scope="session")
def light() -> StreamedRequests:
    """180 requests at 3/s, some half of what the engine of `engine()` can."""
    return run(engine(), count=180, rate_per_s=3.0)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of 150 requests at 3/s."""
    path = tmp_path_factory.mktemp("runs") / "light"
    prompts, outputs = lengths(150, 4)
    exchanges = simulated(engine(), prompts, outputs, at_s=arrivals(150, 3.0, 4))
    write(path, exchanges, {"rate": 3.0, "arrival": "poisson", "burstiness": 1.0})
    return path
