"""A run directory in memory: what was recorded, and the tables derived from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from sidelight.exporter import tables
from sidelight.exporter.ci.markdown import verdict_markdown
from sidelight.exporter.document import without_controls
from sidelight.exporter.evaluation.evaluate import Evaluated, evaluate
from sidelight.exporter.html.markup import blocks
from sidelight.exporter.report.verdict import verdict_blocks, verdict_of
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.verdict import RunVerdict
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.printable.numbers import count_of
from sidelight.scraper.series.table import EndpointSeries
from sidelight.sidecar.run import Run as Recorded
from sidelight.sidecar.run import open_run as _open_run

TableName = Literal["requests", "chunks", "scrapes", "timeslices"]
SCRAPE_COLUMNS: dict[str, pa.DataType] = {
    "url": pa.string(),
    "at_ns": pa.int64(),
    "name": pa.string(),
    "labels": pa.map_(pa.string(), pa.string()),
    "value": pa.float64(),
}


@dataclass(frozen=True)
class Run:
    """A run: its manifest, its requests and scrapes in columns, and its tables. Made by `open_run`.

    path       the run directory
    manifest   what was asked for, with what and when, secrets masked
    status     `complete`, `interrupted`, or `crashed` where its process was killed
    requests   one numpy column per property of a request, the warm-up's too; stamps are Unix ns, -1 where missing
    scrapes    per scraped URL one matrix of scrapes by series
    """

    path: Path
    _recorded: Recorded

    def __repr__(self) -> str:
        """Return one line with the run's status, requests and endpoints."""
        requests, pages = len(self.requests.index), len(self.scrapes)
        return f"<Run {self.status}: {count_of(requests, 'request')}, {count_of(pages, 'metrics page')}>"

    @property
    def manifest(self) -> Mapping[str, Any]:
        """Return the manifest: the requested settings, versions and times, with secrets masked."""
        return self._recorded.manifest

    @property
    def status(self) -> str:
        """Return the final status of the run."""
        return self._recorded.status

    @property
    def requests(self) -> RequestLog:
        """Return the requests in columns, as `attribute` takes them."""
        return self._recorded.requests

    @property
    def scrapes(self) -> tuple[EndpointSeries, ...]:
        """Return the scrapes of each URL, as `attribute` takes them."""
        return self._recorded.endpoints

    @property
    def verdict(self) -> RunVerdict:
        """Return the verdict: the state, four figures, the parts of the TTFT, why, and what to do."""
        return verdict_of(self._evaluated.summary)

    def _repr_html_(self) -> str:
        """Return the verdict as a notebook shows it."""
        return blocks(verdict_blocks(without_controls(self.verdict)))

    def _repr_markdown_(self) -> str:
        return verdict_markdown(without_controls(self.verdict))

    def arrow(self, name: TableName) -> pa.Table:
        """Return a table: stamps are int64 ns, durations float64 ms, null where missing.

        requests    one row a request, its breakdown of TTFT included: the columns of requests.parquet
        chunks      one row a content chunk of a request: request_id, at_ns, characters
        scrapes     one row a scrape and series: url, at_ns, name, labels, value
        timeslices  one row a slice, quantity and statistic: the columns of timeslices.parquet

        Raises ValueError for another name.
        """
        if name == "requests":
            parts, reuse = self._evaluated.parts, self._evaluated.reuse.requests
            return tables.requests_table(self.requests, parts, reuse, self._recorded.nodes)
        if name == "timeslices":
            return tables.timeslices_table(self._evaluated.summary)
        if name == "chunks":
            return _chunks(self.requests)
        if name == "scrapes":
            return pa.concat_tables([*map(_samples, self.scrapes), pa.schema(SCRAPE_COLUMNS).empty_table()])
        raise ValueError(f"{name!r}: no such table; choose from {', '.join(get_args(TableName))}")

    @cached_property
    def _evaluated(self) -> Evaluated:
        return evaluate(self._recorded)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Read the run directory at `path`, whole or cut short; nothing is written to it.

    Raises SidelightError (`sidelight.ConfigurationError`) where there is no run.
    """
    return Run(path=Path(path), _recorded=_open_run(Path(path)))


def summary(path: str | os.PathLike[str]) -> Summary:
    """Derive the summary of the run at `path`, typed: what `summary.json` says, whether or not it was written.

    Raises SidelightError (`sidelight.ConfigurationError`) where there is no run.
    """
    return open_run(path)._evaluated.summary  # noqa: SLF001  one module


def _chunks(requests: RequestLog) -> pa.Table:
    per_request = np.diff(requests.chunk_start)
    return pa.table(
        {
            "request_id": pa.array(np.repeat(requests.request_id, per_request), pa.string()),
            "at_ns": pa.array(requests.chunk_ns, pa.int64()),
            "characters": pa.array(requests.chunk_chars, pa.int64()),
        }
    )


def _samples(endpoint: EndpointSeries) -> pa.Table:
    """Return the samples of one endpoint that were on a page, series by series."""
    values, series = endpoint.values, endpoint.series
    column, at = np.nonzero(~np.isnan(values.T))

    def of_series(values: list[Any], kind: pa.DataType) -> pa.Array[Any]:
        return pa.array(values, kind).take(pa.array(column, pa.int64()))

    return pa.table(
        {
            "url": pa.array([endpoint.url] * len(at), pa.string()),
            "at_ns": pa.array(endpoint.at_ns[at], pa.int64()),
            "name": of_series([labelled.name for labelled in series], SCRAPE_COLUMNS["name"]),
            "labels": of_series([list(labelled.labels) for labelled in series], SCRAPE_COLUMNS["labels"]),
            "value": pa.array(values[at, column], pa.float64()),
        }
    )
