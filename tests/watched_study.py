"""A test of the draft in virtual time, with the data of its steps beside what it makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
from virtual_study import play

from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Finished, Procedure, Reader, StepData, StudySettings
from sidelight.simulator.settings import EngineSettings, SimulatorSettings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Studied:
    """A study: its steps in order, the data of each, and what it concludes."""

    finished: list[Finished]
    data: dict[int, StepData]
    findings: StudyFindings

    @property
    def kinds(self) -> list[str]:
        return [each.step.kind for each in self.finished]

    def of_kind(self, kind: str) -> list[tuple[Finished, StepData]]:
        return [(each, self.data[each.number]) for each in self.finished if each.step.kind == kind]

    def value(self, name: str) -> float:
        value = self.findings.results[name].value
        assert value is not None, name
        return value

    def ends(self, name: str) -> tuple[float, float]:
        low, high = self.findings.results[name].ci95 or (None, None)
        assert low is not None, name
        assert high is not None, name
        return low, high


def study(
    procedure: Procedure, asked: StudySettings, settings: EngineSettings | SimulatorSettings | None = None, **given: Any
) -> Studied:
    data: dict[int, StepData] = {}

    def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
        data.update({each.number: read(each) for each in finished})
        return procedure.findings(asked, finished, read)

    watched = dataclasses.replace(procedure, findings=findings)
    finished, concluded = play(watched, asked, settings or EngineSettings(), **given)
    msgspec.json.encode(concluded)  # as result.json has it
    return Studied(finished=finished, data=data, findings=concluded)


def records(data: StepData) -> list[Any]:
    """Return the engine's true records of a step's requests that it saw."""
    return [each.record for each in data.about["truth"] if each.record is not None]
