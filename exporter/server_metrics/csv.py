"""The CSV export of server metrics in AIPerf's layout: comments, then a block a type with a header of its own.

It holds what the JSON does but for timeslices. Labels are columns, those of each block in alphabetical order; one that
is called like a column of the block becomes `label_NAME`. A text that a spreadsheet would take for a formula has an
apostrophe before it. Buckets are packed as `LE=COUNT;...`. Values are written in
full, where AIPerf rounds to four decimals.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any
from urllib.parse import urlsplit

from sidelight.exporter.server_metrics.json import PERCENTILES, TYPES
from sidelight.exporter.server_metrics.source import label_columns
from sidelight.rundir.printable.text import defused, escaped

_GAUGE = ("avg", "min", "max", "std", *PERCENTILES)
_STATISTICS = {
    "gauge": _GAUGE,
    "counter": ("total", "rate", "rate_avg", "rate_min", "rate_max", "rate_std"),
    "histogram": ("count", "count_rate", "sum", "sum_rate", "avg", *(f"{name}_estimate" for name in PERCENTILES)),
    "unknown": _GAUGE,
}
_FIRST = ("Endpoint", "Type", "Metric", "Unit")

Json = Mapping[str, Any]


def write(statistics: Json, file: IO[bytes]) -> None:
    """Write the export of the statistics that `json.document` returns."""
    file.write(as_csv(statistics).encode())


def as_csv(document: Json) -> str:
    """Return an export (`json.document`) as CSV. A statistic that it lacks is an empty cell."""
    text = io.StringIO(newline="")
    text.write(_comments(document))
    endpoints = _short_endpoints(document["summary"]["endpoints_configured"])
    blocks = [block for kind in TYPES if (block := list(_block(document["metrics"], kind, endpoints)))]
    writer = csv.writer(text, lineterminator="\n")
    for number, block in enumerate(blocks):
        if number:
            text.write("\n")
        writer.writerows(block)
    return text.getvalue()


def _comments(document: Json) -> str:
    return (
        "# AIPerf-compatible Server Metrics Export (CSV)\n"
        f"# {document['generator']['name']}_version: {escaped(document['generator']['version'])}\n"
        f"# schema_version: {document['schema_version']}\n"
        f"# benchmark_id: {escaped(document['benchmark_id'] or '')}\n"
        "# Note: Same benchmark_id and version appear in JSON and Parquet exports\n"
        "#\n"
    )


def _short_endpoints(urls: Sequence[str]) -> dict[str, str]:
    """Return host and port of each URL, as the format has it; the whole URL where two pages share those."""
    hosts = Counter(urlsplit(url).netloc for url in urls)
    return {url: host if hosts[host := urlsplit(url).netloc] == 1 else url for url in urls}


def _block(metrics: Json, kind: str, endpoints: Mapping[str, str]) -> Iterator[list[Any]]:
    """Yield the header and the rows of one type; nothing without series of this type."""
    chosen = {name: metric for name, metric in metrics.items() if metric["type"] == kind}
    rows = [(name, metric, series) for name, metric in chosen.items() for series in metric["series"]]
    if not rows:
        return
    statistics = _STATISTICS[kind]
    labels = {label for _, _, series in rows for label in series.get("labels", ())}
    last = ("Description", "buckets") if kind == "histogram" else ("Description",)
    columns = label_columns(labels, {*_FIRST, *statistics, *last})
    yield [*_FIRST, *statistics, *map(defused, columns.values()), *last]
    for name, metric, series in rows:
        given = series.get("labels", {})
        texts = (endpoints[series["endpoint_url"]], kind, name, metric.get("unit", ""))
        packed = ";".join(f"{le}={count}" for le, count in (series.get("buckets") or {}).items())
        yield [
            *map(defused, texts),
            *(series["stats"].get(statistic, "") for statistic in statistics),
            *(defused(given.get(label, "")) for label in columns),
            defused(metric["description"]),
            *((packed,) if kind == "histogram" else ()),
        ]
