"""The test of the TTFT: its steps, its percentiles and what it says of slow requests, against the engine's truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs
from virtual_study import play

from sidelight.methodology.measures.looks import parse_until
from sidelight.methodology.procedures.ttft import TTFT, with_ramp
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Done, Finished, Outcome, Parameters, Step, StudySettings
from sidelight.methodology.study.planning import content_seed, decide
from sidelight.rundir.printable.numbers import figure
from sidelight.simulator.settings import EngineSettings


def asked(**parameters: Any) -> StudySettings:
    return StudySettings(
        test="ttft", scale="short", seed=4, parameters=Parameters(**{"load": 0.7, "requests": 300, **parameters})
    )


def played(**parameters: Any) -> tuple[list[Finished], StudyFindings]:
    return play(TTFT, asked(capacity=5.9, **parameters), EngineSettings())


@pytest.fixture(scope="module")
def study() -> tuple[list[Finished], StudyFindings]:
    return played()


def test_load_is_poisson_at_the_stated_share_of_the_capacity(study: tuple[list[Finished], StudyFindings]):
    """One step, of so many requests that enough are left without its first tenth."""
    (step,) = [each.step for each in study[0]]
    assert (step.load, step.options["arrival"]) == ("open", "poisson")
    assert step.level == pytest.approx(0.7 * 5.9)
    assert study[1].results["ttft_requests"].value >= 300


def test_enough_requests_are_left_without_the_first_tenth():
    """Of Poisson arrivals in all but one of ten thousand loads."""
    random = np.random.default_rng(1)
    for count in (100, 1000, 10_000):
        early = random.binomial(with_ramp(count), 0.1, 10_000)
        assert np.mean(with_ramp(count) - early < count) <= 1e-3


def test_the_tables_are_those_of_the_draft(study: tuple[list[Finished], StudyFindings]):
    """Rows and headings by its words; of few requests high percentiles are bounds, and say so."""
    tables = {table.name: table for table in study[1].tables}
    rows = {row[0]: row for row in tables["ttft-results"].rows}
    assert list(rows) == [
        "Requests",
        *(f"TTFT {name}" for name in ("P50", "P90", "P95", "P99", "P99.9", "Mean", "Min", "Max")),
    ]
    value, _, low, high = rows["TTFT P99.9"][1:]
    extreme = study[1].results["ttft_p99_9_ms"]
    assert (extreme.value, high) == (None, None)
    assert low <= value == extreme.sample <= rows["TTFT Max"][1]
    assert "of 10,000 that are needed" in extreme.missing
    assert f"P99.9 is {figure(value)} ms in the sample, at least {figure(low)} ms" in study[1].answer[1]
    by_length = tables["ttft-by-length"]
    assert [column.title for column in by_length.columns[:5]] == [
        "Input Tokens", "Requests", "P50 (ms)", "P95 (ms)", "P99 (ms)",
    ]  # fmt: skip
    assert {row[0] for row in by_length.rows} >= {"0-256", "256-512"}
    assert sum(row[1] for row in by_length.rows) == rows["Requests"][1]


def test_slow_requests_are_those_that_queued():
    """Near the capacity: the queue makes P99, from the first waiting requests on."""
    findings = played(load=0.9)[1]
    assert findings.results["ttft_p99_queue_ratio"].value > 0.7
    assert findings.results["ttft_queue_from_waiting"].value <= 4
    assert "in the engine's queue" in findings.answer[2]


def test_a_study_goes_on_until_the_interval_is_narrow():
    """At growing lengths, five looks at most; what is stated in the end is not wider than what ended it."""
    finished, findings = played(until="ttft_p50±8%", load=0.5)
    assert 2 <= len(finished) <= 5
    sizes = [each.step.requests or 0 for each in finished]
    assert sizes == [with_ramp(300 * 2 ** max(at - 1, 0)) for at in range(len(sizes))]
    p50 = findings.results["ttft_p50_ms"]
    assert p50.value is not None
    low, high = p50.ci95 or (None, None)
    assert low is not None
    assert high is not None
    assert p50.value - low <= 0.08 * p50.value
    assert high - p50.value <= 0.08 * p50.value
    assert "99 %" in p50.method
    ended = decide(TTFT, asked(capacity=5.9, until="ttft_p50±8%", load=0.5), finished)
    assert isinstance(ended, Done)
    assert "known within" in ended.reason


def test_a_width_that_cannot_be_reached_ends_after_five_looks():
    """And the reason says so."""
    wanted = asked(capacity=5.9, until="ttft_p99±0.1%")
    finished: list[Finished] = []
    step = decide(TTFT, wanted, finished)
    assert isinstance(step, Step)
    (first,) = play(TTFT, asked(capacity=5.9), EngineSettings())[0]
    finished = [Finished(number=at, run=f"steps/{at}", step=first.step, outcome=first.outcome) for at in range(1, 6)]
    ended = decide(TTFT, wanted, finished)
    assert isinstance(ended, Done)
    assert ended.reason.startswith("after 5 looks")


def test_a_server_that_fails_every_request_ends_the_looks():
    """There is nothing to look at, and the reason says so."""
    wanted = asked(capacity=5.9, until="ttft_p99±10%")
    step = decide(TTFT, wanted, [])
    assert isinstance(step, Step)
    failed = Finished(number=1, run="steps/1", step=step, outcome=Outcome(status="complete", sent=300))
    ended = decide(TTFT, wanted, [failed])
    assert isinstance(ended, Done)
    assert not ended.complete
    assert TTFT.findings(wanted, [failed], lambda _: pytest.fail("it has no tables")).results["ttft_p99_ms"].missing


def test_a_void_step_is_repeated_with_other_requests():
    """Those of the first time may be in the prefix cache; but where other steps send them too, they are the same."""
    wanted = asked(capacity=5.9)
    first = decide(TTFT, wanted, [])
    assert isinstance(first, Step)
    void = Outcome(status="complete", void="another client used the engine")
    repeats = []
    for step in (first, structs.replace(first, unpaired=False)):
        repeat = decide(TTFT, wanted, [Finished(number=1, run="steps/1", step=step, outcome=void)])
        assert isinstance(repeat, Step)
        assert repeat.repeat == 1
        repeats.append(repeat.seed)
    assert repeats[0] not in {content_seed(wanted, number) for number in range(1, 100)}
    assert repeats[1] == first.seed


def test_a_plan_shows_as_many_looks_as_there_can_be():
    """Of steps that are only expected there are percentiles, and no counts."""
    wanted = asked(capacity=5.9, until="ttft_p99±10%")
    step, finished = decide(TTFT, wanted, []), []
    while isinstance(step, Step):
        expected = Outcome(status="complete", sent=300, ok=300, percentiles={"ttft_ms": {}})
        finished.append(Finished(number=len(finished) + 1, run="", step=step, outcome=expected))
        step = decide(TTFT, wanted, finished)
    assert len(finished) == 5
    assert "has no interval" in step.reason


@pytest.mark.parametrize("text", ["ttft_p99", "tpot_p99±10%", "ttft_p99±0%", "ttft_p98±10%", "ttft_p99±1000%", ""])
def test_a_width_is_a_percentile_and_a_percentage(text: str):
    """Else nothing is sent, and the reason names the option."""
    with pytest.raises(ValueError, match="--until"):
        parse_until(text)
