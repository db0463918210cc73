"""Studies in virtual time whose steps lack results at random: of any test, and derived as a directory would be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
from msgspec import to_builtins as builtins
from msgspec.structs import replace as replaced
from virtual_runs import PartsSource
from virtual_study import run_step

from sidelight.methodology.compliance.facts import step_facts
from sidelight.methodology.compliance.statement import Compliance, comply
from sidelight.methodology.execution.derive import study_result
from sidelight.methodology.execution.record import StepStarted, Study, StudyRecord
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.report.files import study_files
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Done, Finished, Procedure, Step, StepData, StudySettings
from sidelight.methodology.study.outcome import outcome
from sidelight.methodology.study.planning import decide
from sidelight.methodology.study.result import StudyResult
from sidelight.recorded.system import read_system
from sidelight.rundir.columns import take
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.virtual import VirtualServer

REQUESTS, LEVEL, MOST_STEPS = 24, 4.0, 60
#: What each test needs to have any steps: its configurations and numbers.
VARIANTS: Mapping[str, tuple[str, ...]] = {"compare": ("a", "b"), "guardrail": ("baseline", "input")}
NUMBERS: Mapping[str, dict[str, object]] = MappingProxyType(
    {
        "sweep": {"vary": {"concurrency": (1, 4)}, "repeat": 2, "slo": "ttft_p90<1s"},
        "compare": {"rate": 4.0, "gate": True},
        "ttft": {"until": "ttft_p90±10%"},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoilt:
    """A study, and all that is derived from it: `files` by their names."""

    finished: list[Finished]
    end: Step | Done
    findings: StudyFindings
    compliance: Compliance
    result: StudyResult
    files: dict[str, str]


def asked_of(name: str, rng: np.random.Generator) -> StudySettings:
    """Return what a test of the short scale is asked, with its capacity stated or not."""
    numbers = dict(NUMBERS.get(name, {}))
    if rng.random() < 0.5 and name not in ("sweep", "compare"):
        numbers["capacity"] = 5.0
    return StudySettings(
        test=name,
        scale="short",
        parameters=replaced(PROCEDURES[name].presets["short"], **numbers),
        seed=int(rng.integers(1000)),
        variants=VARIANTS.get(name, ()),
        isolated=True,
    )


def spoilt_study(name: str, seed: int, *, wholes: float = 0.5, parts: PartsSource = "truth") -> Spoilt:
    """Run a test, each of whose steps lacks something with the probability 1 - `wholes`; it may stop anywhere."""
    rng = np.random.default_rng(seed)
    asked, last = asked_of(name, rng), rng.integers(1, MOST_STEPS)

    def spoil(_step: Step, data: StepData) -> StepData:
        return SPOILING[rng.integers(len(SPOILING))](data, rng) if rng.random() > wholes else data

    return study_of(asked, spoil, most_steps=int(last), parts=parts)


def study_of(
    asked: StudySettings,
    spoil: Callable[[Step, StepData], StepData],
    *,
    most_steps: int = MOST_STEPS,
    parts: PartsSource = "truth",
) -> Spoilt:
    """Run what is asked, each of whose steps brings what `spoil` leaves of it."""
    procedure = PROCEDURES[asked.test]
    finished: list[Finished] = []
    data: dict[int, StepData] = {}
    while isinstance(step := decide(procedure, asked, finished), Step) and len(finished) < most_steps:
        number = len(finished) + 1
        data[number] = spoil(step, played(step, procedure, parts))
        came = outcome(step, data[number], procedure.rests_on)
        finished.append(Finished(number=number, run=f"steps/{number:04d}-{step.label}", step=step, outcome=came))
    return derived(procedure, asked, finished, data, step)


def derived(
    procedure: Procedure, asked: StudySettings, finished: list[Finished], data: Mapping[int, StepData], end: Step | Done
) -> Spoilt:
    """Derive what follows from a study, as `derive_study` does from its directory."""

    def read(each: Finished) -> StepData:
        return data[each.number]

    findings = procedure.findings(asked, finished, read)
    facts = {each.run: step_facts(data[each.number]) for each in finished}
    whole = isinstance(end, Done) and end.complete
    compliance = comply(asked.test, asked, read_system(None), finished, findings, facts, whole=whole)
    record = StudyRecord(
        study_id="20261122-120000-000000", tool={"name": "sidelight", "version": "0.1.0"}, command=["sidelight"],
        started_at="2026-11-22T12:00:00.000Z", asked=asked, options={}, seen={}, host={},
    )  # fmt: skip
    begun = {each.number: StepStarted(at_ns=each.number, number=each.number, run=each.run) for each in finished}
    study = Study(path=Path(), record=record, finished=tuple(finished), begun=begun)
    result = study_result(study, procedure, findings, facts, compliance.system, read)
    files = {
        "result.json": msgspec.json.encode(builtins(result)).decode(),
        **dict(study_files(result, findings, compliance)),
    }
    return Spoilt(finished=finished, end=end, findings=findings, compliance=compliance, result=result, files=files)


def played(step: Step, procedure: Procedure, parts: PartsSource) -> StepData:
    """Return what a step would bring, of the same few requests for all that are alike."""
    workload = step.options.get("workload", procedure.workload)
    given = {key: step.options[key] for key in ("input_tokens", "output_tokens") if key in step.options}
    return _played(msgspec.json.encode([workload, given]), step.load, step.seed % 3, parts)


@lru_cache(maxsize=256)
def _played(options: bytes, load: str, seed: int, parts: PartsSource) -> StepData:
    workload, given = msgspec.json.decode(options)
    step = Step(kind="level", label="a", load=load, level=LEVEL, requests=REQUESTS, seed=seed, options=given)
    server = VirtualServer(SimulatorSettings(), network_s=0.002, shown=True)
    return run_step(step, server, workload=workload, parts=parts)


def _failed(data: StepData, rng: np.random.Generator) -> StepData:
    """Let requests fail: some, or all."""
    log = data.requests
    return failed_where(data, rng.random(len(log)) < rng.choice([0.1, 0.6, 1.0]))


def failed_where(data: StepData, failed: np.ndarray) -> StepData:
    """Return a step of which these requests [n] failed."""
    log = data.requests
    without = {name: np.where(failed, -1, getattr(log, name)) for name in _REPLIED}
    status, error = log.status.copy(), log.error.copy()
    status[failed], error[failed] = "failed", "http_error: 500 out of memory"
    return _rewritten(data, status=status, error=error, **without)


_REPLIED = ("first_output_ns", "first_token_ns", "last_output_ns", "last_token_ns", "input_tokens", "output_tokens")


def _rewritten(data: StepData, **columns: np.ndarray) -> StepData:
    return replace(data, requests=replace(data.requests, **columns))


def _without(*names: str) -> Callable[[StepData, np.random.Generator], StepData]:
    return lambda data, _: _rewritten(data, **{name: np.full(len(data.requests), -1) for name in names})


def _unsent(data: StepData, _: np.random.Generator) -> StepData:
    """Let no request be sent."""
    nothing = dict.fromkeys(("dispatch_ns", "submit_ns", "connected_ns", "end_ns", *_REPLIED))
    unsent = _without(*nothing)(data, _)
    return _rewritten(unsent, status=np.full(len(data.requests), "cancelled", np.object_))


def _whole_replies(data: StepData, _: np.random.Generator) -> StepData:
    """Let replies come in one piece."""
    nothing, log = np.full(len(data.requests), -1), data.requests
    return _rewritten(
        data, first_token_ns=nothing, last_token_ns=nothing, chunk_ns=log.chunk_ns[:0], chunk_chars=log.chunk_chars[:0],
        chunk_start=np.zeros_like(log.chunk_start),
    )  # fmt: skip


def _first(count: int) -> Callable[[StepData, np.random.Generator], StepData]:
    def cut(data: StepData, _: np.random.Generator) -> StepData:
        rows = np.arange(min(count, len(data.requests)))
        return replace(data, requests=take(data.requests, rows), parts=take(data.parts, rows))

    return cut


def _without_parts(data: StepData, _: np.random.Generator) -> StepData:
    unknown = {each.name: np.full(len(data.parts), np.nan) for each in fields(data.parts) if each.name.endswith("_s")}
    return replace(data, parts=replace(data.parts, **unknown))


def _doubted(*kinds: str) -> Callable[[StepData, np.random.Generator], StepData]:
    return lambda data, _: replace(data, doubts=dict.fromkeys(kinds, "It may be wrong by up to 10 ms: held up."))


#: What may become of a step.
SPOILING: tuple[Callable[[StepData, np.random.Generator], StepData], ...] = (
    _failed,
    _failed,
    _doubted("ttft"),
    _doubted("gaps"),
    _doubted("ttft", "gaps"),
    _doubted("load"),
    lambda data, _: replace(data, status="crashed"),
    lambda data, _: replace(data, damage="3 of its records are lost"),
    lambda data, _: replace(data, endpoints=()),
    lambda data, _: replace(data, end_ns=data.start_ns),
    _without("input_tokens"),
    _without("output_tokens", "input_tokens"),
    _unsent,
    _whole_replies,
    _without_parts,
    _first(0),
    _first(1),
    _first(3),
)
