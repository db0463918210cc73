"""What a study is made of, from what was asked to what follows: what every test of the draft reads and returns.

A test is a pure function of what was asked and of the steps that have ended, so that a study that was cut short goes on
with the same decisions, and is derived again from its directory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from correlator.breakdown import Parts
from loadgen.requests.slo import SloResult
from loadgen.requests.table import RequestLog
from methodology.intervals import QuantileInterval
from methodology.stability import Stability, Verdict
from methodology.steady import SteadyWindow
from methodology.study.findings import Findings
from rundir.fields import NO_UNIT, Amount, Count, Ratio, doc
from scraper.series.table import EndpointSeries

Scale = Literal["letter", "short"]
Limit = Literal["seats", "kv_cache", "steps", "client", "slo", "unknown"]
#: What a load generator may measure wrongly, each by itself: the load that it sent, TTFT, and gaps with TPOT.
Kind = Literal["load", "ttft", "gaps"]


class Parameters(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbers of a test; null where the test has no such number. Each is an option of `sidelight test`."""

    load: Annotated[Ratio | None, doc("Load, as a share of the capacity.", "ratio")] = None
    levels: Annotated[tuple[float, ...] | None, doc("Levels of load, as shares of the capacity.", "ratio")] = None
    duration: Annotated[Amount | None, doc("Length of a step.", "s")] = None
    requests: Annotated[Count | None, doc("Requests of a step, of a class or of a length.", "requests")] = None
    min: Annotated[float | None, doc("Lowest level of the search: requests/s or requests in flight.", NO_UNIT)] = None
    max: Annotated[float | None, doc("Highest level of the search.", NO_UNIT)] = None
    increment: Annotated[float | None, doc("Least difference of two levels of the search.", NO_UNIT)] = None
    capacity: Annotated[Amount | None, doc("Known capacity of the system.", "requests/s")] = None
    capacity_tokens: Annotated[
        Amount | None,
        doc("The same in output tokens: of it, the requests of a step are more or less load.", "tokens/s"),
    ] = None
    slo: Annotated[str | None, doc("Objectives that a level must meet, as `--slo` of `run`.")] = None
    completion: Annotated[Ratio | None, doc("Least share of the requests that must end ok.", "ratio")] = None
    per_slot: Annotated[Count | None, doc("Completions per request in flight that a step needs.", "requests")] = None
    output_tokens: Annotated[Count | None, doc("Fixed output length.", "tokens")] = None
    lengths: Annotated[tuple[int, ...] | None, doc("Input lengths.", "tokens")] = None
    concurrency: Annotated[Count | None, doc("Requests in flight.", "requests")] = None
    mix: Annotated[Ratio | None, doc("Share of the short class among the requests.", "ratio")] = None
    until: Annotated[str | None, doc("Go on until an interval is that narrow, as in ttft_p99±10%.")] = None
    pairs: Annotated[Count | None, doc("Times that each configuration is measured, in turn.", "runs")] = None
    margin: Annotated[Ratio | None, doc("Difference that is still called equivalent.", "ratio")] = None
    gate: Annotated[bool | None, doc("Whether a comparison fails where a configuration is worse than the first.")] = (
        None
    )
    vary: Annotated[
        dict[str, tuple[int | float | str, ...]] | None, doc("Values of the options that a sweep varies.")
    ] = None
    rate: Annotated[Amount | None, doc("Load of an open loop, where it is no share of the capacity.", "requests/s")] = (
        None
    )
    repeat: Annotated[Count | None, doc("Runs of each cell of a sweep.", "runs")] = None
    order: Annotated[Literal["random", "ascending"] | None, doc("Order of the cells of a sweep.")] = None
    sentinel: Annotated[bool | None, doc("Repeat the first level at the end, to see whether the system drifted.")] = (
        None
    )


class Asked(Struct, frozen=True, kw_only=True):
    """What a study was asked for, as resolved; a test decides by it and by the finished steps alone."""

    test: Annotated[str, doc("The test.")]
    scale: Annotated[Scale, doc("letter: the draft's numbers; short: fewer and shorter steps.")]
    parameters: Annotated[Parameters, doc("The test's numbers.")]
    seed: Annotated[int, doc("Seed of the study.", NO_UNIT)]
    options: Annotated[dict[str, Any], doc("Options of `run` that every step has, by their configuration names.")] = {}
    variants: Annotated[tuple[str, ...], doc("Names of the configurations that are measured, if several.")] = ()
    max_model_len: Annotated[int | None, doc("Longest input and output together.", "tokens")] = None
    isolated: Annotated[bool, doc("Whether the system serves nobody else, as declared.")] = False
    system: Annotated[dict[str, Any], doc("The declaration of the system under test.")] = {}


