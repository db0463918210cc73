"""Matching of engine spans to requests by time alone.

It serves spans with neither a trace nor an id of a request. Their engine is behind a gateway that begins a trace of its
own, or passes none on, and gives replies ids of its own. It follows the rules of `matching`, and is stricter: two spans
that are alike are one too many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from sidelight.correlator.exact.matching import Matched, Records, matched
from sidelight.correlator.exact.spans import span_times
from sidelight.correlator.exact.table import ExactTimes
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Ints, take
from sidelight.scraper.perf_metrics import Timings
from sidelight.scraper.spans.requests import EngineSpans

SPANS = Records(
    name="span of another trace",
    plural="spans of other traces",
    alike_s=0.0,
    margin=10.0,
    chance_ratio=0.001,
    clock_is_known=False,
)
# By how much an engine's clock may be off: machines that set their clocks by a server's (NTP) agree to far less.
MOST_CLOCK_S = 2.0
MOST_FIRST_S = 1e9  # nanoseconds of more are no whole number of 64 bits beside a time of the day


def by_time(
    requests: RequestLog, spans: EngineSpans, taken: set[int], rows: Sequence[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times of requests by the spans of other traces that fit them alone; `taken` are those that joined some.

    Not of requests to a URL where at least half have times already: what reaches the engine by there keeps its trace
    or id, and a span of another trace is another client's.
    """
    places = np.array([place for place in range(len(spans)) if place not in taken], dtype=np.int64)
    if not len(places):
        return
    ended = Counter(requests.endpoint_url[requests.status == "ok"].tolist())
    without = Counter(requests.endpoint_url[row] for row in rows if requests.status[row] == "ok")
    wanted = [row for row in rows if 2 * without[requests.endpoint_url[row]] > ended[requests.endpoint_url[row]]]
    if not wanted:
        return
    matches = spans_by_time(take(requests, np.array(wanted)), spans, places)
    for row, place, reason in zip(wanted, matches.row.tolist(), matches.reason.tolist(), strict=True):
        times = None if place < 0 else span_times(spans, [int(places[place])])
        if times is not None:
            taken.add(int(places[place]))
            yield row, times
        elif reason:
            why[row].append(reason)


def spans_by_time(requests: RequestLog, spans: EngineSpans, places: Ints) -> Matched:
    """Find the span of each request among those at some places: rows of the result are numbers of `places`.

    Spans without a time to their first token fit none, nor do those that count other tokens than the client.
    """
    first_s = _first_s(spans)[places]
    usable = (spans.arrival_ns[places] >= 0) & (np.abs(first_s) < MOST_FIRST_S)
    arrival_ns = np.where(usable, spans.arrival_ns[places], -1)
    first_ns = np.rint(np.where(usable, first_s, 0.0) * 1e9).astype(np.int64)
    timings = Timings(
        url=spans.clock[places],
        arrival_ns=arrival_ns,
        first_token_ns=arrival_ns + first_ns,
        last_token_ns=np.where(usable, spans.end_ns[places], -1),
        error_ns=np.full(len(places), round(MOST_CLOCK_S * 1e9), dtype=np.int64),
        **{f"{name}_s": getattr(spans, f"{name}_s")[places] for name in ("queue", "prefill", "decode", "ttft", "e2e")},
        tokens=np.column_stack([spans.input_tokens[places], spans.output_tokens[places]]),
    )
    return matched(requests, timings, SPANS)


def _first_s(spans: EngineSpans) -> Floats:
    """Return the time from each span's arrival to its first token [n]. NaN where it states neither it nor its parts."""
    return np.where(np.isnan(spans.ttft_s), spans.queue_s + spans.prefill_s, spans.ttft_s)
