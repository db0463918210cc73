"""A sweep: its cells and their order, the long table, and the tables of those who sweep too."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_study import play

from sidelight.methodology.procedures.sweep import SWEEP
from sidelight.methodology.study.findings import ResultTable, StudyFindings
from sidelight.methodology.study.model import Finished, Parameters, StudySettings
from sidelight.simulator.settings import EngineSettings

VARY = {"input_tokens": ("64", "256"), "concurrency": ("1", "4")}


def asked(**fields: Any) -> StudySettings:
    parameters = Parameters(**{"requests": 12, "repeat": 3, "order": "random", "vary": VARY, **fields})
    return StudySettings(test="sweep", scale="short", parameters=parameters, seed=5, options={"output_tokens": "16"})


@pytest.fixture(scope="module")
def swept() -> tuple[list[Finished], StudyFindings]:
    return play(SWEEP, asked(), EngineSettings())


def table(findings: StudyFindings, name: str) -> ResultTable:
    return next(each for each in findings.tables if each.name == name)


def test_every_repeat_has_every_cell_in_an_order_of_its_own(swept: tuple[list[Finished], StudyFindings]) -> None:
    """Blocks of all cells, shuffled by the study's seed; each run has contents of its own."""
    finished, _ = swept
    blocks = [[tuple(each.step.options.values()) for each in finished[at : at + 4]] for at in range(0, 12, 4)]
    assert all(len(set(block)) == 4 for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1
    assert len({each.step.seed for each in finished}) == 12
    assert {each.step.level for each in finished} == {1.0, 4.0}
    assert {each.step.load for each in finished} == {"closed"}


def test_ascending_cells_come_as_they_were_written() -> None:
    """The last option varies fastest."""
    finished, _ = play(SWEEP, asked(order="ascending", repeat=1), EngineSettings())
    assert [tuple(each.step.options.values()) for each in finished] == [
        ("64", "1"), ("64", "4"), ("256", "1"), ("256", "4"),
    ]  # fmt: skip


def test_the_long_table_has_a_row_a_run(swept: tuple[list[Finished], StudyFindings]) -> None:
    """With the values of the varied options and all metrics, longer prompts take longer."""
    rows = table(swept[1], "sweep").rows
    names = [column.name for column in table(swept[1], "sweep").columns]
    assert len(rows) == 12
    ttft: dict[Any, list[Any]] = {}
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        assert cells["ok"] == 12
        if cells["concurrency"] == "1":
            ttft.setdefault(cells["input_tokens"], []).append(cells["ttft_p50_ms"])
    assert max(ttft["64"]) < min(ttft["256"])


def test_spread_is_over_the_runs_of_a_cell(swept: tuple[list[Finished], StudyFindings]) -> None:
    """asiai's M8 pools cells, whose speeds differ far more than the runs of one do."""
    rows = table(swept[1], "asiai").rows
    medians = [float(row[3] or 0) for row in rows]
    spread = swept[1].results["std_dev_tok_s"].value
    assert spread is not None
    assert 0 < spread < 0.2 * (max(medians) - min(medians))
    assert all(row[2] == 3 for row in rows)


def test_a_cell_has_siclaits_eight_metrics(swept: tuple[list[Finished], StudyFindings]) -> None:
    """Eight rows, and for those of single requests Mean, Min, Max, P99, P90 and P75."""
    shown = table(swept[1], "siclait-64-4")
    assert [column.title for column in shown.columns] == ["Metric", "Mean", "Min", "Max", "P99", "P90", "P75"]
    assert len(shown.rows) == 8
    assert shown.rows[4][1] == 64


def test_exos_json_has_a_row_a_request_and_says_what_no_client_knows(
    swept: tuple[list[Finished], StudyFindings],
) -> None:
    """`runs`, `cluster` and `system_metrics`, with verified prompt lengths."""
    exo = swept[1].documents["exo"]
    assert len(exo["runs"]) == 12 * 12
    row = exo["runs"][0]
    assert row["pp_tokens"] in (64, 256)
    assert row["tg"] == 16
    assert row["stats"]["generation_tps"] > 0
    assert exo["cluster"] is None
    assert "cluster" in exo["missing"]
    assert {row["repeat_index"] for row in exo["runs"]} == {0, 1, 2}
