"""The types of `summary.json`: what recorded runs derive to fits their schema, and is read back without a loss."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator

from exporter.summary.result import Summary, schema

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
