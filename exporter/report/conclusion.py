"""Sentences below the verdict: objectives, single gateways, and slow requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidelight.correlator.parts import CAUSES
from sidelight.exporter.document import Prose
from sidelight.exporter.report.advice import observed
from sidelight.exporter.report.verdict import beside_figures, measured, where_it_went
from sidelight.exporter.summary.breakdown import is_certain
from sidelight.exporter.summary.gateways import GatewaySummary
from sidelight.exporter.summary.result import Summary, generator_held_up
from sidelight.exporter.summary.tail import TailAttribution, ranked
from sidelight.loadgen.requests.slo.results import ObjectiveResult
from sidelight.loadgen.requests.summary import too_many_failed
from sidelight.recorded.client_spans import FIRST_TOKEN_ATTRIBUTES
from sidelight.rundir.printable.numbers import count_of, spoken, spoken_together
from sidelight.scraper.gateways.catalogue import can_state_more

FEW_REQUESTS = 20  # of fewer, a 95th percentile is the slowest request
LEAST_NAMED = 0.05  # of the whole: less is not worth a word beside the largest
NEARLY_ALL, MOSTLY = 0.9, 0.6  # of a whole
HARDLY_RATIO = 0.2  # standard deviation over mean: of less it does not matter what it is made of


def objectives(summary: Summary) -> Iterator[Prose]:
    """Yield a line for each objective that stands beside no figure of the verdict."""
    slo = summary.client.slo
    beside = beside_figures(summary)
    for objective in slo.objectives if slo else ():
        if objective in beside:
            continue
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
    return f"{measured(objective.value, objective.unit)} over {whole}{failed}{left_out}"


def conclusion(summary: Summary) -> Iterator[str]:
    """Yield the details of a verdict, each paragraph a string: single gateways, and slow requests.

    Nothing where too many requests failed: the others are not the service.
    """
    correlation = summary.correlation
    if too_many_failed(summary.client.requests):
        return
    yield from _gateways(correlation.gateways, correlation.requests)
    if not correlation.missing and not correlation.breakdown.means_only:
        yield from _why_slow(summary)
    if generator_held_up(summary):  # of which the verdict is
        yield where_it_went(summary)


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
            f"on: in the mean it took {f'between {part} and {most}' if part != most else part}.{whose}"
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
    is_said = tail.largest and [tail.largest] == observed(summary).large  # the bar shows it
    sentences = [*(() if is_said else [tail.sentence]), *(() if growing else _from_which_queue(tail))]
    if shown := [*sentences, *_differences(tail, but=str(tail.largest) if is_said else "")]:
        yield " ".join(shown)


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


def _differences(tail: TailAttribution, *, but: str) -> Iterator[str]:
    """Yield the main cause of differences in TTFT between requests, if one dominates; not of part `but`."""
    shares, mean_ms, std_ms = tail.variance_share, tail.mean_ms, tail.std_ms
    if not shares or not mean_ms or not std_ms or std_ms < HARDLY_RATIO * mean_ms:
        return
    name, share = ranked(shares)[0]
    if share >= MOSTLY and name != but and not (name == "other" and tail.merged):
        how = "almost entirely" if share >= NEARLY_ALL else "mostly"
        yield f"Differences in TTFT between requests come {how} from {CAUSES[name]}."
