"""The Parquet export: every series at every scrape, increases since the reference, and SQL over it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from exports import Recorded, S, source_of
from hypothesis import given
from hypothesis import strategies as st
from series import endpoint_of

from sidelight.exporter.server_metrics import parquet as server_metrics_parquet
from sidelight.exporter.server_metrics.json import document
from sidelight.exporter.server_metrics.parquet import write as write_parquet
from sidelight.exporter.server_metrics.source import MetricsSource
from sidelight.rundir.files import replace_file

REPOSITORY = Path(__file__).parents[3]

Rows = Callable[[MetricsSource], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Write a source and read the rows back."""
    path = tmp_path_factory.mktemp("parquet") / "export.parquet"

    def read(source: MetricsSource) -> list[dict[str, Any]]:
        replace_file(path, partial(write_parquet, source))
        return pq.read_table(path).to_pylist()

    return read


def test_the_documented_query_gives_the_rates_of_the_json(tmp_path: Path, recorded: Recorded):
    """The SQL of docs/reference/run-directory.md, run over the file, agrees with every counter of the JSON."""
    endpoint = recorded[1]
    start_ns, end_ns = int(endpoint.response_ns[3]) + S, int(endpoint.response_ns[-1]) - S
    source = source_of(endpoint, start_ns=start_ns, end_ns=end_ns, slice_ns=10 * S)
    replace_file(tmp_path / "server_metrics_export.parquet", partial(write_parquet, source))
    page = (REPOSITORY / "docs/reference/run-directory.md").read_text(encoding="utf-8")
    (query,) = re.findall(r"```sql\n(.*?)```", page, flags=re.DOTALL)
    with duckdb.connect() as connection:
        connection.execute(f"SET file_search_path = '{tmp_path}'")
        cursor = connection.execute(query)
        names = [column[0] for column in cursor.description]
        results = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    expected = {
        (name, *sorted(series.get("labels", {}).values())): series["stats"]["rate"]
        for name, metric in document(source)["metrics"].items()
        if metric["type"] == "counter"
        for series in metric["series"]
    }
    about = {"endpoint_url", "metric_name", "unit", "description", "rate"}
    rates = {
        (row["metric_name"], *sorted(row[name] for name in set(names) - about if row[name] is not None)): row["rate"]
        for row in results
    }
    assert any(rate > 0 for rate in rates.values())
    assert pytest.approx(expected, rel=1e-12) == rates


def test_last_rows_are_the_totals_of_the_json(recorded: Recorded, written: Rows):
    """Counts, sums, buckets and totals: the last row of a series has what the JSON has; the first has nothing yet."""
    source = source_of(recorded[1], slice_ns=10 * S)
    rows = written(source)
    metrics = document(source)["metrics"]
    labels = [name for name in rows[0] if name not in server_metrics_parquet._FIXED]
    first = {row["timestamp_ns"] for row in rows if row["metric_type"] == "counter"}
    last: dict[Any, dict[str, Any]] = {}
    for row in rows:
        label_values = tuple((name, row[name]) for name in labels if row[name] is not None)
        last[row["metric_name"], label_values, row["bucket_le"]] = row
        if row["timestamp_ns"] == min(first) and row["metric_type"] in ("counter", "histogram"):
            assert {0.0} == {row[name] for name in ("value", "sum", "count", "bucket_count") if row[name] is not None}
    compared = 0
    for name, metric in metrics.items():
        for series in metric["series"]:
            label_values = tuple(sorted(series.get("labels", {}).items()))
            if metric["type"] == "counter":
                assert series["stats"]["total"] == last[name, label_values, None]["value"]
            for le, count in series.get("buckets", {}).items():
                row = last[name, label_values, le]
                assert (count, series["stats"]["count"]) == (row["bucket_count"], row["count"])
                assert series["stats"].get("sum", 0.0) == row["sum"]
            compared += 1
    assert 50 < compared


def test_every_series_is_there(recorded: Recorded, written: Rows):
    """Also those that the JSON has no word for; buckets are rows."""
    endpoint = recorded[1]
    rows = written(source_of(endpoint))
    at_ns = int(endpoint.response_ns[-1])
    assert {"gauge", "counter", "histogram", "summary"} == {row["metric_type"] for row in rows}
    of_page = [row for row in rows if row["timestamp_ns"] == at_ns]
    doubled = sum(series.type == "histogram" and not series.name.endswith("_bucket") for series in endpoint.series)
    assert len(endpoint.series) - doubled == len(of_page)
    assert set(endpoint.response_ns.tolist()) == {row["timestamp_ns"] for row in rows}


