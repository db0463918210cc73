"""Source of the server metrics exports, with their common metric names and units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidelight.exporter.server_metrics.units import infer_unit
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

SCHEMA_VERSION = "1.0"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSource:
    """Endpoints and the window that is measured.

    `configured` are the URLs that were asked for, whether they answered or not. `phases` are (name, start, end) of the
    run on its clock, the end None where it was cut short; a phase called `measure` is the format's `profiling`.
    """

    endpoints: Sequence[EndpointSeries]
    window: Window
    slice_ns: int
    benchmark_id: str | None
    input_config: Mapping[str, Any]
    tool_version: str
    configured: Sequence[str] = ()
    phases: Sequence[tuple[str, int, int | None]] = ()

    @property
    def urls(self) -> list[str]:
        """Return every endpoint's URL once: those asked for, then those scraped besides."""
        return list(dict.fromkeys([*self.configured, *(endpoint.url for endpoint in self.endpoints)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric: `name` is the format's, `exposed` is what stands on the page (a PromQL query needs that one)."""

    name: str
    exposed: str
    type: str
    unit: str | None
    description: str


def named(endpoints: Sequence[EndpointSeries]) -> dict[tuple[str, str], Metric]:
    """Return the endpoints' metrics with their names, by family and type as exposed.

    - A counter loses its `_total`, as the format has it; where another metric has the short name, it keeps it.
    - Where endpoints disagree about a family's type, those met later are called `family:type`.
    - The first description that is not empty counts.
    """
    descriptions: dict[tuple[str, str], str] = {}
    for endpoint in endpoints:
        for series in endpoint.series:
            descriptions[key(series)] = descriptions.get(key(series)) or series.help
    short_names = {family for family, kind in descriptions if _short(family, kind) == family}
    metrics: dict[tuple[str, str], Metric] = {}
    taken: set[str] = set()
    for (family, kind), description in descriptions.items():
        short = _short(family, kind)
        name = family if short in short_names else short
        if name in taken:
            name = f"{name}:{kind}"
        taken.add(name)
        unit = infer_unit(family, description)
        metrics[family, kind] = Metric(name=name, exposed=family, type=kind, unit=unit, description=description)
    return metrics


def label_columns(labels: Iterable[str], fixed: Collection[str]) -> dict[str, str]:
    """Return the column of each label, in the order of their names: called like it, or `label_NAME` where a column
    beside it is called so, with `label_` before it once more where that is a label, too.
    """
    ordered = sorted(set(labels))
    taken, columns = {*fixed, *ordered}, dict[str, str]()
    for label in ordered:
        column = label
        while label in fixed and column in taken:
            column = f"label_{column}"
        taken.add(column)
        columns[label] = column
    return columns


def key(series: Series) -> tuple[str, str]:
    """Return the key of a series' metric in `named`: histograms and summaries have one for several series."""
    return series.family if series.type in ("histogram", "summary") else series.name, series.type


def _short(family: str, kind: str) -> str:
    return family.removesuffix("_total") if kind == "counter" else family
