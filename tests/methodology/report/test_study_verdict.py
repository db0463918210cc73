"""Verdict on a study: the same words and digits in every output, and a state that follows from the steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from studies import VERDICT, findings, result
from verdict_words import of_markdown, of_page, plain, words_of
from virtual_study import play

from sidelight.exporter.summary.verdict import StudyVerdict
from sidelight.methodology.compliance.statement import Compliance
from sidelight.methodology.procedures.throughput import THROUGHPUT
from sidelight.methodology.procedures.ttft import TTFT
from sidelight.methodology.report.files import study_files
from sidelight.methodology.report.verdict import study_verdict
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Finished, Outcome, Parameters, Procedure, Reader, Step, StudySettings
from sidelight.methodology.study.result import StudyResult
from sidelight.simulator.settings import EngineSettings

COMPLIANCE = Compliance(
    test="throughput", verdict="unconditional", sentence="None.", contradictions=[], requirements=[]
)


def played(procedure: Procedure, asked: StudySettings) -> StudyVerdict:
    """The verdict on a test that was played in virtual time."""
    readers: list[Any] = []

    def recorded_findings(given: StudySettings, finished: list[Finished], read: Reader) -> StudyFindings:
        readers.append(read)
        return procedure.findings(given, finished, read)

    finished, findings_ = play(
        dataclasses.replace(procedure, findings=recorded_findings), asked, EngineSettings(), parts="scrapes"
    )
    return study_verdict(asked, finished, findings_, readers[0])


@pytest.fixture(scope="module")
def limit() -> StudyVerdict:
    parameters = Parameters(duration=20.0, min=0.01, max=10_000.0, increment=0.01)
    return played(THROUGHPUT, StudySettings(test="throughput", scale="short", parameters=parameters, seed=1))


def test_every_output_of_a_study_has_the_same_words_and_digits(limit: StudyVerdict):
    """Text, page, Markdown and JSON, to the digit; of a study with a single bar, and of one that was played."""
    for verdict in (VERDICT, limit):
        of_study = result(verdict=verdict)
        written = dict(study_files(of_study, findings(), COMPLIANCE))
        outputs = {
            "text": plain(written["report.txt"]),
            "page": of_page(written["report.html"]),
            "markdown": of_markdown(written["report.md"]),
        }
        assert verdict == msgspec.json.decode(msgspec.json.encode(of_study), type=StudyResult).verdict
        assert [] == [(kind, text) for kind, all_ in outputs.items() for text in words_of(verdict) if text not in all_]


def test_a_limit_is_shown_by_the_load_that_held_and_the_one_that_did_not(limit: StudyVerdict):
    """Figures are of the first, the bar of the second: there the queue grows, since seats are few."""
    assert ("limit_found", "queue") == (limit.state, limit.cause)
    served, median, p99, failed = limit.figures
    assert 4 < (served.value or 0.0) < 6
    assert 0 < (median.value or 0.0) <= (p99.value or 0.0)
    assert 0 == failed.value
    (bar,) = limit.bars
    assert bar.mean_ms > (median.value or 0.0)
    assert "--max-num-seqs" in limit.do


def test_a_test_at_one_load_has_no_limit(limit: StudyVerdict):
    """Its step piled up and says so, with the advice of a step that broke; nothing is claimed of other loads."""
    parameters = Parameters(load=1.5, capacity=5.8, duration=20.0, requests=300)
    verdict = played(TTFT, StudySettings(test="ttft", scale="short", parameters=parameters, seed=1))
    assert ("measured", "queue", limit.do) == (verdict.state, verdict.cause, verdict.do)
    assert "where requests pile up" in verdict.bars[0].label


def test_a_study_without_a_step_that_counts_says_why():
    """The first void step's reason is the evidence."""
    step = Step(kind="level", label="open-1", load="open", level=1.0, seed=1)
    void = Finished(number=1, run="r", step=step, outcome=Outcome(status="crashed", void="the engine died"))
    asked = StudySettings(test="throughput", scale="short", parameters=Parameters(), seed=1)
    verdict = study_verdict(asked, [void], findings(), lambda _: pytest.fail("nothing is read"))
    assert ("incomplete", [], []) == (verdict.state, verdict.figures, verdict.bars)
    assert "The engine died." == verdict.why
