"""Each request's TTFT and end-to-end time in parts, from the best available source.

The parts sum to the whole. TTFT = network + gateway + queue + prefill + other; of a request that two engines shared,
router, KV transfer, decode queue and first decode step are parts too. Exact sources (spans, timings in
replies) take precedence over estimates, request by request. What a source does not tell apart stays together in
`other`, and is named.

`correlator.parts` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sidelight.correlator.attribute import NO_FIRST
from sidelight.correlator.estimate.table import BY_TIME, Attribution
from sidelight.correlator.exact.clock_offset import ClockOffsets, first_token_ns
from sidelight.correlator.exact.table import RECORD_BY_TIME, SLACK_S, UNDIVIDED, WITHIN_S, Joined
from sidelight.correlator.gateways import GatewayColumns, gateway_columns
from sidelight.correlator.parts import ENGINE_FRONTEND, NETWORK, OUTSIDE_ENGINE, TTFT_PARTS, Part
from sidelight.correlator.requests import RequestColumns, first_output_ns
from sidelight.loadgen.requests.metrics import e2e_ns, span_s, ttft_ns
from sidelight.recorded.gateway_spans import GatewaySpan
from sidelight.rundir.columns import Bools, Floats, Ints, Texts, texts_of
from sidelight.scraper.engines.catalogue import INNER_TIMES
from sidelight.scraper.spans.request_times import InnerTimes

SOURCES = ("trace", "response", "histogram", "none")
ROUNDING = 1e-12  # of a whole: what is left of it by floating point
STAMP_S = 1e-8  # stamps are in whole nanoseconds
# Names of the parts that may be merged in another.
_MERGED = (NETWORK, "queue", "prefill", ENGINE_FRONTEND.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(InnerTimes):
    """Columns of n requests, in their order: float64 s, NaN where unknown or part of no known TTFT.

    ttft_s, e2e_s           the client's: submission to first and last token; of a reply in one piece, e2e to its end
    send_s                  dispatch to submission, connecting included: before TTFT begins, and in none of its parts
    network_s               outside the engine, less gateway_s: request_network_s (submission to arrival there) and
                            response_network_s (first token there to first output here), which are known apart only
                            where clocks are. Below 0 by as much as stamps are late; NaN: unknown, then in other_s, or
                            not seen, of a request that begins at a gateway: its client sent no spans
    round_trip_s            of network_s, one round trip of TCP to the server that was asked, as far as it was measured;
                            beyond_round_trip_s: what that leaves, in gateways, proxies and HTTP on both sides
    network_split_error_s   by how much those two may be off, as the clocks are; NaN where they are unknown
    gateway_s               in gateways whose spans came (`correlator.gateways`): their first output less that of the
                            engine; where the outermost does not say its first output, what is known of it, and
                            gateway_at_most_s is the most that it can be
    gateway_request_s       of gateway_s, before they called the next server
    gateways                the gateways by themselves, outermost first: a tuple of GatewayPart
    queue_s, prefill_s      in the engine, of two the first; NaN: unknown, then they are in other_s; the queue of an
                            undivided request in prefill_s
    router_s                between two engines, then kv_transfer_s, decode_queue_s and first_step_s in the second, as
                            far as it tells them apart. NaN where one engine served, and router_s where it is within
                            router_error_s, the error of the one clock against the other (in no error_s): it is then
                            in network_s
    other_s                 the rest of TTFT: engine_frontend_s (in the engine, but in none of its other parts),
                            blank_output_s (first output to first token that is not blank), those of INNER_TIMES that
                            are no parts of the TTFT themselves (NaN: in engine_frontend_s), and what `merged` names
    decode_s                first to last token by the engine, else by the client
    decode_source           whose decode_s is, one of SOURCES, or client
    e2e_other_s             the rest of e2e_s, decode_s taken out too: of other_s what was not decoding, and how much
                            longer than the engine's first token its last was on the way
    error_s                 standard error of the least certain part; 0 exact, NaN without a source
    source                  one of SOURCES; a join by request id is a trace
    merged                  what other_s holds that the source does not tell apart; "" for nothing
    reason                  why there is no source; of an estimate, why it rests on no observation, else why there is
                            nothing exact
    quality                 exact of a joined request, or by_time where it was joined by time alone; else that of its
                            estimate, one of `estimate.table.QUALITIES`
    engine_span_id          hex, "" for none; engine: the process that it is of, of two the first, as in `Joined.clock`
    arrival_ns, engine_first_token_ns  int64 ns Unix by our clock, -1 where unknown
    """

    ttft_s: Floats
    e2e_s: Floats
    send_s: Floats
    request_network_s: Floats
    response_network_s: Floats
    network_split_error_s: Floats
    network_s: Floats
    round_trip_s: Floats
    beyond_round_trip_s: Floats
    gateway_s: Floats
    gateway_request_s: Floats
    gateway_at_most_s: Floats
    router_error_s: Floats
    engine_frontend_s: Floats
    queue_s: Floats
    prefill_s: Floats
    blank_output_s: Floats
    decode_s: Floats
    other_s: Floats
    e2e_other_s: Floats
    error_s: Floats
    source: Texts
    decode_source: Texts
    merged: Texts
    reason: Texts
    quality: Texts
    engine_span_id: Texts
    engine: Texts
    gateways: Texts
    arrival_ns: Ints
    engine_first_token_ns: Ints

    def __len__(self) -> int:
        return len(self.source)

    def seconds(self, part: Part) -> Floats:
        """Return one part of each request [n], s."""
        values: Floats = getattr(self, f"{part.column or part.name}_s")
        return values

    @property
    def covered(self) -> Bools:
        """Which requests have a TTFT and its parts [n]."""
        return np.asarray((self.source != "none") & np.isfinite(self.ttft_s), dtype=np.bool_)

    @property
    def undivided(self) -> Bools:
        """Which requests two engines shared that tell nothing but their whole [n]."""
        return np.asarray((self.source != "none") & (self.reason == UNDIVIDED), dtype=np.bool_)

    @property
    def by_two_engines(self) -> Bools:
        """Which requests two engines shared [n]."""
        return np.asarray(np.isfinite(self.decode_queue_s) | np.isfinite(self.first_step_s), dtype=np.bool_)

    @property
    def begins_at_gateway(self) -> Bools:
        """Return a mask [n] of requests that begin at a gateway with a known part.

        Their network is not observed.
        """
        return np.asarray(np.isnan(self.network_s) & np.isfinite(self.gateway_s), dtype=np.bool_)


def network_label(parts: Parts, rows: Bools) -> str:
    """Return the label of the part `network` for some requests [n].

    It is "network" only where it cannot contain a gateway.
    """
    outside = rows & np.isfinite(parts.network_s)
    known, bounded = np.isfinite(parts.gateway_s[outside]), np.isfinite(parts.gateway_at_most_s[outside])
    if parts.begins_at_gateway[rows].any() and not outside.any():
        return NETWORK
    if known.any():
        return NETWORK if (known & ~bounded).all() else f"rest {OUTSIDE_ENGINE}"
    if (parts.by_two_engines & np.isnan(parts.router_s))[outside].any():
        return f"{OUTSIDE_ENGINE}s"  # what is between them too
    return f"{NETWORK} and gateway" if bounded.any() and bounded.all() else OUTSIDE_ENGINE


def gateway_label(parts: Parts, rows: Bools) -> str:
    """Return the label of the part `gateway` for some requests [n]."""
    outermost = [gateways[0] for gateways in parts.gateways[rows & np.isfinite(parts.gateway_s)]]
    return "gateway, inbound" if outermost and not any(part.first_by for part in outermost) else "gateway"


def break_down(
    requests: RequestColumns,
    joined: Joined,
    attribution: Attribution,
    clocks: ClockOffsets | None = None,
    *,
    gateways: Sequence[tuple[GatewaySpan, ...]] | None = None,
    begins_at_gateway: Bools | None = None,
    round_trip_s: Floats | None = None,
) -> Parts:
    """Put every request's times together; all arguments have the same n requests. Without `clocks` none are compared.

    Wherever there are a source and a TTFT, its parts (NaN as 0) sum to it. What passed in `gateways` [n], outermost
    first each, is taken out of the network's part, which is not seen of a request that `begins_at_gateway` [n];
    `round_trip_s` [n] is that of TCP to the server asked.

    - engine times beyond the client's, or below their own parts, by over 10 ms: the engine's TTFT is discarded
    - a reply in one piece has no TTFT, but queue, prefill and decode, and of its end-to-end time what was outside
    """
    known = (exact := joined.source != "none") | (attribution.quality != "none")
    unknown_s, no_stamps_ns = np.full(len(joined), np.nan), np.full(len(joined), -1, dtype=np.int64)
    ttft_s = ttft_ns(requests.submit_ns, requests.first_token_ns) / 1e9
    e2e_s = e2e_ns(requests.submit_ns, requests.last_token_ns, requests.end_ns) / 1e9
    wait_s = span_s(requests.submit_ns, output_ns := first_output_ns(requests))
    engine = _engine_times(joined, attribution, wait_s, e2e_s)
    passed = _gateways(gateways, joined, engine, wait_s, known)
    network_s = _cleared(engine.outside_s - np.nan_to_num(passed.gateway_s), e2e_s)
    before_s = _sum(network_s, passed.gateway_s, *engine.of_ttft())
    decode_s, decode_source = _decode(requests, joined.decode_s, source := _sources(joined, known))
    trip_s = unknown_s if round_trip_s is None else _shorter(round_trip_s, network_s)
    parts = Parts(
        ttft_s=ttft_s,
        e2e_s=e2e_s,
        send_s=span_s(requests.dispatch_ns, requests.submit_ns),
        request_network_s=unknown_s,
        response_network_s=unknown_s,
        network_split_error_s=unknown_s,
        network_s=_seen(network_s, passed.gateway_s, begins_at_gateway),
        round_trip_s=trip_s,
        beyond_round_trip_s=network_s - trip_s,
        **{column.name: getattr(passed, column.name) for column in fields(passed)},
        router_error_s=joined.router_error_s,
        **engine.columns(),
        blank_output_s=span_s(output_ns, requests.first_token_ns),
        decode_s=decode_s,
        other_s=np.where(known, _cleared(ttft_s - before_s, ttft_s), np.nan),
        e2e_other_s=np.where(known, _cleared(e2e_s - _sum(before_s, decode_s), e2e_s), np.nan),
        error_s=_errors_s(exact, attribution),
        source=source,
        decode_source=decode_source,
        merged=_merged(known & np.isfinite(ttft_s), exact & (joined.reason == UNDIVIDED), network_s, engine),
        reason=_reasons(exact, known, joined, attribution),
        quality=texts_of(np.select([joined.by_time, exact], [BY_TIME, "exact"], attribution.quality)),
        engine_span_id=joined.span_id,
        engine=joined.clock,
        arrival_ns=no_stamps_ns,
        engine_first_token_ns=no_stamps_ns,
    )
    return parts if clocks is None else _on_our_clock(parts, requests, joined, clocks)


def _shorter(trip_s: Floats, network_s: Floats) -> Floats:
    """Return the round trips [n]: what took less, by an estimate or a late stamp, was a shorter one."""
    return np.minimum(trip_s, np.maximum(network_s, 0.0))


class _EngineTimes(NamedTuple):
    """Columns [n] in s, NaN where unknown: outside the engine, and within it; `inner_s` by names of INNER_TIMES."""

    outside_s: Floats
    engine_frontend_s: Floats
    inner_s: Mapping[str, Floats]
    queue_s: Floats
    prefill_s: Floats

    def of_ttft(self) -> list[Floats]:
        """Return those that are parts of the TTFT."""
        return [self.queue_s, self.prefill_s, *(self.inner_s[part.name] for part in TTFT_PARTS if part.stated)]

    def columns(self) -> dict[str, Any]:
        """Return those within the engine by their names in `Parts`."""
        inside = {"engine_frontend": self.engine_frontend_s, "queue": self.queue_s, "prefill": self.prefill_s}
        return {f"{name}_s": column for name, column in (inside | dict(self.inner_s)).items()}


def _engine_times(joined: Joined, attribution: Attribution, wait_s: Floats, e2e_s: Floats) -> _EngineTimes:
    """Return the exact times where there are any, else the estimates. `wait_s` is to the client's first output.

    What passed outside the engine is, of a reply in one piece, by the end-to-end times.
    """
    exact = joined.source != "none"
    outside_s = wait_s - joined.ttft_s
    frontend_s = joined.ttft_s - joined.queue_s - joined.prefill_s
    # They are by the stamps of two processes, which the engine's TTFT is not.
    stated_s = {name: getattr(joined, f"{name}_s") for name in INNER_TIMES}
    rest_s = joined.ttft_s - _sum(joined.queue_s, joined.prefill_s)
    inner_s = {name: np.where(time_s > rest_s + WITHIN_S, np.nan, time_s) for name, time_s in stated_s.items()}
    outside_s[(outside_s < -WITHIN_S) | (rest_s < -WITHIN_S)] = np.nan
    whole_s = e2e_s - joined.e2e_s
    whole_s[whole_s < -WITHIN_S] = np.nan
    outside_s = np.where(np.isnan(wait_s), whole_s, outside_s)
    outside_s = np.where(exact, outside_s, attribution.network_s)
    frontend_s = np.where(exact, frontend_s - _sum(*inner_s.values()), attribution.engine_frontend_s)
    return _EngineTimes(
        outside_s=outside_s,
        engine_frontend_s=np.where(np.isnan(outside_s), np.nan, _cleared(frontend_s, wait_s)),
        inner_s=inner_s,
        queue_s=np.where(exact, joined.queue_s, attribution.queue_s),
        prefill_s=np.where(exact, joined.prefill_s, attribution.prefill_s),
    )


def _decode(requests: RequestColumns, engine_s: Floats, source: Texts) -> tuple[Floats, Texts]:
    """Return from the first to the last token, and who measured it: the client where no source of a request does."""
    client_s = np.where(
        source == "none", np.nan, e2e_ns(requests.first_token_ns, requests.last_token_ns, requests.end_ns) / 1e9
    )
    decode_s = np.where(np.isnan(engine_s), client_s, engine_s)
    whose = np.where(np.isnan(engine_s), "client", source)
    return decode_s, texts_of(np.where(np.isnan(decode_s), "none", whose))


def _gateways(
    gateways: Sequence[tuple[GatewaySpan, ...]] | None,
    joined: Joined,
    engine: _EngineTimes,
    wait_s: Floats,
    known: Bools,
) -> GatewayColumns:
    """Return the gateways' parts of each TTFT; for unstreamed replies, of the whole time.

    They are computed beside estimates too. Nothing is known of a request without a source.
    """
    whole_s = np.where(joined.end_ns >= 0, span_s(joined.arrival_ns, joined.end_ns), np.nan)
    return gateway_columns(
        [()] * len(joined) if gateways is None else gateways,
        engine_ttft_s=np.where(joined.source == "none", wait_s - engine.outside_s, joined.ttft_s + 0.0 * wait_s),
        engine_e2e_s=np.where(np.isnan(joined.e2e_s), whole_s, joined.e2e_s),
        outside_s=np.where(known, engine.outside_s, np.nan),
    )


def _seen(network_s: Floats, gateway_s: Floats, begins_at_gateway: Bools | None) -> Floats:
    """Return the network's part, NaN where it is not observed.

    That is where a request begins at a gateway and only rounding is left of its network.
    """
    if begins_at_gateway is None:
        return network_s
    is_unseen = begins_at_gateway & np.isfinite(gateway_s) & (np.abs(network_s) < STAMP_S)
    return np.where(is_unseen, np.nan, network_s)


def _on_our_clock(parts: Parts, requests: RequestColumns, joined: Joined, clocks: ClockOffsets) -> Parts:
    """Put the engines' stamps on our clock, and divide the network's part by them.

    A span whose stamps contradict the others' divides nothing; on which side of a gateway time passed, no span tells.
    """
    arrival_ns = _moved(joined.arrival_ns, clocks)
    request_s = span_s(requests.submit_ns, arrival_ns)
    consistent = (request_s > -SLACK_S) & (request_s < parts.network_s + SLACK_S)
    request_s[~consistent | np.isfinite(parts.gateway_s)] = np.nan
    known = np.isnan(joined.hand_over_s) | np.isfinite(joined.router_s)
    return replace(
        parts,
        request_network_s=request_s,
        response_network_s=parts.network_s - request_s,
        network_split_error_s=np.where(np.isfinite(request_s), clocks.error_ns / 1e9, np.nan),
        arrival_ns=arrival_ns,
        engine_first_token_ns=np.where(known, _moved(first_token_ns(joined), clocks), -1),
    )


def _moved(stamps_ns: Ints, clocks: ClockOffsets) -> Ints:
    """Return stamps of the engines' clocks converted to our clock, -1 where unknown.

    Either the stamp or the offset of its clock may be unknown.
    """
    known = (stamps_ns >= 0) & np.isfinite(clocks.offset_ns)
    return np.where(known, stamps_ns + np.nan_to_num(clocks.offset_ns).astype(np.int64), -1)


def _sources(joined: Joined, known: Bools) -> Texts:
    exact = joined.source != "none"
    replied = np.isin(joined.source, ("response", RECORD_BY_TIME))
    return texts_of(np.select([replied, exact, known], ["response", "trace", "histogram"], "none"))


def _errors_s(exact: Bools, attribution: Attribution) -> Floats:
    errors_s = [getattr(attribution, f"{part.error}_sd_s") for part in TTFT_PARTS if part.error and not part.stated]
    return np.where(exact, 0.0, np.fmax.reduce(errors_s))


def _merged(rows: Bools, undivided: Bools, network_s: Floats, engine: _EngineTimes) -> Texts:
    """Return the names of the parts that `other_s` holds because no source separates them."""
    columns_s = (network_s, engine.queue_s, engine.prefill_s, engine.engine_frontend_s)
    unknown = np.isnan(np.column_stack(columns_s)) & rows[:, None]
    unknown[undivided, 1:] = False  # they are in the prefill and in the first step
    patterns, place = np.unique(unknown, axis=0, return_inverse=True)
    names = [
        _listed([label for label, absent in zip(_MERGED, row, strict=True) if absent]) for row in patterns.tolist()
    ]
    return np.array(names, dtype=np.object_)[place.reshape(-1)] if names else np.empty(0, dtype=np.object_)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _reasons(exact: Bools, known: Bools, joined: Joined, attribution: Attribution) -> Texts:
    """Return each request's reason: the gaps of an exact source, the basis of an estimate, or why both are missing."""
    both = zip(attribution.reason.tolist(), joined.reason.tolist(), strict=True)
    neither = np.array([_neither(*pair) for pair in both], dtype=np.object_)
    estimated = np.where(attribution.reason != "", attribution.reason, joined.reason)
    return texts_of(np.where(exact, joined.reason, np.where(known, estimated, neither)))


@lru_cache(maxsize=1024)
def _neither(estimated: str, exact: str) -> str:
    """Return the reason why a request has no times; of equal pairs of reasons one object."""
    return exact if estimated == NO_FIRST else f"{estimated}; {exact}"


def _cleared(left_s: Floats, whole_s: Floats) -> Floats:
    """Return the remainder of a whole, 0 where it is only rounding error."""
    return np.where(np.abs(left_s) <= ROUNDING * np.abs(whole_s), 0.0, left_s)


def _sum(*parts_s: Floats) -> Floats:
    """Add parts up, unknown ones as 0: what they took stays in what is left."""
    return np.asarray(np.sum([np.nan_to_num(part_s) for part_s in parts_s], axis=0), dtype=np.float64)
