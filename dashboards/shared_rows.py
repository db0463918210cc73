"""The rows that a run and a watch have in common: where the TTFT went, the engine, gateways' pages, distributions."""

from __future__ import annotations

from panels import (
    TTFT_NAMES,
    Panel,
    PanelRow,
    Scope,
    heatmap,
    lines,
    mean,
    of_parts,
    of_pool,
    quantile,
    stack,
    total,
)

from sidelight.correlator.parts import INSIDE_PARTS, LABELS

PHASES = (
    ("queue", "queue_time", "prefill"),
    ("prefill", "prefill_time", "prefill"),
    ("decode", "decode_time", "decode"),
)
LAST_ANSWER = "sidelight_engine_last_answer_timestamp_seconds"
LIVE_DELAY = "Estimates come some seconds after the requests they are of."


def breakdown_row(scope: Scope, *more: Panel) -> PanelRow:
    """Return the row that joins client and engine: where each request's wait went, part by part."""
    labels = scope.client
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
            lines(
                "p99 of each part",
                p99,
                "Which part makes the worst requests slow: it is often another than the one that makes the mean. "
                "Quantiles of parts do not add up to the quantile of the whole. From buckets.",
            ),
            *more,
        ),
    )


def by_both_clocks(scope: Scope, width: int) -> Panel:
    """Return the panel that sets the client's TTFT beside the engine's, in the same seconds."""
    return lines(
        "Mean TTFT by both clocks",
        {
            "client": mean("sidelight_client_ttft_seconds", scope.client),
            "engine": mean("sidelight_engine_ttft_seconds", of_pool(scope.engine, "neither")),
        },
        "Means are exact on both sides. Their gap is what the engine does not see of a user's wait: the network, "
        "gateways, and HTTP before the engine's clock starts.",
        width=width,
    )


def engine_row(scope: Scope) -> PanelRow:
    """Return the row of the engines' own metrics."""
    client, engine = scope.client, scope.engine
    prompts, outputs = of_pool(engine, "prefill"), of_pool(engine, "decode")
    hits, lookups = (total(f"sidelight_engine_prefix_cache_{what}_total", prompts) for what in ("hits", "queries"))
    return PanelRow(
        "Engine",
        (
            stack(
                "Mean time by phase",
                {
                    phase: mean(f"sidelight_engine_{quantity}_seconds", of_pool(engine, pool))
                    for phase, quantity, pool in PHASES
                },
                "Mean time a request spent in each phase, exact, over the requests that finished. Observed at finish: "
                "what still waits is not in it.",
            ),
            lines(
                "Output tokens / s: client and engine",
                {
                    "client": total("sidelight_client_output_tokens_total", client),
                    "engine": total("sidelight_engine_generation_tokens_total", outputs),
                },
                "Engine above client for long: someone else uses the engine, or it generates what nobody receives "
                "(cancelled requests).",
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
                width=12,
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
                width=12,
            ),
        ),
        collapsed=True,
    )


def distributions_row(scope: Scope) -> PanelRow:
    """Return the row of how TTFTs are spread, request by request."""
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
                of_pool(scope.engine, "neither"),
                "The same by the engine's clock, in its own coarser buckets. A band only the client has arose in "
                "between.",
            ),
        ),
    )


def scrapes(scope: Scope, width: int) -> Panel:
    """Return the panel of how well engines' pages are read."""
    return lines(
        "Scrapes by outcome",
        {"{{outcome}}": total("sidelight_scrapes_total", scope.engine, by="outcome")},
        "Scrapes that fail leave holes in the engine's side; the breakdown's coverage falls with them.",
        unit="ops",
        width=width,
    )
