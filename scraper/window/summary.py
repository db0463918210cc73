"""The `server` part of summary.json: what the endpoints said of each canonical quantity in the measured window.

Whatever cannot be computed is left out, and a `missing` beside it says why. No number is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Struct, UnsetType, field
from msgspec.structs import replace

from sidelight.rundir.fields import UNSET, Count, StampNs, doc
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.catalogue import catalogue
from sidelight.scraper.engines.recognition import (
    FEATURES,
    QUANTITIES,
    RecognisedEngine,
    canonical,
    detect,
    leading_engine,
)
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.pools import BY_POOL, OF_NEITHER, Rank, Role, SlowRank, is_of, ranks_of, roles_of
from sidelight.scraper.window.quantities import GatewayPage, Quantities
from sidelight.scraper.window.statistics import Described, describe, described_parts, measure
from sidelight.scraper.window.window import ScrapeSelection, Window, select_scrapes


class DetectedEngine(Struct, frozen=True, kw_only=True):
    """The engine behind the scraped pages."""

    name: Annotated[str, doc("Its name.")]
    version: Annotated[str | None, doc("Its version, where something states it.")]
    detected_by: Annotated[str, doc("The metric by which it was recognised.")]


class Scrapes(Struct, frozen=True, kw_only=True):
    """Scrapes of an endpoint by outcome."""

    ok: Annotated[Count, doc("Pages that could be read.", "scrapes")]
    failed: Annotated[Count, doc("Attempts that gave none.", "scrapes")]
    failures: Annotated[dict[str, int], doc("Failed attempts by reason.", "scrapes")]


class FirstScrape(Struct, frozen=True, kw_only=True):
    """The scrape that increases are counted from."""

    at_ns: Annotated[StampNs, doc("When it was complete.", "ns")]
    before_window: Annotated[bool, doc("False where no scrape precedes the window, so that the first one counts.")]


class LastScrape(Struct, frozen=True, kw_only=True):
    """The scrape that increases are counted to."""

    at_ns: Annotated[StampNs, doc("When it was complete.", "ns")]


class Endpoint(Quantities, frozen=True):
    """One scraped page: its quantities alone."""

    url: Annotated[str, doc("The page that was scraped.")]
    engine: Annotated[str | None, doc("The engine that the page is of; null where none is recognised.")]
    scrapes: Annotated[Scrapes, doc("Scrapes by outcome.")]
    role: Annotated[
        Literal["prefill", "decode"] | UnsetType,
        doc("Which part of requests the engine serves, where another serves the other; absent where it serves all."),
    ] = UNSET
    reason: Annotated[str | UnsetType, doc("Why no scrape could be used; absent where there is `reference`.")] = UNSET
    reference: Annotated[FirstScrape | UnsetType, doc("The scrape that increases are counted from.")] = UNSET
    last: Annotated[LastScrape | UnsetType, doc("The scrape that increases are counted to.")] = UNSET
    per_interval_slices: Annotated[
        bool | UnsetType, doc("True where slices are scrape intervals: the page changes more rarely than a slice.")
    ] = UNSET
    ranks: Annotated[
        list[Rank] | UnsetType, doc("Its data-parallel ranks alone; absent where the page has but one.")
    ] = UNSET
    slow_rank: Annotated[
        SlowRank | UnsetType,
        doc("The rank with a queue longer than the others', all the time; absent without one."),
    ] = UNSET


class Gap(Struct, frozen=True, kw_only=True):
    """A time in which nothing was scraped, because the scraper had died."""

    start_ns: Annotated[StampNs, doc("Its last scrape; of one that never scraped, when its death was noticed.", "ns")]
    end_ns: Annotated[StampNs | None, doc("When another had scraped each page; null where none was up again.", "ns")]
    reason: Annotated[str, doc("What it died of.")]


class _Totals(Quantities, frozen=True):
    """Fields before the quantities. Fields that are not by keyword alone come first."""

    engine: Annotated[DetectedEngine | None, doc("The engine behind the pages; null where none is recognised.")]
    reason: Annotated[str | UnsetType, doc("Why there are no server metrics.")] = UNSET


class Server(_Totals, frozen=True, kw_only=True):
    """The engine's metrics over the window, added up over label sets and endpoints."""

    missing: Annotated[dict[str, str], doc("Canonical quantities that are absent, and why.")]
    endpoints: Annotated[list[Endpoint], doc("Each scraped page alone.")]
    status: Annotated[
        Literal["complete", "incomplete", "missing"],
        doc(
            "complete: the scraper ran all the time; incomplete: it was down for a part of the window (`gaps`); "
            "missing: no page could be read."
        ),
    ] = "complete"
    gaps: Annotated[list[Gap], doc("Times in which the scraper was down, also outside of the measured window.")] = (
        field(default_factory=list)
    )
    gateways: Annotated[
        list[GatewayPage] | UnsetType,
        doc("What gateways' pages showed of the window; absent without such a page."),
    ] = UNSET


