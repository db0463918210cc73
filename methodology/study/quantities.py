"""Percentiles and means as results and tables of a test state them: with intervals, or why they are missing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.statistics import intervals
from sidelight.correlator.statistics.intervals import QuantileInterval
from sidelight.methodology.study.findings import Cell, Plot, PlotLine, ResultQuantity, ResultTable, plot, table
from sidelight.methodology.study.model import Finished, Outcome
from sidelight.methodology.study.outcome import KIND_OF, QUANTILES
from sidelight.rundir.columns import Floats
from sidelight.rundir.printable.numbers import count_of, figure

LABELS = {name: "P" + name[1:].replace("_", ".") for name in QUANTILES}
UNKNOWN = intervals.quantile([], 0.5)
BOUNDS = "bounds, not an interval"
_POINTS = 200  # of a cumulative distribution
LEAST_BEYOND = 10  # values beyond a percentile, from which on it is stated: the draft's 1,000 of a P99


def percentile(
    interval: QuantileInterval, name: str, n: int, *, level: float = 0.95, least: int = LEAST_BEYOND
) -> ResultQuantity:
    """Return a percentile of n times; of too few only the end of its interval that they know, and the sample's.

    least  values that must lie beyond it: 10, unless the draft asks for percentiles of fewer
    """
    beyond = n * min(QUANTILES[name], 1 - QUANTILES[name])
    missing = "" if n else "there is no value"
    if n and round(beyond, 6) < least:
        needed = math.ceil(round(least / (beyond / n), 6))
        missing = f"too few for {LABELS[name]}: {count_of(n, 'value')} of {needed:,} that are needed"
    return ResultQuantity(
        value=None if missing else interval.estimate,
        unit="ms",
        ci95=(interval.low, interval.high),
        n=n,
        tau=interval.tau,
        method=f"order statistics, {100 * level:g} % of n / tau independent values",
        missing=missing,
        sample=interval.estimate,
    )


def percentiles(
    values: Floats,
    of: str,
    names: tuple[str, ...] = tuple(QUANTILES),
    *,
    least: int = LEAST_BEYOND,
    of_itself: bool = False,
) -> dict[str, ResultQuantity]:
    """Return percentiles of times [n] in order, NaN left out, by result name: of `of`, with {} for the percentile."""
    values = values[np.isfinite(values)]
    estimates = intervals.quantiles(values, [QUANTILES[name] for name in names], of_itself=of_itself)
    return {
        of.format(name): percentile(interval, name, len(values), least=least)
        for name, interval in zip(names, estimates, strict=True)
    }


def mean(values: Floats, *, unit: str = "ms") -> ResultQuantity:
    """Return the mean of values [n] in order, those that are not finite left out."""
    values = values[np.isfinite(values)]
    if not len(values):
        return ResultQuantity(value=None, unit=unit, n=0, missing="there is no value")
    middle, low, high = intervals.mean(values)
    return ResultQuantity(
        value=middle, unit=unit, ci95=(low, high), n=len(values), method="Student's t, n / tau values"
    )


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share."""
    from scipy.stats import binomtest  # noqa: PLC0415  half a second, and most commands need none of SciPy

    interval = binomtest(count, max(total, 1)).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def latency(outcome: Outcome, metric: str, name: str) -> QuantileInterval:
    """Return a latency percentile of a step, in ms; else that of nothing.

    The metric is ttft, tpot, e2e or itl, or a part of the TTFT.
    """
    return outcome.percentiles.get(f"{metric}_ms", {}).get(name, UNKNOWN)


def latency_result(outcome: Outcome, metric: str, name: str) -> ResultQuantity:
    """Return a latency percentile as a result; of a time that is missing or cannot be trusted, why."""
    interval = latency(outcome, metric, name)
    if interval.estimate is None:
        reason = outcome.doubts.get(KIND_OF.get(metric, "load"), "no request has it")
        return ResultQuantity(value=None, unit="ms", ci95=(None, None), missing=reason.rstrip("."))
    window_s = outcome.window.duration_s if outcome.window else 0
    of = percentile(interval, name, round((outcome.realised_per_s or 0) * window_s))
    median_ms, (low, high) = latency(outcome, metric, "p50").estimate, of.ends
    is_empty = low is not None and median_ms is not None and low < median_ms
    return replace(of, ci95=(None, high)) if is_empty and name != "p50" else of  # a bound that the median exceeds


def reported_times(each: Finished | None, of: str = "", missing: str = "no level counts") -> dict[str, ResultQuantity]:
    """Return a step's TTFT and TPOT for the minimum report, with its load and number.

    of  which of the levels that is, in words
    """
    keys = {f"{metric}_{name}_ms": (metric, name) for metric in ("ttft", "tpot") for name in ("p50", "p99")}
    if each is None:
        return unknown(missing, "ms", *keys)
    at = ", ".join(filter(None, (each.step.load_words, of, f"step {each.number}")))
    return {key: replace(latency_result(each.outcome, *time), at=at) for key, time in keys.items()}


