"""Which exposed metric means which canonical quantity, one YAML an engine; and which engine a page is of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

from scraper.exposition import Series
from scraper.missing import Missing
from scraper.series import HistogramColumns, histograms

QUANTITIES = (
    "queue_time",
    "prefill_time",
    "decode_time",
    "inference_time",
    "ttft",
    "inter_token_latency",
    "tpot_per_request",
    "e2e_latency",
    "requests_running",
    "requests_waiting",
    "kv_cache_usage",
    "prompt_tokens",
    "generation_tokens",
    "preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "requests_finished",
)
ENGINES = ("vllm",)

Kind = Literal["histogram", "gauge", "counter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One canonical quantity of one engine: `metrics` are families in the order in which they are tried."""

    name: str
    kind: Kind
    unit: str
    observed: str
    across: Literal["sum", "max"]
    meaning: str
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that a page was recognised as; `version` only where something states it."""

    name: str
    version: str | None
    detected_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalSource:
    """Where a matrix holds a canonical quantity: `columns` of a gauge or counter (one a label set), or `histograms`."""

    quantity: Quantity
    metric: str
    columns: tuple[int, ...]
    histograms: tuple[HistogramColumns, ...]


@cache
def quantities(engine: str) -> dict[str, Quantity]:
    """Read an engine's YAML: its canonical quantities by name. Raises ValueError for one not in `ENGINES`."""
    table = _table(engine)
    return {
        name: Quantity(
            name=name,
            kind=entry["kind"],
            unit=entry["unit"],
            observed=entry["observed"],
            across=entry.get("across", "sum"),
            meaning=entry["meaning"],
            metrics=tuple(metric["name"] for metric in entry["metrics"]),
        )
        for name, entry in table["quantities"].items()
    }


def detect(series: Iterable[Series]) -> Engine | None:
    """Recognise an engine by a canonical metric of its own among the series of a page; none if there is none.

    Its name's prefix alone would not do: an engine's sidecars use it too.
    """
    families = dict.fromkeys(one.family for one in series)
    for name in ENGINES:
        known = {metric for quantity in quantities(name).values() for metric in quantity.metrics}
        found = next((family for family in families if family in known), None)
        if found is not None:
            return Engine(name=name, version=None, detected_by=f"metric {found}")
    return None


def canonical(series: tuple[Series, ...], engine: str) -> dict[str, CanonicalSource | Missing]:
    """Say for each of `QUANTITIES` which columns of a page (or matrix) provide it, or why none does."""
    table = quantities(engine)
    grouped: dict[str, list[HistogramColumns]] = {}
    for group in histograms(series):
        grouped.setdefault(group.family, []).append(group)
    columns: dict[tuple[str, str], list[int]] = {}
    for column, one in enumerate(series):
        columns.setdefault((one.family, one.type), []).append(column)
    return {
        name: _source(table[name], grouped, columns) if name in table else Missing(f"{engine} has no metric for it")
        for name in QUANTITIES
    }


def _source(
    quantity: Quantity, grouped: dict[str, list[HistogramColumns]], columns: dict[tuple[str, str], list[int]]
) -> CanonicalSource | Missing:
    for metric in quantity.metrics:
        groups = tuple(grouped.get(metric, ())) if quantity.kind == "histogram" else ()
        plain = tuple(columns.get((metric, quantity.kind), ())) if quantity.kind != "histogram" else ()
        if groups or plain:
            return CanonicalSource(quantity=quantity, metric=metric, columns=plain, histograms=groups)
    return Missing(f"the page shows no {quantity.kind} {' or '.join(quantity.metrics)}")


@cache
def _table(engine: str) -> dict[str, Any]:
    if engine not in ENGINES:
        raise ValueError(f"no engine {engine}; known: {', '.join(ENGINES)}")
    text = resources.files(__name__).joinpath(f"{engine}.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text)
    return table
