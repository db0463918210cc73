"""Table of exact times, one row per request, and the times that every source supplies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sidelight.correlator.parts import SHARED_PARTS
from sidelight.loadgen.requests.metrics import OTHER_UNIT
from sidelight.recorded.gateway_spans import GatewaySpan
from sidelight.rundir.columns import Bools, Floats, Ints, Texts, same_text
from sidelight.scraper.engines.catalogue import INNER_TIMES
from sidelight.scraper.spans.request_times import InnerTimes

SPAN_BY_TIME, RECORD_BY_TIME = "span by time", "record by time"
SOURCES = ("trace", "request id", "response", SPAN_BY_TIME, RECORD_BY_TIME, "none")
# Of requests that two engines shared, whose spans tell nothing but their whole.
UNDIVIDED = "the spans of its engines are not divided: what they waited is in prefill_ms and in first_step_ms"
NO_FIRST_OUTPUT = "no span of its router says when its first output came, and those of its engines are not divided"
EARLY = "its first output came before its prefill engine was done with it"
TIMES = ("queue", "prefill", "decode", "ttft", "e2e")
ALL_TIMES = (*TIMES, *INNER_TIMES)  # with what some sources state besides
# The client's and the engine's clocks tick alike to 10 ms an hour and better; stamps of the client are late by less.
SLACK_S = 0.010
# What is compared, so that what is left after rounding is within the slack too: stamps are in whole nanoseconds.
WITHIN_S = SLACK_S - 1e-8


class Refusal(str):
    """Why times that came are not used; other reasons say why none came."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(InnerTimes):
    """Columns of n requests, in their order.

    source                  one of SOURCES
    reason                  why there is none, or what the source leaves open; "" where queue and prefill are known
    refusal                 where there is none for a request that succeeded, why times that came are not used; "" where
                            none came
    queue_s, prefill_s, decode_s  float64, NaN where unknown; ttft_s, e2e_s: from the request's arrival at the
                            server to its first and last token
    arrival_ns, end_ns      int64 ns Unix by the engine's clock, -1 unless spans or records state them
    span_id, trace_id       hex ids of the engine's span, "" for none. Of several choices, queue, prefill and TTFT are
                            those of the first to have a token, decode is the longest. Of two engines that shared it,
                            queue and prefill are the first's, decode is the second's, and all else is of both
    clock                   which clock the stamps are by (`EngineSpans.clock`), "" where that is unknown
    place, next_place       int64, where its only span stands in `EngineSpans`, and that of the second engine that
                            shared it; -1 for none, and where all of several spans are its own
    hand_over_s             from the first engine's end to the second's arrival by the stamps of either, NaN where one
                            engine served; it is in none of the other times until it is known (`handed_over`)
    hand_over_by            the two clocks of those stamps, "" where they are one; router_error_s is by how much
                            router_s may be off for that, NaN where it is not known
    """

    source: Texts
    reason: Texts
    refusal: Texts
    queue_s: Floats
    prefill_s: Floats
    decode_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    arrival_ns: Ints
    end_ns: Ints
    span_id: Texts
    trace_id: Texts
    clock: Texts
    place: Ints
    next_place: Ints
    hand_over_s: Floats
    hand_over_by: Texts
    router_error_s: Floats

    def __len__(self) -> int:
        return len(self.source)

    @property
    def by_time(self) -> Bools:
        """Which requests were joined by time alone [n]."""
        return np.isin(self.source, (SPAN_BY_TIME, RECORD_BY_TIME))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactTimes:
    """Times that a source states of one request, in the columns of `Joined`; `inner_s` by names of INNER_TIMES."""

    queue_s: float
    prefill_s: float
    decode_s: float
    ttft_s: float
    e2e_s: float
    inner_s: Mapping[str, float] = field(default_factory=dict)
    arrival_ns: int = -1
    end_ns: int = -1
    span_id: str = ""
    trace_id: str = ""
    clock: str = ""
    place: int = -1
    next_place: int = -1
    hand_over_s: float = np.nan
    hand_over_by: str = ""
    reason: str = ""


