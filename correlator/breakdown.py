"""Each request's TTFT and end-to-end time in parts, from the best source there is, summing to the whole.

TTFT = network + gateway + queue + prefill + other. Exact sources (spans, timings in replies) take precedence over
estimates, request by request. What a source does not tell apart stays together in `other`, and is named.

This is the one list of parts: report, summary, tables, metrics, spans and dashboards read their names, labels and order
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from correlator.estimate import NO_FIRST
from correlator.estimate.table import Attribution
from correlator.exact.clock_offset import ClockOffsets, first_token_ns
from correlator.exact.table import SLACK_MS, Joined
from correlator.requests import RequestColumns
from rundir.columns import Bools, Floats, Ints, Texts

SOURCES = ("trace", "response", "histogram", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a request's time: its name in metrics and files, and what people read.

    column      of `Parts`, without its unit; the name where nothing else is stated
    within      the name of the part that holds it; "" of those that add up to the whole
    error       the column of `Attribution` whose standard error is that of its estimate, "" for none
    by_client   the client measures it alone, without any other source
    """

    name: str
    label: str
    column: str = ""
    within: str = ""
    error: str = ""
    by_client: bool = False

    def of(self, parts: Parts) -> Floats:
        """Return this part of each request [n], ms."""
        values: Floats = getattr(parts, f"{self.column or self.name}_ms")
        return values


