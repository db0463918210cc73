"""Plan of a study: the steps that it would decide on, and the sum of their durations, warm-ups and drains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from msgspec.structs import replace

from sidelight.correlator.load.stability import Stability, Verdict
from sidelight.correlator.load.steady import SteadyWindow
from sidelight.loadgen.plan.fitting import clip
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.requests.slo.results import SloResult
from sidelight.loadgen.requests.warmup import DRAFT_OUTPUT_TOKENS, DRAFT_REQUESTS, PROBES
from sidelight.methodology.execution.asking import options_of, with_values
from sidelight.methodology.study.model import Done, Finished, Outcome, Parameters, Procedure, Step, StudySettings
from sidelight.methodology.study.planning import decide
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.printable.numbers import count_of, figure, minutes
from sidelight.sidecar.options.checks import lengths_of
from sidelight.sidecar.options.load import SHORT_WARM_UP, RunOptions
from sidelight.sidecar.run.load import WARM_UP_CONCURRENCY

AT_OBJECTIVES = 0.7  # of the capacity: where objectives are expected to be reached
NEAR = 0.02  # loads nearer to the capacity are decided on by a longer step
OVERHEAD_S = 3.0  # of a step: processes, settling, its own derivation
PROBE_S = 0.2  # a short request alone
MOST_STEPS = 500  # of a plan: a test that decides on more would never end
# A system of speed 1, as the simulated engine: requests at once, tokens in its cache, and the longest request; the time
# of an output token, of one for each request beside it, and of a prompt token.
SEATS, CACHE_TOKENS, MODEL_TOKENS = 16, 32_768, 8192
TOKEN_S, BESIDE_S, PROMPT_TOKEN_S = 8e-3, 0.3e-3, 0.15e-3
_SAMPLE = 500  # requests that lengths are taken of
_LONG = 0.98  # quantile of the outputs: a step waits for them at its end


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
class SystemSpeed:
    """Speed of a system, and the mean lengths of its requests; `longest`: an output that a step waits for."""

    speed: float
    prompt: float
    output: float
    longest: float

    @property
    def seats(self) -> float:
        """Return the number of requests that run at once."""
        return max(1.0, min(SEATS, CACHE_TOKENS / max(self.prompt + self.output, 1.0))) * max(1.0, self.speed)

    def e2e_s(self, running: float, output: float) -> float:
        """Return the duration of a request beside others, s, without its wait for a place."""
        batch = max(1.0, running / max(1.0, self.speed))
        computed_s = output * (TOKEN_S + batch * BESIDE_S) + batch * self.prompt * PROMPT_TOKEN_S
        return computed_s / min(1.0, self.speed)

    def per_s(self, in_flight: float = math.inf) -> float:
        """Return the number of requests completed a second; by default, by a full system."""
        running = min(in_flight, self.seats)
        return running / self.e2e_s(running, self.output)

    def of_step(self, step: Step) -> float:
        """Return the number of requests that a step would complete a second."""
        return min(self.per_s(), step.level) if step.load == "open" else self.per_s(step.level)


def expected(
    procedure: Procedure,
    asked: StudySettings,
    common: RunOptions,
    finished: Sequence[Finished] = (),
    *,
    speed: float | None = None,
) -> Plan:
    """Return the steps that would follow on the user's system.

    `speed` is the system's; None: what the closed loops so far show, else by the stated capacity, else 1.
    """

    def served(step: Step, speed: float) -> SystemSpeed:
        longest = asked.max_model_len or (None if "input_tokens" in step.options else MODEL_TOKENS)
        return served_at(speed, with_values(common, step.options), longest)

    if speed is None:
        shown = [
            each.outcome.completed_per_s / served(each.step, 1.0).per_s(each.step.level)
            for each in finished
            if each.step.load == "closed" and each.outcome.completed_per_s
        ]
        speed = max(shown, default=0.0) or speed_of(common, asked.parameters.capacity, asked.max_model_len)
    played: list[Finished] = list(finished)
    steps: list[Expected] = []
    warm = {each.step.variant for each in finished}
    while not isinstance(step := decide(procedure, asked, played), Done) and len(steps) < MOST_STEPS:
        system = served(step, speed)
        steps.append(_expected(step, system, is_warm=step.variant in warm))
        warm.add(step.variant)
        number = len(played) + 1
        played.append(Finished(number=number, run=f"steps/{number:04d}", step=step, outcome=_outcome(step, system)))
    return Plan(steps=tuple(steps), finished=tuple(played), end=step if isinstance(step, Done) else None)


def speed_of(common: RunOptions, capacity: float | None, max_model_len: int | None = None) -> float:
    """Return the speed of a system with a capacity of a workload, in requests/s. It is 1 without a capacity."""
    return capacity / served_at(1.0, common, max_model_len or MODEL_TOKENS).per_s() if capacity else 1.0


@cache
def served_at(speed: float, options: RunOptions, max_model_len: int | None = MODEL_TOKENS) -> SystemSpeed:
    """Return a system with the lengths of a workload's requests, cut to the model's."""
    if options.prompts is not None:
        output = float(options.output_tokens or 0)
        return SystemSpeed(speed=speed, prompt=0.0, output=output, longest=output)
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
    prompt, output = (sum(tokens) / len(sample) for tokens in zip(*sample, strict=True))
    longest = sorted(tokens for _, tokens in sample)[int(_LONG * len(sample))]
    return SystemSpeed(speed=speed, prompt=prompt, output=output, longest=longest)


def _length_s(step: Step, served: SystemSpeed) -> float:
    rate = step.level if step.load == "open" else served.of_step(step)
    return min(step.duration or math.inf, step.requests / rate if step.requests else math.inf)


def _expected(step: Step, served: SystemSpeed, *, is_warm: bool) -> Expected:
    length_s, per_s = _length_s(step, served), served.of_step(step)
    requests = round(length_s * (step.level if step.load == "open" else per_s))
    left = requests - per_s * length_s if step.load == "open" else step.level if step.requests is None else 0.0
    drain_s = max(0.0, left) / per_s + served.e2e_s(1.0, served.longest)
    warm_up_s = 0.0
    if step.warm_up != "none" and not is_warm:
        by_draft = step.warm_up == "draft"
        by_tokens = round(DRAFT_OUTPUT_TOKENS / max(served.output, 1.0))
        warm, probes = (max(DRAFT_REQUESTS, by_tokens), 2 * PROBES) if by_draft else (SHORT_WARM_UP, 0)
        width = min(warm, step.level if step.load == "closed" else WARM_UP_CONCURRENCY)
        requests += warm + probes
        warm_up_s = warm / served.per_s(width) + probes * PROBE_S
    return Expected(
        step=step,
        by_requests=step.duration is None or length_s < step.duration,
        seconds=OVERHEAD_S + warm_up_s + length_s + drain_s,
        warm_up_s=warm_up_s,
        requests=requests,
        input_tokens=round(requests * served.prompt),
        output_tokens=round(requests * served.output),
    )


def _outcome(step: Step, served: SystemSpeed) -> Outcome:
    """Return the expected outcome of a step, as far as later decisions read it."""
    length_s, per_s = _length_s(step, served), served.of_step(step)
    is_open = step.load == "open"
    use = step.level / (served.per_s() if is_open else served.seats)
    near = abs(use - 1) <= NEAR and not step.label.endswith("longer")
    verdict: Verdict = "undecided" if near else "growing" if use > 1 + NEAR else "stable"
    sent = round(length_s * (step.level if is_open else per_s))
    slo, met = str(step.options.get("slo") or ""), (use / AT_OBJECTIVES if is_open else use) <= 1
    return Outcome(
        status="complete",
        window=SteadyWindow(start_ns=0, end_ns=round(0.9e9 * length_s), left_out=0.1, enough=True),
        sent=sent,
        ok=sent,
        realised_per_s=step.level if is_open else per_s,
        completed_per_s=per_s,
        stability=Stability(verdict=verdict, reason="expected", capacity_per_s=None) if is_open else None,
        slo=SloResult(text=slo, met=met, good_requests=sent, undetermined_requests=0, objectives=[]) if slo else None,
        percentiles={"ttft_ms": {}},
        queued_ratio=float(use >= 1),
        running_max=math.floor(min(1.0, use) * served.seats),
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
    procedure: Procedure, asked: StudySettings, common: RunOptions, budget_s: float, *, speed: float | None = None
) -> tuple[StudySettings, list[str]]:
    """Return a test shortened to a time limit, and each change's cost in a sentence.

    speed  the system's by what was stated; None: by the test's own number

    Raises ConfigurationError where even the short scale takes longer.
    """
    costs: list[str] = []
    short = procedure.presets["short"]
    for name, cost in _SHORTENED:
        needed_s = expected(procedure, asked, common, speed=speed).seconds
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
    needed_s = expected(procedure, asked, common, speed=speed).seconds
    if needed_s > budget_s:
        stated = speed or asked.parameters.capacity or "capacity" not in options_of(procedure)
        cure = "" if stated else ", or --capacity if it is known"
        length_s, needed = asked.parameters.duration, math.ceil(needed_s / 60)
        of_steps = f" with steps of {minutes(length_s)} (--duration)" if length_s else ""
        raise ConfigurationError(
            "study.budget",
            f"--budget {minutes(budget_s)}: {procedure.name} takes up to {needed} min{of_steps}; "
            f"give --budget {needed}m{cure}",
        )
    return asked, costs


def _shown_value(name: str, value: object) -> str:
    if name == "duration" and isinstance(value, int | float):
        return minutes(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(f"{each:g}" for each in value) if isinstance(value, tuple) else f"{value:g}"
