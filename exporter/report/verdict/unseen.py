"""Verdict on a watch without clients' spans: by what engines' pages say."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from sidelight.correlator.live.reasons import NO_CLIENT
from sidelight.exporter.report.advice import advice_on_queue, observed
from sidelight.exporter.report.verdict.shown import served_figure
from sidelight.exporter.report.verdict.state import (
    CLIENT_SPANS,
    NO_SPANS,
    WITHOUT_CLIENT,
    is_queueing,
    page_means,
    unseen_headline,
)
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.verdict import RunVerdict
from sidelight.exporter.summary.watched import WatchedTraffic
from sidelight.rundir.printable.text import as_sentence


def unseen_verdict(summary: Summary, watch: WatchedTraffic) -> RunVerdict:
    """Return the verdict on a watch without clients' spans.

    It has no figure where engines' pages count no request.
    """
    server, seen, unseen = summary.server, observed(summary), watch.missing.get(NO_CLIENT, 0)
    rate = server.requests_finished.stats.rate_per_s if server.requests_finished else UNSET
    stated = (("TTFT", server.ttft), ("queue", server.queue_time), ("prefill", server.prefill_time))
    means_ms = {
        label: 1e3 * each.stats.mean for label, each in stated if each and not isinstance(each.stats.mean, UnsetType)
    }
    queue = advice_on_queue(seen.waited, seen.limits, seen.preemptions) if is_queueing(means_ms) else None
    return RunVerdict(
        state="not_judged",
        cause="queue" if queue else "none",
        headline=unseen_headline(unseen) if unseen or rate else "Not judged: no request was seen.",
        figures=[] if isinstance(rate, UnsetType) or not rate else [served_figure(rate, None)],
        parts=[],
        why=f"{page_means(means_ms)} {as_sentence(queue.seen if queue else WITHOUT_CLIENT)}".lstrip(),
        do=as_sentence(queue.cure if queue else CLIENT_SPANS if unseen else NO_SPANS),
    )
