"""Bytes a sample: a recording of scrapes as our log and table keep it, beside the pages themselves through gzip.

    python benchmarks/storage.py RECORDING.jsonl.gz ...

A recording has one JSON object a line, `body` its page; `time` is the CPU time of parsing and writing one page.
"""

from __future__ import annotations

import gzip
import platform
import sys
import time
from pathlib import Path

from parse import pages

from sidelight.scraper.series.log import Encoder, LogReader
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.targets.scrape import Scrape


def main() -> None:
    """Print a line a recording."""
    print(f"Python {platform.python_version()}")
    for path in sys.argv[1:]:
        bodies = [page.encode() for page in pages(Path(path))]
        encoder, reader = Encoder(), LogReader()
        start = time.process_time()
        payloads = [
            payload for number, page in enumerate(bodies) for payload in encoder.encode(_scrape(number, page))[0]
        ]
        spent_s = time.process_time() - start
        (endpoint,) = build(found for payload in payloads if (found := reader.take(payload)) is not None)
        samples = endpoint.values.size
        print(
            f"{path}: {len(bodies)} pages, {samples} samples; "
            f"log {sum(8 + len(one) for one in payloads) / samples:.2f} B/sample; "
            f"pages gzipped {sum(len(gzip.compress(page)) for page in bodies) / samples:.2f} B/sample; "
            f"memory {_bytes(endpoint) / samples:.2f} B/sample; {1e3 * spent_s / len(bodies):.2f} ms a page"
        )


def _scrape(number: int, page: bytes) -> Scrape:
    at_ns = number * 10**9
    return Scrape(
        url="recorded",
        tick_ns=at_ns,
        request_ns=at_ns,
        response_ns=at_ns + 1,
        status=200,
        content_type="text/plain; version=0.0.4",
        body=page,
        error="",
    )


def _bytes(endpoint: EndpointSeries) -> int:
    return endpoint.values.nbytes + 4 * endpoint.response_ns.nbytes + endpoint.changed.nbytes


if __name__ == "__main__":
    main()
