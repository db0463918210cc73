"""The CSV export: AIPerf's blocks and columns, and the numbers of the JSON in full."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from exports import Recorded, S, source_of
from series import endpoint_of

from sidelight.exporter.server_metrics.csv import as_csv
from sidelight.exporter.server_metrics.json import document

Table = list[dict[str, str]]


def blocks(text: str) -> dict[str, Table]:
    """Read the blocks back, by type: comments first, an empty line between blocks."""
    lines = text.splitlines(keepends=True)
    body = "".join(line for line in lines if not line.startswith("#"))
    tables = [list(csv.DictReader(block.splitlines(keepends=True))) for block in body.replace("\r", "").split("\n\n")]
    return {table[0]["Type"]: table for table in tables if table}


def test_numbers_are_those_of_the_json_in_full(recorded: Recorded):
    """Every series of the JSON is one row, and each of its statistics comes back bit for bit."""
    exported = document(source_of(recorded[1], slice_ns=10 * S))
    tables = blocks(as_csv(exported))
    expected = [
        (metric["type"], name, series)
        for kind in ("gauge", "counter", "histogram", "unknown")
        for name, metric in exported["metrics"].items()
        if metric["type"] == kind
        for series in metric["series"]
    ]
    rows = [row for table in tables.values() for row in table]
    assert [(kind, name) for kind, name, _ in expected] == [(row["Type"], row["Metric"]) for row in rows]
    for (_, _, series), row in zip(expected, rows, strict=True):
        assert series["stats"] == {name: float(row[name]) for name in series["stats"]}
        assert series.get("labels", {}) == {name: row[name] for name in series.get("labels", {})}
        if series.get("buckets"):
            pairs = (pair.split("=") for pair in row["buckets"].split(";"))
            assert series["buckets"] == {le: int(count) for le, count in pairs}


def test_columns_are_those_of_a_real_file(recorded: Recorded, reference: Path):
    """Block for block the same columns in the same order, labels aside, and as many comment lines."""
    theirs = (reference / "server_metrics_export.csv").read_text()
    ours = as_csv(document(source_of(recorded[1], slice_ns=10 * S)))
    for kind, table in blocks(theirs).items():
        our_rows = blocks(ours)[kind]
        plain = [name for name in table[0] if name not in {"engine", "model_name", "finished_reason", "handler"}]
        assert plain == [name for name in our_rows[0] if name in plain], kind
        labels = list(our_rows[0])[len(plain) - (2 if kind == "histogram" else 1) : -2 if kind == "histogram" else -1]
        assert sorted(labels) == labels
        assert {row["Endpoint"] for row in table} == {"127.0.0.1:38411"}
        assert {row["Endpoint"] for row in our_rows} == {"127.0.0.1:8000"}
    comments = [[line for line in text.splitlines() if line.startswith("#")] for text in (theirs, ours)]
    assert len(comments[0]) == len(comments[1])
    assert comments[0][2] == comments[1][2]


def test_what_is_missing_is_an_empty_cell():
    """A histogram without observations has a count and buckets; a series without a label has none there."""
    page = (
        '# TYPE h histogram\nh_bucket{le="1"} 0\nh_bucket{le="+Inf"} 0\nh_sum 0\nh_count 0\n'
        '# TYPE g gauge\ng{a="x,\\"y\\""} 1\n# TYPE f gauge\nf 2.5\n'
    )
    tables = blocks(as_csv(document(source_of(endpoint_of([page] * 3)))))
    (row,) = tables["histogram"]
    assert ("0", "", "", "1=0;+Inf=0") == (row["count"], row["sum"], row["p50_estimate"], row["buckets"])
    assert [("f", "", "2.5"), ("g", 'x,"y"', "1.0")] == [(r["Metric"], r["a"], r["avg"]) for r in tables["gauge"]]


def test_a_label_called_like_a_column_is_renamed():
    """No column stands twice."""
    text = as_csv(document(source_of(endpoint_of(['# TYPE g gauge\ng{avg="x",z="y"} 1\n'] * 3))))
    (row,) = blocks(text)["gauge"]
    assert ("1.0", "x", "y") == (row["avg"], row["label_avg"], row["z"])


def test_a_label_called_like_a_renamed_one_stays_beside_it():
    """Of two columns of one name a reader would see one."""
    text = as_csv(document(source_of(endpoint_of(['# TYPE g gauge\ng{avg="x",label_avg="y"} 1\n'] * 3))))
    (row,) = blocks(text)["gauge"]
    assert ("1.0", "x", "y") == (row["avg"], row["label_label_avg"], row["label_avg"])


def test_pages_of_one_host_are_distinguished():
    """An endpoint is its host and port where that is enough, else its URL."""
    urls = ("http://a:1/metrics", "http://a:1/other", "http://b:2/metrics")
    endpoints = [endpoint_of(["# TYPE g gauge\ng 1\n"] * 3, url=url) for url in urls]
    table: Any = blocks(as_csv(document(source_of(*endpoints))))["gauge"]
    assert [*urls[:2], "b:2"] == [row["Endpoint"] for row in table]


def test_a_text_that_a_spreadsheet_would_evaluate_is_marked_as_text():
    """Labels and help texts are the server's; a label that is a number stays one."""
    page = '# HELP g =1+1\n# TYPE g gauge\ng{a="=cmd|\' /C calc\'!A0",b="@SUM(1)",c="-2+3",d="-2"} 1\n'
    (row,) = blocks(as_csv(document(source_of(endpoint_of([page] * 3)))))["gauge"]
    texts = ("'=cmd|' /C calc'!A0", "'@SUM(1)", "'-2+3", "-2", "'=1+1")
    assert texts == tuple(row[name] for name in ("a", "b", "c", "d", "Description"))
