"""Dashboard *Watch*: the TTFT of real traffic, where it goes, and what a resident sidecar says of itself."""

from __future__ import annotations

from panels import (
    E2E_NAMES,
    STATES,
    Board,
    PanelRow,
    Scope,
    Variable,
    advice_of,
    engines,
    increase,
    lines,
    mean,
    of_parts,
    of_pool,
    quantile,
    quantiles,
    share,
    stack,
    table,
    tile,
    total,
    verdict_of,
)
from run_board import FAILED
from shared_rows import breakdown_row, by_both_clocks, distributions_row, engine_row, gateways_row, scrapes

from sidelight.correlator.parts import ENGINE_PARTS

# A watch's series bear no run_id.
SCOPE = Scope('run_id="", instance=~"$instance"')
WATCH, ENGINE = SCOPE.client, SCOPE.engine


def in_range(counter: str, labels: str = WATCH) -> str:
    return increase(counter, labels, window="$__range")


REQUESTS = "sidelight_client_requests_total"
PENDING = f"(max (sidelight_breakdown_pending{{{WATCH}}}) or vector(0))"
COUNTED = f"({in_range('sidelight_requests_total')} + {PENDING})"
HEADROOM = f"max by (bound) (sidelight_headroom_ratio{{{WATCH}}}) * scalar({total(REQUESTS, WATCH, window='$__range')})"
TTFT, TTFT_SUM = "sidelight_client_ttft_seconds", "sidelight_ttft_part_seconds_sum"

ANSWER_FIRST = PanelRow(
    "Answer first",
    (
        tile(
            "Verdict",
            verdict_of(f"sidelight_verdict{{{WATCH}}}"),
            "Of the last minute's requests: their state, and what causes it; below, why and what to do.",
            unit="none",
            width=8,
            shows="name",
            coloured=STATES,
            empty="not judged",
        ),
        tile(
            "Requests / s",
            {"ended": f"{total('sidelight_client_requests_total', WATCH, window='$__range')} > 0"},
            "Requests whose outermost span came, whatever became of them, over the range shown.",
            unit="reqps",
            empty="no outermost span",
            width=5,
        ),
        tile(
            "TTFT",
            {f"p{q * 100:g}": f"{quantile(q, TTFT, WATCH, '$__range')} >= 0" for q in (0.5, 0.99)},
            "Of the requests in the range shown whose client or gateway notes its first output. From buckets, ten a "
            "decade: a watch keeps no requests, and a value may be off by up to a quarter.",
            width=6,
            shows="value_and_name",
            empty="no span says its first token",
        ),
        tile(
            "Failed",
            {"share": share(in_range(REQUESTS, f'{WATCH}, status!~"ok|cancelled"'), in_range(REQUESTS))},
            "Share of the requests in the range shown. Latencies are those of the others.",
            unit="percentunit",
            steps=FAILED,
            width=5,
        ),
        table(
            "Why, and what to do",
            advice_of(f"sidelight_advice_info{{{WATCH}}}"),
            "The sentences of the verdict, as the sidecar's live page has them.",
            height=5,
        ),
        tile(
            "Engine",
            engines(ENGINE),
            "The engines that were found behind the scraped endpoints. Empty: nothing known was found on their pages.",
            unit="none",
            width=8,
            shows="name",
            empty="none found",
        ),
        tile(
            "Waiting",
            {"waiting": f"sum (sidelight_engine_requests_waiting{{{ENGINE}}})"},
            "Requests that wait to be scheduled now. This gauge is live, whereas queue time is only observed when a "
            "request ends: a stalled queue shows here first.",
            unit="short",
            width=5,
            steps=((None, "green"), (1, "orange"), (50, "red")),
        ),
        tile(
            "KV cache, fullest",
            {"fullest": f"max (sidelight_engine_kv_cache_usage_ratio{{{ENGINE}}})"},
            "The fullest engine's KV cache now. Near 100 % requests wait for memory, not compute.",
            unit="percentunit",
            width=6,
            steps=((None, "green"), (0.9, "orange"), (0.98, "red")),
        ),
        tile(
            "Broken down",
            {"share": share(in_range("sidelight_requests_total", f'{WATCH}, source!="none"'), COUNTED)},
            "Share of the requests in the range shown that are broken down, those that still wait for it counted in "
            "the whole. Below 100 %, the panel of reasons says what to switch on.",
            unit="percentunit",
            width=5,
            steps=((None, "red"), (0.9, "orange"), (0.98, "green")),
        ),
    ),
)

END_TO_END = stack(
    "Mean end-to-end time by part",
    of_parts("sidelight_e2e_part_seconds", WATCH, E2E_NAMES),
    "The parts of the TTFT, and decode. Of production traffic whose first token nobody noted this is all there is.",
    width=8,
)
NOT_BROKEN_DOWN = stack(
    "Not broken down, by why",
    {"{{reason}}": total("sidelight_breakdown_missing_total", WATCH, by="reason")},
    "What to switch on or mend: spans that never come, clients that note no first token, pages that cannot be scraped.",
    unit="reqps",
    width=8,
)
ENGINE_ONLY = lines(
    "Queue and prefill without a client's span",
    {part.label: mean("sidelight_no_client_part_seconds", f'{WATCH}, part="{part.name}"') for part in ENGINE_PARTS},
    "Means of requests whose engine sent a span and no client did: as the engine states them.",
    width=8,
)

