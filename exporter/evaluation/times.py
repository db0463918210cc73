"""Times of a recorded run's requests, by client and server together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sidelight.correlator.attribute import attribute
from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.intervals import Observed, observe
from sidelight.correlator.estimate.table import Attribution
from sidelight.correlator.exact.clock_offset import ClockOffset, clock_offsets, handed_over
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.matching import Matched, matched
from sidelight.correlator.exact.table import Joined, by_decode_engines
from sidelight.correlator.live.reasons import NOT_COMPARED
from sidelight.correlator.opening import WatchRun
from sidelight.correlator.replay import Replayed
from sidelight.correlator.requests import address
from sidelight.loadgen.host.round_trip import RoundTrip
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.gateway_spans import GatewaySpan, nested
from sidelight.recorded.run import Run
from sidelight.rundir.columns import Bools, Floats, Texts, held
from sidelight.rundir.stats import Missing
from sidelight.scraper.window.pools import Role, roles_of

SHARED = "a prefill and a decode engine shared each request; their spans tell its times (--otlp-listen HOST:PORT)"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlated:
    """Time breakdown of each request of a run, warm-up included, and its sources; columns [n].

    `observed` is what each endpoint's scrapes show of the ends of requests, `decoding` the same of a decode pool, whose
    prefills are elsewhere; `roles` are those of the endpoints; `refusal` is as of `Joined`, `joined` its table; None
    of a watch.
    """

    parts: Parts
    refusal: Texts
    attribution: Attribution
    observed: Sequence[Observed | Missing]
    decoding: Sequence[Observed]
    roles: Sequence[Role]
    clocks: Mapping[str, ClockOffset]
    joined: Joined | None = None
    records: Matched | None = None


def correlated(run: Run) -> Correlated:
    """Return every request's times: exact ones from spans and replies, for all others estimates from scrapes.

    Those of a watch are as they were when its requests ended.
    """
    if isinstance(run, WatchRun):
        return _watched(run, run.watched)
    requests = held(run.requests)
    records = matched(requests, run.timings) if run.timings.clocks else None
    round_trips = _round_trips(run)
    own_urls = [url for url, trip in round_trips.items() if trip.own_address is True]
    joined = join(requests, run.spans, records)
    passed = _gateways(requests, run.gateways, joined)
    joined = handed_over(joined, requests, _one_machine(requests, run, own_urls), gateways=passed)
    roles = roles_of(run.endpoints)
    observed = [
        Missing(SHARED) if role == "decode" else observe(endpoint)
        for role, endpoint in zip(roles, run.endpoints, strict=True)
    ]
    # A request ends at the prefill engine long before its client sees it end.
    attribution = attribute(requests, run.endpoints, [Missing(SHARED)] * len(roles) if any(roles) else observed)
    if any(roles):
        joined = by_decode_engines(joined)
    clocks = clock_offsets(requests, joined, own_urls, run.nodes)
    parts = break_down(
        requests,
        joined,
        attribution,
        clocks,
        gateways=passed,
        round_trip_s=_round_trip_s(requests, round_trips),
    )
    return Correlated(
        parts=parts,
        refusal=joined.refusal,
        attribution=attribution,
        observed=observed,
        decoding=[
            times
            for role, endpoint in zip(roles, run.endpoints, strict=True)
            if role == "decode" and isinstance(times := observe(endpoint), Observed)
        ],
        roles=roles,
        clocks=clocks.by_engine,
        joined=joined,
        records=records,
    )


def _watched(run: Run, watched: Replayed) -> Correlated:
    unknown = ClockOffset(offset_ns=None, error_ns=None, pairs=0, reason=NOT_COMPARED)
    return Correlated(
        parts=watched.parts,
        refusal=np.full(len(watched.parts), "", dtype=np.object_),
        attribution=watched.attribution,
        observed=[observe(endpoint) for endpoint in run.endpoints],
        decoding=(),
        roles=roles_of(run.endpoints),
        clocks={"": unknown},
    )


def _gateways(
    requests: RequestLog, gateways: Mapping[str, tuple[GatewaySpan, ...]], joined: Joined
) -> list[tuple[GatewaySpan, ...]]:
    """Return the gateways that each request passed [n]: those of its own trace, and of that of its engine's span."""
    if not gateways:
        return [()] * len(requests)
    pairs = zip(requests.trace_id.tolist(), joined.trace_id.tolist(), strict=True)
    return [nested(*(gateways.get(trace, ()) for trace in dict.fromkeys(pair))) for pair in pairs]


def _one_machine(requests: RequestLog, run: Run, own_urls: Collection[str]) -> Bools:
    """Return a mask [n] of requests to engines on this machine."""
    is_here = all(address(endpoint.url)[0] in _LOOPBACK for endpoint in run.endpoints)
    return np.array([is_here and url in own_urls for url in requests.endpoint_url.tolist()], dtype=np.bool_)


def _round_trips(run: Run) -> dict[str, RoundTrip]:
    """Return the measured TCP round trip to the server of each requested URL. URLs without a measurement are left
    out.
    """
    measured = msgspec.convert(run.manifest.get("network_rtt_ms", []), list[RoundTrip])
    by_address = {address(trip.url): trip for trip in measured if trip.median is not None}
    return {url: by_address[address(url)] for url in set(run.requests.endpoint_url) if address(url) in by_address}


def _round_trip_s(requests: RequestLog, round_trips: Mapping[str, RoundTrip]) -> Floats:
    """Return the round trip to each request's server [n], s, NaN if not measured."""
    by_url = {url: trip.median / 1e3 for url, trip in round_trips.items() if trip.median is not None}
    return np.array([by_url.get(url, np.nan) for url in requests.endpoint_url], dtype=np.float64)
