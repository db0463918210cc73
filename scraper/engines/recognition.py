"""Catalogue of engines' metrics as canonical quantities, one YAML each; recognition of a page's engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource, PageNames, is_copy
from sidelight.scraper.engines.catalogue import (
    FEATURES,
    QUANTITIES,
    Catalogue,
    CatalogueQuantity,
    EngineLimits,
    Entry,
    catalogue,
    engine_names,
    metrics_paths,
    own_names,
    version_paths,
)
from sidelight.scraper.exposition import Series

__all__ = [
    "FEATURES",
    "QUANTITIES",
    "CanonicalSource",
    "Catalogue",
    "CatalogueQuantity",
    "EngineLimits",
    "Entry",
    "RecognisedEngine",
    "canonical",
    "catalogue",
    "detect",
    "engine_names",
    "leading_engine",
    "metrics_paths",
    "version_paths",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecognisedEngine:
    """An engine that a page was recognised as; `version` only where something states it."""

    name: str
    version: str | None
    detected_by: str


@lru_cache(maxsize=64)  # of a page both are asked for by each part of a report
def detect(series: tuple[Series, ...]) -> RecognisedEngine | None:
    """Return the engine of a page, by a canonical metric of its own, else None.

    - Its name's prefix alone would not do: an engine's sidecars use it too.
    - Nor do a router's copies of engines' metrics (`is_copy`): its page belongs to a gateway.
    - A Dynamo worker's page holds its engine's metrics: it is of that engine, and Dynamo's only where it holds none.
    - The version is what a metric named `build_info` or `version_info` states, of which no engine has one yet.
    """
    shown = [labelled for labelled in series if not is_copy(labelled.labels)]
    names = dict.fromkeys(name for labelled in shown for name in (labelled.family, labelled.name))
    for engine in engine_names():
        known, identifying = catalogue(engine), own_names(engine)
        metric = next((name for name in names if known.normalised(name) in identifying), None)
        if metric is not None:
            page = identifying[known.normalised(metric)]
            by = f"metric {metric} ({page})" if page else f"metric {metric}"
            return RecognisedEngine(name=engine, version=_version(shown, known), detected_by=by)
    return None


@lru_cache(maxsize=64)
def canonical(series: tuple[Series, ...], engine: str) -> Mapping[str, CanonicalSource | Missing]:
    """Return the source of each of `QUANTITIES`, or why it is missing; of `FEATURES`, those that the page shows.

    A source is the columns of a page (or matrix) that provide it.
    """
    known = catalogue(engine)
    page = PageNames(series, known, is_copy)
    sources = {name: _source(known.quantities[name], page) for name in QUANTITIES}
    features = {name: page.source(known.quantities[name]) for name in FEATURES}
    shown = {name: source for name, source in features.items() if source is not None}
    return MappingProxyType(sources | shown)  # callers share it


def leading_engine(
    recognised: Iterable[tuple[RecognisedEngine, Mapping[str, CanonicalSource | Missing]]],
) -> RecognisedEngine | None:
    """Return the engine of a run, by its pages' engines and their `QUANTITIES`.

    It is the first that shows queue times, else the first that shows how many requests wait, else the first. A frontend
    comes after all engines: Dynamo's shows how many wait too, those being prefilled included.
    """
    pages = sorted(recognised, key=lambda page: catalogue(page[0].name).frontend)
    for name in ("queue_time", "requests_waiting"):
        for engine, sources in pages:
            if not isinstance(sources[name], Missing):
                return engine
    return pages[0][0] if pages else None


def _source(quantity: CatalogueQuantity, page: PageNames) -> CanonicalSource | Missing:
    if (source := page.source(quantity)) is not None:
        return source
    if not quantity.metrics:
        return Missing(quantity.absent)
    tried = " or ".join(
        entry.text() + (f" (beside {entry.beside})" if entry.beside else "")
        for entry in quantity.metrics
        if not entry.page
    )
    switch = f"; {quantity.enable} switches it on" if quantity.enable else ""
    return Missing(f"the page shows no {quantity.kind} {tried}{switch}")


def _version(series: list[Series], known: Catalogue) -> str | None:
    stating = (s for s in series if s.name.endswith(("build_info", "version_info")))
    return next(
        (
            value
            for info in stating
            if known.normalised(info.name).startswith(known.prefix)
            for label, value in info.labels
            if label == "version" and value
        ),
        None,
    )
