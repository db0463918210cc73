"""`result.json` of a study as types; `sidelight schema result` is generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

from sidelight.correlator.load.stability import Verdict
from sidelight.correlator.load.steady import SteadyWindow
from sidelight.exporter.summary.result import DIALECT
from sidelight.exporter.summary.verdict import StudyVerdict
from sidelight.methodology.study.findings import ResultQuantity, SupportingNumber
from sidelight.methodology.study.model import Kind, Limit, Parameters, Scale
from sidelight.rundir.fields import NO_UNIT, Amount, Count, doc


class StepRecord(Struct, frozen=True, kw_only=True):
    """A step of a study, as `result.json` states it."""

    number: Annotated[int, doc("Its number, repeats counted.", NO_UNIT)]
    run: Annotated[str, doc("Its run directory inside the study's.")]
    kind: Annotated[str, doc("What it was for.")]
    load: Annotated[Literal["open", "closed"], doc("Load model.")]
    level: Annotated[Amount, doc("Requests/s of an open loop, requests in flight of a closed one.", NO_UNIT)]
    share: Annotated[float | None, doc("The level as a share of the capacity.", "ratio")]
    variant: Annotated[str, doc("Configuration that it measured; empty: the only one.")]
    offered: Annotated[float | None, doc("Requests by the schedule.", "requests/s")]
    realised: Annotated[float | None, doc("Requests as they were dispatched.", "requests/s")]
    completed: Annotated[float | None, doc("Completions in the window.", "requests/s")]
    stability: Annotated[Verdict | None, doc("Whether the load was sustained; null: not judged.")]
    stability_reason: Annotated[str, doc("Why that is so; empty: not judged.")] = ""
    limit: Annotated[Limit | None, doc("What bounds the throughput, where something does.")]
    void: Annotated[str, doc("Why it counts for nothing; empty where it counts.")]
    window: Annotated[SteadyWindow | None, doc("What of it is counted.")]
    requests: Annotated[Count, doc("Requests sent in its measured phase.", "requests")] = 0
    ok: Annotated[Count, doc("Of them, ended ok.", "requests")] = 0
    seed: Annotated[int | None, doc("Seed of its contents and arrivals.", NO_UNIT)] = None
    requests_sha256: Annotated[str | None, doc("Hash of the requests as sent; null: not known.")] = None
    blame: Annotated[str, doc("What made its slowest requests slow, in words.")] = ""
    doubts: Annotated[
        dict[Kind, str], doc("What of it the load generator measured badly, and why: load, ttft or gaps.")
    ] = {}


class Drift(Struct, frozen=True, kw_only=True):
    """Drift of the system during the study: its first level, measured again at the end."""

    verdict: Annotated[Literal["none", "drifted", "unknown"], doc("Whether it did.")]
    sentence: Annotated[str, doc("The same in words, with the numbers.")]
    results: Annotated[dict[str, ResultQuantity], doc("Ratio of the last to the first, by metric.")] = {}


class Cost(Struct, frozen=True, kw_only=True):
    """Cost of a study in steps and time."""

    steps: Annotated[Count, doc("Steps, void ones too.", "steps")]
    seconds: Annotated[Amount, doc("Time of its steps.", "s")]
    between_seconds: Annotated[
        Amount,
        doc(
            "Time between its steps: pauses until it was resumed, steps cut short, set-up.",
            "s",
        ),
    ] = 0.0
    load_seconds: Annotated[Amount, doc("Of `seconds`, measured load.", "s")]
    requests: Annotated[Count, doc("Requests sent in measured phases.", "requests")]
    input_tokens: Annotated[Count, doc("Their input tokens.", "tokens")]
    output_tokens: Annotated[Count, doc("Their output tokens.", "tokens")]


class Reproduction(Struct, frozen=True, kw_only=True):
    """Data for repeating a study, and the versions and inputs it was made with."""

    command: Annotated[list[str], doc("The command line, secrets masked; empty: not recorded.")] = []
    versions: Annotated[dict[str, str], doc("Versions by what they are of: sidelight, python, engine.")] = {}
    model: Annotated[str, doc("The model as the requests name it; empty: not known.")] = ""
    workload: Annotated[str, doc("Name of the workload; empty: not known.")] = ""
    tokenizer: Annotated[str, doc("What counts tokens; empty: not known.")] = ""
    warm_up: Annotated[str, doc("The warm-up that was followed, in words; empty: not known.")] = ""
    options: Annotated[dict[str, Any], doc("Options of `run` that every step had, secrets masked.")] = {}
    started_at: Annotated[str, doc("Begin of the first step, ISO 8601; empty: not known.")] = ""
    ended_at: Annotated[str, doc("End of the last step, ISO 8601; empty: not known.")] = ""


class StudyResult(Struct, frozen=True, kw_only=True):
    """The result of a study."""

    schema_version: Annotated[Literal[1], doc("Version of this schema.", NO_UNIT)] = 1
    study_id: Annotated[str, doc("Names the study; sorts by time.")]
    test: Annotated[str, doc("The test.")]
    scale: Annotated[Scale, doc("letter or short.")]
    status: Annotated[Literal["complete", "partial", "interrupted"], doc("Whether the test has all that it needs.")]
    reason: Annotated[str, doc("Why it ended.")]
    sut: Annotated[dict[str, Any], doc("The system under test as declared and as seen.")]
    parameters: Annotated[Parameters, doc("The test's numbers.")]
    seed: Annotated[int, doc("Its seed.", NO_UNIT)]
    steps: Annotated[list[StepRecord], doc("Its steps, in order.")]
    verdict: Annotated[StudyVerdict, doc("What the report begins with.")]
    answer: Annotated[list[str], doc("The result in a few sentences.")]
    results: Annotated[dict[str, ResultQuantity], doc("Results by name.")]
    evidence: Annotated[list[SupportingNumber], doc("What the sentences rest on.")]
    drift: Annotated[Drift | None, doc("Whether the system drifted; null without a sentinel.")]
    cost: Annotated[Cost, doc("What the study took.")]
    notes: Annotated[list[str], doc("How the draft was read where it is open, and deviations.")]
    passed: Annotated[bool | None, doc("Whether stated criteria hold; null: none, or not decided.")]
    reproduction: Annotated[Reproduction, doc("What it takes to repeat the study.")] = Reproduction()


def schema() -> dict[str, Any]:
    """Return the JSON Schema of `result.json`, generated from its types."""
    return {"$schema": DIALECT, "title": "Sidelight study", **msgspec.json.schema(StudyResult)}
