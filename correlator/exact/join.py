"""The engine's own times of each request, joined exactly: by trace id, else by request id, else from its reply, else
from a record of the engine's that only fits this request.

Nothing is estimated here (that is `attribute`'s part), and nothing guessed: an id that several requests share joins
none of them. Which forms an engine gives its ids is in `scraper/engines/*.yaml`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from correlator.exact.matching import Matched
from correlator.requests import Requests
from rundir.columns import Floats, Ints, Texts
from scraper import engines
from scraper.spans.requests import EngineSpans

SOURCES = ("trace", "request id", "response", "none")
# The client's and the engine's clocks tick alike to 10 ms an hour and better; stamps of the client are late by less.
SLACK_MS = 10.0
_PARTS = ("queue", "prefill", "decode", "ttft", "e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Columns of n requests, in their order.

    source                  one of SOURCES
    reason                  why there is none, or what the source leaves open; "" where queue and prefill are known
    queue_ms, prefill_ms, decode_ms  float64, NaN where unknown; ttft_ms, e2e_ms: from the request's arrival at the
                            server to its first and last token. A second of a span times 1000, else as it was stated
    arrival_ns, end_ns      int64 ns Unix by the engine's clock, -1 unless spans or records tell them
    span_id                 hex id of the engine's span, "" for none. Of several, for several choices or engines that
                            shared it, queue, prefill and TTFT are those of the first to have a token, decode is the
                            longest
    clock                   whose clock the stamps are by (`EngineSpans.clock`), "" where that is not told
    """

    source: Texts
    reason: Texts
    queue_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats
    ttft_ms: Floats
    e2e_ms: Floats
    arrival_ns: Ints
    end_ns: Ints
    span_id: Texts
    clock: Texts

    def __len__(self) -> int:
        return len(self.source)


def join(requests: Requests, spans: EngineSpans, records: Matched | None = None) -> Joined:
    """Find each request's own times; `records` are those of `/perf_metrics`, where it was read.

    - a trace id, or a request id, that several requests bear joins none of them
    - several spans of one request are its choices, or the engines that shared it
    - a gateway's span is no engine's: it joins nothing
    - times longer than the client waited are not believed, whichever source states them
    """
    table = unjoined(len(requests.trace_id))
    why: list[list[str]] = [[] for _ in range(len(table))]
    taken = set(np.flatnonzero(spans.is_gateway).tolist())
    for source, found in (("trace", _by_trace), ("request id", _by_request_id)):
        for place, rows in found(requests, spans, np.flatnonzero(table.source == "none").tolist(), taken, why):
            taken.update(rows)
            _put_spans(table, requests, place, spans, rows, source=source, why=why[place])
    for place in np.flatnonzero(table.source == "none").tolist():
        _put_response(table, requests, place, why[place])
        if records is not None and table.source[place] == "none":
            _put_record(table, requests, place, records, why[place])
    for place, reasons in enumerate(why):
        if table.source[place] == "none":
            table.reason[place] = _why_none(requests, place, reasons, any_spans=len(spans) > 0)
    return table


def _by_trace(
    requests: Requests, spans: EngineSpans, places: Sequence[int], taken: Collection[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, list[int]]]:
    """Give requests and the rows of the spans in their traces."""
    rows = _places(spans.trace_id, taken)
    bearers = Counter(requests.trace_id)
    for place in places:
        trace = requests.trace_id[place]
        if trace not in rows:
            continue
        if bearers[trace] > 1:
            why[place].append(f"{bearers[trace]} requests share its trace id")
        else:
            yield place, rows[trace]


def _by_request_id(
    requests: Requests, spans: EngineSpans, places: Sequence[int], taken: Collection[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, list[int]]]:
    """Give requests and the rows of the spans that bear their id, in the form that the engine gives it."""
    claims: dict[int, list[int]] = {}
    for engine in sorted(set(spans.engine)):
        known = engines.catalogue(engine).spans
        if known is None or known.is_gateway:
            continue
        others = np.flatnonzero(spans.engine != engine).tolist()
        rows = _places(spans.request_id, {*taken, *others})
        for place in places:
            for form in known.ids:
                found = _of_form(form, requests.request_id[place], requests.response_id[place], rows)
                if found:
                    claims[place] = found
                    break
    claimed = Counter(row for rows in claims.values() for row in rows)
    for place, found in claims.items():
        most = max(claimed[row] for row in found)
        if most > 1:
            why[place].append(f"{most} requests share its request id")
        else:
            yield place, found


def _of_form(form: str, request_id: str, response_id: str, rows: Mapping[str, list[int]]) -> list[int]:
    if ("{request}" in form and not request_id) or ("{response}" in form and not response_id):
        return []
    found: list[int] = []
    for prompt in range(len(rows)):
        bearing = rows.get(form.format(request=request_id, response=response_id, n=prompt), ())
        found.extend(bearing)
        if not bearing or "{n}" not in form:
            break
    return found


def _places(column: Texts, without: Collection[int]) -> dict[str, list[int]]:
    """Return where each text stands."""
    places: dict[str, list[int]] = {}
    for place, text in enumerate(column.tolist()):
        if text and place not in without:
            places.setdefault(text, []).append(place)
    return places


