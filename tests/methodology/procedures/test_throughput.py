"""The test of throughput on the simulated engine: what it says of the maximum, and of what makes that the limit."""

from __future__ import annotations

import re

import pytest
from virtual_study import play

from sidelight.methodology.procedures.throughput import THROUGHPUT
from sidelight.methodology.study.model import Finished, Outcome, Parameters, Step, StudySettings
from sidelight.methodology.study.quantities import number
from sidelight.rundir.printable.numbers import figure
from sidelight.simulator.settings import EngineSettings


def asked(**differs: object) -> StudySettings:
    parameters = {"duration": 20.0, "min": 0.01, "max": 10_000.0, "increment": 0.01, "slo": None, **differs}
    return StudySettings(test="throughput", scale="short", parameters=Parameters(**parameters), seed=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "parameters", "limit", "sentence"),
    [
        (
            EngineSettings(),
            {},
            "seats",
            (
                "The limit is how many requests the engine runs at once: requests waited in 100 % of the scrapes while "
                "it ran 16 and no more; the KV cache is not the limit"
            ),
        ),
        (EngineSettings(max_num_seqs=64, kv_blocks=512), {}, "kv_cache", "The limit is the KV cache: requests waited"),
        (
            EngineSettings(),
            {"concurrency": 8},
            "client",
            "The limit is the load generator's requests in flight, not the server",
        ),
    ],
    ids=["seats", "kv_cache", "client"],
)
def test_what_binds_is_said(settings: EngineSettings, parameters: dict[str, object], limit: str, sentence: str):
    """By what the engine's page showed of the saturated steps."""
    steps, findings = play(THROUGHPUT, asked(**parameters), settings, parts="none")
    saturated = [each for each in steps if each.step.kind == "saturate"]
    assert limit in {each.outcome.limit for each in saturated}
    assert findings.answer[2].startswith(sentence)


#: Requests/s of a closed loop of 4,000 requests, 256 of them in flight, whose first and last tenth are left out.
TRUE_LIMIT = 5.835


def test_the_limit_and_where_the_objective_is_reached():
    """The limit is the throughput of a long saturated run; the objective binds before it."""
    steps, findings = play(THROUGHPUT, asked(slo="ttft_p99<500ms", duration=40.0), EngineSettings(), parts="none")
    results = findings.results
    assert abs((results["limit_requests_per_s"].value or 0) / TRUE_LIMIT - 1) < 0.03
    assert sum(each.step.kind != "slo" for each in steps) <= 6
    assert (results["slo_requests_per_s"].value or 99) < TRUE_LIMIT
    highest, saturated, _, slo, draft = findings.answer
    load = {
        name: figure(results[f"{name}_requests_per_s"].value or 0)
        for name in ("sustainable", "limit", "slo", "draft_sustainable")
    }
    tokens = figure(results["max_output_tokens_per_s"].value or 0)
    sustained = rf"Highest load shown stable: {load['sustainable']} requests/s of mean size \(1\d\d output tokens\), "
    assert re.match(rf"{sustained}with {tokens} output tokens/s \(", highest)
    assert "requests piled up" in highest
    assert saturated.startswith(f"Saturated, it completes {load['limit']} requests/s (")
    assert slo.startswith(f"SLO: ttft_p99<500ms holds up to {load['slo']} requests/s")
    assert re.match(rf"The draft would (not )?accept {load['sustainable']} requests/s", draft)
    assert "offered" not in " ".join(findings.answer)
    search = findings.tables[2]
    loads = [row[[column.name for column in search.columns].index("load_per_s")] for row in search.rows]
    assert {results[f"{name}_requests_per_s"].value for name in ("sustainable", "draft_sustainable")} <= {*loads}
    assert [table.name for table in findings.tables] == [
        "throughput-summary",
        "latency-at-maximum-throughput",
        "throughput-search",
    ]
    assert len(findings.tables[2].rows) == len(steps)


def test_a_study_whose_steps_are_all_void_says_why():
    """There is no number of it, and the reason is that of the steps."""
    void = Outcome(status="complete", void="the engine restarted during the step.")
    step = Step(kind="saturate", label="closed-64", load="closed", level=64, seed=1)
    finished = [Finished(number=1, run="steps/0001-closed-64", step=step, outcome=void)]
    findings = THROUGHPUT.findings(asked(), finished, lambda _: pytest.fail("a void step is not read"))
    assert findings.answer == (
        "The maximum throughput is not known: no step counts, since the engine restarted during the step.",
    )
    assert findings.results["max_output_tokens_per_s"].value is None


@pytest.mark.parametrize(
    ("ends", "shown"),
    [
        ((1.1, 1.5), " (1.10 to 1.50, 95 %)"),
        ((1204.6, 13_110.2), " (1,205 to 13,110, 95 %)"),
        ((None, 1.59), " (at most 1.59, 95 %)"),
        ((0.9, None), " (at least 0.900, 95 %)"),
        ((1.24, 1.24), ""),
    ],
)
def test_a_number_has_what_is_known_of_its_interval_behind_it(ends: tuple[float | None, float | None], shown: str):
    """Nothing where neither end is known: the number alone says nothing of how sure it is."""
    assert number(1.24, "requests/s", ci95=ends).interval() == shown
    assert number(1.24, "requests/s").interval() == ""
