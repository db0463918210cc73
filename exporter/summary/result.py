"""`summary.json` as types: what each part of a run's results is called, means and is measured in.

The parts live with what makes them; this puts them together and generates the schema of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UnsetType, structs

from sidelight.correlator.load.stability import Stability
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.correlator.statistics.percentiles import NAMES, PercentileIntervals
from sidelight.exporter.summary.breakdown import Breakdown, is_certain, json_name
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.verdict import RunVerdict
from sidelight.exporter.summary.watched import WatchedTraffic
from sidelight.loadgen.requests.self_check.check import SelfCheck
from sidelight.loadgen.requests.self_check.claims import Claim, are_sure
from sidelight.loadgen.requests.self_check.nodes import NodeSummary, unknown_clocks
from sidelight.loadgen.requests.summary import ClientSummary
from sidelight.loadgen.requests.warmup import WarmupStatement
from sidelight.recorded.integrity import Integrity
from sidelight.rundir.fields import NO_UNIT, UNSET, Count, Missing, Reason, StampNs, doc
from sidelight.rundir.stats import STATISTICS
from sidelight.scraper.hardware.summary import Hardware
from sidelight.scraper.window.quantities import MOST_SLICES, quantities_of
from sidelight.scraper.window.summary import Server
from sidelight.twin.seats import MoreSeats

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Status = Literal["complete", "interrupted", "crashed"]
DRAFT = "draft-gaikwad-llm-benchmarking-methodology-00"
Verdict = Literal["unconditional", "conditional", "not compliant", "not judged"]
State = Literal["met", "not met", "not judged", "not applicable", "declared"]
Page = TypeVar("Page", bound=msgspec.Struct)
Moment = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z$")]

# What is promised of a recorded configuration, whatever the command.
CONFIG = {
    "api_key": {"enum": [None, "***"], "description": "Masked."},
    "slice_duration": {"type": "number", "exclusiveMinimum": 0, "description": "Length of a slice.", "unit": "s"},
    "scrape_interval": {"type": "number", "exclusiveMinimum": 0, "description": "Between two scrapes.", "unit": "s"},
}

# Only a run that was killed has no end.
ENDED = {
    "if": {"properties": {"status": {"enum": ["complete", "interrupted"]}}},
    "then": {"properties": {"ended_at": {"type": "string"}}},
}


def _one_of(*groups: tuple[str, ...]) -> dict[str, Any]:
    """Return the rule that an object has all fields of at least one group."""
    return {"anyOf": [{"required": list(group)} for group in groups]}


# By type, which of the fields that may be absent come together; where they do not, a reason stands in their place.
RULES: dict[str, dict[str, Any]] = {
    "Server": {"if": {"properties": {"engine": {"type": "null"}}}, "then": {"required": ["reason"]}},
    "Endpoint": _one_of(("reason",), ("reference", "last", "per_interval_slices")),
    "HistogramSlice": _one_of(("count",), ("missing",)),
    "GaugeSlice": _one_of(("mean", "min", "max"), ("missing",)),
    "CounterSlice": _one_of(("total", "rate_per_s"), ("missing",)),
    "SampleStatistics": {"anyOf": [{"required": ["count"]}, {"maxProperties": 0}]},
    "CounterStatistics": {"anyOf": [{"required": ["total", "rate_per_s"]}, {"maxProperties": 0}]},
}


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Tool that wrote the summary."""

    name: Annotated[Literal["sidelight"], doc("Its name.")]
    version: Annotated[str, doc("Its version.")]


class MeasuredWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The measured window, which client, server and correlation are about."""

    start_ns: Annotated[StampNs, doc("Start of the measured phase.", "ns")]
    end_ns: Annotated[StampNs, doc("End of its last response.", "ns")]
    start: Annotated[Moment, doc("The start, in UTC: ISO 8601 to the millisecond.")]
    end: Annotated[Moment, doc("The end, in the same form.")]
    duration_s: Annotated[float, msgspec.Meta(ge=0), doc("Its length.", "s")]


class Tokenizer(msgspec.Struct, frozen=True, kw_only=True):
    """Tokenizer that measures lengths."""

    name: Annotated[str, doc("Its name.")]
    version: Annotated[str, doc("Its version.")]
    vocab_size: Annotated[int | None, doc("Its size, where known.", "tokens")]
    source: Annotated[str, doc("Where it is from.")]
    option: Annotated[str, doc("The draft's option: A native, B reference.")]
    special_tokens: Annotated[dict[str, str], doc("How BOS, EOS, system, template and tool tokens are counted.")]
    why_not_the_servers: Annotated[Reason | UnsetType, doc("Why the server's was not used.")] = UNSET


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Workload: the requests that were sent."""

    name: Annotated[str | None, doc("The workload; null where nothing was sent.")]
    seed: Annotated[int | None, doc("Its seed.", NO_UNIT)]
    tokenizer: Annotated[Tokenizer | None, doc("What lengths are measured with; null where nothing was sent.")]
    max_model_len: Annotated[
        int | None, doc("The model's limit on input and output together; null where not known.", "tokens")
    ]
    planned_requests: Annotated[
        int | None, doc("Requests made for the measured phase; null: the plan was not finished.", "requests")
    ]
    clipped_inputs: Annotated[int | None, doc("Inputs cut to the model's length.", "requests")]
    clipped_outputs: Annotated[int | None, doc("Outputs cut to the model's length.", "requests")]
    requests_sha256: Annotated[
        Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None,
        doc("SHA-256 of all request bodies in order: equal for equal requests."),
    ]
    dropped_turns: Annotated[Count | None, doc("Turns of sessions that would not fit the model.", "requests")]
    missed_lengths: Annotated[Count | None, doc("Prompts whose length was not met exactly.", "requests")]
    stated: Annotated[
        dict[str, Any] | None,
        doc("What the draft wants stated: distributions, data, sharing, content."),
    ]
    shares_prefixes: Annotated[
        bool | None,
        doc("Whether prompts were meant to share prefixes; null: not known."),
    ] = None
    warmup_requests: Annotated[Count, doc("Requests sent before the measurement.", "requests")]


