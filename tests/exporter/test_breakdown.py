"""Where the TTFT went: the answer in its three forms, the table's rows, and the lines of associations."""

from __future__ import annotations

import importlib.util
import json
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from exporter.breakdown_text import answer, association_rows, breakdown_table


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("summaries", Path(__file__).with_name("summaries.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


summaries = _load()


def table_of(correlation: dict[str, Any]) -> list[list[str]]:
    """The table's rows, as words."""
    console = Console(file=StringIO(), width=100, color_system=None)
    console.print(breakdown_table(correlation))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.split() for line in text.splitlines() if line.strip()]


def test_the_answer_shares_the_ttft_out():
    """Where client and engine speak of the same requests: each part, and its share of the mean TTFT."""
    assert "Of a mean TTFT of 200.0 ms: 150.0 ms (75 %) queue, 30.0 ms (15 %) prefill, 20.0 ms (10 %) other." == answer(
        summaries.correlated()
    )


def test_the_answer_gives_no_shares_of_other_requests():
    """Where the engine finished others' requests as well, its means are not of ours."""
    assert "The engine's means are not those of your requests alone, so the TTFT is not shared out." == answer(
        summaries.correlated(server_requests=150)
    )


def test_the_answer_gives_the_reason_where_there_is_none():
    """A missing breakdown is a reason, not a zero."""
    assert "Where the TTFT went is not known: no server offers queue and prefill times." == answer(
        summaries.uncorrelated("no server offers queue and prefill times")
    )


@pytest.mark.parametrize(
    ("server_requests", "comparable"), [(98, True), (100, True), (102, True), (97, False), (103, False), (0, False)]
)
def test_comparable_is_within_two_percent(server_requests: int, comparable: bool):
    """The engine may have finished 2 % more or fewer than succeeded here."""
    assert comparable == summaries.correlated(server_requests=server_requests)["comparable"]


def test_the_table_has_the_parts_their_shares_and_what_other_is():
    rows = table_of(summaries.correlated())
    assert ["queue", "150.0", "75", "%", "█" * 12, "engine"] in rows
    assert ["prefill", "30.0", "15", "%", "██", "engine"] in rows
    assert ["other", "20.0", "10", "%", "██", "what", "is", "left"] in rows
    assert ["outside", "the", "engine", "5.00", "network,", "gateway,", "client"] in rows
    assert ["blank", "output", "2.00", "before", "the", "first", "text"] in rows
    assert ["TTFT", "200.0", "100", "%", "client"] == rows[-1]


def test_the_table_has_no_shares_of_other_requests():
    """Neither percentages nor bars nor the parts of `other`, where the engine's means are not of our requests."""
    rows = table_of(summaries.correlated(server_requests=150))
    assert ["queue", "150.0", "-", "engine"] in rows
    assert ["TTFT", "200.0", "client"] == rows[-1]
    assert not any("%" in row or "outside" in row for row in rows)


def test_other_that_is_not_told_apart_has_no_rows_of_its_own():
    rows = table_of(summaries.correlated(other=None))
    assert 1 == sum("other" in row for row in rows)
    assert not any("outside" in row for row in rows)


@pytest.mark.parametrize(
    ("change", "ending"),
    [
        ({}, "95 % interval 0.62 to 0.97"),
        ({"ci95": [-0.1, 0.9]}, "95 % interval -0.10 to 0.90 (not told apart from chance)"),
        ({"ci95": None}, "too few independent samples for an interval (not told apart from chance)"),
    ],
)
def test_an_association_says_how_sure_it_is(change: dict[str, Any], ending: str):
    """An interval that holds zero, or none at all, is not told apart from chance."""
    correlation = summaries.correlated()
    correlation["association"][0] |= change
    assert [f"ttft_ms and requests_waiting: rank correlation 0.88 at a lag of 0.25 s, {ending}"] == list(
        association_rows(correlation)
    )


def test_an_association_that_is_not_known_says_why():
    rows = list(association_rows(summaries.uncorrelated("reason")))
    assert ["ttft_ms against requests_waiting: not known, the gauge never changed"] == rows


def test_the_object_is_strict_json():
    for correlation in (summaries.correlated(), summaries.uncorrelated("reason")):
        assert correlation == json.loads(json.dumps(correlation, allow_nan=False))
