"""What the dashboard shows: its rows and panels, from the answer at the top to the tool's own error at the bottom."""

from __future__ import annotations

from breakdown_rows import QUEUE, TTFT_SUM, WHERE_TTFT_WENT
from panels import ENGINE, SIDECAR, Panel, Query, Row, heatmap, mean, quantile, quantiles, total
from watch_rows import RECEIVER


def _tile(
    title: str,
    unit: str,
    query: Query,
    description: str,
    steps: tuple[tuple[float | None, str], ...] = ((None, "text"),),
) -> Panel:
    return Panel(
        kind="tile", title=title, unit=unit, queries=(query,), description=description, steps=steps, width=4, height=4
    )


def _name_tile(title: str, query: Query, description: str, empty: str) -> Panel:
    return Panel(
        kind="tile",
        title=title,
        unit="none",
        queries=(query,),
        description=description,
        width=4,
        height=4,
        shows_name=True,
        empty=empty,
    )


NOT_OK = 'status!~"ok|cancelled"'

ANSWER_FIRST = Row(
    title="Answer first",
    panels=(
        _tile(
            "TTFT p99",
            "s",
            Query(
                expr=quantile(0.99, "sidelight_client_ttft_seconds", SIDECAR, "$__range"),
                legend="client p99",
                instant=True,
            ),
            "What one in a hundred users waits, at least, for the first token, by the client's clock, over the whole "
            "range shown. The rows below say on which side the wait was.",
        ),
        _tile(
            "Output tokens / s",
            "short",
            Query(expr=total("sidelight_client_output_tokens_total", SIDECAR), legend="tokens / s"),
            "Tokens received a second. Flat while the offered load rises: the engine is saturated.",
        ),
        _tile(
            "Requests / s",
            "reqps",
            Query(expr=total("sidelight_client_requests_total", SIDECAR), legend="requests / s"),
            "Requests that ended, a second, whatever their status. Below the offered rate: a queue grows somewhere.",
        ),
        _tile(
            "Failed or refused",
            "percentunit",
            Query(
                expr=f"(sum (increase(sidelight_client_requests_total{{{SIDECAR}, {NOT_OK}}}[$__range])) or vector(0))"
                f" / (sum (increase(sidelight_client_requests_total{{{SIDECAR}}}[$__range])) > 0)",
                legend="share",
                instant=True,
            ),
            "Share of requests that failed or were refused in the range shown. Above zero, latencies are those of the "
            "survivors and look better than they are.",
            ((None, "green"), (0.001, "orange"), (0.01, "red")),
        ),
        _tile(
            "Generator lateness p99",
            "s",
            Query(
                expr=quantile(0.99, "sidelight_generator_schedule_lateness_seconds", SIDECAR, "$__range"),
                legend="p99",
                instant=True,
            ),
            "Can these numbers be trusted? How late our own requests left, against their schedule. Beyond a tenth of "
            "the TTFT above, the load generator is part of what is measured: use more workers or a quieter machine.",
            ((None, "green"), (0.005, "orange"), (0.02, "red")),
        ),
        _name_tile(
            "Run",
            Query(expr=f"sidelight_run_info{{{SIDECAR}}}", legend="{{run_id}} ({{phase}})", instant=True),
            "The run that is going on, and its phase. Only what falls in the measure phase is in the report.",
            "no run now",
        ),
        _tile(
            "Running",
            "short",
            Query(expr=f"sum (sidelight_engine_requests_running{{{ENGINE}}})", legend="running"),
            "Requests in the engine's batch now. At its configured limit, further requests can only wait.",
        ),
        _tile(
            "Waiting",
            "short",
            Query(expr=f"sum (sidelight_engine_requests_waiting{{{ENGINE}}})", legend="waiting"),
            "Requests that wait to be scheduled now. This gauge is live, whereas queue time is only observed when a "
            "request ends: a stalled queue shows here first.",
            ((None, "green"), (1, "orange"), (50, "red")),
        ),
        _tile(
            "KV cache, fullest",
            "percentunit",
            Query(expr=f"max (sidelight_engine_kv_cache_usage_ratio{{{ENGINE}}})", legend="fullest engine"),
            "The fullest engine's KV cache. Near 100 % requests wait for memory, not compute; preemptions begin.",
            ((None, "green"), (0.9, "orange"), (0.98, "red")),
        ),
        _tile(
            "Queue's share of TTFT",
            "percentunit",
            Query(
                expr=f"{total('sidelight_ttft_part_seconds_sum', QUEUE)} / ({TTFT_SUM} > 0)",
                legend="queue",
            ),
            "How much of the client's TTFT was waiting in the engine's queue, over the last seconds. Above one "
            "half, add capacity or lower the load; below, look at prefill (prompt length, prefix cache).",
            ((None, "green"), (0.5, "orange"), (0.8, "red")),
        ),
        _tile(
            "Broken down",
            "percentunit",
            Query(
                expr=f'(sum (increase(sidelight_requests_total{{{SIDECAR}, source!="none"}}[$__range])) or vector(0))'
                f" / (sum (increase(sidelight_requests_total{{{SIDECAR}}}[$__range])) > 0)",
                legend="share",
                instant=True,
            ),
            "Share of requests whose wait is told in parts, over the range shown. Below 100 % the parts speak of some "
            "requests only; why the others are missing stands further down.",
            ((None, "red"), (0.9, "orange"), (0.98, "green")),
        ),
        _name_tile(
            "Engine",
            Query(expr=f"sidelight_engine_info{{{ENGINE}}}", legend="{{engine}} {{version}}", instant=True),
            "The engine that was found behind the scraped endpoint. Empty: nothing known was found on its page, and "
            "the engine panels stay empty too.",
            "none found",
        ),
    ),
)