# Gives, of some requests (rows), those that the source has times of; and notes by row why it has none of others.
Find = Callable[[Sequence[int], Sequence[list[str]]], Iterator[tuple[int, ExactTimes]]]


def unjoined(size: int, reason: str = "") -> Joined:
    """Return a table in which nothing is known of any request, and why."""

    def texts(text: str) -> Texts:
        return same_text(text, size)

    return Joined(
        source=texts("none"),
        reason=texts(reason),
        refusal=texts(""),
        **{f"{name}_s": np.full(size, np.nan) for name in ALL_TIMES},
        arrival_ns=np.full(size, -1, dtype=np.int64),
        end_ns=np.full(size, -1, dtype=np.int64),
        span_id=texts(""),
        trace_id=texts(""),
        clock=texts(""),
        place=np.full(size, -1, dtype=np.int64),
        next_place=np.full(size, -1, dtype=np.int64),
        hand_over_s=np.full(size, np.nan),
        hand_over_by=texts(""),
        router_error_s=np.full(size, np.nan),
    )


def put(
    table: Joined,
    row: int,
    source: str,
    times: ExactTimes,
    *,
    ttft_s: float = np.inf,
    waited_s: float = np.inf,
    whole_s: float = np.inf,
    came_s: float = np.nan,
) -> str:
    """Write one request's times and return '', or return a reason to refuse them.

    A decode beyond all that the client waited is left out, and an inner time beyond the first token.
    """
    states = {"response": "reply", RECORD_BY_TIME: "record"}.get(source, "span")
    parts_s = sum(part_s for part_s in (times.queue_s, times.prefill_s) if not np.isnan(part_s))
    if reason := _refusal(times, parts_s, ttft_s=ttft_s, waited_s=waited_s, whole_s=whole_s, came_s=came_s):
        return Refusal(f"its {states} {reason}")
    table.source[row] = source
    stated_s = {name: getattr(times, f"{name}_s") for name in TIMES}
    stated_s |= {name: time_s for name, time_s in times.inner_s.items() if parts_s + time_s <= ttft_s + WITHIN_S}
    for name, time_s in stated_s.items():
        getattr(table, f"{name}_s")[row] = time_s if 0 <= time_s < np.inf else np.nan
    if parts_s + times.decode_s > waited_s + WITHIN_S:
        table.decode_s[row] = np.nan
    unknown = [name for name in ("queue", "prefill") if np.isnan(getattr(times, f"{name}_s"))]
    table.reason[row] = times.reason or (f"the {states} tells no {unknown[0]}" if unknown else "")
    table.arrival_ns[row], table.end_ns[row] = times.arrival_ns, times.end_ns
    table.span_id[row], table.trace_id[row], table.clock[row] = times.span_id, times.trace_id, times.clock
    table.place[row], table.next_place[row] = times.place, times.next_place
    table.hand_over_s[row], table.hand_over_by[row] = times.hand_over_s, times.hand_over_by
    return ""


def by_decode_engines(table: Joined) -> Joined:
    """Return requests with the times in their replies as a decode engine's.

    Where a prefill engine computed the prompt, a reply comes from the engine that went on, and states its own.
    """
    rows, unknown_s = table.source == "response", np.full(len(table), np.nan)
    columns: dict[str, Any] = {
        "decode_queue_s": np.where(rows, table.queue_s, table.decode_queue_s),
        "first_step_s": np.where(rows, table.prefill_s, table.first_step_s),
        **{name: np.where(rows, unknown_s, getattr(table, name)) for name in ("queue_s", "prefill_s", "ttft_s")},
    }
    return replace(table, **columns)


class HandOverBounds(NamedTuple):
    """The least and most time [n] between two engines, s; NaN where no router's calls bound it."""

    least_s: Floats
    most_s: Floats