@np.errstate(over="ignore", invalid="ignore")  # what no number can hold is left out, with a reason
def server_summary(
    endpoints: Sequence[EndpointSeries],
    window: Window,
    slice_ns: int,
    *,
    roles: Sequence[Role] | None = None,
    engine_version: str | None = None,
    gaps: Sequence[Gap] = (),
) -> Server:
    """Summarise the endpoints over a window, aggregated and one by one.

    Of pools that share requests, each quantity is of the pool that it is about; `roles`, if known, are the endpoints'.
    Endpoints of another engine than the leading one (`leading_engine`), or of none, are listed but not added; only what
    a frontend counts, and its own stages, stand in for what the leading engine's pages lack.
    `engine_version` is what the caller learnt elsewhere (`/version`): vLLM's page does not say. `gaps` are the times
    in which nothing was scraped.
    """
    engines = [detect(endpoint.series) for endpoint in endpoints]
    shown = [
        canonical(endpoint.series, engine.name) if engine else {}
        for endpoint, engine in zip(endpoints, engines, strict=True)
    ]
    engine = leading_engine(
        (detected, sources) for detected, sources in zip(engines, shown, strict=True) if detected is not None
    )
    parts: dict[str, list[Described]] = {name: [] for name in (*QUANTITIES, *FEATURES)}
    counted_before: dict[str, list[Described]] = {name: [] for name in parts}
    missing: dict[str, str] = {}
    listed: list[Endpoint] = []
    for endpoint, detected, sources, role in zip(endpoints, engines, shown, roles or roles_of(endpoints), strict=True):
        selection = select_scrapes(endpoint, window, slice_ns)
        described, absent = described_parts(endpoint, selection, sources) if detected else ({}, None)
        alone = _endpoint(endpoint, selection, detected, role, described, absent)
        listed.append(alone if isinstance(selection, Missing) else _with_ranks(alone, endpoint, selection, sources))
        if engine is not None and detected is not None and detected.name == engine.name:
            for name, part in described.items():
                if not role or is_of(name, role):
                    parts[name].append(part)
            missing = (absent or {}) | missing | (dict.fromkeys(OF_NEITHER, BY_POOL) if role else {})
        elif detected is not None and catalogue(detected.name).frontend:
            for name, part in described.items():
                if part[0].source.quantity.kind == "counter" or name in FEATURES:
                    counted_before[name].append(part)
    parts = {name: shares or counted_before[name] for name, shares in parts.items()}
    reason = UNSET if engine else _why_no_engine(endpoints)
    if reason:
        missing = dict.fromkeys(QUANTITIES, reason)
    return Server(
        engine=DetectedEngine(
            name=engine.name, version=engine_version or engine.version, detected_by=engine.detected_by
        )
        if engine
        else None,
        reason=reason,
        **{name: _together(shares) for name, shares in parts.items() if shares},
        missing={name: missing[name] for name in QUANTITIES if name in missing and not parts[name]},
        endpoints=listed,
        status=_status(endpoints, window, gaps),
        gaps=list(gaps),
    )


def _status(
    endpoints: Sequence[EndpointSeries], window: Window, gaps: Sequence[Gap]
) -> Literal["complete", "incomplete", "missing"]:
    if not any(len(endpoint.response_ns) for endpoint in endpoints):
        return "missing"
    is_open = any(gap.end_ns is None for gap in gaps)
    is_cut = any(gap.start_ns <= window.end_ns and (gap.end_ns or 0) > window.start_ns for gap in gaps)
    return "incomplete" if is_open or is_cut else "complete"


def _together(shares: Sequence[Described]) -> Any:
    """Describe a quantity of one or several endpoints."""
    if len(shares) == 1:
        return shares[0][1]
    parts = [part for part, _ in shares]
    return describe(parts, measure(parts))


def _endpoint(
    endpoint: EndpointSeries,
    selection: ScrapeSelection | Missing,
    engine: RecognisedEngine | None,
    role: Role,
    described: dict[str, Described],
    absent: dict[str, str] | None,
) -> Endpoint:
    usable = None if isinstance(selection, Missing) else selection
    return Endpoint(
        url=endpoint.url,
        engine=engine.name if engine else None,
        role=role or UNSET,
        scrapes=Scrapes(
            ok=len(endpoint.response_ns),
            failed=len(endpoint.failures),
            failures=dict(Counter(reason for _, reason in endpoint.failures)),
        ),
        reason=selection.reason if isinstance(selection, Missing) else UNSET,
        reference=FirstScrape(at_ns=int(endpoint.response_ns[usable.reference]), before_window=not usable.late)
        if usable
        else UNSET,
        last=LastScrape(at_ns=int(endpoint.response_ns[usable.last])) if usable else UNSET,
        per_interval_slices=usable.per_interval if usable else UNSET,
        **{name: quantity for name, (_, quantity) in described.items()},
        missing=UNSET if absent is None else absent,
    )


def _with_ranks(
    alone: Endpoint,
    endpoint: EndpointSeries,
    selection: ScrapeSelection,
    sources: Mapping[str, CanonicalSource | Missing],
) -> Endpoint:
    """Return an endpoint with its data-parallel ranks, where its page has several."""
    label = catalogue(alone.engine).data_parallel if alone.engine else ""
    names = {value for each in endpoint.series for name, value in each.labels if name == label and value}
    if len(names) < 2:
        return alone
    ranks, slow = ranks_of(endpoint, selection, sources, {(label, name) for name in names})
    return replace(alone, ranks=ranks or UNSET, slow_rank=slow or UNSET)


def _why_no_engine(endpoints: Sequence[EndpointSeries]) -> str:
    if not endpoints:
        return "no metrics endpoint was scraped"
    if not any(len(endpoint.response_ns) for endpoint in endpoints):
        reasons = [endpoint.failures[-1][1] for endpoint in endpoints if endpoint.failures]
        return f"no scrape succeeded: {reasons[0]}" if reasons else "no scrape succeeded"
    return "no known engine's metrics are on the page"
