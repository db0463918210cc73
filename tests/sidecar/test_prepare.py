from __future__ import annotations

import dataclasses

import pytest

from sidecar.config import RunOptions
from sidecar.prepare import planned_requests

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"rate": 4.0, "duration": 30.0}, None),
        ({"concurrency": 4, "requests": 7}, 7),
        ({"concurrency": 4, "requests": 7, "duration": 30.0}, 7),
        ({"concurrency": 4, "duration": 30.0}, 240),
        ({"concurrency": 4, "duration": 0.5}, 40),
        ({"concurrency": 1000, "duration": 3600.0}, 20_000),
    ],
)
def test_a_closed_loop_is_prepared_whole_before_the_load(load: dict[str, float], expected: int | None):
    """By its number of requests; else two a second and slot, at least ten a slot, and not without bound."""
    assert expected == planned_requests(dataclasses.replace(RunOptions(url=URL), **load))
