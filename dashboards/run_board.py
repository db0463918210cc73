"""Dashboard *Run*: one load run, from the answer at the top to the tool's own error at the bottom."""

from __future__ import annotations

from panels import (
    STATES,
    TTFT_NAMES,
    Board,
    PanelRow,
    Scope,
    Variable,
    advice_of,
    bars,
    client_quantile,
    engines,
    last,
    lines,
    of_pool,
    quantiles,
    share,
    table,
    tile,
    total,
    verdict_of,
)
from shared_rows import breakdown_row, by_both_clocks, distributions_row, engine_row, gateways_row, scrapes

from sidelight.correlator.parts import LABELS

SCOPE = Scope('run_id="$run", instance=~"$instance"')
RUN, ENGINE = SCOPE.client, SCOPE.engine
MET = {"0": "missed", "1": "met"}
MISSED_MET = ((None, "red"), (1.0, "green"))
LATE = ((None, "green"), (0.005, "orange"), (0.02, "red"))
FAILED = ((None, "green"), (0.001, "orange"), (0.01, "red"))


def latest(series: str) -> str:
    """Return the PromQL of the last of a run's series."""
    return f"topk (1, max_over_time (timestamp ({series}{{{RUN}}})[$__range:$__interval]))"


TTFT_MEAN = "sidelight_ttft_part_mean_seconds"
MODEL = Variable("model", "Model", 'label_values(sidelight_run_info{phase!="watch"}, model)')
REQUESTS = "sidelight_client_requests_total"
ENDED = last(REQUESTS, RUN, fold="sum")
PENDING = f"({last('sidelight_breakdown_pending', RUN)} or vector(0))"
COUNTED = f"({last('sidelight_requests_total', RUN, fold='sum')} + {PENDING})"


def rate(of: str, by: str = "", labels: str = RUN) -> str:
    """Return the PromQL of a rate in a run's measured phase, as in its report."""
    return last("sidelight_client_rate_per_second", f'{labels}, of="{of}"', by)


ANSWER_FIRST = PanelRow(
    "Answer first",
    (
        tile(
            "Verdict",
            verdict_of(latest("sidelight_verdict")),
            "What the report begins with: the state of the run, and what causes it; below, why and what to do.",
            unit="none",
            width=8,
            shows="name",
            coloured=STATES,
            empty="not judged yet",
        ),
        tile(
            "Requests / s",
            {"offered": rate("offered"), "served": f"{rate('served')} or {rate('requests')}"},
            "Over the measured phase up to the end of the range. Sent below offered: the generator or its cap holds "
            "requests back. Ended ok is over the drain too, as throughput is: below sent in a short run.",
            unit="reqps",
            width=6,
            shows="value_and_name",
        ),
        tile(
            "TTFT",
            {"p50": client_quantile("ttft", 0.5, RUN), "p99": client_quantile("ttft", 0.99, RUN)},
            "How long users waited for the first token, by the client's clock, over the measured phase up to the end "
            "of the range: exact, and at the run's end as in its report.",
            width=6,
            shows="value_and_name",
        ),
        tile(
            "Failed or refused",
            {"share": share(last(REQUESTS, f'{RUN}, status!~"ok|cancelled"', fold="sum"), ENDED)},
            "Share of the requests that ended. Above zero, latencies are those of the survivors and look better than "
            "they are.",
            unit="percentunit",
            width=4,
            steps=FAILED,
        ),
        table(
            "Why, and what to do",
            advice_of(latest("sidelight_advice_info")),
            "The sentences that the report begins with, as of the end of the range.",
            height=5,
        ),
        bars(
            "TTFT by part",
            {LABELS[part]: last(TTFT_MEAN, f'{RUN}, part="{part}"', "run_id") for part in TTFT_NAMES},
            "Of the mean TTFT of the requests that are broken down: the longest piece is where to work first. A part "
            "without a piece is in other.",
            height=4,
        ),
        tile(
            "Waiting, at most",
            {"waiting": last("sidelight_engine_highest", f'{ENGINE}, of="requests_waiting"')},
            "The longest queue that a scrape of an engine saw in the measured phase, as in the report. Lines of this "
            "page may show fewer: Prometheus reads more rarely than Sidelight.",
            unit="short",
            width=4,
            steps=((None, "green"), (1, "orange"), (50, "red")),
        ),
        tile(
            "KV cache, at most",
            {"fullest": last("sidelight_engine_highest", f'{ENGINE}, of="kv_cache_usage"')},
            "The fullest engine's KV cache. Near 100 % requests wait for memory, not compute; preemptions begin.",
            unit="percentunit",
            width=4,
            steps=((None, "green"), (0.9, "orange"), (0.98, "red")),
        ),
        tile(
            "Broken down",
            {"share": share(last("sidelight_requests_total", f'{RUN}, source!="none"', fold="sum"), COUNTED)},
            "Share of the requests that ended whose TTFT is broken down, those that still wait for it counted in the "
            "whole. Below 100 % the parts describe some requests only.",
            unit="percentunit",
            width=4,
            steps=((None, "red"), (0.9, "orange"), (0.98, "green")),
        ),
        tile(
            "Run",
            {"{{run_id}}": f"group by (run_id, instance) (last_over_time(sidelight_run_info{{{RUN}}}[$__range]))"},
            "The run that is shown: pick another above. While it goes, its live page is behind the link.",
            unit="none",
            width=6,
            shows="name",
            link=("Live page of the sidecar", "http://${__field.labels.instance}/"),
            empty="no run in this range",
        ),
        tile(
            "Engine",
            engines(ENGINE),
            "The engine that was found behind the scraped endpoint. Empty: nothing known was found on its page, and "
            "the engine panels stay empty too.",
            unit="none",
            width=6,
            shows="name",
            empty="none found",
        ),
        tile(
            "Objectives",
            {"{{objective}}": last("sidelight_slo_met", RUN, "objective", "min")},
            "Whether each objective of --slo is met so far; the row below has limits and values.",
            unit="none",
            width=12,
            shows="value_and_name",
            words=MET,
            steps=MISSED_MET,
            empty="no --slo was given",
        ),
    ),
)

