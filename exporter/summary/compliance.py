"""Compliance of a run with the benchmarking draft, as `summary.json` states it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from rundir.fields import doc

DRAFT = "draft-gaikwad-llm-benchmarking-methodology-00"
Verdict = Literal["unconditional", "conditional", "not compliant", "not judged"]
State = Literal["met", "not met", "not judged", "not applicable", "declared"]


class RunStatement(Struct, frozen=True, kw_only=True):
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
