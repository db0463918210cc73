"""Offered, realised and served: three rates of one load, and the ramp and the drain that belong to none of them.

A rate over the whole run also counts the ramp, while the first requests could not have ended yet, and the drain, while
nothing was sent any more. Of a short or an overloaded run these are most of its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UnsetType

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Ints, take
from sidelight.rundir.fields import NO_UNIT, UNSET, Amount, Count, Reason, Reasons, StampNs, doc
from sidelight.rundir.stats import Missing, Statistics, describe

# How long a request takes is read off those that found the system empty, before any queue.
EARLY_REQUESTS = 10
# Requests in flight grow from none to their usual number within about this multiple of that.
RAMP_RESIDENCES = 2.0
# Less of the load than that, behind the ramp, has no rate.
LEAST_SHARE = 1 / 2
# An outage: at least five sent after the last answer, and a streak that chance brings in one run of a hundred.
UNANSWERED = ("connect", "reset", "timeout")
LEAST_UNANSWERED, BY_CHANCE = 5, 0.01
# From such a share of failures on, times are of what was left, and nothing is concluded from them.
TOO_MANY_FAILED = 0.1
CLOSED = "a closed loop offers no rate of its own: each request waits for another one to end"
AT_ONCE = "all requests were sent at one moment"
FEW = "fewer than two requests were sent"
NUMBERS = (
    "load_s", "ramp_s", "drain_s", "offered_requests_per_s", "realised_requests_per_s", "served_requests_per_s",
    "completed_requests_per_s",
)  # fmt: skip


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of requests offered, sent and served, per second. The drain counts in none of these."""

    load_s: Annotated[float | None, doc("from the first dispatch to the last", "s")]
    ramp_s: Annotated[
        float | None,
        doc(
            "the begin of the load that `served_requests_per_s` leaves out: twice the mean time in flight of the first "
            "ten requests",
            "s",
        ),
    ]
    drain_s: Annotated[float | None, doc("from the last dispatch to the end of the window", "s")]
    offered_requests_per_s: Annotated[
        float | None, doc("requests by the schedule of an open loop, from the first to the last", "requests/s")
    ]
    realised_requests_per_s: Annotated[
        float | None, doc("requests as they were dispatched, from the first to the last", "requests/s")
    ]
    served_requests_per_s: Annotated[
        float | None, doc("requests that ended ok while the load ran, behind the ramp", "requests/s")
    ]
    completed_requests_per_s: Annotated[
        float | None,
        doc(
            "`realised_requests_per_s` times the share of the requests that ended ok, also in the drain",
            "requests/s",
        ),
    ]
    ended_in_load: Annotated[Count, doc("requests that ended, however, before the last was dispatched", "requests")]
    open_at_end: Annotated[Count, doc("requests in flight when the last was dispatched, that one included", "requests")]
    missing: Reasons = UNSET


