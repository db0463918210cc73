"""Facts of a step's run for checking requirements, taken once to hold no table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.load.steady import SteadyWindow, in_flight
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.correlator.statistics.server_load import leading_endpoints
from sidelight.loadgen.plan import arrivals
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.requests.delivery import Delivery, delivery
from sidelight.loadgen.requests.metrics import refused_by_filter, request_metrics
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.methodology.study.model import StepData
from sidelight.methodology.study.server_side import increase
from sidelight.rundir.columns import take
from sidelight.scraper.engines.recognition import detect
from sidelight.scraper.series.table import EndpointSeries

LEAST_OUTPUT_TOKENS = 50  # of a request whose gaps count (itl-setup)
# What the draft wants stated of a workload: of all of it, or of each of its classes.
STATED = ("input_tokens", "output_tokens", "content", "domain", "language", "system_prompt", "shared_prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts from a step's requests, pages and manifest; None where they state nothing."""

    about: Mapping[str, Any]  # as of StepData
    load_doubt: str
    workload: str  # the draft's workload that it is, with whatever lengths; else its label
    is_custom: bool
    is_dataset: bool
    requests_sha256: str | None  # of all request bodies in order
    unstated: tuple[str, ...]  # which of STATED are not stated
    transport: str | None  # http, websocket or grpc
    arrivals: tuple[str, ...]  # the arrival processes that the load generator has
    ok: int
    refused: int  # requests, by a safety system
    stamp_ns: int  # what divides all stamps: their resolution
    unrecorded: int  # requests that ended ok without one of the stamps and numbers that the draft names
    held: int  # requests that a cap on those in flight held back
    in_flight_mean: float | None  # requests, from the first tenth of the submissions on to the last
    known_parts: tuple[str, ...]  # of the TTFT, of any request
    gaps: int  # between chunks
    long_requests: int  # of at least 50 output tokens
    long_gaps: int  # between their chunks
    classes: Mapping[str, int]  # requests that ended ok, by class
    delivery: Delivery
    first_tokens: int
    is_server_timed: bool
    cached_ratio: float | None  # share of the prompt tokens that were cached, by the replies
    unshared_cached_ratio: float  # the same where prompts share nothing; else 0
    hits: float | None  # increase of the engine's prefix cache hits
    is_clock_compared: bool  # whether a time is the difference of our clock and another machine's
    round_trip_ms: float | None
    engine: str
    engine_version: str
    cache_config: Mapping[str, str]  # labels of the engine's cache_config_info


def step_facts(data: StepData) -> StepFacts:
    """Return the facts of a step from its tables."""
    return facts_of(data.requests, data.parts, data.endpoints, data.about, data.doubts.get("load", ""))