def test_resets_are_unrolled(written: Rows):
    """A counter that fell goes on from where it was; one that is off the page has no row."""
    values = (5, 7, None, 3, 4)
    pages = [("" if v is None else f"# TYPE a_total counter\na_total {v}\n") + "# TYPE g gauge\ng 1\n" for v in values]
    rows = written(source_of(endpoint_of(pages)))
    assert [(1, 0.0), (2, 2.0), (4, 5.0), (5, 6.0)] == [
        (row["timestamp_ns"] // S, row["value"]) for row in rows if row["metric_name"] == "a"
    ]


def test_bounds_that_change_are_rows_of_their_own(written: Rows):
    """A bucket has a row at the scrapes whose page had it."""
    pages = [
        f'# TYPE h histogram\nh_bucket{{le="{le}"}} {n}\nh_bucket{{le="+Inf"}} {n}\nh_sum {n}\nh_count {n}\n'
        for n, le in enumerate(("1", "1", "2"))
    ]
    rows = written(source_of(endpoint_of(pages)))
    assert [(1, "1"), (1, "+Inf"), (2, "1"), (2, "+Inf"), (3, "2"), (3, "+Inf")] == [
        (row["timestamp_ns"] // S, row["bucket_le"]) for row in rows
    ]
    assert [0.0, 0.0, 1.0, 1.0, 2.0, 2.0] == [row["count"] for row in rows] == [row["sum"] for row in rows]


def test_a_label_called_like_a_renamed_one_stays_beside_it(written: Rows):
    """Two labels in one column would be one value, and the other one lost."""
    rows = written(source_of(endpoint_of(['# TYPE g gauge\ng{value="x",label_value="y",unit="u"} 1\n'] * 2)))
    names = ("value", "label_label_value", "label_value", "unit", "label_unit")
    assert [(1.0, "x", "y", None, "u")] * 2 == [tuple(row[name] for name in names) for row in rows]


def test_odd_series(written: Rows):
    """A label called like a column, a histogram without a sum, a summary, an info: nothing is lost or mixed up."""
    page = (
        '# TYPE g gauge\ng{value="x"} 1\n# TYPE s summary\ns{quantile="0.5"} 2\ns_sum 6\ns_count 3\n'
        '# TYPE h histogram\nh_bucket{le="-1"} 0\nh_bucket{le="+Inf"} 0\nh_count 0\n'
    )
    rows = written(source_of(endpoint_of([page] * 2)))
    last = [row for row in rows if row["timestamp_ns"] == 2 * S]
    assert [
        ("g", "x", None, 1.0, None, None),
        ("h", None, None, None, None, 0.0),
        ("h", None, None, None, None, 0.0),
        ("s", None, "0.5", 2.0, None, None),
        ("s", None, None, None, 0.0, None),
        ("s", None, None, None, None, 0.0),
    ] == [tuple(r[c] for c in ("metric_name", "label_value", "quantile", "value", "sum", "count")) for r in last]


@given(rows=st.integers(1, 60))
def test_row_groups_change_nothing(written: Rows, rows: int):
    """However small row groups are, the rows are the same in the same order."""
    buckets = 'h_bucket{{le="1"}} {0}\nh_bucket{{le="+Inf"}} {0}\n'
    page = "# TYPE h histogram\n" + buckets + "h_sum {0}\nh_count {0}\n# TYPE g gauge\ng {0}\n"
    source = source_of(endpoint_of([page.format(n) for n in range(20)]))
    whole = written(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_metrics_parquet, "ROWS", rows)
        assert whole == written(source)


def test_an_endpoint_without_usable_scrapes_has_no_rows(written: Rows):
    """The file is there all the same, and empty."""
    assert [] == written(source_of(endpoint_of(["# TYPE g gauge\ng 1\n"]), start_ns=0, end_ns=S))


def test_columns_and_metadata_are_those_of_a_real_file(tmp_path: Path, recorded: Recorded, reference: Path):
    """Columns in the same order with the same types, labels aside; no metadata that changes each time."""
    replace_file(tmp_path / "ours.parquet", partial(write_parquet, source_of(recorded[1])))
    theirs, ours = (
        pq.ParquetFile(path) for path in (reference / "server_metrics_export.parquet", tmp_path / "ours.parquet")
    )
    types = [
        [(field.name, str(field.type)) for field in file.schema_arrow if field.name in server_metrics_parquet._FIXED]
        for file in (theirs, ours)
    ]
    assert types[0] == types[1]
    names = list(ours.schema_arrow.names)
    labels = names[names.index("timestamp_ns") + 1 : names.index("value")]
    assert labels == sorted(labels)
    their_metadata, our_metadata = (
        {k.decode(): v.decode() for k, v in file.metadata.metadata.items()} for file in (theirs, ours)
    )
    absent = {"ARROW:schema", "aiperf.version", "aiperf.export_timestamp_utc"}
    absent |= {"aiperf.python_version", "aiperf.pyarrow_version"}
    assert set(their_metadata) - absent == {name for name in our_metadata if name.startswith("aiperf.")}
    assert labels == json.loads(our_metadata["aiperf.label_columns"])
    assert {"sidelight.version", "sidelight.rate_seconds", "sidelight.reference_ns"} < set(our_metadata)