class RunStatement(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements that a run lacks to be a test of the draft."""

    verdict: Annotated[Verdict, doc("unconditional, conditional or not compliant: docs/reference/compliance.md")]
    sentence: Annotated[str, doc("the verdict in words, with the requirements that are not met")]
    contradictions: Annotated[
        list[str] | UnsetType, doc("what the server shows that was declared otherwise; absent where there is nothing")
    ] = UNSET
    requirements: Annotated[
        dict[str, State],
        doc("met, not met, not applicable, or declared: met by what was declared alone; by requirement"),
    ]


class Methodology(msgspec.Struct, frozen=True, kw_only=True):
    """Compliance with the benchmarking draft, and whether there was a steady state to measure."""

    draft: Annotated[str, doc("The draft that tests follow.")]
    tests: Annotated[
        dict[str, RunStatement],
        doc("By test of the draft that the run could be, whether it complies."),
    ]
    missing: Missing = UNSET
    stability: Annotated[Stability, doc("Whether the load was sustained, or requests piled up.")]
    warmup: Annotated[WarmupStatement | None, doc("The warm-up; null where the run ended before it did.")]
    percentiles: Annotated[
        dict[str, PercentileIntervals],
        msgspec.Meta(extra_json_schema={"propertyNames": {"enum": list(NAMES)}}),
        doc(
            "95 % intervals of percentiles of `ttft_ms`, `tpot_ms`, `e2e_ms` and `itl_ms` (gaps between chunks) "
            "of the requests that ended ok, and of the parts of the TTFT"
        ),
    ]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a run directory."""

    schema_version: Annotated[Literal[2], doc("Version of this schema.", NO_UNIT)] = 2
    run_id: Annotated[str, msgspec.Meta(min_length=1), doc("Names the run; sorts by time.")]
    tool: Annotated[Tool, doc("What wrote this.")]
    status: Annotated[Status, doc("How the run ended; crashed: killed, or stopped by an error.")]
    started_at: Annotated[Moment, doc("When the run began.")]
    ended_at: Annotated[Moment | None, doc("When it ended; null where it was killed.")]
    window: Annotated[MeasuredWindow, doc("The measured window, of client, server and correlation.")]
    verdict: Annotated[
        RunVerdict | UnsetType,
        doc(
            "What to know in ten seconds, in the words and digits of every output; absent in files of earlier versions."
        ),
    ] = UNSET
    warnings: Annotated[list[str], doc("What to know before any number, worst first.")]
    integrity: Annotated[Integrity, doc("Whether all that was recorded could be read.")]
    config: Annotated[
        dict[str, Any],
        msgspec.Meta(extra_json_schema={"properties": CONFIG, "required": ["slice_duration", "scrape_interval"]}),
        doc("The configuration as resolved, secrets masked; `sidelight schema config` describes its names."),
    ]
    workload: Annotated[Workload, doc("What was sent.")]
    client: Annotated[ClientSummary, doc("What the client saw; statistics are over requests that ended ok.")]
    server: Annotated[Server, doc("What the engine said of itself in the measured window.")]
    correlation: Annotated[Correlation, doc("Where the time to first token went, by client and server together.")]
    hardware: Annotated[Hardware, doc("Power, energy and what a token cost, over the measured window.")]
    self_check: Annotated[SelfCheck, doc("The load generator's own error.")]
    methodology: Annotated[Methodology, doc("Compliance with the benchmarking draft.")]
    more_seats: Annotated[
        MoreSeats | UnsetType,
        doc("Where a higher limit on running requests is advised, what it would have brought; absent elsewhere."),
    ] = UNSET
    watch: Annotated[
        WatchedTraffic | UnsetType,
        doc("What a watch saw beside its requests, which are those of the clients' spans; absent for other commands."),
    ] = UNSET


def as_written(summary: Summary) -> Summary:
    """Return a summary as `summary.json` has it: more than MOST_SLICES slices are in timeslices.parquet alone."""
    server, correlation = summary.server, summary.correlation
    endpoints = [_without_slices(page) for page in server.endpoints]
    gateways = [_without_slices(page) for page in server.gateways] if server.gateways else server.gateways
    if reason := _too_many(correlation.timeslices):
        correlation = structs.replace(correlation, timeslices=[], timeslices_missing=reason)
    server = structs.replace(_without_slices(server), endpoints=endpoints, gateways=gateways)
    return structs.replace(summary, server=server, correlation=correlation)


def _without_slices(page: Page) -> Page:
    """Return a page without the slices that are too many; `missing` gives the reason."""
    shown = {
        name: structs.replace(quantity, timeslices=[], missing={**(quantity.missing or {}), "timeslices": reason})
        for name, quantity in quantities_of(page)
        if (reason := _too_many(quantity.timeslices))
    }
    return structs.replace(page, **shown)


def _too_many(slices: Sequence[msgspec.Struct]) -> str:
    """Return the reason for slices missing from `summary.json`, "" if they are there."""
    if len(slices) <= MOST_SLICES:
        return ""
    return (
        f"{len(slices):,} slices, more than the {MOST_SLICES} that summary.json keeps: they are in timeslices.parquet"
    )


def schema() -> dict[str, Any]:
    """Return the JSON Schema of `summary.json`, with a description and, of each number, a unit."""
    generated = msgspec.json.schema(Summary)
    definitions = generated.pop("$defs")
    for name, definition in definitions.items():
        if "properties" in definition:
            definition.update(additionalProperties=False, **_reasons(definition["properties"]), **RULES.get(name, {}))
    whole = definitions.pop("Summary")
    return {"$schema": DIALECT, **whole, "title": "Sidelight summary", **ENDED, "$defs": definitions}


def _reasons(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the rule that statistics are null only where `missing` says why; nothing of what has none."""
    if not {"missing", *STATISTICS} <= set(properties):
        return {}
    numbers = {"properties": {name: {"type": "number"} for name in STATISTICS}}
    return {"if": {"not": {"required": ["missing"]}}, "then": numbers}


def generator_held_up(summary: Summary) -> bool:
    """Return whether the load generator's error is large enough to change the verdict.

    That is whether an objective is met, and which part of the TTFT is the largest. Goodput judges each request, whose
    margins are not known; without an objective and parts the figures are all there is.
    """
    error_ms, slo = summary.self_check.error_ms, summary.client.slo
    if summary.watch or not error_ms.ttft.unusable:
        return False
    objectives = slo.objectives if slo else []
    timed = [(each.metric, Claim(each.value_ms, each.bound)) for each in objectives if each.value_ms is not None]
    gaps = [claim for metric, claim in timed if metric in ("itl", "tpot")]
    waits = [*(claim for metric, claim in timed if metric in ("ttft", "e2e")), *_largest_claim(summary.correlation)]
    if not (objectives or waits) or any(each.metric in ("goodput", "goodput_ratio") for each in objectives):
        return True
    return not (are_sure(waits, error_ms.ttft.p99 or 0.0) and are_sure(gaps, error_ms.itl.p99 or 0.0))


def unknown_clock(summary: Summary) -> NodeSummary | None:
    """Return the node with a clock that could change the largest part of the TTFT.

    Spans and replies state durations, each by one clock. Estimates and joins by time compare a node's clock with ours.
    """
    correlation, nodes = summary.correlation, unknown_clocks(summary.client.by_node or ())
    if not correlation.coverage.histogram and not correlation.quality.by_time:
        return None
    off_ms = [(node.clock_error_ms or 0.0) * node.sent / max(1, summary.client.requests.sent) for node in nodes]
    return None if are_sure(_largest_claim(correlation), sum(off_ms)) else nodes[off_ms.index(max(off_ms))]


def _largest_claim(correlation: Correlation) -> list[Claim]:
    return [] if correlation.missing else largest_claim(correlation.breakdown)


def largest_claim(breakdown: Breakdown) -> list[Claim]:
    """Return the claim that a part of the mean TTFT is the largest; nothing where its parts are not known."""
    parts = (getattr(breakdown, json_name(part)) for part in TTFT_PARTS)
    means_ms = sorted((part.mean for part in parts if part.mean is not None and is_certain(part)), reverse=True)
    first_ms, second_ms, *_ = *means_ms, 0.0, 0.0
    return [Claim(first_ms, second_ms)] if means_ms else []