def _put_spans(
    table: Joined,
    requests: Requests,
    place: int,
    spans: EngineSpans,
    rows: Sequence[int],
    *,
    source: str,
    why: list[str],
) -> None:
    """Take the times of the span whose token came first; of the others only the longest decode."""
    telling = [row for row in rows if np.isfinite(spans.queue_s[row]) or np.isfinite(spans.prefill_s[row])]
    if not telling:
        off_s = np.fmax.reduce(np.abs(spans.off_clock_s[list(rows)]))
        off = f"its span was stamped by a clock {off_s / 60:.0f} min off ours: refused"
        why.append("its span tells neither queue nor prefill" if np.isnan(off_s) else off)
        return
    first = min(telling, key=lambda row: _first_token_ns(spans, row))
    ms = {part: float(getattr(spans, f"{part}_s")[first]) * 1e3 for part in _PARTS}
    ms["decode"] = float(np.fmax.reduce(spans.decode_s[telling])) * 1e3
    if _put(table, requests, place, source, ms, why):
        table.arrival_ns[place] = spans.arrival_ns[first]
        # Engines that shared a request may have clocks of their own.
        alike = [row for row in telling if spans.clock[row] == spans.clock[first]]
        table.end_ns[place] = spans.end_ns[alike].max()
        table.span_id[place] = spans.span_id[first]
        table.clock[place] = spans.clock[first]


def _first_token_ns(spans: EngineSpans, row: int) -> float:
    """Return when a span's first token came: arrival and TTFT, else the parts that it tells."""
    ttft_s = spans.ttft_s[row]
    if np.isnan(ttft_s):
        ttft_s = np.nansum([spans.queue_s[row], spans.prefill_s[row]])
    return float(spans.arrival_ns[row] + 1e9 * ttft_s)


def _put_response(table: Joined, requests: Requests, place: int, why: list[str]) -> None:
    ms = {part: float(getattr(requests, f"server_{part}_ms")[place]) for part in _PARTS}
    if np.isnan(ms["queue"]) and np.isnan(ms["prefill"]):
        why.append("its reply tells neither queue nor prefill")
        return
    _put(table, requests, place, "response", ms, why)


def _put_record(table: Joined, requests: Requests, place: int, records: Matched, why: list[str]) -> None:
    """Take the times of the record that fits; its stamps are by our clock as far as the engine's could be read."""
    row, timings = int(records.row[place]), records.timings
    if row < 0:
        why.append(records.reason[place])
        return
    ms = {part: float(getattr(timings, f"{part}_s")[row]) * 1e3 for part in _PARTS}
    if _put(table, requests, place, "response", ms, why):
        table.arrival_ns[place] = timings.arrival_ns[row]
        table.end_ns[place] = timings.last_token_ns[row]
        table.clock[place] = timings.url[row]


def _put(table: Joined, requests: Requests, place: int, source: str, ms: Mapping[str, float], why: list[str]) -> bool:
    """Write one row's times, unless they cannot be those of this request."""
    waited_ms = (requests.end_ns[place] - requests.submit_ns[place]) / 1e6
    parts = [ms[part] for part in ("queue", "prefill") if not np.isnan(ms[part])]
    where = "reply" if source == "response" else "span"
    if any(not 0 <= one < np.inf for one in parts):
        why.append(f"its {where} tells impossible times")
        return False
    if requests.submit_ns[place] >= 0 and requests.end_ns[place] >= 0 and sum(parts) > waited_ms + SLACK_MS:
        why.append(f"its {where} tells longer times than the client waited")
        return False
    table.source[place] = source
    for part, one in ms.items():
        getattr(table, f"{part}_ms")[place] = one if 0 <= one < np.inf else np.nan
    unknown = [part for part in ("queue", "prefill") if np.isnan(ms[part])]
    table.reason[place] = f"the {where} tells no {unknown[0]}" if unknown else ""
    return True


def _why_none(requests: Requests, place: int, why: Sequence[str], *, any_spans: bool) -> str:
    """Say why a request has no times: by its own fate first, since an engine tells only of what it finished."""
    status, http_status = requests.status[place], requests.http_status[place]
    if http_status >= 400:
        return f"the server answered HTTP {http_status}"
    if status in ("cancelled", "failed", "in_flight"):
        fate = {"cancelled": "was cancelled", "failed": "failed", "in_flight": "did not end"}[status]
        return f"it {fate}, and engines tell only of requests that they finished"
    if not any("span" in one or "share" in one for one in why):
        why = ["no span of it came" if any_spans else "no spans came", *why]
    return "; ".join(dict.fromkeys(why))


def unjoined(size: int) -> Joined:
    """Return a table in which nothing is known of any request, nor why."""

    def texts(text: str) -> Texts:
        return np.full(size, text, dtype=np.object_)

    return Joined(
        source=texts("none"),
        reason=texts(""),
        **{f"{part}_ms": np.full(size, np.nan) for part in _PARTS},
        arrival_ns=np.full(size, -1, dtype=np.int64),
        end_ns=np.full(size, -1, dtype=np.int64),
        span_id=texts(""),
        clock=texts(""),
    )