class Step(Struct, frozen=True, kw_only=True):
    """One run that a test decides on."""

    kind: Annotated[str, doc("What it is for: saturate, level, alone, mixed, sentinel, ...")]
    label: Annotated[str, doc("Names its directory, as in closed-32.")]
    load: Annotated[Literal["open", "closed"], doc("Load model.")]
    level: Annotated[Amount, doc("Offered requests/s of an open loop, requests in flight of a closed one.", NO_UNIT)]
    share: Annotated[Amount | None, doc("The level as a share of the capacity.", "ratio")] = None
    duration: Annotated[Amount | None, doc("Submit until then; null: until `requests` were sent.", "s")] = None
    requests: Annotated[Count | None, doc("Requests to send at most; null: as many as the duration has.")] = None
    seed: Annotated[Count, doc("Seed of contents and arrivals: equal seeds send the same requests.", NO_UNIT)]
    options: Annotated[dict[str, Any], doc("Further options of `run`, by their configuration names.")] = {}
    variant: Annotated[str, doc("Configuration that it measures; empty: the only one.")] = ""
    warm_up: Annotated[
        Literal["draft", "none"],
        doc("draft: warmed up if the engine has not been since it started; none: cold, on purpose."),
    ] = "draft"
    reset_cache: Annotated[bool, doc("Whether the prefix cache is emptied before.")] = False
    unpaired: Annotated[
        bool, doc("Whether no other step sends its requests: a repeat then sends others, which no cache holds.")
    ] = False
    repeat: Annotated[Count, doc("1: the same step again, because the first was void.", NO_UNIT)] = 0

    @property
    def load_words(self) -> str:
        """Return the level in words."""
        return f"{self.level:.3g} requests/s offered" if self.load == "open" else f"{self.level:g} requests in flight"


class Done(Struct, frozen=True, kw_only=True):
    """No further step."""

    reason: Annotated[str, Meta(min_length=1), doc("Why there is none.")]
    complete: Annotated[bool, doc("Whether the test has all that it needs.")] = True


class Beyond(Struct, frozen=True, kw_only=True):
    """How much of a step does not keep an objective of a percentile; what failed is beyond each bound."""

    share: Annotated[Ratio, doc("Share of the requests, of an itl of the gaps, beyond the bound.", "ratio")]
    allowed: Annotated[Ratio, doc("The share that the objective allows.", "ratio")]
    n: Annotated[Count, doc("How many there are.", "values")]
    tau: Annotated[Amount, doc("How many in a row say as much of the share as an independent one.", "values")]


