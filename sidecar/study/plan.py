"""What a study will take: its steps, played against what a system of a stated capacity would answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from msgspec.structs import replace

from loadgen.plan import workloads
from loadgen.requests.slo import ObjectiveResult, SloResult, parse_slo
from loadgen.requests.warmup import DRAFT_OUTPUT_TOKENS, DRAFT_REQUESTS, PROBES
from methodology.intervals import QuantileInterval
from methodology.stability import Stability, Verdict
from methodology.steady import SteadyWindow
from methodology.study.model import Asked, Done, Finished, Outcome, Parameters, Procedure, Step
from methodology.study.planning import decide
from sidecar.errors import ConfigurationError
from sidecar.options.checks import lengths_of
from sidecar.options.load import RunOptions
from sidecar.study.asking import with_values

DEMO_PER_S, DEMO_SEATS, DEMO_E2E_S = 5.95, 8, 1.34  # the simulated engine of the profile `demo`
AT_SLO = 90.0  # requests in flight
OVERHEAD_S = 3.0  # of a step: processes, probes, settling
MOST_STEPS = 500  # of a plan: a test that decides on more would never end
_SAMPLE = 50  # requests that the mean lengths are taken of


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A step that a study would run, and what it takes."""

    step: Step
    seconds: float
    requests: int
    input_tokens: int
    output_tokens: int


