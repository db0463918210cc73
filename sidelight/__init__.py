"""Sidelight as a library, for notebooks and scripts: read a run, and call the estimators behind its report.

    import sidelight

    run = sidelight.open_run("runs/today")
    run.arrow("requests").to_pandas()               # one row a request, as in requests.parquet
    sidelight.summary("runs/today").status
    sidelight.attribute(run.requests, run.scrapes)  # queue and prefill time of each request, from scrapes alone
    sidelight.estimate_quantiles(bounds, counts, sums, [0.5, 0.99])

These names are stable. The packages in it (`sidelight.loadgen`, `sidelight.scraper` and so on) are private: they change
without notice. See docs/reference/library.md.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing is imported after signals are heeded
if TYPE_CHECKING:
    from typing import Any

    from sidelight.correlator.attribute import attribute
    from sidelight.exporter.summary.result import Summary
    from sidelight.recorded.errors import ConfigurationError
    from sidelight.run import Run, TableName, open_run, summary
    from sidelight.scraper.quantiles import estimate as estimate_quantiles

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

# By name: its module, and its name there. They are imported when they are asked for: each process of a run imports this
# package.
_PLACES = {
    "ConfigurationError": ("recorded.errors", "ConfigurationError"),
    "Summary": ("exporter.summary.result", "Summary"),
    "attribute": ("correlator.attribute", "attribute"),
    "estimate_quantiles": ("scraper.quantiles", "estimate"),
    **{name: ("run", name) for name in ("Run", "TableName", "open_run", "summary")},
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415  as above

    module, attribute_name = _PLACES[name]
    return getattr(import_module(f"sidelight.{module}"), attribute_name)


def __dir__() -> list[str]:
    return list(__all__)
