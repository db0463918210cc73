"""A sweep: options of `run` over several values, each combination several times, as one long table.

Beside it the tables of those who sweep too: siclait's eight metrics a load level, asiai's medians and spread over the
runs of a cell (Benchmark Metrics Specification 0.4.0), and exo's bench's JSON.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import to_builtins as builtins
from msgspec.structs import replace

from sidelight.loadgen.plan.rates import pace_of
from sidelight.loadgen.requests.other_benchmarks.asiai import asiai_columns, pooled_std, stability
from sidelight.loadgen.requests.other_benchmarks.exo import generation_tps, prefill_tps
from sidelight.loadgen.requests.other_benchmarks.siclait import PopulationStatistics, Siclait, siclait
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.methodology.study.findings import (
    Cell,
    Plot,
    PlotLine,
    ResultQuantity,
    ResultTable,
    StudyFindings,
    plot,
    table,
)
from sidelight.methodology.study.model import (
    Done,
    Finished,
    Parameters,
    Procedure,
    Reader,
    Step,
    StepData,
    StudySettings,
)
from sidelight.methodology.study.planning import content_seed, counting
from sidelight.methodology.study.quantities import number, slug
from sidelight.methodology.study.samples import FAMILY, RATES, TIMES, RunSample, sample
from sidelight.rundir.columns import Floats, take
from sidelight.rundir.printable.numbers import count_of, figure
from sidelight.rundir.stats import Missing, finite, known

CELL = "cell"
_LETTER = Parameters(duration=60.0, repeat=3, order="random", vary={})
UNKNOWN_TO_A_CLIENT = {
    "peak_memory_usage": "only the server knows its memory",
    "output_text_preview": "replies' text is not kept in tables; the raw log has it",
    "placement": "only the cluster knows where a model is placed",
    "download_duration_s": "only the cluster knows",
    "cluster": "no client can see the cluster's state",
}
SICLAIT = {"mean": "Mean", "min": "Min", "max": "Max", "p99": "P99", "p90": "P90", "p75": "P75"}
SICLAIT_ROWS = {
    "ttft_ms": "Time to first token, ms",
    "request_latency_ms": "Request latency, ms",
    "itl_ms": "Inter-token latency, ms",
    "request_output_tps": "Output token throughput per request, tokens/s",
    "input_tokens": "Input sequence length, tokens",
    "output_tokens": "Output sequence length, tokens",
    "output_tps": "Output token throughput, tokens/s",
    "requests_per_s": "Request throughput, requests/s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A run of a sweep: its cell, which repeat it is from 1 on, what it showed, and others' metrics."""

    cell: tuple[str, ...]
    repeat: int
    sample: RunSample
    siclait: Siclait
    speed: float
    exo: Sequence[Mapping[str, Any]]
    power_watts: float


def cells(asked: StudySettings) -> list[dict[str, int | float | str]]:
    """Return the combinations of the values that are varied, the last option's fastest."""
    vary = asked.parameters.vary or {}
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the next run: each repeat has all cells, in seeded or written order."""
    every, repeats = cells(asked), asked.parameters.repeat or 1
    if not (asked.parameters.vary or {}):
        return Done(reason="nothing was varied", complete=False)
    ended = {each.step.seed for each in finished}
    at = next((at for at in range(len(every) * repeats) if content_seed(asked, at + 1) not in ended), None)
    if at is None:
        return Done(reason=f"{count_of(len(every), 'combination')} measured, each {count_of(repeats, 'time')}")
    repeat, place = divmod(at, len(every))
    order = list(range(len(every)))
    if asked.parameters.order != "ascending":
        order = np.random.default_rng([asked.seed, repeat]).permutation(len(every)).tolist()
    cell = every[order[place]]
    settings = {**builtins(asked.parameters), **cell}
    rate, concurrency = settings.get("rate"), settings.get("concurrency")
    is_closed = rate is None and concurrency is not None
    label = "-".join(f"{name.partition('_')[0]}-{value}" for name, value in cell.items())
    return Step(
        kind=CELL,
        label="".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in f"{label}-{repeat + 1}"),
        load="closed" if is_closed else "open",
        level=float((concurrency if is_closed else pace_of(rate).per_s) or 1.0),
        duration=_number(cell.get("duration"), asked.parameters.duration),
        requests=None if (count := _number(cell.get("requests"), asked.parameters.requests)) is None else round(count),
        seed=content_seed(asked, at + 1),
        options=dict(cell),
    )


def _number(varied: float | str | None, stated: float | None) -> float | None:
    return stated if varied is None else float(varied)


def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Return one row a run, and the tables of siclait, asiai and exo."""
    names = tuple(asked.parameters.vary or {})
    counts: dict[tuple[str, ...], int] = {}
    runs = []
    for each in counting(finished):
        cell = tuple(str(each.step.options.get(name)) for name in names)
        counts[cell] = counts.get(cell, 0) + 1
        runs.append(_measured(each, read(each), cell, counts[cell]))
    spread = _spread(runs)
    best = max(runs, key=lambda run: run.sample.metrics[RATES[0].name], default=None)
    answer = [f"{len(runs)} runs of {len(counts)} combinations of {', '.join(names)} were measured."]
    if not runs:
        answer = [f"Nothing is known of the combinations of {', '.join(names)}: no run counts."]
    if best is not None and not math.isnan(peak := best.sample.metrics[RATES[0].name]):
        where = ", ".join(f"{name} {value}" for name, value in zip(names, best.cell, strict=True))
        answer.insert(0, f"Most output tokens/s ({figure(peak)}) came at {where}.")
    return StudyFindings(
        answer=tuple(answer),
        results={"std_dev_tok_s": spread},
        tables=(
            _long_table(names, runs),
            _asiai_table(names, runs, spread),
            *(_siclait_table(names, cell, runs) for cell in counts),
        ),
        plots=tuple(_plot(names, runs, metric.name, metric.title) for metric in (TIMES[0], RATES[0])),
        documents={"exo": _exo(runs)},
    )


