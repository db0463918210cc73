"""Data model of a study, from request to findings: what every test of the draft reads and returns.

A test is a pure function of what was asked and of the steps that have ended, so that a study that was cut short goes on
with the same decisions, and is derived again from its directory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.load.stability import Stability, Verdict
from sidelight.correlator.load.steady import SteadyWindow
from sidelight.correlator.statistics.intervals import QuantileInterval
from sidelight.loadgen.requests.slo.results import SloResult
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.methodology.study.findings import StudyFindings
from sidelight.rundir.fields import NO_UNIT, Amount, Count, Ratio, Reason, doc
from sidelight.rundir.printable.numbers import figure
from sidelight.scraper.series.table import EndpointSeries

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
        doc("The same in output tokens, by which a step's requests are more or less load.", "tokens/s"),
    ] = None
    slo: Annotated[str | None, doc("Objectives that a level must meet, as `--slo` of `run`.")] = None
    completion: Annotated[Ratio | None, doc("Least share of the requests that must end ok.", "ratio")] = None
    per_slot: Annotated[Count | None, doc("Completions per request in flight that a step needs.", "requests")] = None
    output_tokens: Annotated[Count | None, doc("Fixed output length.", "tokens")] = None
    lengths: Annotated[tuple[int, ...] | None, doc("Input lengths.", "tokens")] = None
    concurrency: Annotated[Count | None, doc("Requests in flight.", "requests")] = None
    mix: Annotated[Ratio | None, doc("Share of the short class among the requests.", "ratio")] = None
    until: Annotated[str | None, doc("How narrow an interval must be, as in ttft_p99±10%.")] = None
    pairs: Annotated[Count | None, doc("Times that each configuration is measured, in turn.", "runs")] = None
    margin: Annotated[Ratio | None, doc("Difference that is still called equivalent.", "ratio")] = None
    gate: Annotated[bool | None, doc("Whether a worse configuration fails a comparison.")] = None
    vary: Annotated[
        dict[str, tuple[int | float | str, ...]] | None, doc("Values of the options that a sweep varies.")
    ] = None
    rate: Annotated[Amount | None, doc("Load of an open loop that is not a share of the capacity.", "requests/s")] = (
        None
    )
    repeat: Annotated[Count | None, doc("Runs of each cell of a sweep.", "runs")] = None
    order: Annotated[Literal["random", "ascending"] | None, doc("Order of the cells of a sweep.")] = None
    sentinel: Annotated[
        bool | None,
        doc("Whether the first level is repeated at the end."),
    ] = None


class StudySettings(Struct, frozen=True, kw_only=True):
    """Settings of a study, as resolved; a test decides by them and by the finished steps alone."""

    test: str
    scale: Scale
    parameters: Parameters
    seed: int
    options: dict[str, Any] = {}  # of `run`, that every step has, by their configuration names
    variants: tuple[str, ...] = ()  # names of the configurations that are measured, if several
    max_model_len: int | None = None  # longest input and output together, tokens
    isolated: bool = False  # whether the system serves no one else, as declared
    system: dict[str, Any] = {}  # the declaration of the system under test


class Step(Struct, frozen=True, kw_only=True):
    """One run that a test decides on."""

    kind: str  # what it is for: saturate, level, alone, mixed, sentinel, ...
    label: str  # names its directory, as in closed-32
    load: Literal["open", "closed"]
    level: Amount  # offered requests/s of an open loop, requests in flight of a closed one
    share: Amount | None = None  # the level as a share of the capacity
    duration: Amount | None = None  # s of submissions; None: until `requests` were sent
    requests: Count | None = None  # to send at most; None: as many as the duration has
    seed: Count  # of contents and arrivals: equal seeds send the same requests
    options: dict[str, Any] = {}  # further ones of `run`, by their configuration names
    variant: str = ""  # configuration that it measures; empty: the only one
    # draft, short: warmed up, by the draft or by a few requests, if the engine has not been since it started;
    # none: cold, on purpose.
    warm_up: Literal["draft", "short", "none"] = "draft"
    reset_cache: bool = False  # whether the prefix cache is emptied before
    # Whether no other step sends its requests: a repeat then sends others, which no cache holds.
    unpaired: bool = False
    repeat: Count = 0  # 1: the same step again, because the first was void

    @property
    def load_words(self) -> str:
        """Return the level in words."""
        if self.load == "closed":
            return f"{self.level:g} request{'s' * (self.level != 1)} in flight"
        return f"{figure(self.level)} requests/s offered"


class Done(Struct, frozen=True, kw_only=True):
    """No further step: why, and whether the test has all that it needs."""

    reason: Reason
    complete: bool = True


class Beyond(Struct, frozen=True, kw_only=True):
    """How much of a step does not keep an objective of a percentile; what failed is beyond each bound."""

    share: Ratio  # of the requests, of an itl of the gaps, beyond the bound
    allowed: Ratio  # by the objective
    n: Count  # how many there are
    tau: Amount  # how many in a row say as much of the share as an independent one


class Outcome(Struct, frozen=True, kw_only=True):
    """Outcome of a step, as later decisions need it; derived from the step's run directory alone.

    Rates are of the window, with 95 % intervals by batch means; latencies are of the requests submitted in it.
    """

    status: str  # complete, interrupted or crashed, as of the run
    void: str = ""  # why the step counts for nothing; empty where it counts
    # Why what the load generator measured cannot be trusted, by what of it; a percentile of such a time is missing.
    doubts: dict[Kind, str] = {}
    window: SteadyWindow | None = None  # what is counted; None where nothing was sent
    sent: Count = 0
    ok: Count = 0
    failed: dict[str, int] = {}  # by kind of error
    out_of_memory: Count = 0  # failed requests whose error speaks of memory that ran out
    input_tokens: Count = 0  # of the requests that ended ok, as far as known
    output_tokens: Count = 0
    output_tokens_std: float | None = None
    offered_per_s: float | None = None  # requests/s due by the schedule; None in a closed loop
    realised_per_s: float | None = None  # requests/s dispatched
    completed_per_s: float | None = None
    throughput_ci95: tuple[float, float] | None = None  # of completed_per_s
    output_tokens_per_s: float | None = None  # that arrived
    output_tokens_ci95: tuple[float, float] | None = None
    input_tokens_per_s: float | None = None  # of the requests whose first token came
    realised_tokens_per_s: float | None = None  # output tokens of the requests dispatched
    server_tokens_per_s: float | None = None  # increase of the engine's generation_tokens
    stability: Stability | None = None  # whether the load was sustained; of a closed loop not judged
    # By metric (ttft_ms, tpot_ms, e2e_ms, itl_ms, parts of the TTFT), then p50, p90, p95, p99, p99_9.
    percentiles: dict[str, dict[str, QuantileInterval]] = {}
    ttft_counts: dict[int, int] = {}  # TTFTs of those that ended ok, counted: bin b from exp(b / 100) ms on
    slo: SloResult | None = None  # the objectives that the step states
    beyond: dict[str, Beyond] = {}  # by objective of a percentile
    queued_ratio: Ratio | None = None  # share of the scrapes with requests waiting
    running_max: float | None = None  # requests in the engine
    running_mean: float | None = None
    waiting_mean: float | None = None
    kv_cache_max: float | None = None  # ratio
    preemptions: float | None = None
    little_residual: float | None = None  # in flight over rate times E2E, less 1: a check of ourselves
    foreign_ratio: float | None = None  # share of the engine's requests that were not ours
    limit: Limit | None = None  # what bounds the throughput, where something does
    limit_reason: str = ""  # the evidence for that, in words
    blame: str = ""  # what made the slowest requests slow, in words
    notes: tuple[str, ...] = ()  # what a reader must know of the step, in words
    engine_start_ns: int | None = None  # when the engine's process started, by its page

    @property
    def success(self) -> float | None:
        """Return the share of the requests that ended ok, None where none was sent."""
        return self.ok / self.sent if self.sent else None

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict on the load's stability, None where it was not judged."""
        return self.stability.verdict if self.stability else None

    @property
    def slo_met(self) -> bool | None:
        """Return whether the objectives were met, None where not judged or not known."""
        return self.slo.met if self.slo else None


