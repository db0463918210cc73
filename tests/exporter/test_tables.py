"""The tables for notebooks: a request's parts as columns, a slice's as rows, with how sure they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import summaries
from recordings import log_of

from sidelight.correlator.load.reuse import TOKENS, RequestReuse
from sidelight.exporter import tables
from sidelight.exporter.tables import requests_table, timeslices_table

NAMES = np.full(100, "", dtype=np.object_)
UNKNOWN_REUSE = RequestReuse(
    served_by=NAMES, endpoint=NAMES, **dict.fromkeys(("expected_cached_tokens", *TOKENS), np.full(100, np.nan))
)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (
            "trace",
            {"queue_ms": 150.0, "request_network_ms": 2.0, "decode_ms": 1000.0, "breakdown_error_ms": 0.0}
            | {"breakdown_quality": "exact", "breakdown_reason": None, "gateway_ms": None, "engine_arrival_ns": None},
        ),
        (
            "histogram",
            {"queue_ms": 150.0, "request_network_ms": None, "decode_ms": None, "breakdown_error_ms": 4.0}
            | {"breakdown_quality": "shared"},
        ),
        (
            "none",
            {"queue_ms": None, "other_ms": None, "breakdown_error_ms": None, "breakdown_reason": "it failed"}
            | {"breakdown_quality": "none"},
        ),
    ],
)
def test_a_requests_parts_are_columns_and_null_where_they_are_unknown(source: str, shown: dict[str, Any]):
    parts = summaries.parts(source, reason="it failed" if source == "none" else "")
    row = requests_table(log_of(100), parts, UNKNOWN_REUSE).to_pylist()[7]
    assert {"breakdown_source": source, **shown} == {name: row[name] for name in ("breakdown_source", *shown)}


def test_requests_are_written_in_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of 100 requests in groups of 30 four, with the rows of one table."""
    log, parts = log_of(100), summaries.parts("trace")
    monkeypatch.setattr(tables, "_ROW_GROUP", 30)
    with (tmp_path / "requests.parquet").open("wb") as file:
        tables.write_requests(log, parts, UNKNOWN_REUSE, (), file)
    written = pq.ParquetFile(tmp_path / "requests.parquet")
    assert 4 == written.num_row_groups
    assert tables.requests_table(log, parts, UNKNOWN_REUSE).equals(written.read())


def test_a_slices_means_are_rows_with_their_coverage_and_quality():
    summary = summaries.summary(summaries.correlated(), summaries.NO_SERVER)
    rows = [row for row in timeslices_table(summary).to_pylist() if row["slice"] == 4]
    by_statistic = {row["statistic"]: (row["value"], row["unit"]) for row in rows}
    assert {"ttft_breakdown"} == {row["quantity"] for row in rows}
    assert ((150.0, "milliseconds"), (20.0, "requests")) == (by_statistic["queue_ms"], by_statistic["covered"])
    assert ((1.0, "ratio"), (20.0, "requests")) == (by_statistic["coverage_trace"], by_statistic["quality_exact"])
    assert "gateway_ms" not in by_statistic


def test_a_count_that_64_bits_do_not_hold_is_kept():
    """A server may say it: the table of the other slices is written all the same."""
    summary = summaries.summary(summaries.correlated(), summaries.NO_SERVER)
    slices = list(summary.correlation.timeslices)
    slices[0] = msgspec.structs.replace(slices[0], requests=10**30)
    correlation = msgspec.structs.replace(summary.correlation, timeslices=slices)
    rows = timeslices_table(msgspec.structs.replace(summary, correlation=correlation)).to_pylist()
    assert [1e30] == [row["value"] for row in rows if (row["slice"], row["statistic"]) == (0, "requests")]