def _measured(finished: Finished, data: StepData, cell: tuple[str, ...], repeat: int) -> _Measured:
    ok = take(data.requests, data.requests.status == "ok")
    speeds = known(asiai_columns(ok).tok_per_sec)
    watts = data.about.get("gpu_power_watts")
    return _Measured(
        cell=cell,
        repeat=repeat,
        sample=sample(finished, data, data.doubts),
        siclait=siclait(ok),
        speed=float(np.median(speeds)) if len(speeds) else math.nan,
        exo=_exo_rows(ok, finished, data, repeat),
        power_watts=math.nan if watts is None else float(watts),
    )


def _long_table(names: Sequence[str], runs: Sequence[_Measured]) -> ResultTable:
    rows = []
    for run in runs:
        outcome = run.sample.finished.outcome
        metrics = (finite(run.sample.metrics[metric.name]) for metric in FAMILY)
        counts = (run.repeat, outcome.sent, outcome.ok)
        rows.append((run.sample.finished.run, *run.cell, *counts, *metrics, outcome.verdict))
    titles = {"run": "Run", **{name: name for name in names}, "repeat": "Repeat", "sent": "Sent", "ok": "Ok"}
    titles |= {metric.name: metric.title for metric in FAMILY} | {"stability": "Load"}
    return table("sweep", "Runs", titles, rows, digits=dict.fromkeys(("repeat", "sent", "ok")))


def _spread(runs: Sequence[_Measured]) -> ResultQuantity:
    """Return M8 of asiai: the root of the mean, over cells, of the variance of their runs' speeds."""
    groups = np.array(["\0".join(run.cell) for run in runs], dtype=object)
    value = pooled_std(np.array([run.speed for run in runs]), groups) if runs else Missing("no run has ended")
    method = "asiai's M8: pooled over the runs of the same combination; the speed of a run is the median of its replies"
    if isinstance(value, Missing):
        return ResultQuantity(
            value=None, unit="tokens/s", missing="no combination has two runs that count", method=method
        )
    return number(value, "tokens/s", n=len(runs), method=method)


def _asiai_table(names: Sequence[str], runs: Sequence[_Measured], spread: ResultQuantity) -> ResultTable:
    rows: list[tuple[Cell, ...]] = []
    for cell in dict.fromkeys(run.cell for run in runs):
        of_cell = [run for run in runs if run.cell == cell]
        speeds = known([run.speed for run in of_cell])
        watts = known([run.power_watts for run in of_cell])
        if not len(speeds):
            rows.append((*cell, len(of_cell), *[None] * 7))
            continue
        middle, mean, deviation = float(np.median(speeds)), float(speeds.mean()), float(speeds.std())
        cv = 100 * deviation / mean if len(speeds) > 1 else None
        power = float(watts.mean()) if len(watts) else None
        per_watt = mean / power if power else None
        spread_class = None if cv is None else stability(cv)
        rows.append((*cell, len(of_cell), middle, mean, deviation, cv, spread_class, power, per_watt))
    pooled = "not known" if spread.value is None else f"{figure(spread.value)} tokens/s"
    titles = {name: name for name in names} | {
        "runs": "Runs", "tok_per_sec_median": "M1, median", "tok_per_sec_mean": "mean", "std_dev": "sd of runs",
        "cv_percent": "CV, %", "stability": "Class", "power_watts": "M6, W", "tok_per_sec_per_watt": "M7",
    }  # fmt: skip
    note = f"M8, pooled over the runs of each combination: {pooled}. A power that is missing was not measured."
    title = "Generation speed by asiai's specification, the median first"
    return table("asiai", title, titles, rows, note, {"runs": None})


