"""A study as it may come of a throughput test, built by hand: every kind of plot, missing values, a void step."""

from __future__ import annotations

from sidelight.exporter.summary.verdict import MeanParts, PartShare, SidesFigure, StudyVerdict
from sidelight.methodology.study.findings import (
    Plot,
    PlotLine,
    ResultColumn,
    ResultQuantity,
    ResultTable,
    StudyFindings,
    SupportingNumber,
)
from sidelight.methodology.study.model import Parameters
from sidelight.methodology.study.result import Cost, Drift, Reproduction, StepRecord, StudyResult

ANSWER = (
    "The system sustains 5.92 requests/s (941 output tokens/s) of this workload.",
    "The 95 % interval is 5.85 to 5.98 requests/s, from one saturated step and four searched levels.",
    "The engine's seats limit it: 8 requests ran in 97 % of the scrapes while others waited.",
)
NOTES = ("The 90 % completion rule was counted in the steady window; it calls 6.2 requests/s sustainable.",)


def quantity(value: float | None, unit: str, *ends: float | None, missing: str = "") -> ResultQuantity:
    ci95 = (ends[0], ends[1]) if ends else None
    method = "" if missing else "order statistics over 1,204 requests"
    return ResultQuantity(value=value, unit=unit, ci95=ci95, n=1204, tau=3.2, method=method, missing=missing)


def step(
    number: int, label: str, load: str, level: float, *, stability: str | None = None, void: str = ""
) -> StepRecord:
    return StepRecord(
        number=number,
        run=f"steps/{number:04}-{label}",
        kind="saturate" if load == "closed" else "level",
        load=load,
        level=level,
        share=None,
        variant="",
        offered=None if load == "closed" else level,
        realised=level * 0.99,
        completed=min(level, 5.9),
        stability=stability,
        limit="seats" if stability == "growing" else None,
        void=void,
        window=None,
        requests=350,
        ok=349,
        seed=1234 + number,
        requests_sha256=f"{number:x}" * 64,
        blame="84 % of the TTFT above P99 was spent in the engine's queue." if stability == "growing" else "",
    )


def findings(tables: tuple[ResultTable, ...] = (), plots: tuple[Plot, ...] = ()) -> StudyFindings:
    return StudyFindings(
        answer=ANSWER,
        results=RESULTS,
        evidence=EVIDENCE,
        tables=(*TABLES, *tables),
        plots=(*PLOTS, *plots),
        notes=NOTES,
    )


RESULTS = {
    "max_output_tokens_per_s": quantity(941.23, "tokens/s", 930.1, 951.7),
    "max_requests_per_s": quantity(5.9213, "requests/s", 5.85, 5.98),
    "ttft_p50_ms": quantity(211.4, "ms", 198.2, 230.0),
    "ttft_p99_ms": quantity(1873.5, "ms", 1640.0, None),
    "tpot_p50_ms": quantity(9.31, "ms", 9.2, 9.4),
    "output_tokens_per_gpu_s": quantity(None, "tokens/s", missing="the number of accelerators was not declared"),
}
EVIDENCE = (
    SupportingNumber(claim=ANSWER[2], quantity="requests_running", run="steps/0002-closed-64", value=8.0),
    SupportingNumber(claim=ANSWER[2], quantity="requests_waiting", run="steps/0002-closed-64", value=55.25),
)
TABLES = (
    ResultTable(
        name="summary-results",
        title="Throughput Summary",
        columns=(
            ResultColumn(name="metric", title="Metric"),
            ResultColumn(name="value", title="Value"),
            ResultColumn(name="unit", title=""),
        ),
        rows=(
            ("Max Output Throughput", 941.23, "tok/s"),
            ("Max Request Throughput", 5.9213, "req/s"),
            ("Tokens per GPU-second", None, "tok/s/GPU"),
        ),
        note="Tokens are counted as they arrive within the steady window.",
    ),
    ResultTable(
        name="latency-at-maximum",
        title="Latency at Maximum Throughput",
        columns=(
            ResultColumn(name="metric", title="Metric"),
            *(ResultColumn(name=f"{label}_ms", title=f"{label.upper()} (ms)") for label in ("p50", "p95", "p99")),
        ),
        rows=(("TTFT", 211.4, 912.0, 1873.5), ("TPOT", 9.31, 11.2, 14.9), ("End-to-End", 1702.0, 3011.5, 4100.0)),
    ),
    ResultTable(
        name="levels",
        title="Every level",
        columns=(
            ResultColumn(name="offered_per_s", title="Offered (r/s)"),
            *(
                ResultColumn(name=f"{metric}_{label}_ms", title=f"{metric.upper()} {label.upper()} (ms)")
                for metric in ("ttft", "tpot", "e2e")
                for label in ("p50", "p95", "p99")
            ),
            ResultColumn(name="success", title="Success (%)"),
            ResultColumn(name="verdict", title="Queue"),
        ),
        rows=tuple(
            (rate, *(rate * 13.37 * (1 + at) for at in range(9)), 100.0, "stable" if rate < 6 else "growing")
            for rate in (2.0, 4.0, 5.5, 6.2)
        ),
    ),
)
X = (2.0, 4.0, 5.5, 6.2)
PLOTS = (
    Plot(
        name="throughput-latency",
        title="Throughput-latency curve",
        kind="line",
        x_title="achieved, output tokens/s",
        y_title="TTFT, ms",
        log_y=True,
        lines=(
            PlotLine(
                name="P50",
                x=(318.0, 640.0, 870.0, 940.0),
                y=(102.0, 121.0, 180.0, 830.0),
                low=(100.0, 117.0, 171.0, 700.0),
                high=(104.0, 126.0, 190.0, 990.0),
            ),
            PlotLine(
                name="P99",
                x=(318.0, 640.0, 870.0, 940.0),
                y=(142.0, 267.0, None, 3456.0),
                low=(130.0, 240.0, None, 2900.0),
                high=(160.0, 300.0, None, None),
            ),
        ),
    ),
    Plot(
        name="search-path",
        title="Search path",
        kind="marks",
        x_title="step",
        y_title="offered, requests/s",
        lines=(
            PlotLine(name="stable", x=(2.0, 4.0), y=(5.2, 5.8)),
            PlotLine(name="growing", x=(3.0,), y=(6.2,)),
        ),
    ),
    Plot(
        name="parts",
        title="TTFT by part over load",
        kind="stack",
        x_title="offered, requests/s",
        y_title="mean, ms",
        lines=(
            PlotLine(name="network", x=X, y=(1.0, 1.1, 1.2, 1.3)),
            PlotLine(name="queue", x=X, y=(2.0, 20.0, 120.0, 900.0)),
            PlotLine(name="prefill", x=X, y=(80.0, 85.0, 90.0, 91.0)),
        ),
    ),
    Plot(
        name="cdf",
        title="Distribution of the TTFT",
        kind="steps",
        x_title="TTFT, ms",
        y_title="share of requests",
        log_x=True,
        lines=(
            PlotLine(
                name="TTFT", x=tuple(80.0 * 1.003**at for at in range(1500)), y=tuple(at / 1500 for at in range(1500))
            ),
        ),
    ),
)