ONE_AXIS = Row(
    title="Client and server on one time axis",
    panels=(
        Panel(
            kind="lines",
            title="TTFT: client and engine",
            unit="s",
            queries=(
                *quantiles("sidelight_client_ttft_seconds", SIDECAR, "client"),
                *quantiles("sidelight_engine_ttft_seconds", ENGINE, "engine", (0.99,)),
            ),
            description="Both lines together: the wait is inside the engine. Client above engine: it is in between "
            "(network, proxy, tokenisation, the HTTP front end). Engine buckets are coarse; compare means below for "
            "small gaps.",
        ),
        Panel(
            kind="lines",
            title="Waiting, running, in flight",
            unit="short",
            queries=(
                Query(expr=f"sum (sidelight_engine_requests_waiting{{{ENGINE}}})", legend="waiting"),
                Query(expr=f"sum (sidelight_engine_requests_running{{{ENGINE}}})", legend="running"),
                Query(
                    expr=f"sum (sidelight_client_requests_in_flight{{{SIDECAR}}})",
                    legend="in flight, client",
                ),
            ),
            description="Waiting rises with TTFT: the queue explains it. In flight well above waiting plus running: "
            "requests are held before the engine, in a proxy or its front end.",
        ),
        Panel(
            kind="lines",
            title="Mean TTFT by both clocks",
            unit="s",
            queries=(
                Query(expr=mean("sidelight_client_ttft_seconds", SIDECAR), legend="client mean"),
                Query(expr=mean("sidelight_engine_ttft_seconds", ENGINE), legend="engine mean"),
            ),
            description="Means are exact on both sides. Their gap is what the engine does not see of a user's wait.",
        ),
        Panel(
            kind="lines",
            title="Time between tokens: client and engine",
            unit="s",
            queries=(
                *quantiles("sidelight_client_inter_token_latency_seconds", SIDECAR, "client"),
                *quantiles("sidelight_engine_inter_token_latency_seconds", ENGINE, "engine", (0.99,)),
            ),
            description="Engine p99 jumps when prefills share steps with decodes. Client jumps alone: chunks are "
            "gathered on the way, or several tokens come in one chunk.",
        ),
        Panel(
            kind="lines",
            title="End to end: client and engine",
            unit="s",
            queries=(
                *quantiles("sidelight_client_e2e_latency_seconds", SIDECAR, "client"),
                *quantiles("sidelight_engine_e2e_latency_seconds", ENGINE, "engine", (0.99,)),
            ),
            description="From the request's last byte to the last token. It grows with the output length: compare "
            "runs of the same workload only.",
        ),
        Panel(
            kind="lines",
            title="Time per output token, client",
            unit="s",
            queries=quantiles("sidelight_client_time_per_output_token_seconds", SIDECAR, "client"),
            description="One value a request: how fast it streamed after its first token. Rises with the number of "
            "running requests long before TTFT does.",
        ),
    ),
)

