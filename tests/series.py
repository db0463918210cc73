"""Pages of metrics written down as their families, scrapes of pages, and endpoints of scrapes.

A page is the sum of its families: `gauge(WAITING, 3) + histogram(QUEUE, count=2, total=0.5)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sidelight.rundir.columns import Floats, Ints
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.targets.scrape import Scrape

SECOND = 10**9
URL = "http://127.0.0.1:8000/metrics"
QUEUE = "vllm:request_queue_time_seconds"
PREFILL = "vllm:request_prefill_time_seconds"
WAITING = "vllm:num_requests_waiting"
# Ends a page: one that ended in half a histogram would be taken for a cut one.
END = "# TYPE end gauge\nend 7\n"


def gauge(name: str, *values: object, labels: Sequence[str] = ("",), kind: str = "gauge") -> str:
    """Return a gauge with a value for each of the label sets, which are written as on a page: `e="0"`."""
    samples = (f"{name}{{{each}}}" if each else name for each in labels)
    return f"# TYPE {name} {kind}\n" + "".join(
        f"{sample} {value}\n" for sample, value in zip(samples, values, strict=True)
    )


def counter(name: str, *values: object, labels: Sequence[str] = ("",)) -> str:
    """Return a counter, as `gauge`."""
    return gauge(name, *values, labels=labels, kind="counter")


def histogram(
    family: str,
    count: object,
    total: object,
    *,
    buckets: Sequence[tuple[str, object]] | None = None,
    labels: str = "",
    without: str = "",
) -> str:
    """Return a histogram, by default with all observations within 1 s; samples that begin with `without` left out."""
    inside, braced = f"{labels}," if labels else "", f"{{{labels}}}" if labels else ""
    bounded = (*((("1.0", count),) if buckets is None else buckets), ("+Inf", count))
    samples = [f'_bucket{{{inside}le="{bound}"}} {value}' for bound, value in bounded]
    samples += [f"_sum{braced} {total}", f"_count{braced} {count}"]
    shown = [family + sample for sample in samples if not without or not sample.startswith(without)]
    return "\n".join([f"# TYPE {family} histogram", *shown, ""])


def scraped(
    at_ns: int, page: str, *, url: str = "http://engine.test/metrics", error: str = "", took_ns: int = 2_000_000
) -> Scrape:
    """Return a scrape that ended at this moment; one with an error has no page."""
    return Scrape(
        url=url,
        tick_ns=at_ns,
        request_ns=at_ns - took_ns,
        response_ns=at_ns,
        status=0 if error else 200,
        content_type="text/plain",
        body=b"" if error else page.encode(),
        error=error,
    )


def scrapes(
    pages: Sequence[str | None],
    *,
    url: str = URL,
    first_s: int = 1,
    at_ns: Sequence[int] = (),
    took_ns: int = 2_000_000,
) -> list[Scrape]:
    """Return scrapes a second apart, or at the moments given; one without a page has failed."""
    moments = at_ns or [SECOND * at for at in range(first_s, first_s + len(pages))]
    return [
        scraped(at, page or "", url=url, error="" if page else "connect: refused", took_ns=took_ns)
        for at, page in zip(moments, pages, strict=True)
    ]


def endpoint_of(pages: Sequence[str | None], **scraped_as: Any) -> EndpointSeries:
    """Return the endpoint of `scrapes`, with its options."""
    (endpoint,) = build(rows(scrapes(pages, **scraped_as)))
    return endpoint


def endpoint_of_columns(
    series: Iterable[Series], values: Floats, *, request_ns: Ints, response_ns: Ints, url: str = URL
) -> EndpointSeries:
    """Return an endpoint with a column of values for each series, whose scrapes all succeeded."""
    return EndpointSeries(
        url=url,
        tick_ns=request_ns,
        request_ns=request_ns,
        response_ns=response_ns,
        at_ns=request_ns + (response_ns - request_ns) // 2,
        series=tuple(series),
        values=values,
        changed=np.ones(len(request_ns), dtype=np.bool_),
        failures=(),
    )
