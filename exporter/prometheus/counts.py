"""Counts of requests by part and of clients' spans, for the Prometheus page.

Shared by a run, whose requests are its own, and by `watch`, whose requests are production's. Apart from `page`, since
what this imports would delay a run's first request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from sidelight.correlator.breakdown import SOURCES, Parts
from sidelight.correlator.estimate.table import QUALITIES
from sidelight.correlator.gateways import GatewayPart
from sidelight.correlator.parts import (
    E2E_PARTS,
    ENGINE_PARTS,
    GATEWAY_REQUEST,
    INSIDE_PARTS,
    SHARED_PARTS,
    TTFT_PARTS,
    Part,
)
from sidelight.correlator.requests import RequestColumns
from sidelight.exporter.prometheus.snapshot import (
    LATENCY_BOUNDS_S,
    MEAN_BOUNDS_S,
    ClientCounts,
    Cumulative,
    PartCounts,
    add,
    bucketize,
    traced,
)
from sidelight.recorded.client_spans import ClientSpan
from sidelight.recorded.gateway_spans import FIRST_OUTPUT
from sidelight.rundir.columns import Texts

# Of what parts consist of, what is on the page.
INNER = (*INSIDE_PARTS, GATEWAY_REQUEST)
NO_GATEWAY = "no_gateway"


def nothing_counted(*, sources: Iterable[str] = SOURCES[:-1], reasons: Iterable[str] = ()) -> PartCounts:
    """Return the counts of no requests: series of these sources are there from the start, so that Prometheus sees
    their first rise; those of others come with their first request.
    """
    empty, coarse, sources = bucketize([], LATENCY_BOUNDS_S), bucketize([], MEAN_BOUNDS_S), tuple(sources)
    missing = dict.fromkeys(reasons, 0)
    return PartCounts(
        ttft={(part.name, source): empty for part in TTFT_PARTS for source in sources if part not in SHARED_PARTS},
        e2e={(part.name, source): coarse for part in E2E_PARTS for source in sources if part not in SHARED_PARTS},
        inner={(part.name, source): empty for part in INNER for source in sources},
        requests=dict.fromkeys(SOURCES, 0),
        quality=dict.fromkeys(QUALITIES, 0),
        gateways=dict.fromkeys((*FIRST_OUTPUT, NO_GATEWAY), 0),
        missing=missing,
        engine_only={(part.name, "trace"): coarse for part in ENGINE_PARTS if missing},
    )


def counted(
    before: PartCounts,
    parts: Parts,
    *,
    whole: Parts | None = None,
    reasons: Texts | None = None,
    requests: RequestColumns | None = None,
    engine_only: Parts | None = None,
) -> PartCounts:
    """Add requests that ended: their TTFT by `parts`, their end-to-end time by `whole`, without one by `parts` too.

    `reasons`, each one of `before.missing`, say why a TTFT was not broken down, "" where it was; more than n where
    others are without one that are no requests here, but `engine_only`. The traces of `requests`[n] become exemplars of
    the TTFT's parts.
    """
    whole = parts if whole is None else whole
    ended = (whole.source != "none") & np.isfinite(whole.e2e_s)
    source = np.where(parts.covered, parts.source, np.where(ended, whole.source, SOURCES[-1]))
    quality = np.where(parts.covered, parts.quality, np.where(ended, whole.quality, QUALITIES[-1]))
    of_ttft, of_e2e = np.where(parts.covered, parts.source, ""), np.where(ended, whole.source, "")
    return PartCounts(
        ttft=_observed(before.ttft, TTFT_PARTS, parts, of_ttft, LATENCY_BOUNDS_S, requests),
        e2e=_observed(before.e2e, E2E_PARTS, whole, of_e2e, MEAN_BOUNDS_S),
        inner=_observed(before.inner, INNER, whole, of_e2e, LATENCY_BOUNDS_S),
        requests=_more(before.requests, source),
        quality=_more(before.quality, quality),
        gateways=_more(before.gateways, map(_first_output, parts.gateways[source != SOURCES[-1]].tolist())),
        missing=before.missing if reasons is None else _more(before.missing, reasons[reasons != ""]),
        engine_only=before.engine_only
        if engine_only is None
        else _observed(
            before.engine_only,
            ENGINE_PARTS,
            engine_only,
            np.full(len(engine_only), "trace", dtype=np.object_),
            MEAN_BOUNDS_S,
        ),
    )


def without_breakdown(counts: PartCounts, reason: str, requests: int) -> PartCounts:
    """Return the counts with more requests without a breakdown, for a new reason."""
    none = SOURCES[-1]
    by_source = {**counts.requests, none: counts.requests[none] + requests}
    return replace(counts, requests=by_source, missing={**counts.missing, reason: requests})


def no_clients_counted() -> ClientCounts:
    """Return the counts of no clients' spans."""
    empty = bucketize([], LATENCY_BOUNDS_S)
    return ClientCounts(requests={"ok": 0, "failed": 0}, ttft=empty, e2e=empty)


def clients_counted(before: ClientCounts, clients: Sequence[tuple[ClientSpan, str]], now_ns: int) -> ClientCounts:
    """Add clients' spans that ended, each with its trace, an exemplar of the TTFT."""
    if before.ttft is None or before.e2e is None:
        raise AssertionError("they are counted from the start")
    spans, traces = [span for span, _ in clients], np.array([trace for _, trace in clients], object)
    first_s, whole_s = np.array([span.first_s for span in spans]), np.array([span.whole_s for span in spans])
    failed = sum(span.failed for span in spans)
    return ClientCounts(
        requests={
            "ok": before.requests["ok"] + len(spans) - failed,
            "failed": before.requests["failed"] + failed,
        },
        input_tokens=_tokens(before.input_tokens, [span.input_tokens for span in spans]),
        output_tokens=_tokens(before.output_tokens, [span.output_tokens for span in spans]),
        ttft=add(before.ttft, traced(first_s, LATENCY_BOUNDS_S, traces, np.full(len(spans), now_ns))),
        e2e=add(before.e2e, bucketize(whole_s, LATENCY_BOUNDS_S)),
    )


def _tokens(before: int | None, counts: Sequence[int]) -> int | None:
    """Add the token counts that spans state, -1 where missing; None if all are missing."""
    stated = [count for count in counts if count >= 0]
    return (before or 0) + sum(stated) if stated or before else None


def _observed(
    before: Mapping[tuple[str, str], Cumulative],
    kinds: Sequence[Part],
    parts: Parts,
    source: npt.NDArray[np.str_] | Texts,
    bounds_s: tuple[float, ...],
    requests: RequestColumns | None = None,
) -> dict[tuple[str, str], Cumulative]:
    after = dict(before)
    for name in sorted(set(source) - {""}):
        rows = source == name
        for part in kinds:
            # Stamps are late by a little: a sum on the page must not fall for that.
            values_s, key = np.maximum(parts.seconds(part)[rows], 0.0), (part.name, name)
            if (key in after or part in SHARED_PARTS) and np.isnan(values_s).all():
                continue
            if requests is None:
                new = bucketize(values_s, bounds_s)
            else:
                new = traced(values_s, bounds_s, requests.trace_id[rows], requests.first_token_ns[rows])
            after[key] = add(after[key], new) if key in after else new
    return after


def _first_output(gateways: Sequence[GatewayPart]) -> str:
    """Return the source of the first output time of a request's outermost gateway."""
    return gateways[0].first_by or FIRST_OUTPUT[-1] if gateways else NO_GATEWAY


def _more(before: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    new = Counter(names)
    return {name: count + new[name] for name, count in before.items()}
