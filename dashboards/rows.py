"""What the dashboard shows: its rows and panels, from the answer at the top to the tool's own error at the bottom."""

from __future__ import annotations

from breakdown_rows import QUEUE, TTFT_SUM, WHERE_TTFT_WENT
from panels import (
    ENGINE,
    SIDECAR,
    Row,
    exact_quantile,
    heatmap,
    lines,
    mean,
    quantile,
    quantiles,
    seen,
    share,
    stack,
    tile,
    total,
)
from watch_rows import RECEIVER

ANSWER_FIRST = Row(
    "Answer first",
    (
        tile(
            "TTFT p99",
            {"client p99": exact_quantile(0.99, "ttft", SIDECAR)},
            "What one in a hundred users waits, at least, for the first token, by the client's clock: of a run "
            "exactly, as its report has it; of a watch from buckets. The rows below say where the wait was.",
            instant=True,
        ),
        tile(
            "Output tokens / s",
            {"tokens / s": total("sidelight_client_output_tokens_total", SIDECAR)},
            "Tokens received a second. Flat while the offered load rises: the engine is saturated.",
            unit="short",
        ),
        tile(
            "Requests / s",
            {
                "ended": total("sidelight_client_requests_total", SIDECAR),
                "submitted": total("sidelight_client_requests_submitted_total", SIDECAR),
                "scheduled": total("sidelight_client_requests_scheduled_total", SIDECAR),
            },
            "Requests that ended, a second, whatever their status, beside those that were sent, and those whose time "
            "had come (of an open loop). Fewer ended than scheduled: a queue grows somewhere.",
            unit="reqps",
            shows_name=True,
        ),
        tile(
            "Failed or refused",
            {"share": share("sidelight_client_requests_total", 'status!~"ok|cancelled"')},
            "Share of requests that failed or were refused in the range shown. Above zero, latencies are those of the "
            "survivors and look better than they are.",
            unit="percentunit",
            instant=True,
            steps=((None, "green"), (0.001, "orange"), (0.01, "red")),
        ),
        tile(
            "Generator lateness p99",
            {"p99": quantile(0.99, "sidelight_generator_schedule_lateness_seconds", SIDECAR, "$__range")},
            "Is this the load that was asked for? How late our own requests left, against their schedule. That changes "
            "no latency; but later than the gap between them, they leave in bunches: use more workers or another host.",
            instant=True,
            steps=((None, "green"), (0.005, "orange"), (0.02, "red")),
        ),
        tile(
            "Run",
            {"{{run_id}}": seen("sidelight_run_info", SIDECAR, "run_id")},
            "The runs of the range shown. Only what falls in the measure phase is in a run's report.",
            unit="none",
            instant=True,
            shows_name=True,
            empty="no run in this range",
        ),
        tile(
            "Running",
            {"running": f"sum (sidelight_engine_requests_running{{{ENGINE}}})"},
            "Requests in the engine's batch now. At its configured limit, further requests can only wait.",
            unit="short",
        ),
        tile(
            "Waiting",
            {"waiting": f"sum (sidelight_engine_requests_waiting{{{ENGINE}}})"},
            "Requests that wait to be scheduled now. This gauge is live, whereas queue time is only observed when a "
            "request ends: a stalled queue shows here first.",
            unit="short",
            steps=((None, "green"), (1, "orange"), (50, "red")),
        ),
        tile(
            "KV cache, fullest",
            {"fullest engine": f"max (sidelight_engine_kv_cache_usage_ratio{{{ENGINE}}})"},
            "The fullest engine's KV cache. Near 100 % requests wait for memory, not compute; preemptions begin.",
            unit="percentunit",
            steps=((None, "green"), (0.9, "orange"), (0.98, "red")),
        ),
        tile(
            "Queue's share of TTFT",
            {"queue": f"{total('sidelight_ttft_part_seconds_sum', QUEUE)} / ({TTFT_SUM} > 0)"},
            "How much of the client's TTFT was waiting in the engine's queue, over the last seconds. Above one half, "
            "add capacity or lower the load; below, look at prefill (prompt length, prefix cache).",
            unit="percentunit",
            steps=((None, "green"), (0.5, "orange"), (0.8, "red")),
        ),
        tile(
            "Broken down",
            {"share": share("sidelight_requests_total", 'source!="none"', "sidelight_breakdown_pending")},
            "Share of requests that ended whose TTFT is broken down, over the range shown, those that wait for it "
            "included. Below 100 % the parts describe some requests only; a panel further down has the reasons.",
            unit="percentunit",
            instant=True,
            steps=((None, "red"), (0.9, "orange"), (0.98, "green")),
        ),
        tile(
            "Engine",
            {"{{engine}} {{version}}": seen("sidelight_engine_info", ENGINE, "engine, version")},
            "The engine that was found behind the scraped endpoint. Empty: nothing known was found on its page, and "
            "the engine panels stay empty too.",
            unit="none",
            instant=True,
            shows_name=True,
            empty="none found",
        ),
    ),
)