PARTS = [
    PartShare(part="queue", label="queue", mean_ms=900.0, share=0.9, known_from="estimate"),
    PartShare(part="prefill", label="prefill", mean_ms=100.0, share=0.1, known_from="engine spans"),
]
VERDICT = StudyVerdict(
    state="limit_found",
    cause="queue",
    headline="Stable to 5.8 requests/s; saturated at 6.1 requests/s.",
    figures=[SidesFigure(name="served", label="served", value=5.8, text="5.8 of 5.8 requests/s")],
    bars=[
        MeanParts(label="Mean TTFT at 6.2 requests/s, where requests pile up: 1,000 ms", mean_ms=1000.0, parts=PARTS)
    ],
    why="Requests waited while it ran 16 and no more.",
    do="Add a replica.",
)


def result(**others: object) -> StudyResult:
    origin = Reproduction(
        command=["sidelight", "test", "throughput", "http://127.0.0.1:8000", "--scale", "short"],
        model="sim-llama",
        versions={"sidelight": "0.9", "engine": "vllm 0.11.0"},
        workload="synthetic-uniform",
        tokenizer="cl100k_base",
        options={"url": ["http://127.0.0.1:8000"], "slo": "ttft_p99<500ms"},
        started_at="2026-11-22T17:00:00.000Z",
        ended_at="2026-11-22T17:08:20.000Z",
        warm_up="102 requests before the first step.",
    )
    steps = [
        step(1, "closed-32", "closed", 32.0),
        step(2, "closed-64", "closed", 64.0),
        step(3, "open-5.2", "open", 5.2, stability="stable"),
        step(4, "open-6.2", "open", 6.2, stability="growing"),
        step(5, "open-5.8", "open", 5.8, void="the load generator is not to be trusted with TTFT"),
        step(6, "open-5.8", "open", 5.8, stability="stable"),
    ]
    fields = {
        "study_id": "20261122T170000-throughput",
        "test": "throughput",
        "scale": "short",
        "status": "complete",
        "reason": "the interval is narrow enough",
        "sut": {},
        "parameters": Parameters(duration=60.0, slo="ttft_p99<500ms", levels=(0.25, 0.5)),
        "seed": 42,
        "steps": steps,
        "verdict": VERDICT,
        "answer": list(ANSWER),
        "results": RESULTS,
        "evidence": list(EVIDENCE),
        "drift": Drift(
            verdict="none",
            sentence="The first level, repeated at the end, gave 0.99 of its throughput: no drift is seen.",
        ),
        "cost": Cost(
            steps=6, seconds=500.0, load_seconds=360.0, requests=2100, input_tokens=670000, output_tokens=330000
        ),
        "notes": list(NOTES),
        "passed": None,
        "reproduction": origin,
    }
    return StudyResult(**(fields | others))
