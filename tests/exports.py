"""Pages as endpoints, and endpoints as what the exports of server metrics are made from."""

from __future__ import annotations

from collections.abc import Sequence

from scraped import scraped

from exporter.server_metrics.source import Source
from scraper.series.log import rows
from scraper.series.table import EndpointSeries, build
from scraper.window.window import Window

S = 10**9
URL = "http://127.0.0.1:8000/metrics"

Recorded = tuple[list[str], EndpointSeries]


def endpoint_of(pages: Sequence[str], *, url: str = URL, at_ns: Sequence[int] = ()) -> EndpointSeries:
    """Make an endpoint of pages a second apart from second 1 on, or at the moments given; an empty page has failed."""
    moments = at_ns or [S * at for at in range(1, len(pages) + 1)]
    pairs = zip(moments, pages, strict=True)
    taken = (scraped(at, page, url=url, error="" if page else "connect: refused") for at, page in pairs)
    (endpoint,) = build(rows(taken))
    return endpoint


def source_of(
    *endpoints: EndpointSeries,
    start_ns: int | None = None,
    end_ns: int | None = None,
    slice_ns: int = 2 * S,
    configured: Sequence[str] = (),
    phases: Sequence[tuple[str, int, int | None]] = (),
) -> Source:
    """Make a source over the window given, or over all scrapes of the first endpoint."""
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