def facts_of(
    requests: RequestLog,
    parts: Parts,
    endpoints: Sequence[EndpointSeries],
    about: Mapping[str, Any],
    load_doubt: str = "",
) -> StepFacts:
    """Return the facts of the measured requests of a run; arguments as StepData has them."""
    config, stated = about.get("config") or {}, about.get("workload") or {}
    ok = take(requests, requests.status == "ok")
    metrics = request_metrics(ok)
    engine = next(filter(None, (detect(page.series) for page in endpoints)), None)
    delivered = delivery(ok)
    is_long = ok.output_tokens >= LEAST_OUTPUT_TOKENS
    protocol = PROTOCOLS.get(config.get("endpoint", ""))
    label = str(stated.get("label") or config.get("workload") or "not known")
    cached_ratio = _cached_ratio(ok)
    round_trips = [each["median"] for each in about.get("network_rtt_ms") or () if each.get("median") is not None]
    stamp_ns, unrecorded = _recorded(ok)
    return StepFacts(
        about=about,
        load_doubt=load_doubt,
        workload=next((name for name in workloads.NAMES if label.startswith(name)), label),
        is_custom=not str(stated.get("source")).startswith("draft-"),
        is_dataset=bool(stated.get("data")),
        requests_sha256=planned.get("sha256") if isinstance(planned := about.get("planned"), Mapping) else None,
        unstated=tuple(name for name in STATED if not _is_stated(stated, name)),
        transport=protocol.transport if protocol else None,
        arrivals=get_args(arrivals.Kind),
        ok=len(ok),
        refused=int(refused_by_filter(requests).sum()),
        stamp_ns=stamp_ns,
        unrecorded=unrecorded,
        held=int((requests.held_ns > 0).sum()),
        in_flight_mean=_in_flight_mean(requests),
        known_parts=tuple(part.name for part in TTFT_PARTS if np.isfinite(parts.seconds(part)).any()),
        gaps=int(metrics.gap_count.sum()),
        long_requests=int(is_long.sum()),
        long_gaps=int(metrics.gap_count[is_long].sum()),
        classes=Counter(ok.workload_class.tolist()),
        delivery=delivered,
        first_tokens=int((ok.first_kind != "").sum()),
        is_server_timed=bool(delivered.server_itl_ms.count) and delivered.itl_option != "direct",
        cached_ratio=cached_ratio,
        unshared_cached_ratio=0.0 if _shares(stated, ok) else cached_ratio or 0.0,
        hits=increase(leading_endpoints(endpoints), "prefix_cache_hits"),
        is_clock_compared=bool(np.isfinite(parts.request_network_s).any()),
        round_trip_ms=min(round_trips, default=None),
        engine=engine.name if engine else "",
        engine_version=(engine.version if engine else "") or "",
        cache_config=_cache_config(endpoints),
    )


def _cached_ratio(ok: RequestLog) -> float | None:
    """Return the cached share of the prompt tokens, by the replies that report it."""
    known = (ok.cached_tokens >= 0) & (ok.input_tokens > 0)
    return float(ok.cached_tokens[known].sum() / ok.input_tokens[known].sum()) if known.any() else None


def _shares(stated: Mapping[str, Any], ok: RequestLog) -> bool:
    """Return whether prompts share a beginning, by the workload or by sessions."""
    classes = (stated, *(stated.get("classes") or ()))
    declared = any(each.get("system_prompt") or each.get("shared_prefix") for each in classes)
    return declared or bool((ok.session >= 0).any())


def _recorded(ok: RequestLog) -> tuple[int, int]:
    """Return the resolution of all stamps, and the number of incompletely recorded requests.

    These lack a stamp or number that the draft names. Of a reply that was all blank there is no first token, but its
    output was recorded.
    """
    stamps = np.array([ok.submit_ns, ok.first_output_ns, ok.last_output_ns])
    numbers = np.array([ok.input_tokens, ok.output_tokens])
    unrecorded = (stamps < 0).any(axis=0) | (numbers < 0).any(axis=0)
    return int(np.gcd.reduce(stamps, axis=None)) if len(ok) else 0, int(unrecorded.sum())


def _is_stated(workload: Mapping[str, Any], name: str) -> bool:
    """Return whether a workload, its data set or each of its classes states a field."""
    classes: Sequence[Mapping[str, Any]] = workload.get("classes") or ({},)
    return name in workload or all(name in each for each in classes) or name in (workload.get("data") or ())


def _in_flight_mean(requests: RequestLog) -> float | None:
    sent_ns = requests.submit_ns[requests.submit_ns >= 0]
    if not len(sent_ns):
        return None
    begin_ns, end_ns = int(np.quantile(sent_ns, 0.1)), int(sent_ns.max())
    window = SteadyWindow(start_ns=begin_ns, end_ns=end_ns, left_out=0.1, enough=None)
    return in_flight(requests.dispatch_ns, requests.end_ns, window)


def _cache_config(endpoints: Sequence[EndpointSeries]) -> dict[str, str]:
    infos = (each for endpoint in endpoints for each in endpoint.series if each.name.endswith(":cache_config_info"))
    return dict(next((info.labels for info in infos), ()))
