"""Verdict on a run, as an object of `summary.json` and as all outputs show it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sidelight.rundir.fields import NO_UNIT, doc

State = Literal["healthy", "overloaded", "failing", "missed", "untrusted", "not_judged"]
Subject = Literal["network", "gateway", "queue", "prefill", "decode", "other", "server", "generator", "data", "none"]


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


class RunVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict on a run: its state, four figures, the parts of the TTFT, evidence, and advice."""

    state: Annotated[
        State,
        doc(
            "`failing`: requests fail, or the server stopped answering; `untrusted`: records are missing, or the load "
            "generator was held up; `overloaded`: requests piled up; `missed`: an objective was missed; `healthy`: "
            "none of these, and every objective met, or without any no wait stands out; else `not_judged`."
        ),
    ]
    cause: Annotated[
        Subject, doc("What the state or the time is due to: a part, the server, the generator, or the data; `none`.")
    ]
    headline: Annotated[str, doc("The state in a sentence.")]
    figures: Annotated[list[VerdictFigure], doc("Served rate, TTFT p50 and p99, and failed requests.")]
    parts: Annotated[
        list[PartShare], doc("What the mean is made of, in the order of a request; empty where that is not known.")
    ]
    why: Annotated[str, doc("The evidence in a sentence.")]
    do: Annotated[str, doc("What to do about it in a sentence.")]
