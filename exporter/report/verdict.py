"""Verdict on a run for every output: its state, four figures, the TTFT's parts, evidence, and advice.

It is a pure function of the summary. Nothing is judged anew here: the state follows from what the summary states of
failures, records, the load generator, the load and the objectives, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from msgspec import UNSET

from correlator.parts import CAUSES, E2E_PARTS, INNER_PARTS, NETWORK, SPENT, TTFT_PARTS, Part
from exporter.document import BLANK, Block, Figures, PartsBar, Piece, Prose
from exporter.report.advice import advised, generator_held_up, large_parts
from exporter.report.alerts import damage_of, failed_line, is_failing, loss_lines
from exporter.report.load import overload
from exporter.report.tables.breakdown import source_words
from exporter.summary.breakdown import E2ePart, TtftPart, is_certain, json_name, label_of
from exporter.summary.result import Summary
from exporter.summary.tail import MAJORITY, places
from exporter.summary.verdict import PartShare, RunVerdict, State, Subject, VerdictFigure
from loadgen.requests.slo.results import ObjectiveResult
from loadgen.requests.summary import too_many_failed
from rundir.clock import iso_ms
from rundir.printable.numbers import cell, count_of, percent, spoken
from rundir.printable.text import as_sentence

WHY, DO = "Why: ", "Do this: "
MOSTLY = 0.6  # of a part: what makes up more of it is named in its place
LEAST_SHOWN = 0.005  # of the whole: a smaller part has no piece of the bar
TONES: dict[State, str] = {
    "healthy": "met strong", "not_judged": "strong", "missed": "alarm strong", "untrusted": "warning strong",
    "overloaded": "alarm strong", "failing": "alarm strong",
}  # fmt: skip
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
    advice, parts, largest = advised(summary), list(_parts(summary)), _largest(summary)
    judged = _of_records(summary) or _of_requests(summary) or _of_generator(summary) or _of_load(summary)
    return RunVerdict(
        state=judged.state,
        cause=judged.cause or (largest.part if largest else "none"),
        headline=judged.headline,
        figures=list(_figures(summary)),
        parts=[] if too_many_failed(summary.client.requests) else parts,
        why=judged.why or where_it_went(summary),
        do=as_sentence(advice.cure),
    )


def verdict_blocks(verdict: RunVerdict) -> Iterator[Block]:
    """Yield the verdict as every report shows it; an empty line ends it."""
    yield Prose(verdict.headline, TONES[verdict.state])
    if verdict.figures:
        yield Figures(tuple((each.label, each.text, "alarm" if each.bad else "") for each in verdict.figures))
    shown = [part for part in verdict.parts if part.share is None or part.share >= LEAST_SHOWN]
    if shown:
        yield PartsBar(tuple(Piece(part.part, part.label, part.mean_ms, part.share, part.known_from) for part in shown))
    yield Prose(f"{WHY}{verdict.why}")
    yield Prose(f"{DO}{verdict.do}", "strong")
    yield BLANK


def objective_beside(summary: Summary, name: str) -> ObjectiveResult | None:
    """Return the objective of a figure of the TTFT with its value; None without one."""
    slo, ttft_ms = summary.client.slo, summary.client.ttft_ms
    for objective in slo.objectives if slo else ():
        value_ms = getattr(ttft_ms, objective.statistic or "", None)
        is_same = value_ms is not None and objective.value is not None and abs(objective.value - value_ms) < 1e-6
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
    if outage is not UNSET:
        head = f"Failing: the server answered none of {requests.sent:,} requests."
        if outage.at_ns is not None:
            since = f"{iso_ms(outage.at_ns)[11:19]} UTC, {outage.at_s:.1f} s into the load"
            head = f"Failing since {since}: the server stopped answering."
    return JudgedState("failing", head, "server", failed_line(summary))


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
    named = [objective for objective in (slo.objectives if slo else ()) if not objective.met]
    texts = ", ".join(objective.text for objective in named)
    if any(objective.met is False for objective in named):
        return JudgedState("missed", f"Objective missed: {texts}.")
    if named:
        return JudgedState("not_judged", f"Not judged: whether {texts} is met is not known ({named[0].missing}).")
    if slo is not None:
        return JudgedState("healthy", "Healthy: every objective was met.")
    if stability.verdict == "undecided":
        return JudgedState("not_judged", f"Not judged: {stability.reason}.")
    waits = [part for part in large_parts(summary) if part != "prefill"] if not summary.correlation.missing else []
    if waits:
        goal = "a watch has no objectives" if summary.watch else "no objective (--slo) says what is good enough"
        return JudgedState("not_judged", f"Not judged: {CAUSES[waits[0]]} stands out, and {goal}.")
    if summary.correlation.missing:
        return JudgedState("healthy", "Healthy by its requests; where their time went is not known.", "none")
    return JudgedState("healthy", "Healthy: the load was served, and no wait stands out.")


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
    of = f" of {cell(offered)}" if offered is not None and not summary.watch else ""
    yield VerdictFigure(name="served", label="served", value=served, text=f"{cell(served)}{of} requests/s{drained}")
    yield from _times(summary)
    failed = requests.failed + requests.refused
    unended = requests.cancelled + requests.in_flight
    text = f"{failed:,} of {requests.sent:,}" + (f", {unended:,} not ended" if unended else "")
    yield VerdictFigure(name="failed", label="failed", value=float(failed), text=text, bad=failed > 0)


def _times(summary: Summary) -> Iterator[VerdictFigure]:
    """Yield p50 and p99 of the TTFT, each with its objective; of replies in one piece, of the end-to-end time."""
    whole = "ttft" if summary.client.ttft_ms.mean is not None or summary.client.e2e_ms.mean is None else "e2e"
    times = getattr(summary.client, f"{whole}_ms")
    names = [(f"{whole}_{level}", f"{whole.upper()} {level}", getattr(times, level)) for level in ("p50", "p99")]
    beside = {name: objective_beside(summary, name) for name, *_ in names}
    bounds = [objective.bound_ms for objective in beside.values() if objective]
    together = *(value for *_, value in names), *bounds
    for name, label, value in names:
        objective, text = beside[name], spoken(value, *together)
        if objective is not None:
            text += (
                f" ({objective.text[len(name) :][:1]} {spoken(objective.bound_ms, *together)}: {_MET[objective.met]})"
            )
        bad = objective is not None and not objective.met
        yield VerdictFigure(name=name, label=label, value=value, text=text, bad=bad)  # type: ignore[arg-type]


def _described(summary: Summary) -> Iterator[tuple[Part, TtftPart | E2ePart, float]]:
    """Yield the known parts of the mean with their shares: of the TTFT, or without one of the end-to-end time."""
    correlation = summary.correlation
    is_e2e = not correlation.requests and correlation.breakdown.e2e.other_ms.mean is not None
    if correlation.missing and not is_e2e:
        return
    breakdown = correlation.breakdown.e2e if is_e2e else correlation.breakdown
    for part in E2E_PARTS if is_e2e else TTFT_PARTS:
        described = getattr(breakdown, json_name(part))
        if described.mean is not None:
            yield part, described, getattr(described, f"share_of_{'e2e' if is_e2e else 'ttft'}") or 0.0


def _parts(summary: Summary) -> Iterator[PartShare]:
    breakdown = summary.correlation.breakdown
    for part, described, share in _described(summary):
        yield PartShare(
            part=cast("Subject", part.name),
            label=label_of(part, breakdown),
            mean_ms=described.mean or 0.0,
            share=share if is_certain(described) else None,
            known_from=source_words(part, described, breakdown),
        )


def _largest(summary: Summary) -> PartShare | None:
    return max((part for part in _parts(summary) if part.share), key=lambda part: part.share or 0.0, default=None)


def where_it_went(summary: Summary) -> str:
    """Return the evidence for the wait, else the largest part of the mean; or the missing one's reason."""
    correlation, server, seen, largest = summary.correlation, summary.server, advised(summary).seen, _largest(summary)
    if seen:
        return as_sentence(seen)
    if largest is not None:
        return _spent(summary, largest)
    unsure = [(part, described) for part, described, _ in _described(summary) if not is_certain(described)]
    if unsure:
        part, described = max(unsure, key=lambda pair: pair[1].mean or 0.0)
        estimate, error = (spoken(value, described.mean) for value in (described.mean, described.error_ms))
        return f"The estimate of {CAUSES[part.name]}, {estimate}, is within its own error of {error}."
    if server.engine is None and not server.endpoints and not correlation.refused_reasons:
        why = f" ({server.reason})" if server.reason else ""
        return f"No breakdown: no metrics page of this server could be read{why}."
    return f"No breakdown: {correlation.missing or 'no part of the time is known'}."


