"""A recording of a real vLLM, and the real files of the format that ours follow."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path

import pytest
from exports import Recorded
from series import endpoint_of

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def recorded() -> Recorded:
    """Twenty pages of a real vLLM under load, five seconds apart, and the same as series."""
    with lzma.open(REPOSITORY / "tests/data/vllm_scrapes.jsonl.xz", "rt") as file:
        next(file)
        taken = [json.loads(line) for line in file]
    pages = [row["page"] for row in taken]
    return pages, endpoint_of(pages, at_ns=[row["response_ns"] for row in taken])


@pytest.fixture(scope="session")
def reference() -> Path:
    """The directory of files that AIPerf 0.13.0 itself wrote; what needs it is skipped where it is absent."""
    shared = Path(os.environ.get("SIDELIGHT_SHARED", REPOSITORY.parent / "shared"))
    path = shared / "bench/aiperf-reference"
    if not path.is_dir():
        pytest.skip("no AIPerf reference files")
    return path