ONE_AXIS = Row(
    "Client and server on one time axis",
    (
        lines(
            "TTFT: client and engine",
            {
                **quantiles("sidelight_client_ttft_seconds", SIDECAR, "client"),
                **quantiles("sidelight_engine_ttft_seconds", ENGINE, "engine", (0.99,)),
            },
            "Both lines together: the wait is inside the engine. Client above engine: it is in between (network, "
            "proxy, tokenisation, the HTTP front end). Engine buckets are coarse; compare means below for small gaps.",
        ),
        lines(
            "Waiting, running, in flight",
            {
                "waiting": f"sum (sidelight_engine_requests_waiting{{{ENGINE}}})",
                "running": f"sum (sidelight_engine_requests_running{{{ENGINE}}})",
                "in flight, client": f"sum (sidelight_client_requests_in_flight{{{SIDECAR}}})",
            },
            "Waiting rises with TTFT: the queue explains it. In flight well above waiting plus running: requests are "
            "held before the engine, in a proxy or its front end.",
            unit="short",
        ),
        lines(
            "Mean TTFT by both clocks",
            {
                "client mean": mean("sidelight_client_ttft_seconds", SIDECAR),
                "engine mean": mean("sidelight_engine_ttft_seconds", ENGINE),
            },
            "Means are exact on both sides. Their gap is what the engine does not see of a user's wait.",
        ),
        lines(
            "Time between tokens: client and engine",
            {
                **quantiles("sidelight_client_inter_token_latency_seconds", SIDECAR, "client"),
                **quantiles("sidelight_engine_inter_token_latency_seconds", ENGINE, "engine", (0.99,)),
            },
            "Engine p99 jumps when prefills share steps with decodes. Client jumps alone: chunks are gathered on the "
            "way, or several tokens come in one chunk.",
        ),
        lines(
            "End to end: client and engine",
            {
                **quantiles("sidelight_client_e2e_latency_seconds", SIDECAR, "client"),
                **quantiles("sidelight_engine_e2e_latency_seconds", ENGINE, "engine", (0.99,)),
            },
            "From the request's last byte to the last token. It grows with the output length: compare runs of the "
            "same workload only.",
        ),
        lines(
            "Time per output token, client",
            quantiles("sidelight_client_time_per_output_token_seconds", SIDECAR, "client"),
            "One value a request: how fast it streamed after its first token. Rises with the number of running "
            "requests long before TTFT does.",
        ),
    ),
)

HITS = total("sidelight_engine_prefix_cache_hits_total", ENGINE)
QUERIES = total("sidelight_engine_prefix_cache_queries_total", ENGINE)
PHASES = (("queue", "queue_time"), ("prefill", "prefill_time"), ("decode", "decode_time"))

