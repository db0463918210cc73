"""Sidelight as a library, for notebooks and scripts: read a run, and call the estimators behind its report.

    import sidelight

    run = sidelight.open_run("runs/today")
    run.verdict.do                                  # what the report begins with; a notebook shows it for `run`
    run.arrow("requests").to_pandas()               # one row a request, as in requests.parquet
    sidelight.summary("runs/today").status
    sidelight.attribute(run.requests, run.scrapes)  # queue and prefill time of each request, from scrapes alone
    sidelight.estimate_quantiles(bounds, counts, sums, [0.5, 0.99])

These names are stable. All other packages (`loadgen`, `scraper`, `correlator`, `methodology`, `exporter`, `recorded`,
`sidecar`, `rundir`, `simulator`) are private: they change without notice. See docs/reference/library.md.
"""

from __future__ import annotations

from correlator.attribute import attribute
from exporter.summary.result import Summary
from recorded.errors import ConfigurationError
from scraper.quantiles import estimate as estimate_quantiles
from sidelight.run import Run, TableName, open_run, summary

__all__ = [
    "ConfigurationError",
    "Run",
    "Summary",
    "TableName",
    "attribute",
    "estimate_quantiles",
    "open_run",
    "summary",
]