PHASES = (("queue", "queue_time"), ("prefill", "prefill_time"), ("decode", "decode_time"))

THE_ENGINE = Row(
    title="Engine",
    panels=(
        Panel(
            kind="stack",
            title="Mean time by phase",
            unit="s",
            queries=tuple(
                Query(expr=mean(f"sidelight_engine_{quantity}_seconds", ENGINE), legend=phase)
                for phase, quantity in PHASES
            ),
            description="Mean time a request spent in each phase, exact, over the requests that finished. Observed at "
            "finish: what still waits is not in it.",
        ),
        Panel(
            kind="lines",
            title="p99 by phase",
            unit="s",
            queries=tuple(
                Query(expr=quantile(0.99, f"sidelight_engine_{quantity}_seconds", ENGINE), legend=phase)
                for phase, quantity in PHASES
            ),
            description="Quantiles of phases do not add up to the quantile of the whole. Below the first bucket's "
            "bound (0.3 s for vLLM) they are interpolated from zero: trust the means there.",
        ),
        Panel(
            kind="lines",
            title="Output tokens / s: client and engine",
            unit="short",
            queries=(
                Query(expr=total("sidelight_client_output_tokens_total", SIDECAR), legend="client"),
                Query(expr=total("sidelight_engine_generation_tokens_total", ENGINE), legend="engine"),
            ),
            description="Engine above client for long: someone else uses the engine, or it generates what nobody "
            "receives (cancelled requests).",
        ),
        Panel(
            kind="lines",
            title="Prompt tokens / s: client and engine",
            unit="short",
            queries=(
                Query(expr=total("sidelight_client_input_tokens_total", SIDECAR), legend="client"),
                Query(expr=total("sidelight_engine_prompt_tokens_total", ENGINE), legend="engine"),
            ),
            description="The prefill load. The client counts a request when it ends, the engine when it is scheduled "
            "or ends: only lasting differences mean something.",
        ),
        Panel(
            kind="lines",
            title="Requests / s: client and engine",
            unit="reqps",
            queries=(
                Query(expr=total("sidelight_client_requests_total", SIDECAR), legend="client"),
                Query(expr=total("sidelight_engine_requests_finished_total", ENGINE), legend="engine"),
            ),
            width=6,
            description="Engine above client: the engine serves others too, and its sums are not this run's alone.",
        ),
        Panel(
            kind="lines",
            title="KV cache in use",
            unit="percentunit",
            queries=(
                Query(
                    expr=f"max by (endpoint) (sidelight_engine_kv_cache_usage_ratio{{{ENGINE}}})", legend="{{endpoint}}"
                ),
            ),
            width=6,
            highest=1.0,
            description="At the ceiling the batch cannot grow: more memory or shorter contexts help, more compute does "
            "not.",
        ),
        Panel(
            kind="lines",
            title="Prefix cache hit rate",
            unit="percentunit",
            queries=(
                Query(
                    expr=f"{total('sidelight_engine_prefix_cache_hits_total', ENGINE)}"
                    f" / ({total('sidelight_engine_prefix_cache_queries_total', ENGINE)} > 0)",
                    legend="hit rate",
                ),
            ),
            width=6,
            highest=1.0,
            description="Share of looked-up tokens that were cached. It shortens prefill, so runs with different hit "
            "rates are not comparable.",
        ),
        Panel(
            kind="lines",
            title="Preemptions / s",
            unit="ops",
            queries=(Query(expr=total("sidelight_engine_preemptions_total", ENGINE), legend="preemptions / s"),),
            width=6,
            description="Anything above zero means that the KV cache ran out and work was done twice. Lower the "
            "concurrency or give it more memory.",
        ),
    ),
)


