"""Samples of whole runs, one value per metric, for comparisons and sweeps; and verdicts on their differences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.estimate.table import Attribution, nothing
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.report.verdict import described_parts, part_shares
from sidelight.exporter.summary.breakdown import Breakdown, Explained, group
from sidelight.exporter.summary.verdict import PartShare
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.self_check.stated_error import UNUSABLE_RATIO
from sidelight.methodology.compare import LEAST_RUNS, Comparison, of_family, paired, unpaired
from sidelight.methodology.study.model import Finished, Kind, StepData
from sidelight.methodology.study.outcome import KIND_OF, trusted
from sidelight.rundir.printable.numbers import figure
from sidelight.rundir.stats import known


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMetric:
    """A number of each run that is compared; `kind` is what of the load generator it rests on, beside the load."""

    name: str
    title: str
    unit: str
    lower_is_better: bool = True
    kind: Kind | None = None


_TIMES = {"ttft_ms": (50, 90, 99), "tpot_ms": (50, 99), "e2e_ms": (50, 99)}
TIMES = tuple(
    ComparedMetric(
        name=f"{time[:-3]}_p{percent}_ms",
        title=f"{time[:-3].upper()} P{percent}",
        unit="ms",
        kind=KIND_OF.get(time[:-3]),
    )
    for time, percents in _TIMES.items()
    for percent in percents
)
RATES = (
    ComparedMetric(name="output_tokens_per_s", title="Output tokens/s", unit="tokens/s", lower_is_better=False),
    ComparedMetric(
        name="completed_requests_per_s", title="Completed requests/s", unit="requests/s", lower_is_better=False
    ),
)
FAMILY = (*TIMES, *RATES)
LEVEL = 0.95
SAME_SUCCESS = 0.01  # success rates that differ by less are taken as the same


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSample:
    """Sample of a run: a value a metric, the mean of each part of its TTFT, and its success rate; NaN where unknown.

    A request that failed took for ever: a percentile that falls on one is infinite. `error_ms`: as of StepData. `parts`
    are those of the mean with their sources.
    """

    finished: Finished
    metrics: Mapping[str, float]
    parts_ms: Mapping[str, float]
    success: float
    error_ms: Mapping[Kind, float] = field(default_factory=dict)
    parts: Sequence[PartShare] = ()


def sample(finished: Finished, data: StepData, doubts: Collection[Kind]) -> RunSample:
    """Return the sample of one run, without the times that rest on doubted data."""
    outcome, requests = finished.outcome, request_metrics(data.requests)
    ok = data.requests.status == "ok"
    values = {
        "output_tokens_per_s": math.nan if outcome.output_tokens_per_s is None else outcome.output_tokens_per_s,
        "completed_requests_per_s": math.nan if outcome.completed_per_s is None else outcome.completed_per_s,
    }
    for name, percents in _TIMES.items():
        times_ms = trusted(name, np.where(ok, getattr(requests, name), np.inf), doubts)
        ascending = np.sort(times_ms[~np.isnan(times_ms)])
        for percent in percents:
            place = math.ceil(percent / 100 * len(ascending)) - 1
            value = float(ascending[place]) if len(ascending) else math.nan
            values[f"{name.removesuffix('_ms')}_p{percent}_ms"] = value
    covered = data.parts.covered
    means_ms = {part.name: 1e3 * np.nan_to_num(data.parts.seconds(part)[covered]) for part in TTFT_PARTS}
    return RunSample(
        finished=finished,
        metrics=values,
        parts_ms={name: float(values_ms.mean()) for name, values_ms in means_ms.items()} if covered.any() else {},
        success=outcome.ok / outcome.sent if outcome.sent else math.nan,
        error_ms=data.error_ms,
        parts=part_shares(breakdown := breakdown_of(data.parts), described_parts(breakdown, TTFT_PARTS, "ttft")),
    )


def breakdown_of(parts: Parts) -> Breakdown:
    """Return the breakdown of a step.

    Each part's error is the median, over requests, of that of the least certain one: a single request with next to no
    evidence makes no mean uncertain.
    """
    known_s = known(parts.error_s)
    error_s = np.full(len(parts), np.median(known_s) if len(known_s) else np.nan)
    columns = (column.name for column in fields(Attribution) if column.name.endswith("_sd_s"))
    errors_s: dict[str, Any] = dict.fromkeys(columns, error_s)
    errors = replace(nothing(len(parts), ""), **errors_s)
    return group(Explained(parts=parts, attribution=errors, clocks={}), np.ones(len(parts), np.bool_)).breakdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A configuration beside the first: runs of both, and by metric what is concluded."""

    first: str
    other: str
    before: Sequence[RunSample]
    after: Sequence[RunSample]
    is_paired: bool  # the k-th runs of both
    concluded: Mapping[str, Comparison]


