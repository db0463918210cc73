"""Where the waits of production traffic went, request by request as they end, from the spans of clients and engines.

Joined as in a run (`join`) and put together as in a run (`parts`). Only times that one clock measured are taken off
each other, so that no clock has to agree with another. Requests that no engine told of are `rolling_estimate`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from correlator.breakdown import Parts, break_down
from correlator.estimate.table import Attribution, nothing
from correlator.exact.join import SLACK_MS, Joined, join
from correlator.live.client_spans import columns
from correlator.live.traces import TracedRequest
from rundir.columns import Bools, Floats, Texts
from scraper.spans.received import ReceivedSpan
from scraper.spans.requests import EngineSpans, request_spans

NO_ENGINE = "no_engine_span"
NO_CLIENT = "no_client_span"
NO_FIRST = "no_first_token"
NO_TIMES = "no_engine_times"
CONTRADICTION = "contradiction"
FAILED = "failed"
EVICTED = "window_full"
NOT_ESTIMATED = "not_estimated"
REASONS = (NO_ENGINE, NO_CLIENT, NO_FIRST, NO_TIMES, CONTRADICTION, FAILED, EVICTED, NOT_ESTIMATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """n requests that ended: `parts` break down the TTFT, `whole` the time to the end of the client's span.

    reason[n]: why the TTFT was not broken down, one of REASONS; "" where it was. In `whole`, network and gateway are
    what the whole took longer than in the engine; there is no TTFT in it. Of a contradiction neither is told.
    """

    parts: Parts
    whole: Parts
    reason: Texts

    def __len__(self) -> int:
        return len(self.reason)


def break_down_ended(requests: Sequence[TracedRequest], attribution: Attribution | None = None) -> Ended:
    """Break down requests that ended, in their order; `attribution`, with a row for each, where no engine told of it.

    A client's wait that is shorter than what the engine says it did in it, by over SLACK_MS, is a contradiction.
    """
    clients = columns([one.client for one in requests])
    # How long the client waited is compared below, for the TTFT and the whole alike.
    joined = join(replace(clients, submit_ns=np.full(len(requests), -1, dtype=np.int64)), _spans(requests))
    estimate = nothing(len(requests), "") if attribution is None else attribution
    gateways = [one.gateway for one in requests]
    first = np.array([one.first_s if one else math.nan for one in gateways], dtype=np.float64) * 1e3
    last = np.array([one.whole_s if one else math.nan for one in gateways], dtype=np.float64) * 1e3
    parts = break_down(clients, joined, estimate, gateway_ms=first - joined.ttft_ms)
    unseen = np.full(len(requests), -1, dtype=np.int64)
    ends = replace(clients, first_output_ns=unseen, first_token_ns=unseen)
    whole = break_down(ends, joined, estimate, gateway_ms=last - joined.e2e_ms)
    wrong = _contradicts(parts, parts.other_ms) | _contradicts(whole, whole.e2e_other_ms)
    _disbelieve(parts, wrong)
    _disbelieve(whole, wrong)
    reason = _reasons(requests, parts, joined, wrong, estimated=attribution is not None)
    return Ended(parts=parts, whole=whole, reason=reason)


def _contradicts(parts: Parts, other_ms: Floats) -> Bools:
    least_ms = np.fmin(np.fmin(parts.network_ms, parts.gateway_ms), other_ms)
    return np.asarray(least_ms < -SLACK_MS, dtype=np.bool_)


def _disbelieve(parts: Parts, rows: Bools) -> None:
    parts.source[rows] = "none"
    parts.quality[rows] = "none"


def _reasons(
    requests: Sequence[TracedRequest], parts: Parts, joined: Joined, wrong: Bools, *, estimated: bool
) -> Texts:
    reasons = np.full(len(requests), "", dtype=np.object_)
    for place in np.flatnonzero(~parts.covered).tolist():
        request = requests[place]
        if request.evicted:
            reasons[place] = EVICTED
        elif request.client is None:
            reasons[place] = NO_CLIENT
        elif wrong[place]:
            reasons[place] = CONTRADICTION
        elif request.client.failed:
            reasons[place] = FAILED
        elif not request.engine:
            reasons[place] = NOT_ESTIMATED if estimated else NO_ENGINE
        else:
            reasons[place] = NO_TIMES if joined.source[place] == "none" else NO_FIRST
    return reasons


def _spans(requests: Sequence[TracedRequest]) -> EngineSpans:
    """Read the engines' spans; each bears the place of its request as its trace."""
    owners: dict[tuple[str, str], str] = {}
    spans: list[ReceivedSpan] = []
    for place, request in enumerate(requests):
        for one in request.engine:
            owners.setdefault((one.span.trace_id.hex(), one.span.span_id.hex()), str(place))
            spans.append(one)
    read = request_spans(spans)
    places = [owners[key] for key in zip(read.trace_id, read.span_id, strict=True)]
    return replace(read, trace_id=np.array(places, dtype=np.object_))
