"""Each request's TTFT and end-to-end time in parts, from the best source that tells of it, summing to the whole.

TTFT = network + gateway + queue + prefill + other. Exact sources (spans, timings in replies) go before estimates,
request by request. What a source does not tell apart stays together in `other`, and is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from correlator.estimate import NO_FIRST
from correlator.estimate.table import Attribution
from correlator.exact.clock_offset import ClockOffsets, first_token_ns
from correlator.exact.join import SLACK_MS, Joined
from correlator.requests import Requests
from rundir.columns import Bools, Floats, Indices, Ints, Texts

SOURCES = ("trace", "response", "histogram", "none")
FRONT_END = "engine front end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Columns of n requests, in their order: float64 ms, NaN where unknown or part of no known TTFT.

    ttft_ms, e2e_ms         the client's: submission to first and last token; of a reply in one piece, e2e to its end
    send_ms                 dispatch to submission, connecting included: before TTFT begins, and in none of its parts
    network_ms              outside engine and gateway: way_in_ms (submission to arrival there) and way_out_ms (first
                            token there to first output here), which are told apart only where clocks are. Below 0 by
                            as much as stamps are late; NaN: not told, then it is in other_ms
    ways_error_ms           by how much the two ways may be off, as the clocks are; NaN where they are not told apart
    gateway_ms              in a gateway whose span was joined
    queue_ms, prefill_ms    in the engine; NaN: not told, then they are in other_ms
    other_ms                the rest of TTFT: admission_ms (in the engine, neither queue nor prefill), blank_output_ms
                            (first output to first token that is not blank), and what `merged` names
    decode_ms               first to last token by the engine
    e2e_other_ms            the rest of e2e_ms, decode_ms taken out too: of other_ms what was not decoding, and how much
                            longer than the engine's first token its last was on the way
    error_ms                standard error of the least certain part; 0 exact, NaN without a source
    source                  one of SOURCES; a join by request id is a trace
    merged                  what other_ms holds that the source does not tell apart; "" for nothing
    reason                  why there is no source; of an estimate, why it rests on no observation, else why there is
                            nothing exact
    quality                 exact of a joined request, else one of attribution.QUALITIES
    engine_span_id          hex, "" for none
    arrival_ns, engine_first_token_ns  int64 ns Unix by our clock, -1 where unknown
    """

    ttft_ms: Floats
    e2e_ms: Floats
    send_ms: Floats
    way_in_ms: Floats
    way_out_ms: Floats
    ways_error_ms: Floats
    network_ms: Floats
    gateway_ms: Floats
    admission_ms: Floats
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
        """Which requests have a TTFT that is told in parts [n]."""
        return np.asarray((self.source != "none") & np.isfinite(self.ttft_ms), dtype=np.bool_)


def select(parts: Parts, rows: Bools | Indices) -> Parts:
    """Return some of the requests."""
    return Parts(**{one.name: getattr(parts, one.name)[rows] for one in fields(Parts)})


