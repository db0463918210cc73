"""The rows that a run and a watch have in common: where the TTFT went, the engine, gateways' pages, distributions."""

from __future__ import annotations

from panels import (
    E2E_NAMES,
    TTFT_NAMES,
    Panel,
    PanelRow,
    Scope,
    engine_quantile,
    heatmap,
    lines,
    mean,
    of_parts,
    quantile,
    stack,
    total,
)

from correlator.parts import INSIDE_PARTS, LABELS

PHASES = (("queue", "queue_time"), ("prefill", "prefill_time"), ("decode", "decode_time"))
LAST_ANSWER = "sidelight_engine_last_answer_timestamp_seconds"
LIVE_DELAY = "Estimates come some seconds after the requests they are of."


def breakdown_row(scope: Scope, *more: Panel) -> PanelRow:
    """Return the row that joins client and engine: where each request's wait went, part by part."""
    labels = scope.client
    sums = {LABELS[part]: total("sidelight_ttft_part_seconds_sum", f'{labels}, part="{part}"') for part in TTFT_NAMES}
    whole = total("sidelight_ttft_part_seconds_sum", labels)
    p99 = {
        LABELS[part]: quantile(0.99, f"sidelight_{metric}_part_seconds", f'{labels}, part="{part}"')
        for metric, parts in (("ttft", TTFT_NAMES), ("inner", tuple(part.name for part in INSIDE_PARTS)))
        for part in parts
    }
    return PanelRow(
        "Where the TTFT went",
        (
            stack(
                "Mean TTFT by part",
                of_parts("sidelight_ttft_part_seconds", labels, TTFT_NAMES),
                "The height is the client's mean TTFT, each request's wait joined with the engine's own times of that "
                "very request. The thickest band is where to work first. Outside the engine are the network and every "
                "proxy that sends no spans; a gateway whose spans come has a band of its own. Other is the engine's "
                f"front end, and what no source tells apart. {LIVE_DELAY}",
            ),
            stack(
                "Share of TTFT",
                {name: f"{part} / ({whole} > 0)" for name, part in sums.items()},
                "The same parts as shares of the whole. A share that moves with the load is the bottleneck; one that "
                "stays is a fixed cost.",
                unit="percentunit",
                highest=1.0,
            ),
            lines(
                "p99 of each part",
                p99,
                "Which part makes the worst requests slow: it is often another than the one that makes the mean. "
                "Quantiles of parts do not add up to the quantile of the whole. From buckets.",
            ),
            stack(
                "Mean end-to-end time by part",
                of_parts("sidelight_e2e_part_seconds", labels, E2E_NAMES),
                "The same to the last token, decode taken in. Of production traffic whose first token nobody noted "
                "this is all there is.",
            ),
            heatmap(
                "Wait in the queue, request by request",
                "sidelight_ttft_part_seconds",
                f'{labels}, part="queue"',
                "Two bands: some requests find a free slot and others do not. A band that climbs is a queue that "
                "grows. A marked request leads to its trace.",
                width=6,
            ),
            stack(
                "Requests by source of their breakdown",
                {"{{source}}": total("sidelight_requests_total", labels, by="source")},
                "Trace and response are the engine's own times, exact; histogram is estimated from scrapes; none is "
                "not known.",
                unit="reqps",
                width=6,
            ),
            stack(
                "Requests by quality",
                {"{{quality}}": total("sidelight_breakdown_quality_total", labels, by="quality")},
                "Exact, by_time and tight can be read one by one. Of shared, mixed_traffic and prior read means and "
                "quantiles only; many mixed ones say that somebody else uses the engine.",
                unit="reqps",
                width=6,
            ),
            lines(
                "Largest part of the TTFT",
                {"{{part}}": f"max by (part) (sidelight_ttft_largest_part_ratio{{{labels}}})"},
                "What the live page names first, and its share. Another line: the cause has changed. None: fewer than "
                "20 requests, or a part within its own error.",
                unit="percentunit",
                width=6,
                highest=1.0,
            ),
            *more,
        ),
    )