OBJECTIVES = PanelRow(
    "Objectives (--slo)",
    (
        table(
            "Limits and values",
            {
                what.capitalize(): last(f"sidelight_slo_{what}", RUN, "objective", "min")
                for what in ("limit", "value", "met")
            },
            "Each objective over the measured phase up to the end of the range; limits and values are in seconds, "
            "shares or requests a second.",
            unit="short",
            verdicts=("Met",),
            width=24,
        ),
    ),
    collapsed=True,
)


CLASSES = f'{RUN}, class=~"$class"'
OF_CLASS = "sidelight_class_quantile_seconds"
BY_CLASS = PanelRow(
    "By class of request",
    (
        table(
            "Classes",
            {"Ended ok": last("sidelight_class_requests_total", CLASSES, "class")}
            | {
                f"{title} p{100 * q:g}": last(OF_CLASS, f'{CLASSES}, of="{of}", quantile="{q}"', "class")
                for title, of in (("TTFT", "ttft"), ("E2E", "e2e_latency"))
                for q in (0.5, 0.99)
            },
            "Of a workload with several classes: each over the measured phase up to the end of the range, exact. What "
            "is slow in one class alone comes of its requests (their length, their prefix), not of the load.",
            units={"Ended ok": "short"},
            empty="the workload has a single class",
            width=24,
        ),
    ),
    collapsed=True,
)

ONE_AXIS = PanelRow(
    "Client and engine on one time axis",
    (
        lines(
            "TTFT over time",
            quantiles("sidelight_client_ttft_seconds", RUN, "client"),
            "Of the requests of the last seconds, by the client's clock. From buckets, ten a decade: a value may be "
            "off by up to a quarter, the tile above is exact. A marked request leads to its trace.",
            exemplars=True,
        ),
        lines(
            "Requests: waiting, running, in flight",
            {
                "waiting {{role}}": f"sum by (role) (sidelight_engine_requests_waiting{{{ENGINE}}})",
                "running {{role}}": f"sum by (role) (sidelight_engine_requests_running{{{ENGINE}}})",
                "in flight, client": f"sum (sidelight_client_requests_in_flight{{{RUN}}})",
            },
            "Waiting rises with TTFT: the queue explains it. In flight well above waiting plus running: requests are "
            "on the way, held before the engine by a proxy, or in its front end.",
            unit="short",
        ),
        lines(
            "Requests / s: offered, sent, ended",
            {
                "offered": total("sidelight_client_requests_scheduled_total", RUN),
                "sent": total("sidelight_client_requests_submitted_total", RUN),
                "ended": total("sidelight_client_requests_total", RUN),
                "engine": total("sidelight_engine_requests_finished_total", of_pool(ENGINE, "decode")),
            },
            "Offered above sent: our own generator or its cap is behind. Sent above ended for long: a queue grows. "
            "Engine above ended: it serves others too. A closed loop offers nothing by itself.",
            unit="reqps",
            width=8,
        ),
        by_both_clocks(SCOPE, 8),
        lines(
            "Time per output token, client",
            quantiles("sidelight_client_time_per_output_token_seconds", RUN, "client"),
            "One value a request: how fast it streamed after its first token. It rises with the number of running "
            "requests long before TTFT does. From buckets.",
            width=8,
        ),
    ),
)

GENERATOR = PanelRow(
    "The generator itself",
    (
        lines(
            "Schedule lateness",
            quantiles("sidelight_generator_schedule_lateness_seconds", RUN, "", (0.5, 0.99)),
            "How late requests of the last seconds left, against their schedule. It delays load but is not part of "
            "TTFT. Rising with the rate: the generator is saturated, not the engine.",
        ),
        lines(
            "CPU of our processes",
            {"{{process}}": total("sidelight_generator_cpu_seconds_total", RUN, by="process")},
            "100 % is one core. A worker above 70 % adds its own queueing to every stamp: add workers.",
            unit="percentunit",
        ),
        lines(
            "Requests by status",
            {"{{status}}": total("sidelight_client_requests_total", RUN, by="status")},
            "How requests ended. Refusals begin where the engine's admission limit is; failures with the connection "
            "or the engine itself.",
            unit="reqps",
        ),
        scrapes(SCOPE, 12),
    ),
)

BOARD = Board(
    uid="sidelight-run",
    title="Sidelight: run",
    description="A load run and the engine under it on one time axis: how long clients waited, and where.",
    rows=(
        ANSWER_FIRST,
        OBJECTIVES,
        breakdown_row(SCOPE),
        ONE_AXIS,
        engine_row(SCOPE),
        distributions_row(SCOPE),
        BY_CLASS,
        gateways_row(SCOPE),
        GENERATOR,
    ),
    variables=(
        MODEL,
        Variable("instance", "Sidecar", 'label_values(sidelight_run_info{phase!="watch", model=~"$model"}, instance)'),
        Variable(
            "run",
            "Run",
            'label_values(sidelight_run_info{phase!="watch", model=~"$model", instance=~"$instance"}, run_id)',
            several=False,
            newest_first=True,
        ),
        Variable("endpoint", "Engine endpoint", 'label_values(sidelight_engine_info{run_id="$run"}, endpoint)'),
        Variable("class", "Class", 'label_values(sidelight_class_requests_total{run_id="$run"}, class)'),
    ),
    phases=f"sidelight_run_info{{{RUN}}}",
)