THE_ENGINE = Row(
    "Engine",
    (
        stack(
            "Mean time by phase",
            {phase: mean(f"sidelight_engine_{quantity}_seconds", ENGINE) for phase, quantity in PHASES},
            "Mean time a request spent in each phase, exact, over the requests that finished. Observed at finish: "
            "what still waits is not in it.",
        ),
        lines(
            "p99 by phase",
            {phase: quantile(0.99, f"sidelight_engine_{quantity}_seconds", ENGINE) for phase, quantity in PHASES},
            "Quantiles of phases do not add up to the quantile of the whole. Below the first bucket's bound (0.3 s "
            "for vLLM) they are interpolated from zero: trust the means there.",
        ),
        lines(
            "Output tokens / s: client and engine",
            {
                "client": total("sidelight_client_output_tokens_total", SIDECAR),
                "engine": total("sidelight_engine_generation_tokens_total", ENGINE),
            },
            "Engine above client for long: someone else uses the engine, or it generates what nobody receives "
            "(cancelled requests).",
            unit="short",
        ),
        lines(
            "Prompt tokens / s: client and engine",
            {
                "client": total("sidelight_client_input_tokens_total", SIDECAR),
                "engine": total("sidelight_engine_prompt_tokens_total", ENGINE),
            },
            "The prefill load. The client counts a request when it ends, the engine when it is scheduled or ends: "
            "only lasting differences mean something.",
            unit="short",
        ),
        lines(
            "Requests / s: client and engine",
            {
                "client": total("sidelight_client_requests_total", SIDECAR),
                "engine": total("sidelight_engine_requests_finished_total", ENGINE),
            },
            "Engine above client: the engine serves others too, and its sums are not this run's alone.",
            unit="reqps",
            width=6,
        ),
        lines(
            "KV cache in use",
            {"{{endpoint}}": f"max by (endpoint) (sidelight_engine_kv_cache_usage_ratio{{{ENGINE}}})"},
            "At the ceiling the batch cannot grow: more memory or shorter contexts help, more compute does not.",
            unit="percentunit",
            width=6,
            highest=1.0,
        ),
        lines(
            "Prefix cache hit rate",
            {"hit rate": f"{HITS} / ({QUERIES} > 0)"},
            "Share of looked-up tokens that were cached. It shortens prefill, so runs with different hit rates are "
            "not comparable.",
            unit="percentunit",
            width=6,
            highest=1.0,
        ),
        lines(
            "Preemptions / s",
            {"preemptions / s": total("sidelight_engine_preemptions_total", ENGINE)},
            "Anything above zero means that the KV cache ran out and work was done twice. Lower the concurrency or "
            "give it more memory.",
            unit="ops",
            width=6,
        ),
    ),
)

DISTRIBUTIONS = Row(
    "Latency distributions",
    (
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
    "The generator itself",
    (
        lines(
            "Schedule lateness",
            quantiles("sidelight_generator_schedule_lateness_seconds", SIDECAR, ""),
            "How late requests left, against their schedule. It delays load but is not part of TTFT. Rising with the "
            "rate: the generator is saturated, not the engine.",
        ),
        lines(
            "CPU of our processes",
            {"{{process}}": total("sidelight_generator_cpu_seconds_total", SIDECAR, by="process")},
            "100 % is one core. A worker above 70 % adds its own queueing to every stamp: add workers.",
            unit="percentunit",
        ),
        lines(
            "Longest event-loop delay so far",
            {"longest delay": f"max (sidelight_generator_loop_delay_max_seconds{{{SIDECAR}}})"},
            "The latest that a worker's timer came: an upper bound of what a single time stamp can be off.",
            width=6,
        ),
        lines(
            "Requests by status",
            {"{{status}}": total("sidelight_client_requests_total", SIDECAR, by="status")},
            "How requests ended. Refusals begin where the engine's admission limit is; failures with the connection "
            "or the engine itself.",
            unit="reqps",
            width=6,
        ),
        lines(
            "Scrapes by outcome",
            {"{{outcome}}": total("sidelight_scrapes_total", ENGINE, by="outcome")},
            "Scrapes that fail leave holes in the engine's side; the breakdown's coverage falls with them.",
            unit="ops",
            width=6,
        ),
        lines(
            "Duration of a scrape",
            {"{{endpoint}}": f"max by (endpoint) (sidelight_scrape_duration_seconds{{{ENGINE}}})"},
            "How old the engine's numbers are on arrival. Near the scrape interval: scrape less often.",
            width=6,
        ),
    ),
)

ROWS = (ANSWER_FIRST, ONE_AXIS, WHERE_TTFT_WENT, THE_ENGINE, DISTRIBUTIONS, GENERATOR, RECEIVER)
