"""Pages as endpoints, a recording of a real vLLM, and the real files of the format that ours follow."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from exporter.server_metrics_source import Source
from scraper.endpoint import Scrape
from scraper.log import rows
from scraper.normalise import Window
from scraper.series import EndpointSeries, build

REPOSITORY = Path(__file__).parents[2]
S = 10**9
URL = "http://127.0.0.1:8000/metrics"

MakeEndpoint = Callable[..., EndpointSeries]
MakeSource = Callable[..., Source]


def _scrape(at_ns: int, page: str, url: str) -> Scrape:
    return Scrape(
        url=url,
        tick_ns=at_ns,
        request_ns=at_ns - 2_000_000,
        response_ns=at_ns,
        status=200 if page else 0,
        content_type="text/plain",
        body=page.encode(),
        error="" if page else "connect: refused",
    )


@pytest.fixture(scope="session")
def endpoint_of() -> MakeEndpoint:
    """Make an endpoint of pages a second apart from second 1 on, or at the moments given; an empty page has failed."""

    def make(pages: Sequence[str], *, url: str = URL, at_ns: Sequence[int] = ()) -> EndpointSeries:
        moments = at_ns or [S * at for at in range(1, len(pages) + 1)]
        (endpoint,) = build(rows(_scrape(at, page, url) for at, page in zip(moments, pages, strict=True)))
        return endpoint

    return make


@pytest.fixture(scope="session")
def source_of() -> MakeSource:
    """Make a source over the window given, or over all scrapes of the first endpoint."""

    def make(
        *endpoints: EndpointSeries,
        start_ns: int | None = None,
        end_ns: int | None = None,
        slice_ns: int = 2 * S,
        configured: Sequence[str] = (),
        phases: Sequence[tuple[str, int, int | None]] = (),
    ) -> Source:
        stamps = endpoints[0].response_ns
        return Source(
            endpoints=endpoints,
            window=Window(
                start_ns=int(stamps[0]) if start_ns is None else start_ns,
                end_ns=int(stamps[-1]) if end_ns is None else end_ns,
            ),
            slice_ns=slice_ns,
            benchmark_id="550e8400-e29b-41d4-a716-446655440000",
            input_config={"model": "m", "concurrency": 4},
            tool_version="0.1.0",
            configured=configured,
            phases=phases,
        )

    return make


@pytest.fixture(scope="session")
def recorded(endpoint_of: MakeEndpoint) -> tuple[list[str], EndpointSeries]:
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