def by_both_clocks(scope: Scope, width: int) -> tuple[Panel, ...]:
    """Return the panels that set the client's times beside the engine's, in the same seconds."""
    client, engine = scope.client, scope.engine
    return (
        lines(
            "Mean TTFT by both clocks",
            {
                "client": mean("sidelight_client_ttft_seconds", client),
                "engine": mean("sidelight_engine_ttft_seconds", engine),
            },
            "Means are exact on both sides. Their gap is what the engine does not see of a user's wait: the network, "
            "gateways, and HTTP before the engine's clock starts.",
            width=width,
        ),
        lines(
            "Mean end-to-end time by both clocks",
            {
                "client": mean("sidelight_client_e2e_latency_seconds", client),
                "engine": mean("sidelight_engine_e2e_latency_seconds", engine),
            },
            "To the last token. A gap that the TTFT has not arises while the reply is on its way.",
            width=width,
        ),
    )


def engine_row(scope: Scope, so_far: str) -> PanelRow:
    """Return the row of the engines' own metrics. `so_far` says which requests their quantiles are of."""
    client, engine = scope.client, scope.engine
    hits, lookups = (total(f"sidelight_engine_prefix_cache_{what}_total", engine) for what in ("hits", "queries"))
    tokens = {
        what: {
            "client": total(f"sidelight_client_{name}_tokens_total", client),
            "engine": total(f"sidelight_engine_{engine_name}_tokens_total", engine),
        }
        for what, name, engine_name in (("Output", "output", "generation"), ("Prompt", "input", "prompt"))
    }
    return PanelRow(
        "Engine",
        (
            stack(
                "Mean time by phase",
                {phase: mean(f"sidelight_engine_{quantity}_seconds", engine) for phase, quantity in PHASES},
                "Mean time a request spent in each phase, exact, over the requests that finished. Observed at finish: "
                "what still waits is not in it.",
            ),
            lines(
                "p99 by phase",
                {phase: engine_quantile(quantity, 0.99, engine) for phase, quantity in PHASES},
                f"Of {so_far}, estimated from the engine's buckets and sums together, as the report does; a phase "
                "whose buckets are too coarse has no line. They do not add up to the quantile of the whole.",
            ),
            lines(
                "Output tokens / s: client and engine",
                tokens["Output"],
                "Engine above client for long: someone else uses the engine, or it generates what nobody receives "
                "(cancelled requests).",
                unit="short",
            ),
            lines(
                "Prompt tokens / s: client and engine",
                tokens["Prompt"],
                "The prefill load. The client counts a request when it ends, the engine when it is scheduled or ends: "
                "only lasting differences mean something.",
                unit="short",
            ),
            lines(
                "KV cache in use",
                {"{{endpoint}}": f"max by (endpoint) (sidelight_engine_kv_cache_usage_ratio{{{engine}}})"},
                "At the ceiling the batch cannot grow: more memory or shorter contexts help, more compute does not.",
                unit="percentunit",
                width=8,
                highest=1.0,
            ),
            lines(
                "Prefix cache hit rate",
                {"hit rate": f"{hits} / ({lookups} > 0)"},
                "Share of looked-up tokens that were cached. It shortens prefill, so runs with different hit rates are "
                "not comparable.",
                unit="percentunit",
                width=8,
                highest=1.0,
            ),
            lines(
                "Preemptions / s",
                {"preemptions / s": total("sidelight_engine_preemptions_total", engine)},
                "Anything above zero means that the KV cache ran out and work was done twice. Lower the concurrency or "
                "give it more memory.",
                unit="ops",
                width=8,
            ),
        ),
    )


