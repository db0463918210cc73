"""The types of `summary.json`: what recorded runs derive to fits their schema, and is read back without a loss."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import summaries
from jsonschema import Draft202012Validator

from sidelight.exporter.summary.result import Summary, as_written, schema
from sidelight.exporter.tables import timeslices_table
from sidelight.scraper.window.quantities import MOST_SLICES, GaugeSlice
from sidelight.scraper.window.summary import Endpoint, Scrapes

RUNS = Path(__file__).parents[2] / "golden"
SUMMARIES = {path.parents[1].name: json.loads(path.read_bytes()) for path in RUNS.glob("*/expected/summary.json")}


@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_a_recorded_summary_fits_the_generated_schema(name: str):
    objections = Draft202012Validator(schema()).iter_errors(SUMMARIES[name])
    assert [] == [f"{error.json_path}: {error.message}" for error in objections]


@pytest.mark.parametrize("name", sorted(SUMMARIES))
def test_a_recorded_summary_is_read_back_without_a_loss(name: str):
    """Key order included, in which files are written."""
    read: dict[str, Any] = msgspec.to_builtins(msgspec.convert(SUMMARIES[name], Summary))
    assert json.dumps(SUMMARIES[name]) == json.dumps(read)


def test_runs_are_there():
    assert len(SUMMARIES) >= 5


@pytest.mark.parametrize(
    ("path", "absent"),
    [
        ("server.endpoints.0", "reference"),
        ("server.requests_finished.stats", "total"),
        ("server.requests_finished.timeslices.0", "rate_per_s"),
        ("server.requests_waiting.timeslices.0", "mean"),
        ("server.queue_time.timeslices.0", "count"),
    ],
)
def test_what_is_absent_has_a_reason(path: str, absent: str):
    """A number that goes leaves one behind."""
    summary = deepcopy(SUMMARIES["vllm_spans"])
    place: Any = summary
    for key in path.split("."):
        place = place[int(key) if key.isdigit() else key]
    del place[absent]
    assert not Draft202012Validator(schema()).is_valid(summary)


def test_an_unknown_engine_has_a_reason():
    """Null alone does not fit."""
    summary = deepcopy(SUMMARIES["vllm_spans"])
    summary["server"]["engine"] = None
    assert not Draft202012Validator(schema()).is_valid(summary)


def sliced(number: int) -> Summary:
    """Return a summary of so many slices: of the requests, of the engines together, and of each of two."""
    slices = [GaugeSlice(start_ns=at, end_ns=at + 1, mean=1.0, min=0.0, max=float(at)) for at in range(number)]
    waiting = msgspec.structs.replace(summaries.gauge(mean=1.0), timeslices=slices)
    none = Scrapes(ok=0, failed=0, failures={})
    engines = [
        Endpoint(url=url, engine="vllm", scrapes=none, reason="why", requests_waiting=waiting) for url in ("a", "b")
    ]
    server = msgspec.structs.replace(summaries.server(requests_waiting=waiting), endpoints=engines)
    findings = replace(summaries.findings(), edges_ns=list(range(number + 1)))
    return summaries.summary(summaries.correlated(findings), server)


def broken_rules(summary: Summary) -> set[str]:
    """Return the rules of the schema that a summary breaks; one that was made up breaks some."""
    written = json.loads(msgspec.json.encode(summary))
    return {str(error.validator) for error in Draft202012Validator(schema()).iter_errors(written)}


def test_slices_leave_the_summary_of_a_long_run_for_the_table():
    """With a reason in their place, and the table has those of each engine too; a run of few slices keeps them."""
    few = sliced(MOST_SLICES)
    assert few == as_written(few)
    long = sliced(MOST_SLICES + 1)
    written = as_written(long)
    reason = "121 slices, more than the 120 that summary.json keeps: they are in timeslices.parquet"
    assert ([], reason) == (written.correlation.timeslices, written.correlation.timeslices_missing)
    for page in (written.server, *written.server.endpoints):
        assert page.requests_waiting
        assert ([], {"timeslices": reason}) == (page.requests_waiting.timeslices, page.requests_waiting.missing)
    assert [False, True] == ["maxItems" in broken_rules(summary) for summary in (written, long)]
    rows = timeslices_table(long).to_pylist()
    assert {"correlation", "server", "endpoint"} == {row["source"] for row in rows}
    assert {None, "a", "b"} == {row["endpoint"] for row in rows}
    for url in (None, "a", "b"):
        largest = [row["value"] for row in rows if (row["endpoint"], row["statistic"]) == (url, "max")]
        assert list(map(float, range(MOST_SLICES + 1))) == largest
