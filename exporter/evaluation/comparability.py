"""Warnings about counts: an engine's beside the client's, short replies, health probes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import UNSET, UnsetType

from sidelight.correlator.opening import WatchRun
from sidelight.exporter.summary.correlation import Correlation
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.requests.self_check.nodes import clock_line, late_orders, slower_nodes, unknown_clocks
from sidelight.loadgen.requests.summary import ClientSummary
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.run import Run
from sidelight.rundir.printable.numbers import agree, count_of
from sidelight.rundir.stats import as_many
from sidelight.scraper.engines.catalogue import catalogue
from sidelight.scraper.window.summary import Server

TOKENS_RATIO = 0.2  # by which a page's count of tokens may differ from the client's


def comparability(
    run: Run, ok: RequestLog, client: ClientSummary, server: Server, correlation: Correlation
) -> Iterator[str]:
    """Yield warnings if the engine's counts of requests or tokens do not match the client's."""
    tokens = int(ok.output_tokens[ok.output_tokens > 0].sum())
    counted = server.generation_tokens.stats.total if server.generation_tokens else UNSET
    if counted == 0 and tokens:
        yield (
            f"the page counted none of the client's {tokens:,} output tokens: another engine served them, or it counts "
            "them in series that are not known"
        )
    # A token or two of a request may be counted by one side alone: a stop token, one that has no text.
    elif _counted_otherwise(counted, tokens, ok) and correlation.comparable:
        yield (
            f"the page counted {counted:,.0f} output tokens of the requests of which the client counted {tokens:,}: "
            "its rates of tokens are not those that clients got"
        )
    ended = correlation.server_requests
    # Of choices its histograms may be refused (SGLang), and then count none.
    finished = server.requests_finished.stats.total if server.requests_finished else UNSET
    if not ended and isinstance(finished, float) and (ok.choices > 1).any():
        ended = int(finished)
    if not ended or not correlation.client_requests or correlation.comparable:
        return
    engine_ended = f"the engine finished {count_of(ended, 'request')} here"
    if isinstance(run, WatchRun):
        more = "the clients' times are of those, the engine's numbers of all"
        fewer = (
            "the others are on no page that was read, or ended before its first scrape or after its last; the engine's "
            "numbers are without them"
        )
        both = more if ended > client.requests.ok else fewer
        yield f"{engine_ended}, and clients' spans came for {client.requests.ok}: {both}"
    elif (ok.choices > 1).any() and ended in _with_choices(ok):
        yield (
            f"{engine_ended} and the client {client.requests.ok}: it counts each choice of a reply, and its prompt's "
            "tokens as often"
        )
    elif (shared := correlation.breakdown.e2e.first_step_ms.count) and as_many(ended, 2 * client.requests.ok):
        yield (
            f"two engines shared {shared} of the {client.requests.ok} requests, one for the "
            "prompt and one for what follows: the engine's numbers count each of them twice, and its means are over "
            "both engines"
        )
    elif ended < client.requests.ok:
        yield (
            f"{engine_ended} and the client {client.requests.ok}: the others are on no page that was read; the "
            "engine's numbers are without them"
        )
    else:
        yield (
            f"{engine_ended} and the client {client.requests.ok}: other traffic used it too, or scrapes are missing; "
            "the engine's numbers cover all of it"
        )


def _counted_otherwise(counted: float | UnsetType, tokens: int, ok: RequestLog) -> bool:
    """Return whether a page's output tokens differ from those of the client's n requests."""
    if not isinstance(counted, float) or (ok.choices > 1).any() or (ok.output_tokens <= 0).any():
        return False
    return abs(counted - tokens) > TOKENS_RATIO * tokens + 2 * len(ok)


def _with_choices(ok: RequestLog) -> tuple[int, int]:
    """Return the engine's expected number of requests under two ways of counting choices. The first counts each choice
    (vLLM), the second one more where there are several, which fills the cache (SGLang).
    """
    choices = np.maximum(ok.choices, 1)
    return int(choices.sum()), int((choices + (choices > 1)).sum())


def probes(run: Run, client: ClientSummary, server: Server, correlation: Correlation) -> Iterator[str]:
    """Yield a warning if an engine served health probes as requests. They are known by their spans, else by the
    engine's counts over a drained run.
    """
    known = None if server.engine is None else catalogue(server.engine.name)
    path = known.probe_path if known else ""
    instead = f"; probe {path} instead, which generates nothing" if path else ""
    biased = f"each counts in the engine's queue and prefill times and in its tokens{instead}"
    count = correlation.spans.health_probes if correlation.spans else 0
    open_requests = client.requests.cancelled + client.requests.in_flight
    if count:
        were = agree(count, "was served like a request", "were served like requests")
        yield f"{count_of(count, 'health probe')} {were}; their spans are left out, but {biased}"
    elif path and not isinstance(run, WatchRun) and not open_requests and server.queue_time and server.e2e_latency:
        queued, ended = server.queue_time.stats.count or 0, server.e2e_latency.stats.count or 0
        if queued > ended > 0:
            yield (
                f"the engine queued {count_of(queued, 'request')} and ended {ended:,.0f}: "
                f"the others may be health probes, and then {biased}"
            )


def short_replies(run: Run, ok: RequestLog) -> Iterator[str]:
    """Yield a warning if replies ended early although `ignore_eos` was sent. Others must have reached their length."""
    config, target = run.manifest["config"], run.manifest.get("target", {})
    protocol = PROTOCOLS.get(config.get("endpoint"))
    if not config.get("ignore_eos") or "ignore_eos" in target.get("refused_fields", ()):
        return
    if protocol is not None and not protocol.has_ignore_eos:
        return
    tokens = np.maximum(ok.output_tokens, np.diff(ok.chunk_start))
    counted = (ok.output_tokens >= 0) & (ok.output_tokens_source != "estimate") & (ok.max_tokens > 0)
    short = counted & (tokens < ok.max_tokens)
    if short.any() and (counted & ~short).any():
        came = count_of(round(np.median(tokens[short])), "token")
        were = agree(short.sum(), "was", "were")
        yield (
            f"{short.sum()} of {counted.sum()} replies {were} shorter than asked ({came} for "
            f"{np.median(ok.max_tokens[short]):.0f}, medians), although ignore_eos was sent and others reached their "
            "length: their times and the throughput are not those of the load that was asked for"
        )


def node_lines(client: ClientSummary) -> Iterator[str]:
    """Yield warnings about nodes: a clock beyond the draft's limit, an order that came late, a much longer TTFT."""
    nodes = client.by_node or ()
    yield from slower_nodes(nodes)
    yield from late_orders(nodes)
    yield from map(clock_line, unknown_clocks(nodes))