_BEFORE_TOKEN = (
    Part(name="network", label="network", error="network"),
    Part(name="gateway", label="gateway"),
    Part(name="queue", label="queue", error="queue"),
    Part(name="prefill", label="prefill", error="prefill"),
)
DECODE = Part(name="decode", label="decode")
# What adds up to the TTFT, and to the end-to-end time.
TTFT_PARTS = (*_BEFORE_TOKEN, Part(name="other", label="other", error="engine_frontend"))
E2E_PARTS = (
    *_BEFORE_TOKEN,
    DECODE,
    Part(name="other", label="other", column="e2e_other", error="engine_frontend"),
)
ENGINE_FRONTEND = Part(name="engine_frontend", label="engine frontend", within="other", error="engine_frontend")
# What parts consist of, where that is known.
INNER_PARTS = (
    Part(name="request_network", label="request network", within="network"),
    Part(name="response_network", label="response network", within="network"),
    ENGINE_FRONTEND,
    Part(name="blank_output", label="blank output", within="other", by_client=True),
)
# Before the TTFT begins.
SEND = Part(name="send", label="send", by_client=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Columns of n requests, in their order: float64 ms, NaN where unknown or part of no known TTFT.

    ttft_ms, e2e_ms         the client's: submission to first and last token; of a reply in one piece, e2e to its end
    send_ms                 dispatch to submission, connecting included: before TTFT begins, and in none of its parts
    network_ms              outside engine and gateway: request_network_ms (submission to arrival there) and
                            response_network_ms (first token there to first output here), which are known apart only
                            where clocks are. Below 0 by as much as stamps are late; NaN: unknown, then in other_ms
    network_split_error_ms  by how much those two may be off, as the clocks are; NaN where they are unknown
    gateway_ms              in a gateway whose span was joined
    queue_ms, prefill_ms    in the engine; NaN: unknown, then they are in other_ms
    other_ms                the rest of TTFT: engine_frontend_ms (in the engine, neither queue nor prefill),
                            blank_output_ms (first output to first token that is not blank), and what `merged` names
    decode_ms               first to last token by the engine
    e2e_other_ms            the rest of e2e_ms, decode_ms taken out too: of other_ms what was not decoding, and how much
                            longer than the engine's first token its last was on the way
    error_ms                standard error of the least certain part; 0 exact, NaN without a source
    source                  one of SOURCES; a join by request id is a trace
    merged                  what other_ms holds that the source does not tell apart; "" for nothing
    reason                  why there is no source; of an estimate, why it rests on no observation, else why there is
                            nothing exact
    quality                 exact of a joined request, else one of `estimate.table.QUALITIES`
    engine_span_id          hex, "" for none
    arrival_ns, engine_first_token_ns  int64 ns Unix by our clock, -1 where unknown
    """

    ttft_ms: Floats
    e2e_ms: Floats
    send_ms: Floats
    request_network_ms: Floats
    response_network_ms: Floats
    network_split_error_ms: Floats
    network_ms: Floats
    gateway_ms: Floats
    engine_frontend_ms: Floats
    queue_ms: Floats
    prefill_ms: Floats
    blank_output_ms: Floats
    decode_ms: Floats
    other_ms: Floats
    e2e_other_ms: Floats
    error_ms: Floats
    source: Texts
    merged: Texts
    reason: Texts
    quality: Texts
    engine_span_id: Texts
    arrival_ns: Ints
    engine_first_token_ns: Ints

    def __len__(self) -> int:
        return len(self.source)

    @property
    def covered(self) -> Bools:
        """Which requests have a TTFT and its parts [n]."""
        return np.asarray((self.source != "none") & np.isfinite(self.ttft_ms), dtype=np.bool_)


def break_down(
    requests: RequestColumns,
    joined: Joined,
    attribution: Attribution,
    clocks: ClockOffsets | None = None,
    *,
    gateway_ms: Floats | None = None,
) -> Parts:
    """Put every request's times together; all arguments have the same n requests. Without `clocks` none are compared.

    Wherever there are a source and a TTFT, network, gateway, queue, prefill and other (NaN as 0) sum to it. What passed
    in a gateway [n] is taken out of the network's part.

    - engine times beyond the client's, or below their own parts, by over 10 ms: the engine's TTFT is discarded
    - a reply in one piece has no TTFT, but queue, prefill and decode, and of its end-to-end time what was outside
    """
    exact = joined.source != "none"
    known = exact | (attribution.quality != "none")
    unknown_ms, no_stamps_ns = np.full(len(joined), np.nan), np.full(len(joined), -1, dtype=np.int64)
    # Where no first output was noted apart, the first token is it.
    output_ns = np.where(requests.first_output_ns >= 0, requests.first_output_ns, requests.first_token_ns)
    last_ns = np.where(requests.last_token_ns >= 0, requests.last_token_ns, requests.end_ns)
    ttft_ms = _span_ms(requests.submit_ns, requests.first_token_ns)
    e2e_ms = _span_ms(requests.submit_ns, last_ns)
    engine = _engine_times(joined, attribution, _span_ms(requests.submit_ns, output_ns), e2e_ms)
    gateway_ms = unknown_ms if gateway_ms is None else np.where(known, gateway_ms, np.nan)
    network_ms = engine.outside_ms - np.nan_to_num(gateway_ms)
    before_ms = _sum(network_ms, gateway_ms, engine.queue_ms, engine.prefill_ms)
    parts = Parts(
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
        send_ms=_span_ms(requests.dispatch_ns, requests.submit_ns),
        request_network_ms=unknown_ms,
        response_network_ms=unknown_ms,
        network_split_error_ms=unknown_ms,
        network_ms=network_ms,
        gateway_ms=gateway_ms,
        engine_frontend_ms=engine.frontend_ms,
        queue_ms=engine.queue_ms,
        prefill_ms=engine.prefill_ms,
        blank_output_ms=_span_ms(output_ns, requests.first_token_ns),
        decode_ms=joined.decode_ms,
        other_ms=np.where(known, ttft_ms - before_ms, np.nan),
        e2e_other_ms=np.where(known, e2e_ms - _sum(before_ms, joined.decode_ms), np.nan),
        error_ms=_errors_ms(exact, attribution),
        source=_sources(joined, known),
        merged=_merged(known & np.isfinite(ttft_ms), network_ms, engine),
        reason=_reasons(exact, known, joined, attribution),
        quality=np.where(exact, "exact", attribution.quality).astype(np.object_),
        engine_span_id=joined.span_id,
        arrival_ns=no_stamps_ns,
        engine_first_token_ns=no_stamps_ns,
    )
    return parts if clocks is None else _on_our_clock(parts, requests, joined, clocks)


class _EngineTimes(NamedTuple):
    """Columns [n] in ms, NaN where unknown: outside the engine, and within it."""

    outside_ms: Floats
    frontend_ms: Floats
    queue_ms: Floats
    prefill_ms: Floats


def _engine_times(joined: Joined, attribution: Attribution, wait_ms: Floats, e2e_ms: Floats) -> _EngineTimes:
    """Return the exact times where there are any, else the estimates. `wait_ms` is to the client's first output.

    What passed outside the engine is, of a reply in one piece, by the end-to-end times.
    """
    exact = joined.source != "none"
    outside_ms = wait_ms - joined.ttft_ms
    frontend_ms = joined.ttft_ms - joined.queue_ms - joined.prefill_ms
    outside_ms[(outside_ms < -SLACK_MS) | (frontend_ms < -SLACK_MS)] = np.nan
    whole_ms = e2e_ms - joined.e2e_ms
    whole_ms[whole_ms < -SLACK_MS] = np.nan
    outside_ms = np.where(np.isnan(wait_ms), whole_ms, outside_ms)
    outside_ms = np.where(exact, outside_ms, 1e3 * attribution.network_s)
    frontend_ms = np.where(exact, frontend_ms, 1e3 * attribution.engine_frontend_s)
    return _EngineTimes(
        outside_ms=outside_ms,
        frontend_ms=np.where(np.isnan(outside_ms), np.nan, frontend_ms),
        queue_ms=np.where(exact, joined.queue_ms, 1e3 * attribution.queue_s),
        prefill_ms=np.where(exact, joined.prefill_ms, 1e3 * attribution.prefill_s),
    )


def _on_our_clock(parts: Parts, requests: RequestColumns, joined: Joined, clocks: ClockOffsets) -> Parts:
    """Put the engines' stamps on our clock, and divide the network's part by them.

    A span whose stamps contradict the others' divides nothing; on which side of a gateway time passed, no span tells.
    """
    arrival_ns = _moved(joined.arrival_ns, clocks)
    request_ms = _span_ms(requests.submit_ns, arrival_ns)
    consistent = (request_ms > -SLACK_MS) & (request_ms < parts.network_ms + SLACK_MS)
    request_ms[~consistent | np.isfinite(parts.gateway_ms)] = np.nan
    return replace(
        parts,
        request_network_ms=request_ms,
        response_network_ms=parts.network_ms - request_ms,
        network_split_error_ms=np.where(np.isfinite(request_ms), clocks.error_ns / 1e6, np.nan),
        arrival_ns=arrival_ns,
        engine_first_token_ns=_moved(first_token_ns(joined), clocks),
    )


def _moved(stamps_ns: Ints, clocks: ClockOffsets) -> Ints:
    """Return stamps of the engines' clocks by ours, -1 where they or their clock's offset are unknown."""
    known = (stamps_ns >= 0) & np.isfinite(clocks.offset_ns)
    return np.where(known, stamps_ns + np.nan_to_num(clocks.offset_ns).astype(np.int64), -1)


def _sources(joined: Joined, known: Bools) -> Texts:
    exact = joined.source != "none"
    sources = np.select([joined.source == "response", exact, known], ["response", "trace", "histogram"], "none")
    return sources.astype(np.object_)


def _errors_ms(exact: Bools, attribution: Attribution) -> Floats:
    errors_s = [getattr(attribution, f"{part.error}_sd_s") for part in TTFT_PARTS if part.error]
    return np.where(exact, 0.0, 1e3 * np.fmax.reduce(errors_s))


def _merged(rows: Bools, network_ms: Floats, engine: _EngineTimes) -> Texts:
    """Name what other_ms holds because no source tells it apart."""
    labels = ("network", "queue", "prefill", ENGINE_FRONTEND.label)
    unknown = (
        np.isnan(np.column_stack((network_ms, engine.queue_ms, engine.prefill_ms, engine.frontend_ms))) & rows[:, None]
    )
    patterns, place = np.unique(unknown, axis=0, return_inverse=True)
    names = [_listed([label for label, absent in zip(labels, row, strict=True) if absent]) for row in patterns.tolist()]
    return np.array(names, dtype=np.object_)[place.reshape(-1)] if names else np.empty(0, dtype=np.object_)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _reasons(exact: Bools, known: Bools, joined: Joined, attribution: Attribution) -> Texts:
    """Say what a source leaves open, what an estimate rests on, or why there is neither."""
    both = zip(attribution.reason.tolist(), joined.reason.tolist(), strict=True)
    neither = np.array([why if guess == NO_FIRST else f"{guess}; {why}" for guess, why in both], dtype=np.object_)
    estimated = np.where(attribution.reason != "", attribution.reason, joined.reason)
    return np.where(exact, joined.reason, np.where(known, estimated, neither))


def _sum(*parts_ms: Floats) -> Floats:
    """Add parts up, unknown ones as 0: what they took stays in what is left."""
    return np.asarray(np.sum([np.nan_to_num(part_ms) for part_ms in parts_ms], axis=0), dtype=np.float64)


def _span_ms(start_ns: Ints, end_ns: Ints) -> Floats:
    return np.where((start_ns >= 0) & (end_ns >= 0), (end_ns - start_ns) / 1e6, np.nan)
