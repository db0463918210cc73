"""Verdict on a run for every output: its state, four figures, the TTFT's parts, evidence, and advice.

It is a pure function of the summary. Nothing is judged anew here: the state follows from what the summary states of
failures, records, the load generator, the load and the objectives, in this order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from msgspec import UNSET

from sidelight.correlator.parts import CAUSES, E2E_PARTS, INNER_PARTS, SPENT, TTFT_PARTS, Part
from sidelight.exporter.document import BLANK, Block, Figures, PartsBar, Piece, Prose
from sidelight.exporter.report.advice import (
    UNEXPLAINED,
    Advice,
    Observations,
    advised,
    cure_of_failures,
    generator_held_up,
    observed,
    of_missed,
)
from sidelight.exporter.report.alerts import FAILING_IN_PART, damage_of, failed_line, is_failing, loss_lines, restarted
from sidelight.exporter.report.load import overload
from sidelight.exporter.report.tables.breakdown import source_words
from sidelight.exporter.summary.breakdown import (
    Breakdown,
    E2eBreakdown,
    E2ePart,
    TtftPart,
    is_certain,
    json_name,
    label_of,
)
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.tail import MAJORITY, places
from sidelight.exporter.summary.verdict import (
    MeanParts,
    PartShare,
    RunVerdict,
    State,
    StudyState,
    StudyVerdict,
    Subject,
    VerdictFigure,
)
from sidelight.loadgen.requests.self_check.stated_error import ErrorBound
from sidelight.loadgen.requests.slo.results import ObjectiveResult
from sidelight.loadgen.requests.summary import ClientSummary, too_many_failed
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.printable.numbers import cell, count_of, percent, spoken
from sidelight.rundir.printable.text import as_sentence

WHY, DO = "Why: ", "Do this: "
LEVELS = ("p50", "p99")
FEW_REQUESTS = 20  # of fewer, a share of the time is mostly chance
OVERLOADED = 0.8  # of the offered rate: who serves less while ever more wait
MOSTLY = 0.6  # of a part: what makes up more of it is named in its place
LEAST_SHOWN = 0.005  # of the whole: a smaller part has no piece of the bar
TONES: dict[State | StudyState, str] = {
    "healthy": "met strong", "not_judged": "strong", "missed": "alarm strong", "untrusted": "warning strong",
    "overloaded": "alarm strong", "failing": "alarm strong",
    "slower": "alarm strong", "faster": "met strong", "equal": "met strong", "undecided": "strong",
    "limit_found": "strong", "no_limit": "met strong", "none_held": "alarm strong", "measured": "strong",
    "incomplete": "warning strong",
}  # fmt: skip
# What to do now where the parts of the TTFT are not known.
WITHOUT_PARTS = defaultdict(
    lambda: "wait for more requests",
    missed="have clients and engines send their spans, to see where the time goes",
    overloaded="add a replica",
)
Described = tuple[Part, TtftPart | E2ePart, float]  # a part, its statistics, and its share of the mean
_MET = {True: "met", False: "MISSED", None: "not known"}


@dataclass(frozen=True, slots=True)
class JudgedState:
    """State of a run. `cause` is None where it is the largest part of the time; `why` is "" where it follows from the
    parts.
    """

    state: State
    headline: str
    cause: Subject | None = None
    why: str = ""


def verdict_of(summary: Summary) -> RunVerdict:
    """Return the verdict on a run."""
    advice, parts = advised(summary), part_shares(summary.correlation.breakdown, _described(summary))
    largest = largest_share(parts)
    judged = _of_records(summary) or _of_requests(summary) or _of_generator(summary) or _of_load(summary)
    return RunVerdict(
        state=judged.state,
        cause=judged.cause or (largest.part if largest else "none"),
        headline=judged.headline,
        figures=list(_figures(summary)),
        parts=[] if too_many_failed(summary.client.requests) else parts,
        why=judged.why or where_it_went(summary),
        do=as_sentence(advice.cure if judged.state != "failing" else _cure_of(summary) or advice.cure),
    )


def _cure_of(summary: Summary) -> str:
    """Return advice on failures, "" for an unknown kind."""
    if restarted(summary) and summary.client.outage is UNSET:
        return "look at the engine's log for why it ended; it runs again"
    return cure_of_failures(next(iter(summary.client.errors), ""))


def verdict_blocks(verdict: RunVerdict | StudyVerdict) -> Iterator[Block]:
    """Yield a verdict as every report shows it; an empty line ends it."""
    yield Prose(verdict.headline, f"{TONES[verdict.state]} headline")
    if verdict.figures:
        yield Figures(tuple((each.label, each.text, "alarm" if each.bad else "") for each in verdict.figures))
    for bar in (bars := list(_bars(verdict))):
        shown = [part for part in bar.parts if part.share is None or part.share >= LEAST_SHOWN]
        pieces = (Piece(part.part, part.label, part.mean_ms, part.share, part.known_from) for part in shown)
        if shown:
            yield PartsBar(tuple(pieces), bar.label, bar.mean_ms / max(each.mean_ms for each in bars))
    yield Prose(f"{WHY}{verdict.why}")
    yield Prose(f"{DO}{verdict.do}", "strong")
    yield BLANK


def _bars(verdict: RunVerdict | StudyVerdict) -> Iterator[MeanParts]:
    if isinstance(verdict, RunVerdict):
        yield MeanParts(label="", mean_ms=1.0, parts=verdict.parts)
    else:
        yield from verdict.bars


def beside_figures(summary: Summary) -> list[ObjectiveResult]:
    """Return the objectives that stand beside figures of the verdict."""
    objectives = summary.client.slo.objectives if summary.client.slo else ()
    beside = (_objective_of(f"ttft_{level}", getattr(summary.client.ttft_ms, level), objectives) for level in LEVELS)
    return [objective for objective in beside if objective is not None]


def _objective_of(
    name: str, value_ms: float | None, objectives: Sequence[ObjectiveResult], *, off: float = 1e-6
) -> ObjectiveResult | None:
    """Return the objective of a figure with its value; None without one. Values may be `off` by that ratio."""
    for objective in objectives:
        is_same = value_ms is not None and objective.value is not None
        is_same = is_same and abs((objective.value or 0.0) - (value_ms or 0.0)) <= off * abs(value_ms or 0.0)
        if f"{objective.metric}_{objective.statistic}" == name and is_same and objective.bound_ms is not None:
            return objective
    return None


def _of_records(summary: Summary) -> JudgedState | None:
    """Return the state of a run with damaged or missing records; None of another."""
    if what := damage_of(summary.integrity):
        head = "Not to be trusted: recorded data are missing or damaged; the numbers are derived from what is left."
        return JudgedState("untrusted", head, "data", f"{what}.")
    if lost := list(loss_lines(summary.integrity)):
        return JudgedState("untrusted", "Not to be trusted: a share of the load was not sent.", "data", " ".join(lost))
    if not summary.client.requests.sent:
        return JudgedState("not_judged", "Not judged: no request was sent.", "none", "There is no load to judge.")
    return None


def _of_requests(summary: Summary) -> JudgedState | None:
    """Return the state of a run with failures; None of another."""
    requests, outage = summary.client.requests, summary.client.outage
    if not is_failing(summary):
        return None
    failed = requests.failed + requests.refused
    part = "" if too_many_failed(requests) else " in part"
    head = f"Failing{part}: {failed:,} of {requests.sent:,} requests did not succeed."
    if restarted(summary) and outage is UNSET:
        head = f"{head.removesuffix('.')}; the engine restarted, and answers again."
    if outage is not UNSET:
        head = f"Failing: the server answered none of {requests.sent:,} requests."
        if outage.at_ns is not None:
            since = f"{iso_ms(outage.at_ns)[11:19]} UTC, {outage.at_s:.1f} s into the load"
            head = f"Failing since {since}: the server stopped answering."
    return JudgedState("failing", head, "server", f"Errors: {failed_line(summary).partition(': ')[2]}")


def _of_generator(summary: Summary) -> JudgedState | None:
    if not generator_held_up(summary):
        return None
    check = summary.self_check
    cause = check.cause.text if check.cause else f"the load generator {check.verdict}"
    error = (check.first_line or check.verdict).partition(f": {cause}")[0]
    return JudgedState("untrusted", f"Not to be trusted: {error}.", "generator", as_sentence(cause))


def _of_load(summary: Summary) -> JudgedState:
    """Return the state by the load and the objectives."""
    slo, stability = summary.client.slo, summary.methodology.stability
    for line in overload(summary):
        return JudgedState("overloaded", line)
    if judged := _of_objectives(slo.objectives if slo else ()):
        return judged
    large = observed(summary).large if not summary.correlation.missing else []
    if stability.verdict == "undecided":
        if _waits(large) or summary.correlation.missing or summary.client.requests.sent < FEW_REQUESTS:
            return JudgedState("not_judged", f"Not judged: {stability.reason}.")
        return JudgedState("healthy", f"Healthy so far: no wait stands out; {stability.reason}.")
    if summary.correlation.missing:
        return JudgedState("healthy", "Healthy by its requests; where their time went is not known.", "none")
    return _of_parts(large) or JudgedState("healthy", "Healthy: the load was served, and no wait stands out.")


def _of_objectives(objectives: Sequence[ObjectiveResult], when: str = "") -> JudgedState | None:
    """Return the state by the objectives; None without any. `when` says of which time they are."""
    unmet = {met: [each for each in objectives if each.met is met] for met in (False, None)}
    texts = {met: ", ".join(each.text for each in named) for met, named in unmet.items()}
    if unmet[False]:
        return JudgedState("missed", f"Objective missed{when}: {texts[False]}.")
    if unmet[None]:
        why = unmet[None][0].missing
        return JudgedState("not_judged", f"Not judged: whether {texts[None]} is met is not known ({why}).")
    return JudgedState("healthy", f"Healthy{when}: every objective was met.") if objectives else None


def _of_parts(large: Sequence[str]) -> JudgedState | None:
    """Return the state by a large part that is a wait, without an objective; None without one."""
    goal = "no objective (--slo) says what is good enough"
    return next(
        (JudgedState("not_judged", f"Not judged: {CAUSES[part]} stands out, and {goal}.") for part in _waits(large)),
        None,
    )


def _waits(large: Sequence[str]) -> list[str]:
    return [part for part in large if part != "prefill"]


def _figures(summary: Summary) -> Iterator[VerdictFigure]:
    """Yield the served rate, two percentiles of the TTFT, and the failed requests."""
    client = summary.client
    requests, rates = client.requests, client.rates
    if not requests.sent:
        return
    offered, growing = rates.offered_requests_per_s, summary.methodology.stability.verdict == "growing"
    served = client.throughput.requests_per_s if offered is None or summary.watch else rates.completed_requests_per_s
    drained = ""
    if growing:
        served = summary.methodology.stability.capacity_per_s
        if not rates.ended_in_load:
            served, drained = 0.0, "" if served is None else f", {cell(served)} once it ended"
    yield served_figure(served, None if summary.watch else offered, drained)
    yield from _times(client, summary.self_check.error_ms.ttft)
    unended = requests.cancelled + requests.in_flight
    not_ended = f", {unended:,} not ended" if unended else ""
    yield failed_figure(requests.failed + requests.refused, requests.sent, not_ended)


def served_figure(served: float | None, offered: float | None, drained: str = "") -> VerdictFigure:
    of = "" if offered is None else f" of {cell(offered)}"
    return VerdictFigure(name="served", label="served", value=served, text=f"{cell(served)}{of} requests/s{drained}")


def failed_figure(failed: int, sent: int, unended: str = "") -> VerdictFigure:
    text = f"{failed:,} of {sent:,}{unended}"
    return VerdictFigure(name="failed", label="failed", value=float(failed), text=text, bad=failed > 0)


def _times(client: ClientSummary, error: ErrorBound) -> Iterator[VerdictFigure]:
    """Yield p50 and p99 of the TTFT, with an error that is large; of replies in one piece, of the end-to-end time."""
    whole = "ttft" if client.ttft_ms.mean is not None or client.e2e_ms.mean is None else "e2e"
    times = getattr(client, f"{whole}_ms")
    objectives = client.slo.objectives if client.slo else ()
    error_ms = error.p99 if error.unusable else None
    yield from time_figures(whole, {level: getattr(times, level) for level in LEVELS}, objectives, error_ms=error_ms)


def time_figures(
    whole: str,
    times_ms: Mapping[str, float | None],
    objectives: Sequence[ObjectiveResult],
    *,
    off: float = 1e-6,
    error_ms: float | None = None,
) -> Iterator[VerdictFigure]:
    """Yield percentiles of a time, each with its error and its objective."""
    beside = {level: _objective_of(f"{whole}_{level}", times_ms[level], objectives, off=off) for level in LEVELS}
    together = *times_ms.values(), *(objective.bound_ms for objective in beside.values() if objective)
    for level in LEVELS:
        name, objective, text = f"{whole}_{level}", beside[level], spoken(times_ms[level], *together)
        if error_ms is not None:
            text += f" \N{PLUS-MINUS SIGN} {spoken(error_ms, *together)}"
        if objective is not None:
            bound = f"{objective.text[len(name) :][:1]} {spoken(objective.bound_ms, *together)}"
            text += f" ({bound}: {_MET[objective.met]})"
        yield VerdictFigure(
            name=cast("Any", name),
            label=f"{whole.upper()} {level}",
            value=times_ms[level],
            text=text,
            bad=objective is not None and not objective.met,
        )


def _described(summary: Summary) -> Iterator[Described]:
    """Yield the known parts of the mean with their shares: of the TTFT, or without one of the end-to-end time."""
    correlation = summary.correlation
    is_e2e = not correlation.requests and correlation.breakdown.e2e.other_ms.mean is not None
    if correlation.missing and not is_e2e:
        return
    if is_e2e:
        yield from described_parts(correlation.breakdown.e2e, E2E_PARTS, "e2e")
    else:
        yield from described_parts(correlation.breakdown, TTFT_PARTS, "ttft")


def described_parts(
    breakdown: Breakdown | E2eBreakdown, parts: Sequence[Part], whole: Literal["ttft", "e2e"]
) -> Iterator[Described]:
    for part in parts:
        described = getattr(breakdown, json_name(part))
        if described.mean is not None:
            yield part, described, getattr(described, f"share_of_{whole}") or 0.0


def part_shares(breakdown: Breakdown, described: Iterable[Described]) -> list[PartShare]:
    return [
        PartShare(
            part=cast("Subject", part.name),
            label=label_of(part, breakdown),
            mean_ms=each.mean or 0.0,
            share=share if is_certain(each) else None,
            known_from=source_words(part, each, breakdown),
        )
        for part, each, share in described
    ]


def largest_part(breakdown: Breakdown) -> dict[str, float]:
    """Return the largest part of the mean TTFT with its share; nothing of few requests, or where it is uncertain."""
    described = sorted(described_parts(breakdown, TTFT_PARTS, "ttft"), key=lambda each: -each[2])
    is_known = breakdown.ttft_ms.count >= FEW_REQUESTS and described and is_certain(described[0][1])
    return {described[0][0].name: described[0][2]} if is_known else {}


def largest_share(parts: Sequence[PartShare]) -> PartShare | None:
    return max((part for part in parts if part.share), key=lambda part: part.share or 0.0, default=None)


def where_it_went(summary: Summary) -> str:
    """Return the evidence for the wait, else the largest part of the mean; or the missing one's reason."""
    correlation, server, seen = summary.correlation, summary.server, advised(summary).seen
    breakdown, described = correlation.breakdown, list(_described(summary))
    if seen:
        return as_sentence(seen)
    if described:
        subject, covered = "mean TTFT" if correlation.requests else "mean end-to-end time", breakdown.ttft_ms
        if correlation.requests and (covered.count < correlation.requests or correlation.not_ok):
            subject += f" of the {count_of(covered.count, 'request')} with a breakdown ({spoken(covered.mean)})"
        return spent(subject, breakdown, described, is_ttft=bool(correlation.requests), large=observed(summary).large)
    if server.engine is None and not server.endpoints and not correlation.refused_reasons:
        why = f" ({server.reason})" if server.reason else ""
        return f"No breakdown: no metrics page of this server could be read{why}."
    return f"No breakdown: {correlation.missing or 'no part of the time is known'}."