class Outcome(Struct, frozen=True, kw_only=True):
    """What came of a step, as later decisions need it; derived from the step's run directory alone."""

    status: Annotated[str, doc("complete, interrupted or crashed, as of the run.")]
    void: Annotated[str, doc("Why the step counts for nothing; empty where it counts.")] = ""
    doubts: Annotated[
        dict[Kind, str],
        doc(
            "Why what the load generator measured cannot be trusted, by what of it: the load that it sent, ttft, gaps "
            "(between chunks, and TPOT); a percentile of such a time is missing."
        ),
    ] = {}
    window: Annotated[SteadyWindow | None, doc("What is counted; null where nothing was sent.")] = None
    sent: Annotated[Count, doc("Requests sent.", "requests")] = 0
    ok: Annotated[Count, doc("Requests that ended ok.", "requests")] = 0
    failed: Annotated[dict[str, int], doc("Those that did not, by kind of error.")] = {}
    out_of_memory: Annotated[Count, doc("Failed requests whose error speaks of memory that ran out.", "requests")] = 0
    input_tokens: Annotated[Count, doc("Input tokens of the requests that ended ok, as far as known.", "tokens")] = 0
    output_tokens: Annotated[Count, doc("Their output tokens.", "tokens")] = 0
    output_tokens_std: Annotated[float | None, doc("Standard deviation of their output tokens.", "tokens")] = None
    offered_per_s: Annotated[
        float | None, doc("Requests due in the window by the schedule; null in a closed loop.", "requests/s")
    ] = None
    realised_per_s: Annotated[float | None, doc("Requests dispatched in the window.", "requests/s")] = None
    completed_per_s: Annotated[float | None, doc("Completions in the window.", "requests/s")] = None
    output_tokens_per_s: Annotated[float | None, doc("Output tokens that arrived in the window.", "tokens/s")] = None
    input_tokens_per_s: Annotated[
        float | None, doc("Input tokens of requests whose first token came in the window.", "tokens/s")
    ] = None
    realised_tokens_per_s: Annotated[
        float | None, doc("Output tokens of the requests dispatched in the window, over its length.", "tokens/s")
    ] = None
    server_tokens_per_s: Annotated[
        float | None, doc("Increase of the engine's generation_tokens over the window.", "tokens/s")
    ] = None
    throughput_ci95: Annotated[
        tuple[float, float] | None, doc("95 % interval of completed_per_s, by batch means.", "requests/s")
    ] = None
    output_tokens_ci95: Annotated[
        tuple[float, float] | None, doc("95 % interval of output_tokens_per_s, by batch means.", "tokens/s")
    ] = None
    steady: Annotated[bool | None, doc("Whether the output tokens a second vary by chance alone in the window.")] = None
    stability: Annotated[Stability | None, doc("Whether the load was sustained; of a closed loop not judged.")] = None
    percentiles: Annotated[
        dict[str, dict[str, QuantileInterval]],
        doc("By metric (ttft_ms, tpot_ms, e2e_ms, itl_ms, parts of the TTFT), then p50, p90, p95, p99, p99_9."),
    ] = {}
    ttft_counts: Annotated[
        dict[int, int],
        doc("TTFTs of the requests submitted in the window that ended ok, counted: bin b from exp(b / 100) ms on."),
    ] = {}
    slo: Annotated[
        SloResult | None, doc("The objectives that the step states, of the requests submitted in the window.")
    ] = None
    beyond: Annotated[dict[str, Beyond], doc("By objective of a percentile: how much of the step is beyond it.")] = {}
    queued_ratio: Annotated[Ratio | None, doc("Share of the scrapes in the window with requests waiting.", "ratio")] = (
        None
    )
    running_max: Annotated[float | None, doc("Most requests running in the engine.", "requests")] = None
    running_mean: Annotated[float | None, doc("Mean of the requests running.", "requests")] = None
    waiting_mean: Annotated[float | None, doc("Mean of the requests waiting.", "requests")] = None
    kv_cache_max: Annotated[float | None, doc("Highest KV cache usage.", "ratio")] = None
    preemptions: Annotated[float | None, doc("Increase of the engine's preemptions.", "preemptions")] = None
    in_flight_mean: Annotated[float | None, doc("Mean of the client's requests in flight.", "requests")] = None
    little_residual: Annotated[
        float | None, doc("In flight over rate times E2E, less 1: a check of ourselves.", "ratio")
    ] = None
    foreign_ratio: Annotated[float | None, doc("Share of the engine's requests that were not ours.", "ratio")] = None
    limit: Annotated[Limit | None, doc("What bounds the throughput, where something does.")] = None
    limit_reason: Annotated[str, doc("The evidence for that, in words.")] = ""
    blame: Annotated[str, doc("What made the slowest requests slow, in words.")] = ""
    notes: Annotated[tuple[str, ...], doc("What a reader must know of the step, in words.")] = ()
    engine_start_ns: Annotated[int | None, doc("When the engine's process started, by its page.", "ns")] = None

    @property
    def success(self) -> float | None:
        """Return which share of the requests ended ok, None where none was sent."""
        return self.ok / self.sent if self.sent else None

    @property
    def verdict(self) -> Verdict | None:
        """Return whether the load was sustained, None where that was not judged."""
        return self.stability.verdict if self.stability else None

    @property
    def slo_met(self) -> bool | None:
        """Return whether the objectives were met, None where that was not judged or is not known."""
        return self.slo.met if self.slo else None


class Finished(Struct, frozen=True, kw_only=True):
    """A step that has ended."""

    number: Annotated[int, Meta(ge=1), doc("Its number in the study, repeats counted.", NO_UNIT)]
    run: Annotated[str, doc("Its run directory, inside the study's.")]
    step: Annotated[Step, doc("What was decided.")]
    outcome: Annotated[Outcome, doc("What came of it.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The tables of a step's run, of its measured requests [n] alone, and what else its directory says.

    start_ns, end_ns   begin of the measured phase, and end of its load: the last submission
    doubts             why what the load generator measured cannot be trusted, by what of it
    about              facts of the manifest and of the summary by name: target, tokenizer, workload, clock_state,
                       network_rtt_ms, host, config, warmup, planned
    """

    requests: RequestLog
    parts: Parts
    endpoints: tuple[EndpointSeries, ...]
    start_ns: int
    end_ns: int
    closed_loop: bool
    status: str
    doubts: Mapping[Kind, str] = field(default_factory=dict)
    blame: str = ""
    about: Mapping[str, Any]


# Returns the tables of a finished step; reading one anew each time keeps memory small.
Reader = Callable[[Finished], StepData]


@dataclass(frozen=True, slots=True, kw_only=True)
class Procedure:
    """A test of the draft: what it is for, its numbers, its steps, and its results.

    workload  default of `--workload`, or its mapping
    presets   its parameters by scale; an option that is null in both is not one of this test, unless it is `optional`
    rests_on  what its decisions rest on beside the load; a step is void only where one of these cannot be trusted
    """

    name: str
    title: str
    section: str
    objective: str
    workload: str
    presets: Mapping[Scale, Parameters]
    next_step: Callable[[Asked, Sequence[Finished]], Step | Done]
    findings: Callable[[Asked, Sequence[Finished], Reader], Findings]
    optional: tuple[str, ...] = ()
    rests_on: tuple[Kind, ...] = ()
