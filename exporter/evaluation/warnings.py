"""Warnings that a reader of a run needs before any of its numbers.

How it ended, what failed, and what makes its numbers look better or worse than they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, pairwise

import numpy as np
from msgspec import UNSET

from sidelight.correlator.live.reasons import explain_breaks, explain_split
from sidelight.correlator.opening import WatchRun
from sidelight.exporter.evaluation.comparability import comparability, node_lines, probes, short_replies
from sidelight.exporter.evaluation.server import server_lines, span_gaps_of
from sidelight.exporter.report.alerts import damage_lines, gap_line, span_gap_line, torn_lines
from sidelight.exporter.summary.correlation import Correlation, ReceivedSpans, RecordsOfRequests
from sidelight.exporter.summary.result import Workload
from sidelight.loadgen.requests.delivery import first_reads
from sidelight.loadgen.requests.metrics import LEAST_TOKENS, in_one_read, span_ms
from sidelight.loadgen.requests.rates import errors_by_kind
from sidelight.loadgen.requests.self_check.check import SelfCheck
from sidelight.loadgen.requests.summary import ClientSummary
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.rundir.printable.numbers import agree, count_of
from sidelight.scraper.engines.recognition import QUANTITIES
from sidelight.scraper.series.resets import alternates, label_changes, models_in_turn, unlikely_starts
from sidelight.scraper.window.aggregate import impossible_sums, impossible_values
from sidelight.scraper.window.summary import Server

CACHED_RATIO = 0.05
BLANK_RATIO = 0.1
MOST_REASONS = 3  # named in one warning
MOST_NOTES = 100  # of a run: an honest one has a handful
SAID = 160  # characters of an error that a warning repeats
HELD_RATIO = 0.1  # of the replies: fewer, held back on their way, may be the network's chance
LEAST_HELD_MS = 50.0  # of a first token: less may be this machine's own delay
BUFFERED = (
    "something between collects replies before it passes them on (nginx: `proxy_buffering off`, or the header "
    "`X-Accel-Buffering: no`)"
)


def warnings(
    run: Run,
    workload: Workload,
    client: ClientSummary,
    server: Server,
    correlation: Correlation,
    check: SelfCheck,
) -> Iterator[str]:
    """Yield warnings, worst first, from the sections of a summary."""
    yield from _other_models(run)
    yield from damage_lines(run.integrity)
    yield from _ending(run)
    yield from node_lines(client)
    yield from _gaps(run, server)
    yield from torn_lines(run.integrity)
    yield from _failures(run.requests, client)
    yield from _usage(client)
    yield from _warm_up_failures(run)
    yield from _retries(client)
    yield from _notes(run)
    yield from _scrapes(server)
    yield from _records(correlation.perf_metrics)
    yield from _refused(correlation)
    yield from _not_forwarded(correlation.spans)
    yield from (
        f"the pages at {endpoint.url} come from several processes in turn (their start times go back and forth), so "
        "that its numbers mean nothing; scrape each process itself"
        for endpoint in run.endpoints
        if alternates(endpoint)
    )
    yield from (
        f"the pages at {endpoint.url} bring ever new series; all but the first {len(endpoint.series)} are left out: "
        "look for a label with ids or times in it"
        for endpoint in run.endpoints
        if endpoint.is_cut
    )
    for endpoint in run.endpoints:
        if names := endpoint.repeated:
            more = f" and {len(names) - MOST_REASONS} more" if len(names) > MOST_REASONS else ""
            yield (
                f"pages at {endpoint.url} state series of {', '.join(names[:MOST_REASONS])}{more} more than once, with "
                "different values: the first on the page counts"
            )
    yield from _label_changes(run)
    yield from _impossible(run, correlation)
    ok = take(run.requests, (run.requests.phase == "measure") & (run.requests.status == "ok"))
    yield from _arrivals(check)
    yield from comparability(run, ok, client, server, correlation)
    yield from chain(probes(run, client, server, correlation), server_lines(server, len(client.models or ())))
    if isinstance(run, WatchRun):
        routing = run.watched.misrouted or explain_split(run.watched.traces, run.watched.split)
        yield from [routing] if routing else explain_breaks(run.watched.broken, run.watched.whole).values()
    yield from _estimates(ok)
    yield from _unlimited(ok)
    if not isinstance(run, WatchRun):
        yield from _blanks(run, client, correlation)
        yield from _buffering(ok, check.error_ms.ttft.p99 or 0.0)
        yield from short_replies(run, ok)
        yield from _repeats(run, workload) or _cache(run, ok, workload, server)
    yield from _clipping(workload)


def _other_models(run: Run) -> Iterator[str]:
    """Yield a warning for each engine that came back as another model, with the time."""
    start_ns = next((phase.start_ns for phase in run.phases if phase.name == "measure"), None)
    for endpoint in run.endpoints:
        turns = [] if alternates(endpoint) else models_in_turn(endpoint)
        renamed = {endpoint.at_ns[row] for row, _ in label_changes(endpoint)}  # not another model's, for they count on
        for (before, _), (after, at_ns) in islice(pairwise(turns), MOST_REASONS):
            if at_ns in renamed:
                continue
            since_ns = endpoint.at_ns[0] if start_ns is None else start_ns
            yield (
                f"the engine at {endpoint.url} serves another model since second {(at_ns - since_ns) / 1e9:.1f}: "
                f"{after}, before it {before}; its numbers, and the client's, are of both models together"
            )


def _label_changes(run: Run) -> Iterator[str]:
    """Yield a warning for each change of a label while series counted on."""
    for endpoint in run.endpoints:
        for row, change in islice(label_changes(endpoint), MOST_REASONS):
            at_s = (endpoint.at_ns[row] - endpoint.at_ns[0]) / 1e9
            yield (
                f"{change} on the page of {endpoint.url}, {at_s:.1f} s after its first scrape, while its series "
                "counted on: what they counted across that moment is missing"
            )


def _ending(run: Run) -> Iterator[str]:
    """Yield a warning if a run ended early, with its progress until then."""
    if run.status == "complete":
        return
    if isinstance(run, WatchRun) and run.shards and run.watched.dropped:
        yield (
            f"the newest {count_of(len(run.requests), 'request')} of the shards are here, and {run.watched.dropped:,} "
            "older ones are left out: the table of shards counts them, and each shard's own report has more of them"
        )
    if isinstance(run, WatchRun) and "reason" not in run.manifest:
        going = sum(shard.status != "complete" for shard in run.shards)
        which = f", {going} of {len(run.shards)} shards," if going else ""
        yield f"the watch{which} goes on, or was killed; numbers cover what was recorded up to now"
        return
    reason = f" ({run.manifest.get('reason', 'its manifest has no end')})" if run.status == "crashed" else ""
    ended = f"this run was {'cut short' if run.status == 'crashed' else 'interrupted'}{reason}"
    if (run.requests.phase == "measure").any() or not run.manifest["config"].get("url"):
        yield f"{ended}; numbers cover what was recorded up to then"
    elif len(run.requests):
        yield f"{ended} during the warm-up: nothing was measured"
    else:
        yield f"{ended} while requests were being prepared: nothing was sent"


def _gaps(run: Run, server: Server) -> Iterator[str]:
    """Yield warnings with the times when the scraper and the span receiver were down."""
    starts = {phase.name: phase.start_ns for phase in run.phases}
    if server.gaps:
        start_ns = starts.get("measure", server.gaps[0].start_ns)
        yield gap_line(server.gaps, start_ns=start_ns)
    if gaps := span_gaps_of(run):
        yield span_gap_line(gaps, start_ns=starts.get("measure", gaps[0].start_ns))


def _failures(log: RequestLog, client: ClientSummary) -> Iterator[str]:
    requests = client.requests
    failed = requests.failed + requests.refused
    if failed:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in client.errors.items()) or "no reply says why"
        yield f"{failed} of {requests.sent} requests did not succeed: {kinds}{_words(log, client)}"
    unended = requests.cancelled + requests.in_flight
    if unended:
        others = f": latencies are those of the {requests.ok} that did, which waited least" if requests.ok else ""
        yield f"{unended} of {requests.sent} requests did not end{others}"


def _words(log: RequestLog, client: ClientSummary) -> str:
    """Return the first error text of the most frequent kind, "" if it has none."""
    often = next(iter(client.errors), "")
    texts = (str(text).partition(": ") for text in log.error[log.phase == "measure"])
    said = " ".join(next((text for kind, _, text in texts if kind == often), "").split())
    return f"; such as: {said[:SAID]}{'...' if len(said) > SAID else ''}" if said else ""


def _usage(client: ClientSummary) -> Iterator[str]:
    """Yield a warning on the server's token counts that its replies contradict. It names the numbers that are left
    out for it, and those that replace them.
    """
    doubted = client.contradicted_usage
    if not doubted:
        return
    kinds = "; ".join(
        f"{kind} in {count}" + f", such as {doubted.examples[kind]}" * bool(doubted.examples[kind])
        for kind, count in doubted.kinds.items()
    )
    unknown = ["TPOT, output tokens, output tokens/s"] * bool(doubted.without_output_tokens)
    unknown += ["input tokens"] * bool(doubted.without_input_tokens)
    left_out = f". Not known of these: {', '.join(unknown)}" if unknown else ""
    counted = ""
    if doubted.without_output_tokens and doubted.chunks.p50 is not None:
        counted = f"; the median of their chunks is {doubted.chunks.p50:,.0f} a reply"
        counted += f", and all replies came at {doubted.chunks_per_s:,.1f} chunks/s" if doubted.chunks_per_s else ""
    yield (
        f"the server's token counts cannot be right in {doubted.replies} of {client.requests.ok} replies: {kinds}"
        f"{left_out}{counted}"
    )


def _warm_up_failures(run: Run) -> Iterator[str]:
    """Yield the number of warm-up requests that did not succeed. Those that the end of the run cancelled do not
    count.
    """
    warm_up = take(run.requests, run.requests.phase == "warmup")
    failed = take(warm_up, np.isin(warm_up.status, ("failed", "refused")))
    if len(failed):
        kinds = ", ".join(f"{kind} ({count})" for kind, count in errors_by_kind(failed).items())
        yield f"{len(failed)} of {len(warm_up)} warm-up requests did not succeed: {kinds}"


def _retries(client: ClientSummary) -> Iterator[str]:
    """Yield the number of requests sent twice because the server closed a kept connection."""
    if client.retried:
        yield (
            f"{client.retried} of {client.requests.sent} requests {agree(client.retried, 'was', 'were')} sent a second "
            "time, on a new connection: the server closed the one it had kept before a reply began. Their times are "
            "those of the second sending; with --no-reuse each request has a connection of its own"
        )


def _notes(run: Run) -> Iterator[str]:
    """Yield the notes taken during the run. Without any metrics page, the reason stands in the report's conclusion
    instead.
    """
    pages = run.manifest.get("metrics_targets", ())
    reasons = [page["reason"] for page in pages if "reason" in page] if run.manifest.get("server_missing") else []
    sent = (run.requests.phase == "measure").any()
    notes = [note for note in run.notes if not (sent and any(reason in note for reason in reasons))]
    yield from notes[:MOST_NOTES]
    if len(notes) > MOST_NOTES:
        yield f"raw/events.log has {count_of(len(notes) - MOST_NOTES, 'more note')}"


def _scrapes(server: Server) -> Iterator[str]:
    for endpoint in server.endpoints:
        quantities = {name: getattr(getattr(endpoint, name), "resets", UNSET) for name in QUANTITIES}
        resets = {name: count for name, count in quantities.items() if isinstance(count, int)}
        # A restart resets all of them.
        restarts = min(resets.values(), default=0)
        if restarts:
            yield f"the engine at {endpoint.url} restarted ({restarts} x): its counts from just before that are lost"
        alone = [f"{name} ({count - restarts} x)" for name, count in resets.items() if count > restarts]
        if alone:
            more = f" and {len(alone) - MOST_REASONS} more" if len(alone) > MOST_REASONS else ""
            yield (
                f"on the page of {endpoint.url} single counters fell, though the engine did not restart: "
                f"{', '.join(alone[:MOST_REASONS])}{more}; each counts on from 0, and may count too much"
            )
        scrapes = endpoint.scrapes
        if scrapes.failed:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in scrapes.failures.items())
            whole = scrapes.ok + scrapes.failed
            yield f"{scrapes.failed} of {whole} scrapes of {endpoint.url} failed: {reasons}"


def _impossible(run: Run, correlation: Correlation) -> Iterator[str]:
    """Yield impossible values of the pages: numbers out of their range, and times beyond those of the client."""
    for endpoint in run.endpoints:
        for metric, values in impossible_values(endpoint).items():
            yield (
                f"the page at {endpoint.url} states {metric} {values[0]:g}, which cannot be: such values "
                f"({len(values)}) are left out; a share is 0 to 1, and no count is below 0"
            )
        for metric, fault in impossible_sums(endpoint).items():
            yield f"the page at {endpoint.url} states a sum of {metric} that {fault}, which cannot be: it is left out"
        if advanced := unlikely_starts(endpoint):
            yield (
                f"the start time on the page at {endpoint.url} advanced {advanced} x and no counter fell, which cannot "
                "be: no restart is counted"
            )
    if correlation.comparable and correlation.client_requests and correlation.missing:
        yield f"no breakdown: {correlation.missing}"


def _records(records: RecordsOfRequests | None) -> Iterator[str]:
    """Yield the losses of `/perf_metrics` records, and the number of requests without a record."""
    if records is None:
        return
    lost = [f"{count_of(count, 'reading')} failed ({why})" for why, count in records.failed_readings.items()]
    lost += [f"{count_of(count, 'record')} refused ({why})" for why, count in records.refused.items()]
    without = [(records.ambiguous_requests, "several records fit"), (records.unmatched_requests, "no record fits")]
    lost += [f"{count_of(count, 'request')} without one, because {why} the times" for count, why in without if count]
    if lost or not records.records:
        matched = f"records of /perf_metrics that match requests of this run: {records.matched} of {records.records}"
        yield "; ".join([matched, *lost])


def _refused(correlation: Correlation) -> Iterator[str]:
    """Yield the number of requests with rejected exact times, and the reasons."""
    if refused := sum(correlation.refused_reasons.values()):
        reasons = [f"{reason} ({count})" for reason, count in correlation.refused_reasons.items()]
        if len(reasons) > MOST_REASONS:
            reasons[MOST_REASONS:] = [f"{len(reasons) - MOST_REASONS} more reasons"]
        whose = count_of(refused, "request")
        yield f"times of {whose} came from spans or replies and are not used: {'; '.join(reasons)}"


def _not_forwarded(spans: ReceivedSpans | None) -> Iterator[str]:
    """Yield the number of exports lost on the way to the collector of --otlp-forward. Exports that may have been lost
    count apart.
    """
    if spans is None or not spans.forward_dropped + spans.forward_unknown:
        return
    dropped = f"{spans.forward_dropped} {agree(spans.forward_dropped, 'was', 'were')}"
    text = f"of {count_of(spans.exports, 'export')} of spans {dropped} not passed on to the collector"
    if spans.forward_unknown:
        text += f", and {spans.forward_unknown} exports may not have been: a receiver died that had them in memory"
    yield f"{text} (--otlp-forward)"


def _arrivals(check: SelfCheck) -> Iterator[str]:
    """Yield a warning if the load differed from the configured one. It gives the cause unless a reason for distrust
    states it already.
    """
    arrivals, cause = check.arrivals, check.cause
    if arrivals is None or not arrivals.distorted:
        return
    why = f" The reason: {cause.text}. {cause.cure}" if cause is not None and not check.reasons else ""
    yield f"{arrivals.sentence}{why}"


def _estimates(ok: RequestLog) -> Iterator[str]:
    if estimated := int((ok.output_tokens_source == "estimate").sum()):
        whose = "the server" if estimated == len(ok) else f"the server, in {estimated} of {len(ok)} replies,"
        yield f"{whose} returned no `usage`: output tokens are estimated as a quarter of the text's characters"


def _unlimited(ok: RequestLog) -> Iterator[str]:
    """Yield the number of replies longer than `max_tokens` allows. Estimated lengths are not used as evidence."""
    limited = (ok.max_tokens >= 0) & (ok.output_tokens_source != "estimate")
    limit = np.where(limited, ok.max_tokens * np.maximum(ok.choices, 1), np.inf)
    if len(longer := np.flatnonzero(ok.output_tokens > limit)):
        yield (
            f"{len(longer)} of {len(ok)} replies {agree(len(longer), 'is', 'are')} longer than max_tokens allows, "
            f"such as {ok.output_tokens[longer[0]]} for {limit[longer[0]]:.0f} output tokens: the server does not keep "
            "to it"
        )


def _blanks(run: Run, client: ClientSummary, correlation: Correlation) -> Iterator[str]:
    ok, timed = client.requests.ok, client.ttft_ms.count
    log = run.requests
    # Nor has one a first output that was not streamed, or whose stream had no event for what does not show.
    whole = int(((log.phase == "measure") & (log.status == "ok") & (log.first_output_ns < 0)).sum())
    if whole:
        have = agree(whole, "has", "have")
        yield f"{whole} of {ok} replies came in one piece, or with no text at all, and so {have} no TTFT"
    if blank_replies := ok - timed - whole:
        have = agree(blank_replies, "has", "have")
        yield f"{blank_replies} of {ok} replies held nothing but blanks, and so {have} no TTFT"
    blank = correlation.breakdown.blank_output_ms
    if (blank.share_of_ttft or 0.0) > BLANK_RATIO:
        yield f"{blank.mean:.1f} ms of the mean TTFT is blank output: tokens that were generated and show no text"


def _buffering(ok: RequestLog, error_ms: float) -> Iterator[str]:
    """Yield a warning if more than HELD_RATIO of the replies were buffered on their way.

    There is none if the load generator itself was as late as that.
    """
    pieces = np.diff(ok.chunk_start)
    waited_ms = span_ms(ok.submit_ns, ok.first_token_ns)
    together, held_ms = first_reads(ok)
    whole = in_one_read(ok) & (waited_ms > 2 * error_ms)
    long = np.maximum(ok.output_tokens, pieces) >= LEAST_TOKENS
    if whole.sum() > HELD_RATIO * long.sum():
        shown = (
            f"{whole.sum()} of {len(ok)} replies came in one read each, {np.median(pieces[whole]):.0f} pieces (median)"
        )
        cause = BUFFERED if np.median(pieces[whole]) >= LEAST_TOKENS else "they are not streamed token by token"
        yield f"{shown}: {cause}. Their TTFT is the time of the whole reply, and they have no TPOT and no gaps"
    held = (together >= LEAST_TOKENS) & (held_ms > max(LEAST_HELD_MS, error_ms))
    if held.sum() > HELD_RATIO * long.sum():
        first = f"the first {np.median(together[held]):.0f} pieces (median) of {held.sum()} of {len(ok)} replies"
        late = f"Their TTFT is about {np.median(held_ms[held]):.0f} ms too long (median)"
        yield f"{first} came in one read: {BUFFERED}. {late}"


def _repeats(run: Run, workload: Workload) -> list[str]:
    """Return a warning if more requests were sent than a prompts file holds, else nothing."""
    held = (workload.stated or {}).get("prompts")
    session = run.requests.session[run.requests.phase == "measure"]
    sent = int((session < 0).sum()) + len(np.unique(session[session >= 0]))
    if not held or sent <= held:
        return []
    file = count_of(held, "prompt")
    times = f"{sent} requests were sent from a file of {file}, so each was sent about {sent / held:.1f} times"
    cache = "the engine's prefix cache may have answered repeats faster than it would new prompts"
    return [f"{times}: {cache}; --requests {held} sends each once"]


def _cache(run: Run, ok: RequestLog, workload: Workload, server: Server) -> Iterator[str]:
    if workload.shares_prefixes:
        return
    counters = (server.prefix_cache_hits, server.prefix_cache_queries)
    hits, queries = (counter.stats.total if counter else UNSET for counter in counters)
    # Choices of a reply share its prompt: all but the first may find it.
    shared = (np.maximum(ok.input_tokens, 0) * np.where(ok.choices > 1, ok.choices, 0)).sum()
    if hits and queries and hits - shared > CACHED_RATIO * queries:
        share = f"{100 * hits / queries:.0f} % of the prompt tokens"
        yield f"{share} came from the engine's prefix cache: {_why_cached(run, workload)}"


def _why_cached(run: Run, workload: Workload) -> str:
    """Return the likely cause of prefix cache hits, with a cure if there is one. Requests of a file have no other
    seed.
    """
    config = run.manifest["config"]
    if config.get("prompts"):
        return "prompts of the file begin alike, or were sent before"
    if any(each.get("content") == "repeat" for each in (workload.stated or {}).get("classes", ())):
        return "all prompts of `content: repeat` begin alike, whatever the seed; other content shares no beginnings"
    cure = "" if config.get("dataset") or config.get("replay_requests") else " Another --seed sends others"
    return f"were the same requests sent before?{cure}"


def _clipping(workload: Workload) -> Iterator[str]:
    clipped = (workload.clipped_inputs or 0, workload.clipped_outputs or 0)
    if any(clipped):
        yield (
            f"{count_of(clipped[0], 'input')} and {count_of(clipped[1], 'output')} of {workload.planned_requests} "
            f"requests were clipped to the model's length of {workload.max_model_len} tokens"
        )