def _expected_slo(text: str, use: float) -> SloResult | None:
    """Return objectives that are reached at seven tenths of the capacity, and at so much of AT_SLO in flight."""
    if not text:
        return None
    over = math.exp(4 * (use - 0.7))
    objectives = [
        ObjectiveResult(
            text=each.text,
            metric=each.metric,
            statistic=each.statistic,
            unit=each.unit,
            bound=each.bound,
            value=each.bound / over if each.from_below else each.bound * over,
            bound_ms=None,
            value_ms=None,
            count=1,
            requests=1,
            failed_requests=0,
            left_out_requests=0,
            met=over < 1,
        )
        for each in parse_slo(text).objectives
    ]
    return SloResult(text=text, met=over < 1, good_requests=1, undetermined_requests=0, objectives=objectives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The steps of a study, and how it would end; None: not within MOST_STEPS."""

    steps: tuple[Expected, ...]
    end: Done | None

    @property
    def seconds(self) -> float:
        """Return how long all steps take."""
        return sum(each.seconds for each in self.steps)


def expected(
    procedure: Procedure,
    asked: Asked,
    common: RunOptions,
    finished: Sequence[Finished] = (),
) -> Plan:
    """Return the steps that would follow where a system served what the steps so far show, else what was stated, else
    what the simulated engine does.
    """
    shown = max((each.outcome.completed_per_s or 0.0 for each in finished), default=0.0)
    per_s = max(asked.parameters.capacity or 0.0, shown) or DEMO_PER_S
    played: list[Finished] = list(finished)
    steps: list[Expected] = []
    warm = {each.step.variant for each in finished}
    while not isinstance(step := decide(procedure, asked, played), Done) and len(steps) < MOST_STEPS:
        lengths = mean_lengths(with_values(common, step.options))
        steps.append(_expected(step, per_s, lengths, is_warm=step.variant in warm))
        warm.add(step.variant)
        number = len(played) + 1
        played.append(Finished(number=number, run=f"steps/{number:04d}", step=step, outcome=_outcome(step, per_s)))
    return Plan(steps=tuple(steps), end=step if isinstance(step, Done) else None)


@cache
def mean_lengths(options: RunOptions) -> tuple[float, float]:
    """Return the mean input and output length of a workload, in tokens."""
    if options.prompts is not None:
        return 0.0, float(options.output_tokens or 0)
    workload = workloads.build(
        options.workload or "synthetic-uniform",
        seed=options.seed,
        dataset=options.dataset,
        trace=options.trace,
        sessions=options.sessions,
        think_s=options.think_time,
        lengths=lengths_of(options),
    )
    sample = list(islice(workload.requests, _SAMPLE))
    return (
        sum(each.input_tokens for each in sample) / len(sample),
        sum(each.max_tokens for each in sample) / len(sample),
    )


def _served(step: Step, per_s: float) -> float:
    """Return what a step would complete in a second."""
    return min(per_s, step.level if step.load == "open" else step.level / DEMO_E2E_S * per_s / DEMO_PER_S)


def _length_s(step: Step, per_s: float) -> float:
    by_count = step.requests / _served(step, per_s) if step.requests else float("inf")
    return min(step.duration or float("inf"), by_count)


def _expected(step: Step, per_s: float, lengths: tuple[float, float], *, is_warm: bool) -> Expected:
    length_s, served = _length_s(step, per_s), _served(step, per_s)
    sent = round(length_s * (step.level if step.load == "open" else served))
    backlog = max(0.0, sent - served * length_s) if step.load == "open" else step.level
    seconds = OVERHEAD_S + length_s + max(DEMO_E2E_S, backlog / per_s)
    requests = sent
    if step.warm_up == "draft" and not is_warm:
        warm = max(DRAFT_REQUESTS, round(DRAFT_OUTPUT_TOKENS / max(lengths[1], 1.0))) + 2 * PROBES
        requests += warm
        seconds += warm / per_s
    return Expected(
        step=step,
        seconds=seconds,
        requests=requests,
        input_tokens=round(requests * lengths[0]),
        output_tokens=round(requests * lengths[1]),
    )


def _outcome(step: Step, per_s: float) -> Outcome:
    """Return what would come of a step, for the decisions that follow."""
    length_s, served = _length_s(step, per_s), _served(step, per_s)
    use = step.level / per_s if step.load == "open" else 1.0
    full = step.level >= DEMO_SEATS if step.load == "closed" else use >= 1
    ttft_ms = 60.0 / max(0.02, 1 - min(use, 0.98)) if step.load == "open" else 60.0 * (1 + step.level / DEMO_SEATS)
    percentile = {
        name: QuantileInterval(
            estimate=ttft_ms * factor,
            low=ttft_ms * factor * 0.9,
            high=ttft_ms * factor * 1.1,
            tau=1.0,
            effective_tail=100.0,
            needed_n=1,
        )
        for name, factor in (("p50", 1.0), ("p90", 1.5), ("p95", 1.8), ("p99", 2.5), ("p99_9", 3.0))
    }
    verdict: Verdict = "growing" if use > 1.02 else "stable"
    sent = round(length_s * (step.level if step.load == "open" else served))
    return Outcome(
        status="complete",
        window=SteadyWindow(start_ns=0, end_ns=round(0.9e9 * length_s), left_out=0.1, enough=True),
        sent=sent,
        ok=sent,
        offered_per_s=step.level if step.load == "open" else None,
        realised_per_s=step.level if step.load == "open" else served,
        completed_per_s=served,
        throughput_ci95=(0.99 * served, 1.01 * served),
        stability=Stability(verdict=verdict, reason="expected", capacity_per_s=per_s if use > 1 else None)
        if step.load == "open"
        else None,
        slo=_expected_slo(str(step.options.get("slo") or ""), use if step.load == "open" else step.level / AT_SLO),
        percentiles=dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms"), percentile),
        queued_ratio=1.0 if full else 0.0,
        running_max=float(DEMO_SEATS) if full else min(step.level, DEMO_SEATS),
        in_flight_mean=step.level if step.load == "closed" else served * DEMO_E2E_S,
        limit="seats" if full else None,
    )


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the steps of a plan, each with its time, and then what all of them take."""
    for number, each in enumerate(plan.steps, 1):
        step = each.step
        load = f"{step.level:.3g} requests/s" if step.load == "open" else f"{step.level:g} in flight"
        share = f" ({step.share:.0%})" if step.share is not None else ""
        until = f"{step.duration:.0f} s" if step.duration is not None else f"{step.requests} requests"
        where = f" {step.variant}" if step.variant else ""
        yield f"{number:4d}  {step.kind + where:22} {load + share:26} {until:>14}   about {minutes(each.seconds)}"
    yield in_all(plan)


def in_all(plan: Plan) -> str:
    """Say what a plan takes, or why there is none."""
    if plan.end is not None and not plan.end.complete:
        return f"not possible so: {plan.end.reason}"
    sums = [sum(getattr(each, name) for each in plan.steps) for name in ("requests", "input_tokens", "output_tokens")]
    steps = f"{len(plan.steps)} step{'s' if len(plan.steps) != 1 else ''}"
    return f"{steps}, about {minutes(plan.seconds)}: {sums[0]:,} requests, {sums[1]:,} tokens in, {sums[2]:,} out"


def minutes(duration_s: float) -> str:
    """Return a time as people say it."""
    return f"{duration_s:.0f} s" if duration_s < 90 else f"{duration_s / 60:.0f} min"


# What a budget costs, in this order: the field, and what the draft asks for in its place.
_SHORTENED = (
    ("sentinel", "whether the system drifted is not known"),
    ("duration", "the draft's length of a step is not reached"),
    ("per_slot", "the draft's completions per request in flight are not reached"),
    ("requests", "the draft's number of requests is not reached, so P99.9 or P99 is a bound"),
    ("lengths", "the draft's lengths are not all measured"),
    ("levels", "the draft's levels are not all measured"),
)


def within(procedure: Procedure, asked: Asked, common: RunOptions, budget_s: float) -> tuple[Asked, list[str]]:
    """Return what to ask for so that a test takes no longer, and what that costs, a sentence each.

    Raises ConfigurationError where even the short scale takes longer.
    """
    costs: list[str] = []
    short = procedure.presets["short"]
    for name, cost in _SHORTENED:
        needed_s = expected(procedure, asked, common).seconds
        if needed_s <= budget_s:
            return asked, costs
        now, least = getattr(asked.parameters, name), getattr(short, name)
        least = False if name == "sentinel" and now else least
        if (
            least is None
            or now is None
            or now == least
            or (name not in ("sentinel", "levels", "lengths") and now < least)
        ):
            continue
        parameters: Parameters = replace(asked.parameters, **{name: least})
        asked = replace(asked, parameters=parameters)
        costs.append(f"--budget: {name.replace('_', ' ')} {_shown_value(now)} became {_shown_value(least)}: {cost}")
    needed_s = expected(procedure, asked, common).seconds
    if needed_s > budget_s:
        raise ConfigurationError(
            f"--budget {minutes(budget_s)}: the shortest {procedure.name} takes about {minutes(needed_s)}; give as "
            "much, or --capacity if it is known"
        )
    return asked, costs


def _shown_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:g}"