ONE_AXIS = PanelRow(
    "Client and engine on one time axis",
    (
        lines(
            "TTFT over time",
            quantiles("sidelight_client_ttft_seconds", WATCH, "client"),
            "Of the requests of the last seconds, by the clock of their client or gateway. From buckets, ten a decade: "
            "a value may be off by up to a quarter. A marked request leads to its trace.",
            exemplars=True,
        ),
        lines(
            "Requests: waiting, running",
            {
                "waiting {{role}}": f"sum by (role) (sidelight_engine_requests_waiting{{{ENGINE}}})",
                "running {{role}}": f"sum by (role) (sidelight_engine_requests_running{{{ENGINE}}})",
            },
            "Waiting rises with TTFT: the queue explains it.",
            unit="short",
        ),
        lines(
            "Requests / s: clients and engines",
            {
                "ended": total("sidelight_client_requests_total", WATCH),
                "engine": total("sidelight_engine_requests_finished_total", of_pool(ENGINE, "decode")),
                "meets --slo up to ({{bound}})": HEADROOM,
            },
            "Engine above ended: it serves requests whose clients send no spans here. Up to: the rate at which the "
            "objectives are crossed, predicted, with its 90 % interval; none where nothing can be predicted.",
            unit="reqps",
        ),
        by_both_clocks(SCOPE, 12),
    ),
)

RECEIVER = PanelRow(
    "The sidecar itself",
    (
        lines(
            "Spans and exports / s",
            {
                "spans": total("sidelight_receiver_spans_total", WATCH),
                "exports": total("sidelight_receiver_exports_total", WATCH),
                "spans that came again": total("sidelight_window_repeated_spans_total", WATCH),
                "health probes": total("sidelight_health_probes_total", WATCH),
                "exports of {{signal}}": total("sidelight_receiver_other_exports_total", WATCH, by="signal"),
            },
            "Nothing here while traffic goes on: the engine's or the gateway's exporter is off, or sends elsewhere.",
            unit="ops",
        ),
        lines(
            "Refused, dropped, evicted, not written / s",
            {
                "{{kind}}": total("sidelight_receiver_refused_total", WATCH, by="kind"),
                "not passed on": total("sidelight_receiver_forward_dropped_total", WATCH),
                "perhaps not passed on": total("sidelight_receiver_forward_unknown_total", WATCH),
                "{{signal}} not passed on": total("sidelight_receiver_other_dropped_total", WATCH, by="signal"),
                "passed on": total("sidelight_receiver_forwarded_total", WATCH),
                "evicted": total("sidelight_window_evicted_spans_total", WATCH),
                "connections cut": total("sidelight_receiver_cut_connections_total", WATCH),
                "scrapes not written": total("sidelight_scrapes_unwritten_total", WATCH),
            },
            "Anything but passed on is a loss, counted here and said once in the log. Turned away means that senders "
            "were asked to come again, off_clock that a machine's clock is over 10 minutes off: set it by NTP, its "
            "spans are used by nobody. Scrapes are not written where the disk is full. Logs and metrics are not read "
            "here: not passed on is no loss where nothing is forwarded.",
            unit="ops",
        ),
        lines(
            "Requests / s whose client and engine are in two traces",
            {
                "{{service}} {{how}}": total("sidelight_broken_traces_total", WATCH, by="service, how"),
                "in one trace": total("sidelight_whole_traces_total", WATCH),
            },
            "By the service at which traces break: it begins a new trace (new_trace), or is the last in the client's "
            "(not_passed_on; without a name, no gateway's span says where).",
            unit="reqps",
            width=8,
        ),
        lines(
            "Restarts, defects, CPU",
            {
                "receiver restarts": increase("sidelight_receiver_restarts_total", WATCH),
                "scraper restarts": increase("sidelight_scraper_restarts_total", WATCH),
                "defects": increase("sidelight_watch_errors_total", WATCH),
                "cores used": total("sidelight_watch_cpu_seconds_total", WATCH),
                "seconds behind": f"max (sidelight_watch_lag_seconds{{{WATCH}}})",
            },
            "A restart loses what had come and was not logged yet: senders that retry send it again. A defect is "
            "ours: its trace is in the log. Behind means that more spans come than are read: requests are counted "
            "later.",
            unit="short",
            width=8,
        ),
        scrapes(SCOPE, 8),
    ),
)

BOARD = Board(
    uid="sidelight-watch",
    title="Sidelight: watch",
    description="Where the TTFT of real traffic goes, by spans and scrapes, without any load of our own.",
    rows=(
        ANSWER_FIRST,
        breakdown_row(SCOPE, END_TO_END, NOT_BROKEN_DOWN, ENGINE_ONLY),
        ONE_AXIS,
        engine_row(SCOPE),
        distributions_row(SCOPE),
        gateways_row(SCOPE),
        RECEIVER,
    ),
    variables=(
        Variable("instance", "Sidecar", "label_values(sidelight_watch_cpu_seconds_total, instance)"),
        Variable("endpoint", "Engine endpoint", f"label_values(sidelight_engine_info{{{WATCH}}}, endpoint)"),
    ),
    phases='sidelight_run_info{instance=~"$instance", phase!="watch"}',
)