def hand_over_bounds(joined: Joined, gateways: Sequence[tuple[GatewaySpan, ...]]) -> HandOverBounds:
    """Return the bounds of the time between two engines.

    It is at least what lies between the two calls, and at most all of both that neither engine had.
    """
    least_s, most_s = np.full((2, len(joined)), np.nan)
    for row in np.flatnonzero(np.isfinite(joined.hand_over_s)).tolist():
        router = _router(gateways[row])
        if router is None:
            continue
        first_s, first_end_s, second_s, second_end_s = router.pair_s
        between_s, without_s = second_s - first_end_s, second_end_s - first_s - float(joined.e2e_s[row])
        if 0 <= between_s <= without_s:
            least_s[row], most_s[row] = between_s, without_s
    return HandOverBounds(least_s, most_s)


def by_calls(joined: Joined, gateways: Sequence[tuple[GatewaySpan, ...]]) -> Joined:
    """Return requests with undivided spans, completed by the time from prefill to first output.

    The decode engine has the request from the start, and waits for the other one. Where no router says its first output
    and its call of the prefill engine, or these contradict each other, the request's times are refused.
    """
    rows = np.flatnonzero((joined.reason == UNDIVIDED) & (joined.source != "none"))
    if not len(rows):
        return joined
    columns = {name: getattr(joined, name).copy() for name in ("ttft_s", "first_step_s", "source", "reason", "refusal")}
    for row in rows.tolist():
        prefill_s, router = float(joined.prefill_s[row]), _router(gateways[row])
        rest_s = math.nan if router is None else router.first_s - router.pair_s[1]
        if router is not None and rest_s >= 0 and prefill_s <= router.pair_s[1] - router.pair_s[0] + SLACK_S:
            columns["first_step_s"][row], columns["ttft_s"][row] = rest_s, prefill_s + rest_s
        else:
            columns["source"][row] = "none"
            columns["reason"][row] = columns["refusal"][row] = Refusal(EARLY if rest_s < 0 else NO_FIRST_OUTPUT)
    return replace(joined, **columns)


def _router(gateways: Sequence[GatewaySpan]) -> GatewaySpan | None:
    """Return the innermost gateway that called two engines."""
    return next((gateway for gateway in reversed(gateways) if gateway.pair_s), None)


def _refusal(
    times: ExactTimes, parts_s: float, *, ttft_s: float, waited_s: float, whole_s: float, came_s: float
) -> str:
    """Return the reason why times cannot be those of a request, "" where they can.

    No part is larger than its whole, by more than SLACK_S: queue and prefill lie within what the client waited for its
    first token, `ttft_s`, and with the decode within all that it waited. Nor do they outlast the TTFT and the whole
    that are stated with them, or what they are of, a span or a record; what lasts longer than a whole reply, `whole_s`,
    is not of that request. And what is stated in another unit is a small part of what it is of: of a reply, of the time
    in which its output came, `came_s`.
    """
    if any(not 0 <= part_s < np.inf for part_s in (times.queue_s, times.prefill_s) if not np.isnan(part_s)):
        return "tells impossible times"
    if parts_s > waited_s + WITHIN_S:
        return "tells longer times than the client waited"
    if parts_s > ttft_s + WITHIN_S:
        return "tells a queue and prefill longer than the client's TTFT"
    shared_s = float(np.nansum([times.inner_s.get(part.name, np.nan) for part in SHARED_PARTS]))
    if parts_s + shared_s > min(np.nan_to_num((times.ttft_s, times.e2e_s), nan=np.inf)) + WITHIN_S:
        return "tells a queue and prefill longer than its own TTFT, or its whole"
    lasts_s = (times.end_ns - times.arrival_ns) / 1e9 if times.end_ns >= 0 else np.nan
    if parts_s > lasts_s + WITHIN_S:
        return "tells a queue and prefill longer than it lasts"
    if lasts_s > whole_s + WITHIN_S:
        return "lasts longer than the whole reply"
    stated_s = np.fmax(times.e2e_s, parts_s + times.decode_s) if np.isnan(lasts_s) or times.e2e_s >= 0 else np.nan
    if OTHER_UNIT * (stated_s + SLACK_S) < (came_s if np.isnan(lasts_s) else lasts_s):
        return "tells times that are a small part of what it lasts"
    return ""