def gateways_row(scope: Scope) -> PanelRow:
    """Return the row of gateways' own pages, empty where none is scraped."""
    labels = scope.engine
    page = "By the gateway's own page, which --metrics names. "
    return PanelRow(
        "Gateways",
        (
            stack(
                "Requests by how their gateway's first output is known",
                {"{{first_output}}": total("sidelight_gateway_requests_total", scope.client, by="first_output")},
                "Of unknown, some of the gateway's time is in the part outside the engine: its spans came, and do not "
                "say when its first output left. Of no_gateway, no span of one came.",
                unit="reqps",
                width=8,
            ),
            lines(
                "Time in the gateway",
                {
                    "its own, mean {{endpoint}}": f"max by (endpoint) (sidelight_gateway_own_seconds{{{labels}}})",
                    "request, mean": mean("sidelight_gateway_request_seconds", labels),
                    "calls of the next server, mean": mean("sidelight_gateway_upstream_seconds", labels),
                    "wait before its call, mean": mean("sidelight_gateway_queue_seconds", labels),
                    "wait, last requests": f"max (sidelight_gateway_recent_queue_seconds{{{labels}}})",
                },
                f"{page}Its own time is what a request takes less the calls of the next server.",
                width=8,
            ),
            lines(
                "Requests in the gateway",
                {
                    "waiting": f"sum (sidelight_gateway_requests_waiting{{{labels}}})",
                    "in flight": f"sum (sidelight_gateway_requests_in_flight{{{labels}}})",
                    "tried again / s": total("sidelight_gateway_retries_total", labels),
                    "failed calls / s": total("sidelight_gateway_upstream_errors_total", labels),
                },
                f"{page}Waiting here while the engine's queue is empty: the gateway's limit holds requests back.",
                unit="short",
                width=8,
            ),
        ),
        collapsed=True,
    )


def distributions_row(scope: Scope, gaps_by: str) -> PanelRow:
    """Return the row of how latencies are spread, request by request; gaps between tokens by the client or engine."""
    gaps = {"client": scope.client, "engine": scope.engine}[gaps_by]
    return PanelRow(
        "Latency distributions",
        (
            heatmap(
                "TTFT, client",
                "sidelight_client_ttft_seconds",
                scope.client,
                "Two separate bands mean two kinds of requests (cached and not, short and long): a mean describes "
                "neither. A marked request leads to its trace.",
            ),
            heatmap(
                "TTFT, engine",
                "sidelight_engine_ttft_seconds",
                scope.engine,
                "The same by the engine's clock, in its own coarser buckets. A band only the client has arose in "
                "between.",
            ),
            heatmap(
                f"Time between tokens, {gaps_by}",
                f"sidelight_{gaps_by}_inter_token_latency_seconds",
                gaps,
                "A thin upper band is steps in which a prefill was mixed in; it moves up with the prompt length.",
            ),
            heatmap(
                "End to end, client",
                "sidelight_client_e2e_latency_seconds",
                scope.client,
                "The spread is mostly that of output lengths. Everything moving up at once is load.",
            ),
        ),
    )


def scrapes(scope: Scope) -> tuple[Panel, ...]:
    """Return the panels of how well engines' pages are read."""
    return (
        lines(
            "Scrapes by outcome",
            {"{{outcome}}": total("sidelight_scrapes_total", scope.engine, by="outcome")},
            "Scrapes that fail leave holes in the engine's side; the breakdown's coverage falls with them.",
            unit="ops",
            width=8,
        ),
        lines(
            "Duration of a scrape",
            {"{{endpoint}}": f"max by (endpoint) (sidelight_scrape_duration_seconds{{{scope.engine}}})"},
            "How old the engine's numbers are on arrival. Near the scrape interval: scrape less often.",
            width=8,
        ),
        lines(
            "Age of the last page",
            {"{{endpoint}}": f"time() - max by (endpoint) ({LAST_ANSWER}{{{scope.engine}}})"},
            "For how long an engine's page has not answered. A line that climbs: the engine is down since it began to.",
            width=8,
        ),
    )