def spent(
    subject: str, breakdown: Breakdown, described: Sequence[Described], *, is_ttft: bool, large: Sequence[str]
) -> str:
    """Return a sentence on the largest part of the mean; on two where none is most of it."""
    ranked = sorted(described, key=lambda each: -each[2])
    certain = [(share, part.name) for part, each, share in ranked if is_certain(each)]
    if not certain:
        part, each, _ = ranked[0]
        estimate, error = (spoken(value, each.mean) for value in (each.mean, each.error_ms))
        return f"The estimate of {CAUSES[part.name]}, {estimate}, is within its own error of {error}."
    shares = {part.name: share for part, _, share in described}
    where = places({**dict.fromkeys(SPENT), **shares}, breakdown.merged, breakdown.ttft_ms.count)
    for inner in (part for part in INNER_PARTS if part.spent):
        share = getattr(breakdown, json_name(inner)).share_of_ttft or 0.0
        if share > MOSTLY * shares.get(inner.within, 0.0) > 0:
            where[inner.within] = f"{SPENT[inner.within]} ({inner.spent})"
    (share, largest), *others = certain
    also = f" and {percent(others[0][0])} {where[others[0][1]]}" if share <= MAJORITY and others else ""
    alone = "" if not is_ttft or {*large} - {"prefill"} else "; no wait stands out"
    return f"Of the {subject}, {percent(share)} was spent {where[largest]}{also}{alone}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """State of a run or a watch that goes on: its last minutes. What is not known is None, "" or empty.

    more_waiting_per_s  how many more wait with each second, where it is not known what is offered
    failing     since when requests only fail, `failures` of them, most of the `error`'s kind
    silent      the metrics pages that no longer answer, with since when and why; `ended`: requests end all the same
    waiting     the most that waited in each of the last stretches of time
    queue       advice on the queue, which needs no request with known parts
    unseen      requests of engines without a client's span
    objectives  as they stand, or stood some seconds ago, and `when`: over which time
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
    unseen: int = 0
    objectives: Sequence[ObjectiveResult] = ()
    when: str = "so far"


