"""Plan of a study: its steps, played against simulated engines with the capacity of the user's system."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from msgspec.structs import replace

from correlator.load.stability import Stability, Verdict
from correlator.load.steady import SteadyWindow
from correlator.statistics.intervals import QuantileInterval
from loadgen.plan.fitting import clip
from loadgen.plan.workloads import catalogue as workloads
from loadgen.requests.slo.results import SloResult
from loadgen.requests.warmup import DRAFT_OUTPUT_TOKENS, DRAFT_REQUESTS, PROBES
from methodology.execution.asking import options_of, with_values
from methodology.study.model import Asked, Done, Finished, Outcome, Parameters, Procedure, Step
from methodology.study.planning import decide
from recorded.errors import ConfigurationError
from rundir.printable.numbers import count_of, figure, minutes
from sidecar.options.checks import lengths_of
from sidecar.options.load import SHORT_WARM_UP, RunOptions
from sidecar.run.load import WARM_UP_CONCURRENCY
from simulator.settings import EngineSettings

ENGINE = EngineSettings()  # the simulated engine of the profile `demo`
AT_OBJECTIVES = 0.7  # of the capacity: where objectives are expected to be reached
NEAR = 0.02  # loads nearer to the capacity are decided on by a longer step
OVERHEAD_S = 3.0  # of a step: processes, settling, its own derivation
PROBE_S = 0.2  # a short request alone
MOST_STEPS = 500  # of a plan: a test that decides on more would never end
_SAMPLE = 500  # requests that lengths are taken of


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A step that a study would run, and its cost, the warm-up included. `by_requests`: their number ends it."""

    step: Step
    by_requests: bool
    seconds: float
    warm_up_s: float
    requests: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Plan of a study: its steps, their expected outcomes, and its end. The end is None if it is beyond MOST_STEPS."""

    steps: tuple[Expected, ...]
    finished: tuple[Finished, ...]
    end: Done | None

    @property
    def seconds(self) -> float:
        """Return the duration of all steps, s."""
        return sum(each.seconds for each in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths of requests, tokens: the mean input, and outputs [n] in order."""

    prompt: float
    outputs: tuple[float, ...]

    @property
    def output(self) -> float:
        """Return the mean output."""
        return sum(self.outputs) / len(self.outputs)

    def longest(self, running: float) -> float:
        """Return the output of the last of `running` requests: long ones run for long."""
        return self.outputs[min(len(self.outputs) - 1, int(len(self.outputs) * (1 - 1 / (3 * max(running, 1.0)))))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Throughput of `engines` simulated engines on requests of some `lengths`. Less than one engine is a slower one.

    A step of an engine takes as long as the sequences in it, and the prompt tokens that it computes.
    """

    engines: float
    lengths: Lengths

    @property
    def seats(self) -> float:
        """Return the number of requests that run at once. Places and the KV cache limit it."""
        held = ENGINE.kv_blocks * ENGINE.block_size / max(self.lengths.prompt + self.lengths.output, 1.0)
        return max(1.0, min(ENGINE.max_num_seqs, held)) * max(1.0, self.engines)

    @property
    def per_s(self) -> float:
        """Return the number of requests that a full system completes a second."""
        return self.seats / self.e2e_s(self.seats)

    def e2e_s(self, in_flight: float, output: float | None = None) -> float:
        """Return the duration of a request beside others, s, without its wait for a place. By default, it has the mean
        output.
        """
        speed, prompt = ENGINE.speed, self.lengths.prompt
        output = self.lengths.output if output is None else output
        batch = max(1.0, min(in_flight, self.seats) / max(1.0, self.engines))
        step_s = speed.step_s + batch * (speed.sequence_s + speed.kv_token_s * (prompt + output / 2))
        return (output * step_s + batch * prompt * speed.prefill_token_s) / min(1.0, self.engines)

    def closed_per_s(self, in_flight: float) -> float:
        """Return the number of requests completed a second with `in_flight` of them in flight."""
        return min(in_flight, self.seats) / self.e2e_s(in_flight)


def expected(
    procedure: Procedure,
    asked: Asked,
    common: RunOptions,
    finished: Sequence[Finished] = (),
    *,
    engines: float | None = None,
) -> Plan:
    """Return the steps that would follow on the user's system. It has the capacity of `engines` simulated engines;
    None: the capacity that the steps so far show, else the stated one, else that of one engine.
    """
    if engines is None:
        engines = _engines_shown(asked, common, finished) or engines_for(
            common, asked.parameters.capacity, asked.max_model_len
        )
    played: list[Finished] = list(finished)
    steps: list[Expected] = []
    warm = {each.step.variant for each in finished}
    while not isinstance(step := decide(procedure, asked, played), Done) and len(steps) < MOST_STEPS:
        served = Served(engines=engines, lengths=_lengths(asked, common, step))
        steps.append(_expected(step, served, is_warm=step.variant in warm))
        warm.add(step.variant)
        number = len(played) + 1
        played.append(Finished(number=number, run=f"steps/{number:04d}", step=step, outcome=_outcome(step, served)))
    return Plan(steps=tuple(steps), finished=tuple(played), end=step if isinstance(step, Done) else None)


def engines_for(common: RunOptions, capacity: float | None, max_model_len: int | None = None) -> float:
    """Return the number of simulated engines that serve a capacity of a workload. It is 1 without a capacity."""
    return capacity / served_by_one(common, max_model_len) if capacity else 1.0


def served_by_one(common: RunOptions, max_model_len: int | None = None) -> float:
    """Return the number of requests of a workload that one simulated engine serves a second."""
    return Served(engines=1.0, lengths=lengths_from(common, max_model_len or ENGINE.max_model_len)).per_s


def _engines_shown(asked: Asked, common: RunOptions, finished: Sequence[Finished]) -> float:
    """Return the number of simulated engines with the throughput of the closed loops; 0 if none has ended."""
    shown = [
        each.outcome.completed_per_s / alone.closed_per_s(each.step.level)
        for each in finished
        if each.step.load == "closed" and each.outcome.completed_per_s
        for alone in [Served(engines=1.0, lengths=_lengths(asked, common, each.step))]
    ]
    return max(shown, default=0.0)


def _lengths(asked: Asked, common: RunOptions, step: Step) -> Lengths:
    """Return the lengths of a step's requests, cut to the model's. Those that a test sets are not cut."""
    longest = asked.max_model_len or (None if "input_tokens" in step.options else ENGINE.max_model_len)
    return lengths_from(with_values(common, step.options), longest)


@cache
def lengths_from(options: RunOptions, max_model_len: int | None = None) -> Lengths:
    """Return the lengths of a workload's requests."""
    if options.prompts is not None:
        return Lengths(prompt=0.0, outputs=(float(options.output_tokens or 0),))
    workload = workloads.build(
        options.workload or "synthetic-uniform",
        seed=options.seed,
        dataset=options.dataset,
        trace=options.trace,
        sessions=options.sessions,
        think_s=options.think_time,
        lengths=lengths_of(options),
    )
    sample = [clip(each.input_tokens, each.max_tokens, max_model_len) for each in islice(workload.requests, _SAMPLE)]
    outputs = sorted(float(output) for _, output in sample)
    return Lengths(prompt=sum(prompt for prompt, _ in sample) / len(sample), outputs=tuple(outputs))


def _per_s(step: Step, served: Served) -> float:
    """Return the number of requests that a step would complete a second."""
    return min(served.per_s, step.level) if step.load == "open" else served.closed_per_s(step.level)


def _length_s(step: Step, served: Served) -> float:
    rate = step.level if step.load == "open" else _per_s(step, served)
    return min(step.duration or math.inf, step.requests / rate if step.requests else math.inf)


def _expected(step: Step, served: Served, *, is_warm: bool) -> Expected:
    length_s, per_s = _length_s(step, served), _per_s(step, served)
    requests = round(length_s * (step.level if step.load == "open" else per_s))
    left = requests - per_s * length_s if step.load == "open" else step.level if step.requests is None else 0.0
    running = step.level if step.load == "closed" else served.seats * per_s / served.per_s
    drain_s = max(0.0, left) / per_s + served.e2e_s(1.0, served.lengths.longest(running))
    warm_up_s = 0.0
    if step.warm_up != "none" and not is_warm:
        by_draft = step.warm_up == "draft"
        by_tokens = round(DRAFT_OUTPUT_TOKENS / max(served.lengths.output, 1.0))
        warm, probes = (max(DRAFT_REQUESTS, by_tokens), 2 * PROBES) if by_draft else (SHORT_WARM_UP, 0)
        width = min(warm, step.level if step.load == "closed" else WARM_UP_CONCURRENCY)
        requests += warm + probes
        warm_up_s = warm / served.closed_per_s(width) + probes * PROBE_S
    return Expected(
        step=step,
        by_requests=step.duration is None or length_s < step.duration,
        seconds=OVERHEAD_S + warm_up_s + length_s + drain_s,
        warm_up_s=warm_up_s,
        requests=requests,
        input_tokens=round(requests * served.lengths.prompt),
        output_tokens=round(requests * served.lengths.output),
    )


def _outcome(step: Step, served: Served) -> Outcome:
    """Return the expected outcome of a step, for the decisions that follow."""
    length_s, per_s = _length_s(step, served), _per_s(step, served)
    is_open = step.load == "open"
    use = step.level / served.per_s if is_open else step.level / served.seats
    ttft_ms = 60.0 / max(0.02, 1 - use) if is_open else 60.0 + 1e3 * max(0.0, step.level - served.seats) / per_s
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
    near = abs(use - 1) <= NEAR and not step.label.endswith("longer")
    verdict: Verdict = "undecided" if near else "growing" if use > 1 + NEAR else "stable"
    sent = round(length_s * (step.level if is_open else per_s))
    slo, met = str(step.options.get("slo") or ""), (use / AT_OBJECTIVES if is_open else use) <= 1
    return Outcome(
        status="complete",
        window=SteadyWindow(start_ns=0, end_ns=round(0.9e9 * length_s), left_out=0.1, enough=True),
        sent=sent,
        ok=sent,
        offered_per_s=step.level if is_open else None,
        realised_per_s=step.level if is_open else per_s,
        completed_per_s=per_s,
        throughput_ci95=(0.99 * per_s, 1.01 * per_s),
        stability=Stability(verdict=verdict, reason="expected", capacity_per_s=served.per_s if use > 1 else None)
        if is_open
        else None,
        slo=SloResult(text=slo, met=met, good_requests=sent, undetermined_requests=0, objectives=[]) if slo else None,
        percentiles=dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms"), percentile),
        queued_ratio=1.0 if use >= 1 else 0.0,
        running_max=math.floor(min(1.0, use) * served.seats),
        limit="seats" if use >= 1 else None,
    )


def plan_lines(plan: Plan) -> Iterator[str]:
    """Yield the steps of a plan, each with its time, and then the total."""
    for number, each in enumerate(plan.steps, 1):
        step = each.step
        load = f"{figure(step.level)} requests/s" if step.load == "open" else f"{step.level:g} in flight"
        share = f" ({step.share:.0%})" if step.share is not None else ""
        until = f"{step.requests} requests" if each.by_requests else f"{step.duration:.0f} s"
        prompts = f" {step.options['input_tokens']} in" if "input_tokens" in step.options else ""
        what = f"{step.kind} {step.variant}".rstrip() + prompts
        warm = f", {minutes(each.warm_up_s)} of it warm-up" if each.warm_up_s else ""
        yield f"{number:4d}  {what:22} {load + share:26} {until:>14}   about {minutes(each.seconds)}{warm}"
    yield in_all(plan)


def in_all(*plans: Plan) -> str:
    """Return the total of plans: steps, time, requests and tokens."""
    every = [each for plan in plans for each in plan.steps]
    sums = [sum(getattr(each, name) for each in every) for name in ("requests", "input_tokens", "output_tokens")]
    steps = count_of(len(every), "step")
    needed = minutes(sum(each.seconds for each in every))
    return f"{steps}, about {needed}: {sums[0]:,} requests, {sums[1]:,} tokens in, {sums[2]:,} out"


# What a budget costs, in this order: the field, and what the draft asks for in its place.
_SHORTENED = (
    ("sentinel", "whether the system drifted is not known"),
    ("duration", "the draft's length of a step is not reached"),
    ("per_slot", "the draft's completions per request in flight are not reached"),
    ("requests", "the draft's number of requests is not reached, so P99.9 or P99 is a bound"),
    ("lengths", "the draft's lengths are not all measured"),
    ("levels", "the draft's levels are not all measured"),
)


def within(
    procedure: Procedure, asked: Asked, common: RunOptions, budget_s: float, *, engines: float | None = None
) -> tuple[Asked, list[str]]:
    """Return a test shortened to a time limit, and each change's cost in a sentence.

    engines  how many simulated ones serve what was stated; None: what the test's own number says

    Raises ConfigurationError where even the short scale takes longer.
    """
    costs: list[str] = []
    short = procedure.presets["short"]
    for name, cost in _SHORTENED:
        needed_s = expected(procedure, asked, common, engines=engines).seconds
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
        costs.append(
            f"--budget: {name.replace('_', ' ')} {_shown_value(name, now)} became {_shown_value(name, least)}: {cost}"
        )
    needed_s = expected(procedure, asked, common, engines=engines).seconds
    if needed_s > budget_s:
        stated = engines or asked.parameters.capacity or "capacity" not in options_of(procedure)
        cure = "" if stated else ", or --capacity if it is known"
        length_s, needed = asked.parameters.duration, math.ceil(needed_s / 60)
        of_steps = f" with steps of {minutes(length_s)} (--duration)" if length_s else ""
        raise ConfigurationError(
            f"--budget {minutes(budget_s)}: {procedure.name} takes up to {needed} min{of_steps}; "
            f"give --budget {needed}m{cure}"
        )
    return asked, costs


def _shown_value(name: str, value: object) -> str:
    if name == "duration" and isinstance(value, int | float):
        return minutes(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:g}"
