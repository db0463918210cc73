"""Verdict on a run or a watch that goes on, by its last minutes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.report.advice import (
    NO_SOURCE,
    RUNS_AGAIN,
    UNEXPLAINED,
    Advice,
    Observations,
    cure_of_failures,
    of_missed,
)
from sidelight.exporter.report.alerts import FAILING_IN_PART
from sidelight.exporter.report.verdict.parts import FEW_REQUESTS, described_parts, largest_share, part_shares, spent
from sidelight.exporter.report.verdict.shown import failed_figure, served_figure, time_figures
from sidelight.exporter.report.verdict.state import (
    CLIENT_SPANS,
    NO_SPANS,
    WITHOUT_CLIENT,
    JudgedState,
    by_objectives,
    by_parts,
    is_queueing,
    unseen_headline,
    waits_of,
)
from sidelight.exporter.summary.result import largest_claim
from sidelight.exporter.summary.verdict import (
    RunVerdict,
    Subject,
)
from sidelight.loadgen.requests.self_check.claims import Claim, are_sure
from sidelight.loadgen.requests.self_check.stated_error import UNUSABLE_RATIO
from sidelight.loadgen.requests.slo.results import ObjectiveResult
from sidelight.rundir.printable.numbers import cell, count_of, spoken
from sidelight.rundir.printable.text import as_sentence

HELD_UP = "measure on a machine with nothing else to do, or with more --workers, before changing the system"
OVERLOADED = 0.8  # of the offered rate: who serves less while ever more wait
# What to do now where the parts of the TTFT are not known.
WITHOUT_PARTS = defaultdict(
    lambda: "wait for more requests",
    missed=NO_SPANS,
    overloaded="add a replica",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """State of a run or a watch that goes on: its last minutes. What is not known is None, "" or empty.

    more_waiting_per_s  how many more wait with each second, where it is not known what is offered
    failing     since when requests only fail, `failures` of them, most of the `error`'s kind
    silent      the metrics pages that no longer answer, with since when and why; `ended`: requests end all the same
    waiting     the most that waited in each of the last stretches of time
    queue       advice on the queue, which needs no request with known parts
    means_ms    mean TTFT and queue by engines' pages
    unseen      requests of engines without a client's span
    unread      why neither pages nor spans of the engine can say where time goes
    objectives  as they stand, or stood some seconds ago, and `when`: over which time
    late_ms     how late our own requests left behind their schedule (p99): replies are read as late
    """

    served_per_s: float | None
    offered_per_s: float | None = None
    more_waiting_per_s: float | None = None
    ttft_ms: Mapping[str, float | None]
    sent: int
    failed: int
    failures: int = 0
    failing: str = ""
    error: str = ""
    silent: Mapping[str, str]
    ended: bool
    restarted_s: float | None = None
    waiting: Sequence[float | None]
    observed: Observations | None
    queue: Advice | None
    means_ms: Mapping[str, float] = field(default_factory=dict)
    unseen: int = 0
    unread: str = ""
    objectives: Sequence[ObjectiveResult] = ()
    when: str = "so far"
    late_ms: float | None = None


def current_verdict(now: Current) -> RunVerdict:
    """Return the verdict on a run or a watch that goes on."""
    seen = now.observed
    described = [] if seen is None else list(described_parts(seen.breakdown, TTFT_PARTS, "ttft"))
    parts = [] if seen is None else part_shares(seen.breakdown, described)
    is_known = seen is not None and seen.breakdown.ttft_ms.count >= FEW_REQUESTS
    large, largest = seen.large if seen is not None and is_known else [], largest_share(parts) if is_known else None
    is_unseen = not is_known and (now.unseen >= FEW_REQUESTS or (not now.sent and bool(now.served_per_s)))
    judged = _failing_now(now) or _held_up(now) or _load_now(now, large, is_known=is_known, is_unseen=is_unseen)
    explained = seen.explained() if seen is not None and is_known else None
    if judged.state == "failing":
        why, do = judged.why, _cure_now(now)
    elif judged.state == "untrusted":
        why, do = judged.why, HELD_UP
    elif explained is not None:
        why, do = explained.seen, explained.cure
    elif seen is not None and described and is_known:
        subject = f"mean TTFT of the last {count_of(seen.breakdown.ttft_ms.count, 'request')}"
        why = spent(subject, seen.breakdown, described, is_ttft=True, large=large)
        cures = {"missed": of_missed(large, now.objectives), "overloaded": "add a replica"}
        otherwise = cures.get(judged.state, "nothing: no wait stands out")
        do = next((UNEXPLAINED[part] for part in large if part in UNEXPLAINED), otherwise)
    elif now.queue is not None and is_queueing(now.means_ms):
        why, do = now.queue.seen, now.queue.cure
    elif is_unseen and judged.state in ("not_judged", "healthy"):
        why, do = WITHOUT_CLIENT, CLIENT_SPANS if now.unseen else NO_SPANS
    else:
        why = now.unread or f"fewer than {FEW_REQUESTS} requests with known parts of their TTFT ended lately"
        do = NO_SOURCE if now.unread else WITHOUT_PARTS["few" if parts and judged.state == "missed" else judged.state]
    if judged.state == "overloaded" and now.served_per_s:
        do += f"; or send less than {cell(now.served_per_s)} requests/s"
    begun_anew = "" if now.restarted_s is None else f" The engine restarted {now.restarted_s:.0f} s ago."
    return RunVerdict(
        state=judged.state,
        cause=judged.cause or (largest.part if largest else "none"),
        headline=f"{judged.headline}{begun_anew}",
        figures=[
            served_figure(now.served_per_s, now.offered_per_s),
            *time_figures("ttft", now.ttft_ms, now.objectives, off=math.inf),
            failed_figure(now.failed, now.sent),
        ],
        parts=[] if judged.state == "failing" else parts,
        why=as_sentence(why),
        do=as_sentence(do),
    )


def _failing_now(now: Current) -> JudgedState | None:
    """Return the state of a server that fails; None of another."""
    if now.failures:
        since = f" since {now.failing}" if now.failing else ""
        why = f"{count_of(now.failures, 'request')} failed{f', most often: {now.error}' if now.error else ''}"
        return JudgedState("failing", f"Failing{since}: no request has succeeded.", "server", why)
    if now.silent and not now.ended:
        url, why = next(iter(now.silent.items()))
        since, _, error = why.partition(": ")
        return JudgedState("failing", f"Failing {since}: the server does not answer.", "server", f"{url}: {error}")
    if now.failed >= FAILING_IN_PART * now.sent > 0:
        head = f"Failing in part: {now.failed:,} of {now.sent:,} requests did not succeed."
        why = "the engine ended, and what was in flight with it" if now.restarted_s else "their spans state no error"
        return JudgedState("failing", head, "server", f"most often: {now.error}" if now.error else why)
    return None


def _held_up(now: Current) -> JudgedState | None:
    """Return the state of a run with requests that leave too late, else None."""
    late_ms, ttft_ms = now.late_ms or 0.0, now.ttft_ms.get("p50")
    if ttft_ms is None or late_ms <= UNUSABLE_RATIO * ttft_ms or now.sent < FEW_REQUESTS:
        return None
    claims = [
        Claim(each.value_ms, each.bound_ms)
        for each in now.objectives
        if each.metric in ("ttft", "e2e") and each.value_ms is not None and each.bound_ms is not None
    ]
    claims += largest_claim(now.observed.breakdown) if now.observed is not None else []
    if not claims or are_sure(claims, late_ms):
        return None
    head = f"Not to be trusted so far: requests left up to {spoken(late_ms)} late (p99)."
    return JudgedState("untrusted", head, "generator", "the load generator is held up, and reads replies as late")


def _cure_now(now: Current) -> str:
    if now.restarted_s is not None and now.ended and not now.failures:
        return RUNS_AGAIN
    return cure_of_failures(now.error) or "look at the server's log: whether it still runs, and what it refuses"


def _load_now(now: Current, large: Sequence[str], *, is_known: bool, is_unseen: bool) -> JudgedState:
    """Return the state by the load, the objectives and the parts of the TTFT."""
    served, offered = now.served_per_s, now.offered_per_s
    if offered is None and served is not None and now.more_waiting_per_s is not None:
        offered = served + now.more_waiting_per_s
    waiting = [value for value in now.waiting if value is not None]
    half = len(waiting) // 2
    grows = bool(half) and max(waiting[half:]) > max(waiting[:half], default=0.0) and waiting[-1] > 0
    if served is not None and offered is not None and served < OVERLOADED * offered and grows:
        cause: Subject | None = None if is_known else "queue"
        return JudgedState("overloaded", "Overloaded: more requests come than are served, and ever more wait.", cause)
    judged = by_objectives(now.objectives, f" {now.when}")
    enough = is_known or any(each.requests >= FEW_REQUESTS for each in now.objectives)
    if judged is not None and (enough or judged.state != "healthy"):
        return judged
    if now.unread and not is_known and now.sent >= FEW_REQUESTS:
        return JudgedState("healthy", "Healthy by its requests; where their time goes is not known.", "none")
    if is_unseen:
        return JudgedState("not_judged", unseen_headline(now.unseen))
    if not is_known:
        return JudgedState("not_judged", "Not judged yet: too few requests have ended lately.")
    return by_parts(waits_of(large)) or JudgedState("healthy", "Healthy: no wait stands out.")
