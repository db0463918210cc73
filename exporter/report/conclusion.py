"""Conclusion of a run in plain sentences: objectives, events, the mean wait, and slow requests. All come from typed
facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from correlator.parts import CAUSES, E2E_PARTS, INNER_PARTS, SPENT, TTFT_PARTS
from exporter.document import Prose
from exporter.report.advice import LARGE, UNEXPLAINED, advice
from exporter.summary.breakdown import Breakdown, E2ePart, TtftPart, is_certain, json_name
from exporter.summary.gateways import GatewaySummary
from exporter.summary.result import Summary
from exporter.summary.tail import TailAttribution, places, ranked
from loadgen.requests.slo.results import ObjectiveResult
from loadgen.requests.summary import ClientSummary, too_many_failed
from recorded.client_spans import FIRST_TOKEN_ATTRIBUTES
from rundir.printable.numbers import cell, count_of, ms, percent, spoken, spoken_together
from rundir.stats import Statistics
from scraper.gateways.catalogue import can_state_more

FEW_REQUESTS = 20  # of fewer, a 95th percentile is the slowest request
LEAST_NAMED = 0.05  # of the whole: less is not worth a word beside the largest
NEARLY_ALL, MOSTLY = 0.9, 0.6  # of a whole
HARDLY_RATIO = 0.2  # standard deviation over mean: of less it does not matter what it is made of


def objectives(summary: Summary) -> Iterator[Prose]:
    """Yield a line for each objective; none where none was given."""
    slo = summary.client.slo
    for objective in slo.objectives if slo else ():
        verdict = {True: "met", False: "MISSED", None: "not known"}[objective.met]
        tone = "met" if objective.met else "alarm strong"
        yield Prose(f"Objective {objective.text}: {verdict}, {evidence(objective)}", tone)


def evidence(objective: ObjectiveResult) -> str:
    """Return the deciding value of an objective, and its number of requests."""
    more = objective.left_out_requests
    left_out = f"; {more} more {'has' if more == 1 else 'have'} no value" if more else ""
    if objective.value is None:
        return f"{objective.missing}{left_out}"
    failed = f", of which {objective.failed_requests} failed" if objective.failed_requests else ""
    whole = count_of(objective.requests, "request")
    return f"{_measured(objective.value, objective.unit)} over {whole}{failed}{left_out}"


def _measured(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{ms(value)} ms"
    return f"{100 * value:.3g} %" if unit == "ratio" else f"{cell(value)} {unit}"


def conclusion(summary: Summary) -> Iterator[str]:
    """Yield a few sentences, each paragraph a string: what happened, where the wait went, why, and what to do.

    Where too many requests failed, only what became of them and what to do about it: the others are not the service.
    """
    correlation = summary.correlation
    yield _what_happened(summary.client)
    if too_many_failed(summary.client.requests):
        yield from advice(summary)
        return
    if summary.client.requests.ok or correlation.requests:
        yield where_it_went(summary)
    yield from _gateways(correlation.gateways, correlation.requests)
    if not correlation.missing and not correlation.breakdown.means_only:
        yield from _why_slow(summary)
    yield from advice(summary)


def _what_happened(client: ClientSummary) -> str:
    requests = client.requests
    whose = "" if requests.ok == requests.sent else f" of {_the(requests.ok)} that succeeded"
    if client.ttft_ms.mean is not None:
        over = "" if whose else f", over {count_of(client.ttft_ms.count, 'request')}"
        return f"TTFT{whose} was {_distribution(client.ttft_ms, over)}."
    if client.e2e_ms.mean is not None:
        times = _distribution(client.e2e_ms, "")
        had = "text that shows" if client.delivery.replies_in_chunks else "a first token that came before its end"
        return f"No reply had {had}, so there is no TTFT. The end-to-end time{whose} was {times}."
    return f"No TTFT: {client.ttft_ms.missing}."


def _distribution(times: Statistics, over: str) -> str:
    """Return mean and percentiles in words; of few requests the largest, and `over` how many."""
    if times.count == 1:
        return f"{spoken(times.mean)}{', of one request' if over else ''}"
    if times.count < FEW_REQUESTS:
        mean, most = spoken_together(times.mean, times.max)
        return f"{mean} in the mean and {most} at most{over}"
    mean, median, tail = spoken_together(times.mean, times.p50, times.p95)
    return f"{mean} in the mean, {median} at p50 and {tail} at p95"


def where_it_went(summary: Summary) -> str:
    """Return where the mean TTFT went, in a sentence; or why that cannot be said.

    Of replies in one piece, which have no TTFT, where the mean end-to-end time went.
    """
    correlation, server = summary.correlation, summary.server
    breakdown = correlation.breakdown
    if not correlation.missing:
        parts = {part.name: getattr(breakdown, json_name(part)) for part in TTFT_PARTS}
        shares = {name: part.share_of_ttft for name, part in parts.items()}
        is_the_same_mean = breakdown.ttft_ms.count >= correlation.requests and not correlation.not_ok
        subject = "Of the mean" if is_the_same_mean else _subject(breakdown.ttft_ms)
        return _shared_out(subject, parts, shares, breakdown, correlation.requests)
    if not correlation.requests and breakdown.e2e.other_ms.mean is not None:
        e2e_parts = {part.name: getattr(breakdown.e2e, json_name(part)) for part in E2E_PARTS}
        shares = {name: part.share_of_e2e for name, part in e2e_parts.items()}
        return _shared_out("Of the mean", e2e_parts, shares, breakdown, correlation.requests)
    if server.engine is None and not server.endpoints and not correlation.refused_reasons:
        why = f" ({server.reason})" if server.reason else ""
        return f"No breakdown: no metrics page of this server could be read{why}."
    return f"No breakdown: {correlation.missing}."


def where_it_goes(breakdown: Breakdown) -> str:
    """Return where the mean TTFT of the latest requests went, in a sentence.

    It says what to do about a queue. "" of few, or where the largest part is within its own error.
    """
    if not largest_part(breakdown):
        return ""
    parts = {part.name: getattr(breakdown, json_name(part)) for part in TTFT_PARTS}
    shares = {name: part.share_of_ttft for name, part in parts.items() if part.share_of_ttft is not None}
    count = breakdown.ttft_ms.count
    subject = f"Of the mean TTFT of the last {count:,} requests"
    cure = UNEXPLAINED["queue"].partition(";")[0]
    what_to_do = f" What to do: {cure}." if shares.get("queue", 0.0) >= LARGE else ""
    return f"{_shared_out(subject, parts, shares, breakdown, count)}{what_to_do}"


def largest_part(breakdown: Breakdown) -> dict[str, float]:
    """Return the largest part of the mean TTFT with its share; empty where `where_it_goes` says nothing."""
    parts = {part.name: getattr(breakdown, json_name(part)) for part in TTFT_PARTS}
    shares = {name: part.share_of_ttft for name, part in parts.items() if part.share_of_ttft is not None}
    largest = max(shares, key=shares.__getitem__, default="")
    is_known = breakdown.ttft_ms.count >= FEW_REQUESTS and largest and is_certain(parts[largest])
    return {largest: shares[largest]} if is_known else {}


def _subject(covered: Statistics) -> str:
    return f"Of {_the(covered.count)} with a breakdown ({spoken(covered.mean)} in the mean)"


def _the(requests: int) -> str:
    return "the one request" if requests == 1 else f"the {requests:,} requests"


def _shared_out(
    subject: str,
    parts: Mapping[str, TtftPart | E2ePart],
    shares: Mapping[str, float | None],
    breakdown: Breakdown,
    requests: int,
) -> str:
    """Return a sentence on the parts, the largest first, without negligible ones.

    An estimate that is within its own error has no share.
    """
    where = places(shares, breakdown.merged, requests)
    for part in (part for part in INNER_PARTS if part.spent):
        share, whole = getattr(breakdown, json_name(part)).share_of_ttft or 0.0, shares.get(part.within) or 0.0
        if share > MOSTLY * whole > 0:
            mostly = "" if share > NEARLY_ALL * whole else "mostly "
            where[part.within] = f"{SPENT[part.within]} ({mostly}{part.spent})"
    ranking = sorted(((share, name) for name, share in shares.items() if share is not None), reverse=True)
    known = [(share, name) for share, name in ranking if is_certain(parts[name])]
    words = [f"{percent(share)} was spent {where[name]}" for share, name in known[:1]]
    words += [f"{percent(share)} {where[name]}" for share, name in known[1:] if share >= LEAST_NAMED]
    listed = " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    sentences = [f"{subject}, {listed}."] if listed else []
    sentences += [
        f"The estimate of {CAUSES[name]}, {spoken(parts[name].mean, parts[name].error_ms)}, is within its own error of "
        f"{spoken(parts[name].error_ms, parts[name].mean)}."
        for share, name in ranking
        if share >= LEAST_NAMED and not is_certain(parts[name])
    ]
    return " ".join(sentences)


def _gateways(gateways: Sequence[GatewaySummary], requests: int) -> Iterator[str]:
    """Yield the part of each of several gateways, and bounds for unknown first outputs."""
    if len(gateways) > 1:
        parts = (f"{_name(gateway)} {_part(gateway)}" for gateway in gateways)
        yield f"Gateways, outermost first: {', '.join(parts)}."
    yield from (_bounds(gateway, requests) for gateway in gateways if gateway.at_most_ms is not None)


def _bounds(gateway: GatewaySummary, requests: int) -> str:
    """Return the bounds of a gateway's mean part, and the share of requests they cover. It names the source that
    would tell more.
    """
    name = _name(gateway)
    part, request, most = spoken_together(gateway.part_ms, gateway.request_ms, gateway.at_most_ms)
    whose = ""
    if gateway.requests < requests:
        whose = f" That is of {gateway.requests} of {requests} requests: of the others no span of it came."
    if gateway.first_output.get("inner_call", 0) > gateway.first_output.get("unknown", 0):
        return (
            f"The spans of gateway {name} say when the next server's first output reached it, not when it passed that "
            f"on: in the mean it took between {part} and {most}.{whose}"
        )
    inbound = (
        f"In the mean it held requests for {request} before it called the next server, and took "
        if gateway.request_ms is not None
        else "In the mean it took "
    )
    cure = ""
    if can_state_more(gateway.name):
        cure = f" To see the rest, set {FIRST_TOKEN_ATTRIBUTES[0]} (seconds) on its server span."
    return (
        f"The spans of gateway {name} do not say when its first output left. {inbound}at most {most} altogether."
        f"{whose}{cure}"
    )


def _part(gateway: GatewaySummary) -> str:
    if gateway.part_ms is None:
        return f"at most {spoken(gateway.at_most_ms)}"
    return spoken(gateway.part_ms)


def _name(gateway: GatewaySummary) -> str:
    return gateway.service or "without a service.name"


def _why_slow(summary: Summary) -> Iterator[str]:
    """Yield the largest part of slow requests, the queue threshold, and the requests' differences.

    Where requests only piled up, the length of the queue is a measure of time, and no threshold.
    """
    tail = summary.correlation.tail_attribution
    largest = tail.largest and getattr(summary.correlation.breakdown, f"{tail.largest}_ms")
    if tail.missing or (largest and not is_certain(largest)):
        return
    growing = summary.methodology.stability.verdict == "growing"
    yield " ".join([tail.sentence, *(() if growing else _from_which_queue(tail)), *_differences(tail)])


def _from_which_queue(tail: TailAttribution) -> Iterator[str]:
    threshold = tail.threshold
    if not threshold or tail.largest != "queue" or threshold.waiting is None or threshold.fewest is None:
        return
    if threshold.waiting > threshold.fewest:
        most = threshold.waiting - 1
        queue = f"more than {most:g} waiting" if most else "any request waiting"
        yield (
            f"Queueing takes over where the last scrape before a request was sent showed {queue} "
            f"({threshold.requests:,} requests; of the {threshold.below:,} others, {threshold.queued_below:,} queued "
            "for most of their TTFT)."
        )


def _differences(tail: TailAttribution) -> Iterator[str]:
    """Yield the main cause of differences in TTFT between requests, if one dominates."""
    shares, mean_ms, std_ms = tail.variance_share, tail.mean_ms, tail.std_ms
    if not shares or not mean_ms or not std_ms or std_ms < HARDLY_RATIO * mean_ms:
        return
    name, share = ranked(shares)[0]
    if share >= MOSTLY and not (name == "other" and tail.merged):
        how = "almost entirely" if share >= NEARLY_ALL else "mostly"
        yield f"Differences in TTFT between requests come {how} from {CAUSES[name]}."