class Finished(Struct, frozen=True, kw_only=True):
    """A step that has ended."""

    number: Annotated[int, Meta(ge=1)]  # in the study, repeats counted
    run: str  # its run directory, inside the study's
    step: Step
    outcome: Outcome
    again: bool = False  # whether a study that went on tries it again, since it was void twice


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """Tables of a step's measured requests [n], and further data of its run directory."""

    requests: RequestLog
    parts: Parts
    endpoints: tuple[EndpointSeries, ...]
    start_ns: int  # of the measured phase
    end_ns: int  # of its load: the last submission
    closed_loop: bool
    status: str
    doubts: Mapping[Kind, str] = field(default_factory=dict)  # as of Outcome
    # By how much 99 of 100 times may be off, of those that are doubted.
    error_ms: Mapping[Kind, float] = field(default_factory=dict)
    blame: str = ""
    damage: str = ""  # what of its records is missing or damaged, in words
    about: Mapping[str, Any]  # facts of manifest and summary by name: target, tokenizer, workload, config, warmup, ...


# Returns the tables of a finished step; reading one anew each time keeps memory small.
Reader = Callable[[Finished], StepData]


@dataclass(frozen=True, slots=True, kw_only=True)
class Procedure:
    """A test of the draft: what it is for, its numbers, its steps, and its results."""

    name: str
    objective: str
    workload: str  # default of `--workload`, or its mapping
    # Its parameters by scale; an option that is null in both is not one of this test, unless it is `optional`.
    presets: Mapping[Scale, Parameters]
    of_draft: bool = True  # whether its numbers, of the scale letter, are the draft's
    next_step: Callable[[StudySettings, Sequence[Finished]], Step | Done]
    findings: Callable[[StudySettings, Sequence[Finished], Reader], StudyFindings]
    optional: tuple[str, ...] = ()
    # Which step its sentinel repeats; None: its first level.
    sentinel: Callable[[Sequence[Finished]], Finished | None] | None = None
    # What its decisions rest on beside the load; a step is void only where one of these cannot be trusted.
    rests_on: tuple[Kind, ...] = ()
    # Kinds of steps that no other step rests on: where one is void twice, the test goes on without it.
    independent: tuple[str, ...] = ()
    # What the names of its configurations declare of each, where --sut does not.
    variants: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