def latency_line(steps: Sequence[Finished], x: Sequence[float], metric: str, name: str) -> PlotLine:
    """Return a percentile of several steps, with its intervals, over x."""
    known = [latency(each.outcome, metric, name) for each in steps]
    return PlotLine(
        name=LABELS[name],
        x=tuple(x),
        y=tuple(each.estimate for each in known),
        low=tuple(each.low for each in known),
        high=tuple(each.high for each in known),
    )


def number(
    value: float | None,
    unit: str,
    *,
    ci95: tuple[float | None, float | None] | None = None,
    n: int | None = None,
    missing: str = "",
    method: str = "",
) -> ResultQuantity:
    """Return a result; `missing` where it is None or not finite."""
    if value is None or not np.isfinite(value):
        return ResultQuantity(value=None, unit=unit, n=n, missing=missing or "not known")
    return ResultQuantity(value=float(value), unit=unit, ci95=ci95, n=n, method=method)


def unknown(reason: str, unit: str, *names: str) -> dict[str, ResultQuantity]:
    """Return missing results by their names."""
    return dict.fromkeys(names, number(None, unit, missing=reason))


def served_tokens(outcome: Outcome, at: str = "") -> ResultQuantity:
    """Return the output tokens/s of a step's window."""
    ci95 = outcome.output_tokens_ci95
    return replace(number(outcome.output_tokens_per_s, "tokens/s", ci95=ci95, method="batch means"), at=at)


def scaled(quantity: ResultQuantity, factor: float, unit: str) -> ResultQuantity:
    """Return a result, and its interval, in another unit."""
    low, high = (None if end is None else factor * end for end in quantity.ends)
    value = None if quantity.value is None else factor * quantity.value
    return replace(quantity, value=value, unit=unit, ci95=(low, high) if quantity.ci95 else None)


def in_percent(share: ResultQuantity) -> str:
    """Return a share in percent with its interval, or only its bounds if unknown."""
    percent = scaled(share, 100, "%")
    if percent.value is not None:
        return f"{figure(percent.value)} %{percent.interval()}"
    low, high = percent.ends
    return "an unknown share" if low is None or high is None else f"between {figure(low)} and {figure(high)} %"


def slug(name: str, otherwise: str) -> str:
    """Return a name as those of tables and steps are spelt: a-z, 0-9 and single dashes; `otherwise` if none is left."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or otherwise


def metric_table(
    name: str, title: str, titles: Mapping[str, str], results: Mapping[str, ResultQuantity], note: str = ""
) -> ResultTable:
    """Return a table with one row for each existing result. `titles` are the headings by the results' names."""
    heads = {"metric": "Metric", "value": "Value", "unit": "", "ci95_low": "95 % from", "ci95_high": "to"}
    rows = [(head, (of := results[key]).shown, of.unit, *of.ends) for key, head in titles.items() if key in results]
    return table(name, title, heads, rows, note)


def cells(quantities: Mapping[str, ResultQuantity], *names: str) -> tuple[Cell, ...]:
    """Return the values of results, None for one that is not there."""
    return tuple(quantities[name].shown if name in quantities else None for name in names)


def cumulative(name: str, values: Floats) -> PlotLine:
    """Return the cumulative distribution of values as a line, in at most 250 points."""
    known = np.sort(values[np.isfinite(values)])
    last = max(0, len(known) - 1)
    # Evenly, and in the tail the closer the nearer to its end.
    places = [*np.linspace(0, last, _POINTS), *(last - np.geomspace(1, 0.1 * last + 1, _POINTS // 4) + 1)]
    at = np.unique(np.clip(places, 0, last).astype(np.int64))
    return PlotLine(name=name, x=tuple(known[at].tolist()), y=tuple(((at + 1) / len(known)).tolist()))


def grid(
    name: str,
    title: str,
    rows: Mapping[str, str],
    columns: Mapping[str, str],
    results: Mapping[str, ResultQuantity],
    note: str = "",
) -> ResultTable:
    """Return results as a table: of the row `suffix: title` and the column `key: title` that of the name key_suffix.

    The first of the columns is the rows' own.
    """
    keys = list(columns)[1:]

    def cell(key: str, suffix: str) -> Cell:
        quantity = results.get(f"{key}_{suffix}")
        if quantity is None or quantity.method != BOUNDS or quantity.ci95 is None:
            return quantity.shown if quantity else None
        return " to ".join("?" if end is None else figure(end) for end in quantity.ci95)

    cells = ((heading, *(cell(key, suffix) for key in keys)) for suffix, heading in rows.items())
    return table(name, title, columns, cells, note)


def plot_cumulative(
    name: str,
    title: str,
    values: Mapping[str, Floats],
    x_title: str = "TTFT (ms)",
    y_title: str = "share of the requests",
) -> tuple[Plot, ...]:
    """Return the cumulative distributions of times as a plot, none where there are none."""
    lines = tuple(cumulative(label, of_label) for label, of_label in values.items() if np.isfinite(of_label).any())
    return (plot(name, title, (x_title, y_title), lines, log_x=True),) if lines else ()
