"""Verdict on a run for every output: its state, four figures, the TTFT's parts, evidence, and advice.

It is a pure function of the summary. Nothing is judged anew here: the state follows from what the summary states of
failures, records, the load generator, the load and the objectives, in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import UNSET

from sidelight.correlator.parts import CAUSES, E2E_PARTS, TTFT_PARTS, UNDIVIDED_CAUSES
from sidelight.exporter.report.advice import (
    RUNS_AGAIN,
    advised,
    cure_of_failures,
    observed,
)
from sidelight.exporter.report.alerts import damage_of, failed_line, is_failing, loss_lines, restarted
from sidelight.exporter.report.load import overload
from sidelight.exporter.report.verdict.parts import (
    FEW_REQUESTS,
    Described,
    described_parts,
    largest_share,
    part_shares,
    spent,
)
from sidelight.exporter.report.verdict.shown import LEVELS, failed_figure, objective_of, served_figure, time_figures
from sidelight.exporter.report.verdict.state import JudgedState, by_objectives, by_parts, waits_of
from sidelight.exporter.report.verdict.unseen import unseen_verdict
from sidelight.exporter.summary.breakdown import IN_PREFILL
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.result import Summary, generator_held_up, unknown_clock
from sidelight.exporter.summary.tail import in_words
from sidelight.exporter.summary.verdict import (
    RunVerdict,
    VerdictFigure,
)
from sidelight.loadgen.requests.self_check.stated_error import ErrorBound
from sidelight.loadgen.requests.slo.results import ObjectiveResult
from sidelight.loadgen.requests.summary import ClientSummary, too_many_failed
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.printable.numbers import cell, count_of, spoken, spoken_together
from sidelight.rundir.printable.text import as_sentence


def verdict_of(summary: Summary) -> RunVerdict:
    """Return the verdict on a run."""
    if summary.watch and not summary.client.requests.sent and summary.integrity.state != "damaged":
        return unseen_verdict(summary, summary.watch)
    advice, parts = advised(summary), part_shares(summary.correlation.breakdown, _described(summary))
    largest = largest_share(parts)
    judged = _of_records(summary) or _of_requests(summary) or _of_generator(summary) or _of_clocks(summary)
    judged = judged or _of_load(summary)
    return RunVerdict(
        state=judged.state,
        cause=judged.cause or (largest.part if largest else "none"),
        headline=judged.headline,
        figures=list(_figures(summary)),
        parts=[] if too_many_failed(summary.client.requests) else parts,
        why=judged.why or where_it_went(summary),
        do=as_sentence(advice.cure if judged.state != "failing" else _cure_of(summary) or advice.cure)
        + (_by_more_seats(summary) if advice.raises and judged.state != "failing" else ""),
    )


def _by_more_seats(summary: Summary) -> str:
    """Return a sentence on the prediction for more running requests, "" without one."""
    more = summary.more_seats
    if more is UNSET or more.ttft_p99_ms is UNSET or more.tpot_p50_ms is UNSET:
        return ""
    ttft, tpot = more.ttft_p99_ms, more.tpot_p50_ms
    then, low, high, now = spoken_together(ttft.estimate, ttft.low, ttft.high, ttft.now)
    a_token, a_token_now = spoken_together(tpot.estimate, tpot.now)
    helps = "With" if ttft.high < ttft.now else "It may not help: with"
    return (
        f" {helps} {more.then} in place of {more.now}, this load's TTFT p99 would be {then} ({low} to {high}) in place "
        f"of {now}, and TPOT p50 {a_token} in place of {a_token_now} (sidelight predict)."
    )


def _cure_of(summary: Summary) -> str:
    """Return advice on failures, "" for an unknown kind."""
    if restarted(summary) and summary.client.outage is UNSET:
        return RUNS_AGAIN
    return cure_of_failures(next(iter(summary.client.errors), ""))


def beside_figures(summary: Summary) -> list[ObjectiveResult]:
    """Return the objectives that stand beside figures of the verdict."""
    objectives = summary.client.slo.objectives if summary.client.slo else ()
    beside = (objective_of(f"ttft_{level}", getattr(summary.client.ttft_ms, level), objectives) for level in LEVELS)
    return [objective for objective in beside if objective is not None]


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


def _of_clocks(summary: Summary) -> JudgedState | None:
    """Return the state of a run with a clock that could change the cause; None of another."""
    if (node := unknown_clock(summary)) is None:
        return None
    known = f"the clock of node {node.node} is known to {node.clock_error_ms:.1f} ms only"
    why = "Where the TTFT went is known by comparing it with this machine's, and another part may be the largest."
    return JudgedState("untrusted", f"Not to be trusted because {known}.", "clock", why)


def _of_load(summary: Summary) -> JudgedState:
    """Return the state by the load and the objectives."""
    slo, stability = summary.client.slo, summary.methodology.stability
    for line in overload(summary):
        return JudgedState("overloaded", line)
    if judged := by_objectives(slo.objectives if slo else ()):
        return judged
    breakdown = summary.correlation.breakdown
    waits = waits_of(observed(summary).large if not summary.correlation.missing else [], breakdown)
    if stability.verdict == "undecided":
        if waits or summary.correlation.missing or summary.client.requests.sent < FEW_REQUESTS:
            return JudgedState("not_judged", f"Not judged: {stability.reason}.")
        return JudgedState("healthy", f"Healthy so far: no wait stands out; {stability.reason}.")
    if summary.correlation.missing:
        return JudgedState("healthy", "Healthy by its requests; where their TTFT went is not known.", "none")
    judged = by_parts(waits, _causes(summary.correlation))
    return judged or JudgedState("healthy", "Healthy: the load was served, and no wait stands out.")


def _causes(correlation: Correlation) -> Mapping[str, str]:
    """Return the parts as causes: a queue that mostly is loads of KV caches as these, an undivided engine as such."""
    means_ms = {name: getattr(correlation.breakdown, f"{name}_ms").mean for name in ("queue", "decode_queue")}
    loads = correlation.evidence.kv_loads or None
    full = [name for name, mean_ms in means_ms.items() if loads and mean_ms and loads.are_most_of(mean_ms)]
    undivided = UNDIVIDED_CAUSES if correlation.breakdown.queue_ms.missing == IN_PREFILL else {}
    causes = CAUSES | dict.fromkeys(full, "the load of KV caches") | undivided
    merged = correlation.breakdown.merged
    if 10 * sum(merged.values()) > correlation.breakdown.ttft_ms.count:
        causes |= {"other": f"what no source separates ({' or '.join(map(in_words, merged))})"}
    return causes


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


def _times(client: ClientSummary, error: ErrorBound) -> Iterator[VerdictFigure]:
    """Yield p50 and p99 of the TTFT, with an error that is large; of replies in one piece, of the end-to-end time."""
    whole = "ttft" if client.ttft_ms.mean is not None or client.e2e_ms.mean is None else "e2e"
    times = getattr(client, f"{whole}_ms")
    objectives = client.slo.objectives if client.slo else ()
    error_ms = error.p99 if error.unusable else None
    yield from time_figures(whole, {level: getattr(times, level) for level in LEVELS}, objectives, error_ms=error_ms)


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