def _siclait_table(names: Sequence[str], cell: tuple[str, ...], runs: Sequence[_Measured]) -> ResultTable:
    """Return the table of eight metrics from the combination's run of median throughput."""
    of_cell = sorted((run for run in runs if run.cell == cell), key=lambda run: run.siclait.output_tps or 0.0)
    metrics = of_cell[len(of_cell) // 2].siclait
    rows = []
    for name, title in SICLAIT_ROWS.items():
        value = getattr(metrics, name)
        if isinstance(value, PopulationStatistics):
            rows.append((title, *(getattr(value, column) for column in SICLAIT)))
        else:
            rows.append((title, value, *[None] * (len(SICLAIT) - 1)))
    where = ", ".join(f"{name} {value}" for name, value in zip(names, cell, strict=True))
    titles = {"metric": "Metric", **SICLAIT}
    note = "" if len(of_cell) == 1 else f"Of {len(of_cell)} runs, the one of median throughput."
    return table(f"siclait-{slug('-'.join(cell), 'cell')}", f"siclait's metrics at {where}", titles, rows, note)


def _exo_rows(ok: RequestLog, finished: Finished, data: StepData, repeat: int) -> list[dict[str, Any]]:
    prompt, generation = prefill_tps(ok)[0], generation_tps(ok)[0]
    asked_ns = np.where(ok.dispatch_ns >= 0, ok.dispatch_ns, ok.submit_ns)
    elapsed_s: Floats = (ok.end_ns - asked_ns) / 1e9
    concurrency = int(finished.step.level) if finished.step.load == "closed" else None
    model = (data.about.get("target") or {}).get("model")
    return [
        {
            "elapsed_s": finite(elapsed_s[row]),
            "output_text_preview": None,
            "stats": {
                "prompt_tps": finite(prompt[row]),
                "generation_tps": finite(generation[row]),
                "prompt_tokens": int(ok.input_tokens[row]),
                "generation_tokens": int(ok.output_tokens[row]),
                "peak_memory_usage": None,
            },
            "model_id": model,
            "placement_sharding": None,
            "placement_instance_meta": None,
            "placement_nodes": None,
            "pp_tokens": int(ok.input_tokens[row]),
            "tg": int(ok.max_tokens[row]),
            "repeat_index": repeat - 1,
            "concurrency": concurrency,
            "concurrent_index": None if concurrency is None else row % concurrency,
            "download_duration_s": None,
        }
        for row in range(len(ok))
    ]


def _exo(runs: Sequence[_Measured]) -> dict[str, Any]:
    watts = {run.sample.finished.run: finite(run.power_watts) for run in runs}
    return {
        "runs": [row for run in runs for row in run.exo],
        "cluster": None,
        "system_metrics": {"mean_gpu_power_watts": watts} if any(watts.values()) else None,
        "missing": UNKNOWN_TO_A_CLIENT,
    }


def _plot(names: Sequence[str], runs: Sequence[_Measured], metric: str, title: str) -> Plot:
    """Return a plot of a metric over the last varied option. It has a line for each combination of the others."""
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for run in runs:
        others = ", ".join(f"{name} {value}" for name, value in zip(names[:-1], run.cell[:-1], strict=True))
        try:
            x = float(run.cell[-1])
        except ValueError:
            x = float([each.cell[-1] for each in runs].index(run.cell[-1]))
        lines.setdefault(others or title, []).append((x, finite(run.sample.metrics[metric])))
    over = names[-1] if names else ""
    ordered = {name: sorted(points, key=lambda point: point[0]) for name, points in lines.items()}
    drawn = (PlotLine(name=name, x=tuple(x for x, _ in points), y=tuple(y for _, y in points))
             for name, points in ordered.items())  # fmt: skip
    heading = f"{title} over {over}" if over else title
    return plot(f"sweep-{metric.replace('_', '-')}", heading, (over, title), drawn, kind="marks")


SWEEP = Procedure(
    name="sweep",
    of_draft=False,
    objective="Measure combinations of options, each several times.",
    workload="synthetic-uniform",
    presets={"letter": _LETTER, "short": replace(_LETTER, duration=10.0)},
    next_step=next_step,
    findings=findings,
    independent=(CELL,),
    optional=("rate", "concurrency", "requests", "vary"),
)
