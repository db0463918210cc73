"""Percentiles and means of the server's queue and prefill time, over all requests it finished.

A first bucket of 0.3 s says almost nothing of a prefill of 50 ms; the estimates of single requests do. Those are of our
requests, so that they stand for the server's percentiles only where there was next to no other traffic. Means need no
estimates, and stand in for a breakdown by request in a run that is too short for one, or whose engine observes its
times at different moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from sidelight.correlator.estimate.intervals import Observed, ScrapeIntervals, joined
from sidelight.correlator.estimate.table import Attribution
from sidelight.correlator.statistics.intervals import ratio
from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.stats import Missing, as_many
from sidelight.scraper import quantiles
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.quantiles import Estimates
from sidelight.scraper.series.resets import restarts_of, rising_histogram
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

LEAST_COVERED = 0.95
NORMAL_95 = 1.645
NO_SERVER = "no server offers queue and prefill times"
# Each observed once of every request that is served.
_ONCE = {"queue_time": "queue", "prefill_time": "prefill", "ttft": "TTFT", "e2e_latency": "end-to-end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPercentiles:
    """Quantiles [Q] in s with a 90 % interval and their source.

    `source` is "client spans" (the estimates of our requests, inside what the buckets allow) or "buckets and sums".
    `covered_ratio`: the share of the requests counted by the server that are ours.
    """

    values_s: Floats
    low_s: Floats
    high_s: Floats
    source: Literal["client spans", "buckets and sums"]
    covered_ratio: float


def server_percentiles(
    table: Attribution, observed: Sequence[Observed | Missing], part: Literal["queue", "prefill"], qs: ArrayLike
) -> ServerPercentiles | Missing:
    """Estimate quantiles (0 to 1) of a time over all requests counted by the scrapes.

    These are the requests that ended between the first scrape and the last. `table` is what `attribute` made of the
    same scrapes, `observed` what `observe` returned for each endpoint. Missing: no server whose histograms are observed
    at the end of a request, or nothing was observed. A histogram without buckets leaves the client's spans, whatever
    they cover.
    """
    engines = [engine for engine in observed if isinstance(engine, Observed)]
    counted = sum(int(engine.ends.count[~engine.ends.lost].sum()) for engine in engines)
    if not counted:
        return Missing("no server observed the end of a request, and the times of it, between two scrapes")
    wanted = np.atleast_1d(np.asarray(qs, dtype=np.float64))
    values_s, sd_s = (getattr(table, f"{part}{name}") for name in ("_s", "_sd_s"))
    seen = (table.interval >= 0) & np.isfinite(values_s)
    covered = float(seen.sum()) / counted
    buckets = _read_buckets([engine.ends for engine in engines], part, wanted)
    if buckets is not None and covered < LEAST_COVERED:
        return ServerPercentiles(
            values_s=buckets.values,
            low_s=buckets.low,
            high_s=buckets.high,
            source="buckets and sums",
            covered_ratio=covered,
        )
    if not seen.any():
        return Missing("none of our requests ended between two scrapes, and the histogram has no buckets")
    error_s = NORMAL_95 * sd_s[seen]
    columns = (np.maximum(values_s[seen] + shift * error_s, 0.0) for shift in (0, -1, 1))
    quantiles_s = np.stack([np.quantile(column_s, wanted) for column_s in columns])
    if buckets is not None and covered <= 1:
        quantiles_s = np.clip(quantiles_s, buckets.lowest, buckets.highest)
    middle_s, low_s, high_s = quantiles_s
    return ServerPercentiles(
        values_s=middle_s, low_s=low_s, high_s=high_s, source="client spans", covered_ratio=covered
    )


def _read_buckets(parts: Sequence[ScrapeIntervals], part: str, qs: Floats) -> Estimates | None:
    """Read the quantiles off the histograms alone, None where some engine shows no buckets."""
    if any(part not in ends.buckets for ends in parts):
        return None
    fits = []
    for ends in parts:
        buckets, rows = ends.buckets[part], ~ends.lost
        fits.append(quantiles.fit(buckets.bounds, buckets.counts[rows], ends.sums[part][rows]))
    return quantiles.read(fits, qs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMeans:
    """Means over a window: the client's TTFT, and the server's queue and prefill time.

    The client's mean, in s, is of its requests that ended in the window. `ratio` is server over client requests: above
    1 the server finished requests that are not ours. Where there are no means, `missing` says why, and they are None.
    `outside_s` is what passed outside the server, and `proof` says why its sums are those of the client's requests:
    both only where that follows from its counts (`drained_means`). The next two are of a decode pool. `ci90_s` are the
    intervals of means over a long time at this load, by the part; of those alone that sums over scrapes tell.
    """

    client_requests: int
    server_requests: int
    ratio: float | None
    ttft_s: float | None
    queue_s: float | None
    prefill_s: float | None
    missing: str | None
    outside_s: float | None = None
    proof: str = ""
    decode_queue_s: float | None = None
    first_step_s: float | None = None
    ci90_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def server_means(
    ended_ns: Ints,
    ttft_s: Floats,
    observed: Sequence[Observed | Missing],
    window: Window,
    *,
    no_server: str = "",
    decoding: Sequence[Observed] = (),
) -> ServerMeans:
    """Average the servers' times and the clients' waits over a window.

    The clients' requests are ended_ns[n] and ttft_s[n], which may be NaN. `observed` is what `observe` returned for
    each endpoint. Server sums run from the last scrape at or before the window's start to the last scrape: what settles
    after its end is of requests that ended before. Where scrapes began later or ended earlier, only the requests that
    ended while all servers were scraped count. `no_server` is why nothing was scraped, where the caller knows.
    `decoding` are the engines that went on with requests of the observed ones.
    """
    engines = [engine.ends for engine in observed if isinstance(engine, Observed)]
    reasons = "; ".join(dict.fromkeys(absent.reason for absent in observed if isinstance(absent, Missing)))
    inside = window.holds(ended_ns)
    timed = int((inside & np.isfinite(ttft_s)).sum())
    for ends in engines:
        inside &= ended_ns <= ends.end_ns[-1]
        if ends.start_ns[0] > window.start_ns:
            inside &= ended_ns > ends.start_ns[0]
    count, queue_s, prefill_s, ci90_s = _sums(engines, window, "queue", "prefill")
    known_s = ttft_s[inside & np.isfinite(ttft_s)]
    missing = None
    if not engines:
        missing = reasons or no_server or NO_SERVER
    elif not timed:
        missing = "no request with a first token ended here"
    elif not len(known_s):
        missing = f"requests with a first token ended here ({timed}), but only while nothing was scraped"
    elif not count:
        missing = "the server observed no finished request here"
    means = ServerMeans(
        client_requests=len(known_s),
        server_requests=count,
        ratio=count / len(known_s) if len(known_s) and engines else None,
        ttft_s=float(known_s.mean()) if len(known_s) else None,
        queue_s=None if missing else queue_s / count,
        prefill_s=None if missing else prefill_s / count,
        missing=missing,
        ci90_s={} if missing else ci90_s,
    )
    return means if missing or not decoding else _with_decode(means, decoding, window)


def _with_decode(means: ServerMeans, engines: Sequence[Observed], window: Window) -> ServerMeans:
    """Return means with those of a decode pool; as they are where it ended other requests."""
    ended, queue_s, prefill_s, ci90_s = _sums([engine.ends for engine in engines], window, "decode_queue", "first_step")
    if not ended or not as_many(means.server_requests, ended):
        return means
    return replace(
        means, decode_queue_s=queue_s / ended, first_step_s=prefill_s / ended, ci90_s={**means.ci90_s, **ci90_s}
    )


def _sums(
    engines: Sequence[ScrapeIntervals], window: Window, *names: str
) -> tuple[int, float, float, dict[str, tuple[float, float]]]:
    """Return count, sums of queue and prefill, s, and intervals of both means by name.

    Scrapes of several engines stand in the order of time: these are busy together.
    """
    if not engines:
        return 0, 0.0, 0.0, {}
    ends = joined(engines)
    rows = np.argsort(ends.end_ns, kind="stable")
    rows = rows[ends.end_ns[rows] > window.start_ns]
    count, queue_s, prefill_s = ends.count[rows], ends.sums["queue"][rows], ends.sums["prefill"][rows]
    intervals = {name: ratio(times_s, count) for name, times_s in zip(names, (queue_s, prefill_s), strict=True)}
    known = {name: ends_s for name, ends_s in intervals.items() if ends_s}
    return int(count.sum()), float(queue_s.sum()), float(prefill_s.sum()), known


def drained_means(
    means: ServerMeans, endpoints: Sequence[EndpointSeries], window: Window, *, sent: int, wait_s: float
) -> ServerMeans:
    """Return the means, completed for servers that observe times at other moments.

    That is, queue and prefill at moments other than a request's end. Over any window their sums are of different
    requests; over all of a run that was drained they are of the same, if each of the four counts is that of the
    requests `sent`, all of which succeeded. `means` are the client's, with why there are none of the server's; `wait_s`
    is the mean wait for a first output.
    """
    # A page of no engine, such as a gateway's, observes none of them.
    increases = [_increases(endpoint, window) for endpoint in endpoints if detect(endpoint.series)]
    known = [increase for increase in increases if increase is not None]
    if not known or len(known) < len(increases):
        return means
    counts, sums_s = np.sum(known, axis=0).T
    if (counts != sent).any():
        shown = ", ".join(f"{name} {count:,.0f}" for name, count in zip(_ONCE.values(), counts, strict=True))
        why = f"over the whole run it counted {shown}, of {count_of(sent, 'request')} sent"
        return replace(means, missing=f"{means.missing}; {why}")
    if means.client_requests != sent:
        why = f"{means.client_requests:,} of {sent:,} requests succeeded with a first token, and its sums are of all"
        return replace(means, missing=f"{means.missing}; {why}")
    queue_s, prefill_s, ttft_s, _ = (sums_s / sent).tolist()
    return replace(
        means,
        server_requests=sent,
        ratio=1.0,
        queue_s=queue_s,
        prefill_s=prefill_s,
        outside_s=wait_s - ttft_s,
        missing=None,
        proof=(
            "it observes its times at different moments, so that single requests cannot be estimated; but over the "
            f"whole run it observed queue, prefill, TTFT and end-to-end time of {sent:,} requests each, as many as "
            "were sent"
        ),
    )


def _increases(endpoint: EndpointSeries, window: Window) -> list[tuple[float, float]] | None:
    """Return the increase of count and sum of each histogram of `_ONCE`.

    It runs from the last scrape before a window to the last of all. None where a histogram is missing or impossible,
    where nothing was scraped before the window, and where the server restarted.
    """
    engine = detect(endpoint.series)
    first = int(np.searchsorted(endpoint.response_ns, window.start_ns, side="right")) - 1
    if engine is None or first < 0:
        return None
    sources, restarts = canonical(endpoint.series, engine.name), restarts_of(endpoint)
    increases = []
    for name in _ONCE:
        source = sources[name]
        if isinstance(source, Missing) or any(min(columns.count, columns.sum) < 0 for columns in source.histograms):
            return None
        risen = [rising_histogram(endpoint, columns, restarts) for columns in source.histograms]
        unknown = any(np.isnan(histogram.sum[[first, -1]]).any() for histogram in risen)
        if unknown or any(histogram.resets[first + 1 :].any() for histogram in risen):
            return None
        count, sum_s = (
            float(sum(column[-1] - column[first] for column in columns))
            for columns in zip(*((histogram.count, histogram.sum) for histogram in risen), strict=True)
        )
        increases.append((count, sum_s))
    return increases