class SteadyThroughput(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput while a load was steady: without its first tenth, and without the drain."""

    start_ns: Annotated[StampNs, doc("begin of the steady window: a tenth of the load after its start", "ns")]
    end_ns: Annotated[StampNs, doc("its end: the last dispatch", "ns")]
    duration_s: Annotated[Amount, doc("its length", "s")]
    requests_per_s: Annotated[float | None, doc("requests that ended ok in it", "requests/s")]
    requests_per_s_ci95: Annotated[
        tuple[float, float] | None, doc("95 % interval of that, by ten batch means; null below 20", "requests/s")
    ]
    output_tokens_per_s: Annotated[
        float | None,
        doc(
            "output tokens that arrived in it, also of requests that had not ended (a reply's evenly over its chunks)",
            "tokens/s",
        ),
    ]
    output_tokens_per_s_ci95: Annotated[tuple[float, float] | None, doc("95 % interval of that", "tokens/s")]
    input_tokens_per_s: Annotated[
        float | None, doc("input tokens of the requests whose first token came in it", "tokens/s")
    ]
    steady: Annotated[
        bool | None,
        doc("whether output tokens arrived evenly but for chance (von Neumann's ratio of the batches); null below 20"),
    ]
    mser5_left_out: Annotated[
        float | None, doc("share of the load that MSER-5 would leave out; null below 50 that ended", "ratio")
    ]


class OutputCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the measured system's output, in the currency of `--price`."""

    price_per_h: Annotated[Amount, doc("the price", "1/h")]
    million_output_tokens: Annotated[
        float | None, doc("of a million output tokens; null where there were none", NO_UNIT)
    ]
    million_output_tokens_ci95: Annotated[
        tuple[float, float] | None,
        doc("95 % interval of that, by the interval of `steady.output_tokens_per_s`", NO_UNIT),
    ]
    request: Annotated[float | None, doc("of a request that ended ok", NO_UNIT)]
    good_request: Annotated[float | None, doc("of a request that met every objective; null without `--slo`", NO_UNIT)]


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding, by the replies that state their drafts."""

    requests: Annotated[Count, doc("replies ok that had a draft verified", "requests")]
    drafts: Annotated[Count, doc("drafts verified, each in a step of the model", "drafts")]
    draft_tokens: Annotated[Count, doc("tokens of these drafts", "tokens")]
    draft_tokens_accepted: Annotated[Count, doc("of those, the ones that the model kept", "tokens")]
    tokens_a_step: Annotated[Statistics, doc("1 + accepted tokens / drafts of a request", "tokens")]


def speculation(ok: RequestLog) -> Speculation | None:
    """Return the speculative decoding of requests, None where no reply states a draft."""
    drafted = take(ok, ok.drafts > 0)
    if not len(drafted):
        return None
    return Speculation(
        requests=len(drafted),
        drafts=int(drafted.drafts.sum()),
        draft_tokens=int(drafted.draft_tokens.sum()),
        draft_tokens_accepted=int(drafted.draft_tokens_accepted.sum()),
        tokens_a_step=describe(1 + drafted.draft_tokens_accepted / drafted.drafts, ""),
    )


class HeldBack(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a schedule that a cap on requests in flight held back."""

    cap: Annotated[Count, doc("Most requests in flight.", "requests")]
    requests: Annotated[Count, doc("Requests that were due while the cap was reached, and sent later.", "requests")]
    held_ms: Annotated[Statistics, doc("How long each of those was held; not in TTFT.", "ms")]
    not_sent: Annotated[
        int | None, doc("Requests that were still held when submitting was over, and so were not sent.", "requests")
    ]
    missing: Annotated[Reason | UnsetType, doc("Why `not_sent` is null.")] = UNSET


def cost(price_per_h: float, steady: SteadyThroughput | None, per_s: Mapping[str, float | None]) -> OutputCost:
    """Return the cost of tokens and requests at some rates.

    Tokens by the steady part of the load where that is known, else by the window's rates, `per_s`. What waits costs as
    much as what is served: the system is paid for by the hour.
    """
    tokens_per_s = steady.output_tokens_per_s if steady else None
    ends = steady.output_tokens_per_s_ci95 if steady and tokens_per_s else None

    def of(rate: float | None, amount: int = 1) -> float | None:
        return amount * price_per_h / 3600 / rate if rate else None

    return OutputCost(
        price_per_h=price_per_h,
        million_output_tokens=of(tokens_per_s or per_s["output_tokens_per_s"], 10**6),
        million_output_tokens_ci95=(1e6 * price_per_h / 3600 / ends[1], 1e6 * price_per_h / 3600 / ends[0])
        if ends and ends[0] > 0
        else None,
        request=of(per_s["requests_per_s"]),
        good_request=of(per_s["goodput_requests_per_s"]),
    )


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """An outage: a server without any answer until the load's end."""

    at_s: Annotated[float | None, doc("its last answer, from the first dispatch; null where it never gave one", "s")]
    at_ns: Annotated[StampNs | None, doc("the same by the clock", "ns")]
    errors: Annotated[
        dict[str, Count], doc("requests that ended without an answer from then on, by the kind of error", "requests")
    ]


def outage(log: RequestLog) -> Outage | None:
    """Return the server's outage at the load's end, None without one.

    It is None too where chance explains the missing answers.

    A refusal or an error that the server states is an answer. Five requests must have been sent after the last one. By
    chance as many are unanswered as were before, and one more; what we ended ourselves counts as neither.
    """
    failed = np.flatnonzero((log.status == "failed") & (log.end_ns >= 0))
    if len(failed) < LEAST_UNANSWERED:
        return None
    ended = (log.end_ns >= 0) & np.isin(log.status, ("ok", "refused", "failed"))
    unanswered = np.zeros(len(log.status), dtype=bool)
    unanswered[failed] = [str(error).partition(":")[0] in UNANSWERED for error in log.error[failed]]
    answered = ended & ~unanswered
    last_ns = int(log.end_ns[answered].max(initial=-1))
    after = unanswered & (log.end_ns > last_ns)
    silent, before = int(after.sum()), int(unanswered.sum() - after.sum())
    chance = (before + 1) / (before + int(answered.sum()) + 2)
    fresh = int((after & (log.dispatch_ns > last_ns)).sum())  # what was sent before may only have been slower
    if fresh < LEAST_UNANSWERED or chance**silent > BY_CHANCE:
        return None
    at_ns = last_ns if answered.any() else None
    at_s = None if at_ns is None else (at_ns - int(log.dispatch_ns[log.dispatch_ns >= 0].min())) / 1e9
    return Outage(at_s=at_s, at_ns=at_ns, errors=errors_by_kind(take(log, after)))


def failed_share(log: RequestLog) -> float:
    """Return the share of requests that failed or were refused, of those that were sent."""
    return float(np.isin(log.status, ("failed", "refused")).mean()) if len(log) else 0.0


def errors_by_kind(log: RequestLog) -> dict[str, int]:
    """Return the number of unsuccessful requests by the kind of error, most frequent first."""
    texts = log.error[(log.status != "ok") & (log.error != "")]
    kinds, numbers = np.unique([str(text).partition(":")[0] for text in texts], return_counts=True)
    ranked = sorted(zip(kinds.tolist(), numbers.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return dict(ranked)


def rates(log: RequestLog, *, end_ns: int | None, open_loop: bool) -> Rates:
    """Return the rates of the requests of `log`; unknown ones have a reason. The window ends at `end_ns`."""
    sent = np.flatnonzero(log.dispatch_ns >= 0)
    if len(sent) < 2:
        unknown = dict.fromkeys(NUMBERS)
        return Rates(**unknown, ended_in_load=0, open_at_end=len(sent), missing=dict.fromkeys(NUMBERS, FEW))
    dispatch_ns, ended_ns = log.dispatch_ns[sent], log.end_ns[sent]
    last_ns = int(dispatch_ns.max())
    arrived_s = (dispatch_ns - dispatch_ns.min()) / 1e9
    load_s = float(arrived_s.max())
    ramp_s = ramp(arrived_s, np.where(ended_ns >= 0, (ended_ns - dispatch_ns.min()) / 1e9, np.inf))
    ended = (ended_ns >= 0) & (ended_ns <= last_ns)
    offered = _rate(log.scheduled_ns[sent]) if open_loop else None
    realised = _rate(dispatch_ns)
    served = None
    if load_s - ramp_s >= LEAST_SHARE * load_s > 0:
        behind = ended & (log.status[sent] == "ok") & (ended_ns > last_ns - int(1e9 * (load_s - ramp_s)))
        served = float(behind.sum()) / (load_s - ramp_s)
    drain_s = None if end_ns is None else max(0.0, (end_ns - last_ns) / 1e9)
    known = {
        "drain_s": (drain_s, "no request ended"),
        "offered_requests_per_s": (offered, "all requests were due at one moment" if open_loop else CLOSED),
        "realised_requests_per_s": (realised, AT_ONCE),
        "served_requests_per_s": (
            served,
            f"the load lasted {load_s:.1f} s, and its first requests took {ramp_s / RAMP_RESIDENCES:.1f} s",
        ),
        "completed_requests_per_s": (
            None if realised is None else realised * float((log.status[sent] == "ok").mean()),
            AT_ONCE,
        ),
    }
    return Rates(
        load_s=load_s,
        ramp_s=ramp_s,
        **{name: number for name, (number, _) in known.items()},
        ended_in_load=int(ended.sum()),
        open_at_end=int((~ended).sum()),
        missing={name: why for name, (number, why) in known.items() if number is None} or UNSET,
    )


def ramp(arrived_s: Floats, ended_s: Floats) -> float:
    """Return the length of the ramp-up, in s from the first arrival.

    In it the requests in flight are still rising to their usual number.

    arrived_s [n > 0], and when each ended, inf of one that did not: it counts up to the last moment that is known.
    """
    ended = ended_s[np.isfinite(ended_s)]
    last_s = max(float(arrived_s.max()), float(ended.max(initial=-np.inf)))
    early = np.argsort(arrived_s, kind="stable")[:EARLY_REQUESTS]
    return RAMP_RESIDENCES * float((np.minimum(ended_s[early], last_s) - arrived_s[early]).mean())


def _rate(stamps_ns: Ints) -> float | None:
    """Return the rate of the stamps per second, the first not counted; None if unknown."""
    known = stamps_ns[stamps_ns >= 0]
    span_s = (int(known.max()) - int(known.min())) / 1e9 if len(known) > 1 else 0.0
    return (len(known) - 1) / span_s if span_s > 0 else None


def held_back(log: RequestLog, *, cap: int, planned: int | Missing) -> HeldBack:
    """Summarise the requests of `log` that a cap held back.

    `planned` is the number of requests, or sessions, that were due.
    """
    held_ns = log.held_ns[log.held_ns > 0]
    return HeldBack(
        cap=cap,
        requests=len(held_ns),
        held_ms=describe(held_ns / 1e6, "no request was held back"),
        not_sent=None if isinstance(planned, Missing) else max(0, planned - int((log.turn <= 0).sum())),
        missing=planned.reason if isinstance(planned, Missing) else UNSET,
    )