def _spent(summary: Summary, largest: PartShare) -> str:
    """Return a sentence on the largest part of the mean; on two where none is most of it."""
    correlation = summary.correlation
    described = list(_described(summary))
    shares = {part.name: share for part, _, share in described}
    where = places({**dict.fromkeys(SPENT), **shares}, correlation.breakdown.merged, correlation.requests)
    for inner in (part for part in INNER_PARTS if part.spent):
        share = getattr(correlation.breakdown, json_name(inner)).share_of_ttft or 0.0
        if share > MOSTLY * shares.get(inner.within, 0.0) > 0:
            where[inner.within] = f"{SPENT[inner.within]} ({inner.spent})"
    certain = {part.name for part, each, _ in described if is_certain(each) and part.name != largest.part}
    second = max(certain, key=lambda name: shares[name], default="")
    also = ""
    if (largest.share or 0.0) <= MAJORITY and second:
        also = f" and {percent(shares[second])} {where[second]}"
    subject, covered = "mean TTFT" if correlation.requests else "mean end-to-end time", correlation.breakdown.ttft_ms
    if correlation.requests and (covered.count < correlation.requests or correlation.not_ok):
        subject += f" of the {count_of(covered.count, 'request')} with a breakdown ({spoken(covered.mean)})"
    waits = {NETWORK, "gateway", "queue", "other"} & {*large_parts(summary)}
    alone = "" if waits or not correlation.requests else "; no wait stands out"
    return f"Of the {subject}, {percent(largest.share)} was spent {where[largest.part]}{also}{alone}."
