"""The JSONL export: one line a page that changed, every series raw."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from exports import Recorded, S, source_of
from prometheus_client.parser import text_string_to_metric_families
from series import URL, endpoint_of

from sidelight.exporter.server_metrics.jsonl import write
from sidelight.exporter.server_metrics.source import MetricsSource
from sidelight.rundir.files import replace_file

Lines = Callable[[MetricsSource], list[dict[str, Any]]]


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    """Write a source and read the lines back."""

    def read(source: MetricsSource) -> list[dict[str, Any]]:
        path = tmp_path / "export.jsonl"
        replace_file(path, partial(write, source))
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    return read


def test_every_sample_of_a_page_is_there(recorded: Recorded, lines: Lines):
    """The values are what prometheus-client reads from the same page, whatever their type."""
    pages, endpoint = recorded
    written = lines(source_of(endpoint))
    assert len(pages) == len(written)
    for page, line in zip(pages[::6], written[::6], strict=True):
        compared = 0
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.name if sample.name.endswith("_created") else family.name
                inner = {"le", "quantile"} if family.type in ("histogram", "summary") else set()
                labels = {key: value for key, value in sample.labels.items() if key not in inner}
                (entry,) = (row for row in line["metrics"][name] if row.get("labels", {}) == labels)
                if "le" in sample.labels:
                    value = entry["buckets"][sample.labels["le"]]
                elif family.type in ("histogram", "summary"):
                    value = entry[sample.name.rpartition("_")[2]]
                else:
                    value = entry["value"]
                assert sample.value == value, sample
                compared += 1
        assert 400 < compared


def test_pages_that_changed_nothing_are_left_out(lines: Lines):
    """Lines of several endpoints follow each other in time; phases are named as the format names them."""
    first = endpoint_of([f"# TYPE g gauge\ng {v}\n" for v in (1, 1, 2, 2, 3)])
    other = endpoint_of(["# TYPE g gauge\ng 7\n", ""], url="http://b/metrics", at_ns=[S * 5 // 2, 3 * S])
    phases = [("warmup", 0, S), ("measure", 2 * S, 4 * S), ("measure", 9 * S, None)]
    written = lines(source_of(first, other, phases=phases))
    assert [
        (URL, S, 1.0, "warmup"),
        ("http://b/metrics", S * 5 // 2, 7.0, "profiling"),
        (URL, 3 * S, 2.0, "profiling"),
        (URL, 5 * S, 3.0, None),
    ] == [
        (line["endpoint_url"], line["timestamp_ns"], line["metrics"]["g"][0]["value"], line.get("benchmark_phase"))
        for line in written
    ]
    assert {2_000_000} == {line["timestamp_ns"] - line["request_sent_ns"] for line in written}
    assert {2_000_000} == {line["endpoint_latency_ns"] for line in written}


def test_summaries_have_quantiles(lines: Lines):
    """What is not finite is left out, and so is a metric of which nothing is left."""
    page = (
        '# TYPE s summary\ns{a="b",quantile="0.5"} 2\ns{a="b",quantile="0.9"} NaN\ns_sum{a="b"} 6\ns_count{a="b"} 3\n'
        "# TYPE g gauge\ng +Inf\n# TYPE h gauge\nh 1\n"
    )
    (line,) = lines(source_of(endpoint_of([page]), start_ns=0, end_ns=2 * S))
    expected = {
        "s": [{"labels": {"a": "b"}, "quantiles": {"0.5": 2.0}, "sum": 6.0, "count": 3.0}],
        "h": [{"value": 1.0}],
    }
    assert expected == line["metrics"]


def test_fields_are_those_of_a_real_file(recorded: Recorded, lines: Lines, reference: Path):
    """Ours lack only what we do not know (the first byte's stamp) and the phase's further names."""
    with (reference / "server_metrics_export.head.jsonl").open() as file:
        theirs = [json.loads(line) for line in file]
    ours = lines(source_of(recorded[1], phases=[("measure", 0, None)]))
    unknown = {"first_byte_ns", "phase_index", "profiling_index", "phase_name", "phase_kind"}
    assert {field for line in theirs for field in line} - unknown == {field for line in ours for field in line}
    for name, entries in theirs[-1]["metrics"].items():
        if name in ours[-1]["metrics"]:
            assert list(entries[0]) == list(ours[-1]["metrics"][name][0]), name