def current_verdict(now: Current) -> RunVerdict:
    """Return the verdict on a run or a watch that goes on."""
    seen = now.observed
    described = [] if seen is None else list(described_parts(seen.breakdown, TTFT_PARTS, "ttft"))
    parts = [] if seen is None else part_shares(seen.breakdown, described)
    is_known = seen is not None and seen.breakdown.ttft_ms.count >= FEW_REQUESTS
    large, largest = seen.large if seen is not None and is_known else [], largest_share(parts) if is_known else None
    judged = _failing_now(now) or _load_now(now, large, is_known=is_known)
    explained = seen.explained() if seen is not None and is_known else None
    if judged.state == "failing":
        why, do = judged.why, _cure_now(now)
    elif explained is not None:
        why, do = explained.seen, explained.cure
    elif seen is not None and described and is_known:
        subject = f"mean TTFT of the last {count_of(seen.breakdown.ttft_ms.count, 'request')}"
        why = spent(subject, seen.breakdown, described, is_ttft=True, large=large)
        cures = {"missed": of_missed(large, now.objectives), "overloaded": "add a replica"}
        otherwise = cures.get(judged.state, "nothing: no wait stands out")
        do = next((UNEXPLAINED[part] for part in large if part in UNEXPLAINED), otherwise)
    elif now.queue is not None:
        why, do = now.queue.seen, now.queue.cure
    else:
        why = f"fewer than {FEW_REQUESTS} requests with known parts of their TTFT ended lately"
        do = WITHOUT_PARTS[judged.state]
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
        why = f"{count_of(now.failures, 'request')} failed{f', most of {now.error}' if now.error else ''}"
        return JudgedState("failing", f"Failing{since}: no request has succeeded.", "server", why)
    if now.silent and not now.ended:
        url, why = next(iter(now.silent.items()))
        since, _, error = why.partition(": ")
        return JudgedState("failing", f"Failing {since}: the server does not answer.", "server", f"{url}: {error}")
    if now.failed >= FAILING_IN_PART * now.sent > 0:
        head = f"Failing in part: {now.failed:,} of {now.sent:,} requests did not succeed."
        return JudgedState("failing", head, "server", f"most failed of {now.error}" if now.error else head)
    return None


def _cure_now(now: Current) -> str:
    return cure_of_failures(now.error) or "look at the server's log: whether it still runs, and what it refuses"


def _load_now(now: Current, large: Sequence[str], *, is_known: bool) -> JudgedState:
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
    judged = _of_objectives(now.objectives, f" {now.when}")
    enough = is_known or any(each.requests >= FEW_REQUESTS for each in now.objectives)
    if judged is not None and (enough or judged.state != "healthy"):
        return judged
    if not is_known and now.unseen >= FEW_REQUESTS:
        engines = count_of(now.unseen, "engine request")
        return JudgedState("not_judged", f"Not judged: {engines} came without a client's span.")
    if not is_known:
        return JudgedState("not_judged", "Not judged yet: too few requests have ended lately.")
    return _of_parts(large) or JudgedState("healthy", "Healthy: no wait stands out.")