def decomposed(
    requests: Requests,
    joined: Joined,
    attribution: Attribution,
    clocks: ClockOffsets | None = None,
    *,
    gateway_ms: Floats | None = None,
) -> Parts:
    """Put every request's times together; all arguments have the same n requests. Without `clocks` none are compared.

    Wherever there are a source and a TTFT, network, gateway, queue, prefill and other (NaN as 0) sum to it. What passed
    in a gateway [n] is taken out of the network's part.

    - engine times beyond the client's, or below their own parts, by over 10 ms: the engine's TTFT is not believed
    - a reply in one piece has no TTFT, but queue, prefill and decode, and of its end-to-end time what was outside
    """
    unknown = np.full(len(joined), np.nan)
    offset_ns, offset_error_ns = (clocks.offset_ns, clocks.error_ns) if clocks else (unknown, unknown)
    exact = joined.source != "none"
    told = exact | (attribution.quality != "none")
    # Where no first output was noted apart, the first token is it.
    output_ns = np.where(requests.first_output_ns >= 0, requests.first_output_ns, requests.first_token_ns)
    ttft_ms = _span_ms(requests.submit_ns, requests.first_token_ns)
    whole_ns = np.where(requests.last_token_ns >= 0, requests.last_token_ns, requests.end_ns)
    e2e_ms = _span_ms(requests.submit_ns, whole_ns)
    queue_ms = np.where(exact, joined.queue_ms, 1e3 * attribution.queue_s)
    prefill_ms = np.where(exact, joined.prefill_ms, 1e3 * attribution.prefill_s)
    outside_ms, front_ms = _around(joined, _span_ms(requests.submit_ns, output_ns), e2e_ms)
    outside_ms = np.where(exact, outside_ms, 1e3 * attribution.network_s)
    admission_ms = np.where(exact, front_ms, 1e3 * attribution.rest_s)
    admission_ms[np.isnan(outside_ms)] = np.nan
    through_ms = unknown if gateway_ms is None else np.where(told, gateway_ms, np.nan)
    network_ms = outside_ms - np.nan_to_num(through_ms)
    known_ms = _sum(network_ms, through_ms, queue_ms, prefill_ms)
    arrival_ns = _moved(joined.arrival_ns, offset_ns)
    way_in_ms = _span_ms(requests.submit_ns, arrival_ns)
    # A span whose stamps contradict the others' tells of no way; on which side of a gateway one was, no span does.
    believed = (way_in_ms > -SLACK_MS) & (way_in_ms < network_ms + SLACK_MS)
    way_in_ms[~believed | np.isfinite(through_ms)] = np.nan
    errors_s = [getattr(attribution, f"{part}_sd_s") for part in ("network", "queue", "prefill", "rest")]
    return Parts(
        ttft_ms=ttft_ms,
        e2e_ms=e2e_ms,
        send_ms=_span_ms(requests.dispatch_ns, requests.submit_ns),
        way_in_ms=way_in_ms,
        way_out_ms=network_ms - way_in_ms,
        ways_error_ms=np.where(np.isfinite(way_in_ms), offset_error_ns / 1e6, np.nan),
        network_ms=network_ms,
        gateway_ms=through_ms,
        admission_ms=admission_ms,
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        blank_output_ms=_span_ms(output_ns, requests.first_token_ns),
        decode_ms=joined.decode_ms,
        other_ms=np.where(told, ttft_ms - known_ms, np.nan),
        e2e_other_ms=np.where(told, e2e_ms - _sum(known_ms, joined.decode_ms), np.nan),
        error_ms=np.where(exact, 0.0, 1e3 * np.fmax.reduce(errors_s)),
        source=np.select([joined.source == "response", exact, told], ["response", "trace", "histogram"], "none").astype(
            np.object_
        ),
        merged=_merged(told & np.isfinite(ttft_ms), network_ms, queue_ms, prefill_ms, admission_ms),
        reason=_reasons(exact, told, joined, attribution),
        quality=np.where(exact, "exact", attribution.quality).astype(np.object_),
        engine_span_id=joined.span_id,
        arrival_ns=arrival_ns,
        engine_first_token_ns=_moved(first_token_ns(joined), offset_ns),
    )


def _around(joined: Joined, wait_ms: Floats, e2e_ms: Floats) -> tuple[Floats, Floats]:
    """Return what passed outside the engine, and in it but neither in queue nor prefill; NaN where not told.

    Of a reply in one piece the first is by the end-to-end times.
    """
    outside_ms = wait_ms - joined.ttft_ms
    front_ms = joined.ttft_ms - joined.queue_ms - joined.prefill_ms
    outside_ms[(outside_ms < -SLACK_MS) | (front_ms < -SLACK_MS)] = np.nan
    whole_ms = e2e_ms - joined.e2e_ms
    whole_ms[whole_ms < -SLACK_MS] = np.nan
    return np.where(np.isnan(wait_ms), whole_ms, outside_ms), front_ms


def _moved(stamps_ns: Ints, offset_ns: Floats) -> Ints:
    """Return stamps of the engines' clocks by ours, -1 where they or their clock's offset are unknown."""
    known = (stamps_ns >= 0) & np.isfinite(offset_ns)
    return np.where(known, stamps_ns + np.nan_to_num(offset_ns).astype(np.int64), -1)


def _merged(here: Bools, network_ms: Floats, queue_ms: Floats, prefill_ms: Floats, admission_ms: Floats) -> Texts:
    """Name what other_ms holds for want of a source that tells it apart."""
    names = ("network", "queue", "prefill", FRONT_END)
    unknown = np.isnan(np.column_stack((network_ms, queue_ms, prefill_ms, admission_ms))) & here[:, None]
    patterns, place = np.unique(unknown, axis=0, return_inverse=True)
    words = [_listed([name for name, one in zip(names, row, strict=True) if one]) for row in patterns.tolist()]
    return np.array(words, dtype=np.object_)[place.reshape(-1)] if words else np.empty(0, dtype=np.object_)


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _reasons(exact: Bools, told: Bools, joined: Joined, attribution: Attribution) -> Texts:
    """Say what a source leaves open, what an estimate rests on, or why there is neither."""
    both = zip(attribution.reason.tolist(), joined.reason.tolist(), strict=True)
    neither = np.array([why if guess == NO_FIRST else f"{guess}; {why}" for guess, why in both], dtype=np.object_)
    estimated = np.where(attribution.reason != "", attribution.reason, joined.reason)
    return np.where(exact, joined.reason, np.where(told, estimated, neither))


def _sum(*parts_ms: Floats) -> Floats:
    """Add parts up, those that are not told as nothing: what they took stays in what is left."""
    return np.asarray(np.sum([np.nan_to_num(one) for one in parts_ms], axis=0), dtype=np.float64)


def _span_ms(start_ns: Ints, end_ns: Ints) -> Floats:
    return np.where((start_ns >= 0) & (end_ns >= 0), (end_ns - start_ns) / 1e6, np.nan)
