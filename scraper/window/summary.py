"""The `server` part of summary.json: what the endpoints said of each canonical quantity in the measured window.

Whatever cannot be computed is left out, and a `missing` beside it says why. The result holds JSON's own types only, no
NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rundir.stats import Missing
from scraper.engines import QUANTITIES, CanonicalSource, Engine, canonical, detect, leading_engine
from scraper.series.table import EndpointSeries
from scraper.window.aggregate import Part
from scraper.window.statistics import describe, measure
from scraper.window.window import ScrapeSelection, Window, select_scrapes

Json = dict[str, Any]
Sources = Mapping[str, CanonicalSource | Missing]
_Own = tuple[Part, Json]  # one endpoint's part of a quantity, and the description of that part alone


@np.errstate(over="ignore", invalid="ignore")  # what no number can hold is left out, with a reason
def server_summary(
    endpoints: Sequence[EndpointSeries], window: Window, slice_ns: int, *, engine_version: str | None = None
) -> Json:
    """Summarise the endpoints over a window, aggregated and one by one: JSON-ready, per `interfaces.md` "server".

    Endpoints of another engine than the leading one (`leading_engine`), or of none, are listed but not added.
    `engine_version` is what the caller learnt elsewhere (`/version`): vLLM's page does not say.
    """
    engines = [detect(one.series) for one in endpoints]
    shown = [
        canonical(one.series, engine.name) if engine else {} for one, engine in zip(endpoints, engines, strict=True)
    ]
    engine = leading_engine((one, sources) for one, sources in zip(engines, shown, strict=True) if one is not None)
    parts: dict[str, list[_Own]] = {name: [] for name in QUANTITIES}
    missing: dict[str, str] = {}
    listed: list[Json] = []
    for one, found, sources in zip(endpoints, engines, shown, strict=True):
        selection = select_scrapes(one, window, slice_ns)
        entry = _endpoint(one, selection, found)
        if found is not None:
            own, absent = _parts(one, selection, sources)
            entry |= {name: described for name, (_, described) in own.items()}
            entry["missing"] = absent
            if engine is not None and found.name == engine.name:
                for name, one_of in own.items():
                    parts[name].append(one_of)
                missing |= {name: reason for name, reason in absent.items() if name not in missing}
        listed.append(entry)
    summary: Json = {"engine": None}
    if engine is not None:
        version = engine_version or engine.version
        summary["engine"] = {"name": engine.name, "version": version, "detected_by": engine.detected_by}
    else:
        reason = _why_no_engine(endpoints)
        summary["reason"] = reason
        missing = dict.fromkeys(QUANTITIES, reason)
    for name, given in parts.items():
        if len(given) == 1:
            summary[name] = given[0][1]
        elif given:
            added = [part for part, _ in given]
            summary[name] = describe(added, measure(added))
    summary["missing"] = {name: missing[name] for name in QUANTITIES if name in missing and not parts[name]}
    summary["endpoints"] = listed
    return summary


def _parts(
    endpoint: EndpointSeries, selection: ScrapeSelection | Missing, sources: Sources
) -> tuple[dict[str, _Own], dict[str, str]]:
    own: dict[str, _Own] = {}
    absent: dict[str, str] = {}
    for name, source in sources.items():
        if isinstance(source, Missing):
            absent[name] = source.reason
        elif isinstance(selection, Missing):
            absent[name] = selection.reason
        else:
            part = Part(endpoint=endpoint, selection=selection, source=source)
            found = measure([part])
            if isinstance(found, Missing):
                absent[name] = found.reason
            else:
                own[name] = part, describe([part], found)
    return own, absent


def _endpoint(endpoint: EndpointSeries, selection: ScrapeSelection | Missing, engine: Engine | None) -> Json:
    entry: Json = {
        "url": endpoint.url,
        "engine": engine.name if engine else None,
        "scrapes": {
            "ok": len(endpoint.response_ns),
            "failed": len(endpoint.failures),
            "failures": dict(Counter(reason for _, reason in endpoint.failures)),
        },
    }
    if isinstance(selection, Missing):
        entry["reason"] = selection.reason
        return entry
    entry["reference"] = {
        "at_ns": int(endpoint.response_ns[selection.reference]),
        "before_window": not selection.late,
    }
    entry["last"] = {"at_ns": int(endpoint.response_ns[selection.last])}
    entry["per_interval_slices"] = selection.per_interval
    return entry


def _why_no_engine(endpoints: Sequence[EndpointSeries]) -> str:
    if not endpoints:
        return "no metrics endpoint was scraped"
    if not any(len(one.response_ns) for one in endpoints):
        reasons = [one.failures[-1][1] for one in endpoints if one.failures]
        return f"no scrape succeeded: {reasons[0]}" if reasons else "no scrape succeeded"
    return "no known engine's metrics are on the page"
