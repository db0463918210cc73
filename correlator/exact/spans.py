"""Exact times from the engines' spans: of the request's trace, or with the request's id.

Which forms an engine gives its ids is in `scraper/engines/*.yaml`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from correlator.exact.table import ALL_TIMES, ExactTimes
from loadgen.requests.table import RequestLog
from rundir.columns import Texts
from scraper import engines
from scraper.spans.received import OFF_CLOCK_S
from scraper.spans.requests import EngineSpans

# Envoy writes whether a trace was sampled into the thirteenth digit of a UUID that it passes on as X-Request-Id.
_UUID = re.compile(r"([0-9a-f]{8}-[0-9a-f]{4}-)[0-9a-f]([0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12})")
_ANY_TRACE = r"\g<1>4\2"


def by_trace(
    requests: RequestLog, spans: EngineSpans, taken: set[int], rows: Sequence[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times of requests by the spans in their traces; `taken` are the spans that joined some request."""
    places = _places(spans.trace_id, taken)
    bearers = Counter(requests.trace_id)
    for row in rows:
        trace = requests.trace_id[row]
        if trace not in places:
            continue
        if bearers[trace] > 1:
            why[row].append(f"{bearers[trace]} requests share its trace id")
        else:
            yield from _of_spans(row, spans, places[trace], taken, why)


def by_request_id(
    requests: RequestLog, spans: EngineSpans, taken: set[int], rows: Sequence[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times of requests by the spans that bear their id, in the form that the engine gives it.

    UUIDs that differ in the thirteenth digit alone are the same: a gateway changes it.
    """
    claims: dict[int, Sequence[int]] = {}
    for engine in sorted(set(spans.engine)):
        others = np.flatnonzero(spans.engine != engine).tolist()
        places = _places(np.array([same_id(text) for text in spans.request_id], dtype=np.object_), {*taken, *others})
        for row in rows:
            bearing = bearing_id(engine, requests.request_id[row], requests.response_id[row], places)
            if bearing:
                claims[row] = bearing
    claimed = Counter(place for bearing in claims.values() for place in bearing)
    for row, bearing in claims.items():
        most = max(claimed[place] for place in bearing)
        if most > 1:
            why[row].append(f"{most} requests share its request id")
        else:
            yield from _of_spans(row, spans, bearing, taken, why)


def bearing_id(engine: str, request_id: str, response_id: str, places: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the places of what bears a request's ids, in the first of an engine's forms that anything has.

    `places` are by the ids of the engine's spans, each through `same_id`.
    """
    known = engines.catalogue(engine).spans
    if known is None:
        return ()
    forms = (_of_form(form, request_id, response_id, places) for form in known.ids)
    return next((bearing for bearing in forms if bearing), ())


def same_id(text: str) -> str:
    """Return an id without what gateways change in it."""
    return _UUID.sub(_ANY_TRACE, text)


def span_times(spans: EngineSpans, places: Sequence[int]) -> ExactTimes | None:
    """Return the times of the span whose token came first; of the others only the longest decode.

    None where no span states queue or prefill. A span without a TTFT, where others of its process state theirs, had no
    token: for several choices SGLang first fills its prefix cache, by requests with spans of their own.
    """
    stating = [place for place in places if np.isfinite(spans.queue_s[place]) or np.isfinite(spans.prefill_s[place])]
    if not stating:
        return None
    with_token = {spans.clock[place] for place in stating if np.isfinite(spans.ttft_s[place])}
    choices = [place for place in stating if np.isfinite(spans.ttft_s[place]) or spans.clock[place] not in with_token]
    first = min(choices, key=lambda place: _first_token_ns(spans, place))
    times_s: dict[str, Any] = {f"{name}_s": float(getattr(spans, f"{name}_s")[first]) for name in ALL_TIMES}
    times_s["decode_s"] = float(np.fmax.reduce(spans.decode_s[stating]))
    # Engines that shared a request may have clocks of their own.
    alike = [place for place in stating if spans.clock[place] == spans.clock[first]]
    return ExactTimes(
        **times_s,
        arrival_ns=int(spans.arrival_ns[first]),
        end_ns=int(spans.end_ns[alike].max()),
        span_id=spans.span_id[first],
        trace_id=spans.trace_id[first],
        clock=spans.clock[first],
    )


def _of_spans(
    row: int, spans: EngineSpans, places: Sequence[int], taken: set[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, ExactTimes]]:
    taken.update(places)
    times = span_times(spans, places)
    if times is not None:
        yield row, times
        return
    off_s = np.fmax.reduce(np.abs(spans.off_clock_s[list(places)]))
    if np.isnan(off_s):
        why[row].append("its span tells neither queue nor prefill")
    elif off_s > OFF_CLOCK_S:
        why[row].append(f"its span was stamped by a clock {off_s / 60:.0f} min off ours: refused")
    else:
        why[row].append("its span ends before it begins, as where a clock is set back: refused")


def _of_form(form: str, request_id: str, response_id: str, places: Mapping[str, Sequence[int]]) -> list[int]:
    if ("{request}" in form and not request_id) or ("{response}" in form and not response_id):
        return []
    rows: list[int] = []
    for prompt in range(len(places)):
        bearing = places.get(same_id(form.format(request=request_id, response=response_id, n=prompt)), ())
        rows.extend(bearing)
        if not bearing or "{n}" not in form:
            break
    return rows


def _places(column: Texts, without: Collection[int]) -> dict[str, list[int]]:
    """Return where each text stands."""
    places: dict[str, list[int]] = {}
    for place, text in enumerate(column.tolist()):
        if text and place not in without:
            places.setdefault(text, []).append(place)
    return places


def _first_token_ns(spans: EngineSpans, place: int) -> float:
    """Return when a span's first token came: arrival and TTFT, else the parts that it states."""
    ttft_s = spans.ttft_s[place]
    if np.isnan(ttft_s):
        ttft_s = np.nansum([spans.queue_s[place], spans.prefill_s[place]])
    return float(spans.arrival_ns[place] + 1e9 * ttft_s)
