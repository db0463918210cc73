"""The tables for notebooks: a request's parts as columns, a slice's as rows, with how sure they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exporter.tables import requests_table, timeslices_table
from loadgen.log import RequestLog, assemble
from loadgen.records import RequestPart


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("summaries", Path(__file__).with_name("summaries.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


summaries = _load()


def hundred() -> RequestLog:
    """A log of 100 requests of which nothing came back."""
    parts = [
        RequestPart(
            index=index,
            seq=0,
            last=True,
            worker=0,
            url="u",
            scheduled_ns=index,
            dispatch_ns=index,
            connected_ns=index,
            submit_ns=index,
            reused=False,
            status=0,
            head=b"",
            reads_ns=b"",
            read_ends=b"",
            body=b"",
            end_ns=index + 1,
            error="connect: refused",
        )
        for index in range(100)
    ]
    return assemble([], parts, run_id="r")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (
            "trace",
            {"queue_ms": 150.0, "way_in_ms": 2.0, "decode_ms": 1000.0, "breakdown_error_ms": 0.0}
            | {"breakdown_quality": "exact", "breakdown_reason": None, "gateway_ms": None, "engine_arrival_ns": None},
        ),
        (
            "histogram",
            {"queue_ms": 150.0, "way_in_ms": None, "decode_ms": None, "breakdown_error_ms": 4.0}
            | {"breakdown_quality": "shared"},
        ),
        (
            "none",
            {"queue_ms": None, "other_ms": None, "breakdown_error_ms": None, "breakdown_reason": "it failed"}
            | {"breakdown_quality": "none"},
        ),
    ],
)
def test_a_requests_parts_are_columns_and_null_where_they_are_not_told(source: str, shown: dict[str, Any]):
    parts = summaries.parts(source, reason="it failed" if source == "none" else "")
    row = requests_table(hundred(), parts).to_pylist()[7]
    assert {"breakdown_source": source, **shown} == {name: row[name] for name in ("breakdown_source", *shown)}


def test_a_slices_means_are_rows_with_their_coverage_and_quality():
    summary = {"server": {}, "correlation": summaries.correlated()}
    rows = [row for row in timeslices_table(summary).to_pylist() if row["slice"] == 4]
    told = {row["statistic"]: (row["value"], row["unit"]) for row in rows}
    assert {"ttft_breakdown"} == {row["quantity"] for row in rows}
    assert ((150.0, "milliseconds"), (20.0, "requests")) == (told["queue_ms"], told["covered"])
    assert ((1.0, "ratio"), (20.0, "requests")) == (told["coverage_trace"], told["quality_exact"])
    assert "gateway_ms" not in told
