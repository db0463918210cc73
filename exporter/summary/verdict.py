"""Verdicts on runs, studies and comparisons, as objects of JSON."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sidelight.rundir.fields import NO_UNIT, doc

State = Literal["healthy", "overloaded", "failing", "missed", "untrusted", "not_judged"]
StudyState = Literal[
    "slower", "faster", "equal", "undecided", "limit_found", "no_limit", "none_held", "measured", "incomplete"
]
Subject = Literal[
    "network", "gateway", "queue", "prefill", "router", "kv_transfer", "decode_queue", "first_step", "decode", "other",
    "server", "generator", "clock", "data", "none",
]  # fmt: skip


class VerdictFigure(msgspec.Struct, frozen=True, kw_only=True):
    """One of the figures of a verdict, as a number and as people read it."""

    name: Annotated[
        Literal["served", "ttft_p50", "ttft_p99", "e2e_p50", "e2e_p99", "failed"],
        doc("Which: `e2e_*` stands where no reply had a first token of its own."),
    ]
    label: Annotated[str, doc("Its name for people.")]
    value: Annotated[float | None, doc("The number: requests/s, ms, or requests; null where it is missing.", NO_UNIT)]
    text: Annotated[str, doc("The number with its unit and what it is compared with, as every output has it.")]
    bad: Annotated[bool, doc("Whether it misses its objective, or counts failures.")] = False


class PartShare(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the mean TTFT; without a TTFT, of the mean end-to-end time."""

    part: Annotated[Subject, doc("Its name in `correlation.breakdown`, without `_ms`.")]
    label: Annotated[str, doc("Its name for people.")]
    mean_ms: Annotated[float, doc("Its mean.", "ms")]
    share: Annotated[float | None, doc("Its share of the mean; null where its error exceeds it.", NO_UNIT)]
    known_from: Annotated[str, doc("Where it is known from, as the report's table of parts names it.")]


class SidesFigure(VerdictFigure, frozen=True, kw_only=True):
    """One of the figures of a study; of a comparison, of both sides."""

    base: Annotated[float | None, doc("In a comparison, the first side's number.", NO_UNIT)] = None
    ratio: Annotated[float | None, doc("`value` over `base`; of several runs, the mean ratio.", "ratio")] = None
    ratio_ci95: Annotated[tuple[float, float] | None, doc("Its 95 % interval; null of single runs.", "ratio")] = None


class MeanParts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the mean TTFT of a load, or of one side of a comparison."""

    label: Annotated[str, doc("Of which, and how long it is, in words.")]
    mean_ms: Annotated[float, doc("The mean TTFT.", "ms")]
    parts: Annotated[list[PartShare], doc("Its parts, in the order of a request.")]


class StudyVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a study or a comparison: its state, four figures, the parts of the TTFT, evidence, and advice."""

    state: Annotated[
        StudyState,
        doc(
            "Of a comparison, what the other side is beside the first: `slower`, `faster`, `equal` (surely within the "
            "margin). Of a study: `limit_found` (a load held, a higher one did not), `no_limit` (each load held), "
            "`none_held`, `measured` (no load was to be held), `incomplete`. Of both `undecided`."
        ),
    ]
    cause: Annotated[Subject, doc("The part that makes the difference, or most of the TTFT at the limit; `none`.")]
    headline: Annotated[str, doc("The state in a sentence.")]
    figures: Annotated[
        list[SidesFigure], doc("Served rate, TTFT p50 and p99, failed: of both sides, or of the highest load held.")
    ]
    bars: Annotated[list[MeanParts], doc("The TTFT's parts of both sides, or where the limit shows; empty: not known.")]
    why: Annotated[str, doc("The evidence in a sentence.")]
    do: Annotated[str, doc("What to do about it in a sentence.")]


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a run: its state, four figures, the parts of the TTFT, evidence, and advice."""

    state: Annotated[
        State,
        doc(
            "`failing`: requests fail, or the server stopped answering; `untrusted`: records are missing, or the load "
            "generator's error or a node's clock could change an objective or the largest part; `overloaded`: "
            "requests piled up; `missed`: an objective was missed; `healthy`: none of these, and every objective met, "
            "or without any no wait stands out; else `not_judged`."
        ),
    ]
    cause: Annotated[
        Subject,
        doc("What the state or the time is due to: a part, the server, the generator, a clock, the data, `none`."),
    ]
    headline: Annotated[str, doc("The state in a sentence.")]
    figures: Annotated[list[VerdictFigure], doc("Served rate, TTFT p50 and p99, and failed requests.")]
    parts: Annotated[
        list[PartShare], doc("What the mean is made of, in the order of a request; empty where that is not known.")
    ]
    why: Annotated[str, doc("The evidence in a sentence.")]
    do: Annotated[str, doc("What to do about it in a sentence.")]