DISTRIBUTIONS = Row(
    title="Latency distributions",
    panels=(
        heatmap(
            "TTFT, client",
            "sidelight_client_ttft_seconds",
            SIDECAR,
            "Two separate bands mean two kinds of requests (cached and not, short and long): a mean describes neither.",
        ),
        heatmap(
            "TTFT, engine",
            "sidelight_engine_ttft_seconds",
            ENGINE,
            "The same by the engine's clock, in its own coarser buckets. A band only the client has arose in between.",
        ),
        heatmap(
            "Time between tokens, client",
            "sidelight_client_inter_token_latency_seconds",
            SIDECAR,
            "A thin upper band is steps in which a prefill was mixed in; it moves up with the prompt length.",
        ),
        heatmap(
            "End to end, client",
            "sidelight_client_e2e_latency_seconds",
            SIDECAR,
            "The spread is mostly that of output lengths. Everything moving up at once is load.",
        ),
    ),
)

GENERATOR = Row(
    title="The generator itself",
    panels=(
        Panel(
            kind="lines",
            title="Schedule lateness",
            unit="s",
            queries=quantiles("sidelight_generator_schedule_lateness_seconds", SIDECAR, ""),
            description="How late requests left, against their schedule. It delays load but is not part of TTFT. "
            "Rising with the rate: the generator is saturated, not the engine.",
        ),
        Panel(
            kind="lines",
            title="CPU of our processes",
            unit="percentunit",
            queries=(
                Query(expr=total("sidelight_generator_cpu_seconds_total", SIDECAR, by="process"), legend="{{process}}"),
            ),
            description="100 % is one core. A worker above 70 % adds its own queueing to every stamp: add workers.",
        ),
        Panel(
            kind="lines",
            title="Longest event-loop delay so far",
            unit="s",
            queries=(
                Query(expr=f"max (sidelight_generator_loop_delay_max_seconds{{{SIDECAR}}})", legend="longest delay"),
            ),
            width=6,
            description="The latest that a worker's timer came: an upper bound of what a single time stamp can be off.",
        ),
        Panel(
            kind="lines",
            title="Requests by status",
            unit="reqps",
            queries=(Query(expr=total("sidelight_client_requests_total", SIDECAR, by="status"), legend="{{status}}"),),
            width=6,
            description="How requests ended. Refusals begin where the engine's admission limit is; failures with the "
            "connection or the engine itself.",
        ),
        Panel(
            kind="lines",
            title="Scrapes by outcome",
            unit="ops",
            queries=(Query(expr=total("sidelight_scrapes_total", ENGINE, by="outcome"), legend="{{outcome}}"),),
            width=6,
            description="Scrapes that fail leave holes in the engine's side; the breakdown's coverage falls with them.",
        ),
        Panel(
            kind="lines",
            title="Duration of a scrape",
            unit="s",
            queries=(
                Query(expr=f"max by (endpoint) (sidelight_scrape_duration_seconds{{{ENGINE}}})", legend="{{endpoint}}"),
            ),
            width=6,
            description="How old the engine's numbers are on arrival. Near the scrape interval: scrape less often.",
        ),
    ),
)

ROWS = (ANSWER_FIRST, ONE_AXIS, WHERE_TTFT_WENT, THE_ENGINE, DISTRIBUTIONS, GENERATOR, RECEIVER)
