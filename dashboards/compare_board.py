"""Dashboard *Compare*: a line a run of the range shown, beside each other and against one that is chosen as base."""

from __future__ import annotations

from collections.abc import Mapping

from panels import TTFT_NAMES, Board, PanelRow, Variable, bars, client_quantile, last, table
from run_board import FAILED, LATE, MODEL, TTFT_MEAN, rate

from sidelight.correlator.parts import LABELS

RUNS = 'run_id=~"$run", run_id!=""'  # a watch's series bear none
BASE = 'run_id="$base"'
ABOUT = "run_id, model, workload, engine, version"
OPEN_RUN = (
    "Open this run",
    "/d/sidelight-run?var-run=${__data.fields.Run}&${datasource:queryparam}&${__url_time_range}",
)


def whole_parts(labels: str) -> dict[str, str]:
    """Return the PromQL of each part's mean over a run's requests with a breakdown."""
    return {LABELS[part]: last(TTFT_MEAN, f'{labels}, part="{part}"', "run_id") for part in TTFT_NAMES}


def numbers(labels: str) -> dict[str, str]:
    """Return the PromQL of the compared numbers of runs, by column."""
    return {
        "TTFT p50": client_quantile("ttft", 0.5, labels, "run_id"),
        "TTFT p90": client_quantile("ttft", 0.9, labels, "run_id"),
        "TTFT p99": client_quantile("ttft", 0.99, labels, "run_id"),
        "TPOT p50": client_quantile("time_per_output_token", 0.5, labels, "run_id"),
        "E2E p99": client_quantile("e2e_latency", 0.99, labels, "run_id"),
        "Offered / s": rate("offered", "run_id", labels),
        "Ended ok / s": rate("requests", "run_id", labels),
        "Goodput / s": rate("goodput", "run_id", labels),
        "Output tokens / s": rate("output_tokens", "run_id", labels),
    }


def change(expression: str, base: str) -> str:
    """Return the PromQL of a value's relative difference to that of the base run."""
    return f"{expression} / on () group_left () (max ({base}) > 0) - 1"


def changes(values: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    return {column: change(expression, base[column]) for column, expression in values.items()}


RATES = {column: "short" for column in numbers(RUNS) if column.endswith("/ s")}
LATENESS = "sidelight_generator_schedule_lateness_quantile_seconds"
TTFT_P99 = 'of="ttft", quantile="0.99"'
ENDED = "sidelight_client_requests_total"

SIDE_BY_SIDE = PanelRow(
    "Runs of the range shown",
    (
        table(
            "Runs",
            {
                "About": f"topk by (run_id) (1, count by ({ABOUT}) (count_over_time(sidelight_run_info{{{RUNS}, "
                'phase=~"measure|done"}[$__range])))',
                **numbers(RUNS),
                "Failed": f"""({last(ENDED, f'{RUNS}, status=~"failed|refused"', "run_id", "sum")} """
                f"/ ({last(ENDED, RUNS, 'run_id', 'sum')} > 0))",
                "Lateness p99": last(LATENESS, f'{RUNS}, quantile="0.99"', "run_id"),
                "Objectives met": last("sidelight_slo_met", RUNS, "run_id", "min"),
                "Load sustained": last("sidelight_run_verdict", f'{RUNS}, of="load"', "run_id", "min"),
                "Generator trusted": last("sidelight_run_verdict", f'{RUNS}, of="generator"', "run_id", "min"),
            },
            "Each run as its report has it, or so far. Compare runs of one workload only. Rates are over the measured "
            "phase, the drain included, but for what was offered. The last two are "
            " the report's verdicts, of a run that has ended; a run without one has no verdict.",
            units=RATES | {"Failed": "percentunit"},
            coloured={"Lateness p99": LATE, "Failed": FAILED},
            verdicts=("Objectives met", "Load sustained", "Generator trusted"),
            link=OPEN_RUN,
        ),
        bars(
            "Mean TTFT by part",
            whole_parts(RUNS),
            "A bar a run: where the wait of each was. Parts add up to the mean TTFT of the requests that are broken "
            "down. The part that grows from run to run is the one to look at.",
            width=24,
        ),
    ),
)

AGAINST_BASE = PanelRow(
    "Change against the base run ($base)",
    (
        table(
            "Change of latencies and rates",
            changes(numbers(RUNS), numbers(BASE)),
            "How much more than the base run, in per cent of it: above zero is slower for latencies, and more for "
            "rates. A small change may be chance: `sidelight compare` says how sure it is.",
            unit="percentunit",
            link=OPEN_RUN,
        ),
        table(
            "Change of each part's mean",
            {
                part: f"{expression} - on () group_left () max ({whole_parts(BASE)[part]})"
                for part, expression in whole_parts(RUNS).items()
            },
            "How much longer than in the base run, in seconds: they add up to the change of the mean TTFT.",
            width=24,
            link=OPEN_RUN,
        ),
    ),
)

BOARD = Board(
    uid="sidelight-compare",
    title="Sidelight: compare runs",
    description="Load runs beside each other: latencies, where the TTFT went, rates, and the change against one run.",
    rows=(SIDE_BY_SIDE, AGAINST_BASE),
    variables=(
        MODEL,
        Variable("run", "Runs", 'label_values(sidelight_run_info{phase!="watch", model=~"$model"}, run_id)'),
        Variable(
            "base",
            "Base run",
            'label_values(sidelight_run_info{phase!="watch", model=~"$model"}, run_id)',
            several=False,
        ),
    ),
    phases=f"sidelight_run_info{{{RUNS}}}",
)