def against(samples: Sequence[RunSample], first: str, other: str, margin: float, *, in_turn: bool = False) -> Against:
    """Conclude on the differences between two configurations' runs, over all metrics.

    in_turn  they were measured in pairs of equal seeds: only whole pairs are compared, however few these are
    """
    before, after = ([each for each in samples if each.finished.step.variant == name] for name in (first, other))
    seeds = [[each.finished.step.seed for each in group] for group in (before, after)]
    common = set(seeds[0]) & set(seeds[1])
    is_paired = all(len(set(group)) == len(group) for group in seeds) and (
        in_turn or len(common) >= LEAST_RUNS or set(seeds[0]) == set(seeds[1])
    )
    if is_paired:  # a run without its like, as a void one leaves it, says nothing of a difference
        before, after = (
            sorted(
                (each for each in group if each.finished.step.seed in common), key=lambda each: each.finished.step.seed
            )
            for group in (before, after)
        )
    empty = [name for name, group in ((first, before), (other, after)) if not group]
    if empty:
        reason = "no pair has a run of both that counts" if is_paired else f"no run of {' and of '.join(empty)} counts"
        concluded = {metric.name: Comparison(reason=reason) for metric in FAMILY}
    else:
        names = (first, other)
        concluded = {metric.name: _compared(metric, names, before, after, margin, is_paired) for metric in FAMILY}
    return Against(
        first=first, other=other, before=before, after=after, is_paired=is_paired, concluded=of_family(concluded, LEVEL)
    )


def _compared(
    metric: ComparedMetric,
    names: tuple[str, str],
    before: Sequence[RunSample],
    after: Sequence[RunSample],
    margin: float,
    is_paired: bool,
) -> Comparison:
    """Compare one metric of runs, at least one of each; where that cannot be done it has no verdict, and the reason."""
    success = [float(np.mean([each.success for each in group])) for group in (before, after)]
    if metric in TIMES and abs(success[0] - success[1]) > SAME_SUCCESS:
        shares = " and ".join(f"{100 * share:.1f} %" for share in success)
        return Comparison(reason=f"success rates differ ({shares}), so that these are times of different requests")
    a, b = ([each.metrics[metric.name] for each in group] for group in (before, after))
    if metric in RATES and (
        failed := [name for name, group in zip(names, (before, after), strict=True) if all_failed(group)]
    ):
        return Comparison(reason=f"no request of a run of {' and of one of '.join(failed)} ended ok: it has no ratio")
    if np.isinf([*a, *b]).any():
        return Comparison(reason="it falls on one of the requests that failed")
    if empty := [name for name, values in zip(names, (a, b), strict=True) if np.isnan(values).all()]:
        return Comparison(reason=f"no run of {' and none of '.join(empty)} has it")
    if hidden := hides(metric, before, after):
        return Comparison(reason=hidden)
    compare = paired if is_paired else unpaired
    return compare(a, b, margin, LEVEL, lower_is_better=metric.lower_is_better)


def all_failed(runs: Sequence[RunSample]) -> bool:
    """Return whether a run had no request that ended ok."""
    return any(each.success == 0 for each in runs)


def hides(metric: ComparedMetric, before: Sequence[RunSample], after: Sequence[RunSample]) -> str:
    """Return a reason if a time's difference is within the load generator's error, else ""."""
    off_ms = error_ms(metric, before, after)
    means = [known([each.metrics[metric.name] for each in group]) for group in (before, after)]
    if not off_ms or not all(len(each) and np.isfinite(each).all() for each in means):
        return ""
    apart_ms = abs(float(means[1].mean() - means[0].mean()))
    if off_ms <= UNUSABLE_RATIO * apart_ms:
        return ""
    return (
        f"the load generator was held up: single values may be off by {figure(off_ms)} ms, which is over a tenth of "
        f"the difference, {figure(apart_ms)} ms"
    )


def error_ms(metric: ComparedMetric, before: Sequence[RunSample], after: Sequence[RunSample]) -> float:
    """Return the load generator's error of a time, in the worse of these runs."""
    return max((each.error_ms.get(metric.kind, 0.0) for each in (*before, *after) if metric.kind), default=0.0)


def overloaded_sides(comparison: Against) -> list[str]:
    """Return the names of the configurations with a run in which requests piled up."""
    sides = {comparison.first: comparison.before, comparison.other: comparison.after}
    return [name for name, runs in sides.items() if any(each.finished.outcome.verdict == "growing" for each in runs)]
