"""Endpoints as what the exports of server metrics are made from."""

from __future__ import annotations

from collections.abc import Sequence

from sidelight.exporter.server_metrics.source import MetricsSource
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

S = 10**9

Recorded = tuple[list[str], EndpointSeries]


def source_of(
    *endpoints: EndpointSeries,
    start_ns: int | None = None,
    end_ns: int | None = None,
    slice_ns: int = 2 * S,
    configured: Sequence[str] = (),
    phases: Sequence[tuple[str, int, int | None]] = (),
) -> MetricsSource:
    """Make a source over the window given, or over all scrapes of the first endpoint."""
    stamps = endpoints[0].response_ns
    return MetricsSource(
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
