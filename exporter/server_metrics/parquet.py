"""Server metrics as Parquet in AIPerf's columns: every series at every scrape, cumulative values as increases.

One row a scrape and series; a histogram has one a bucket, with its sum and count repeated. `value`, `sum`, `count` and
`bucket_count` of counters, histograms and summaries count from the reference (the last scrape at or before the
window's start, whose rows are the first) and rise across resets; gauges and the rest are as on the page. So the last
`value` of a counter is the JSON's `total`. Rows are sorted by metric, endpoint and series, then by time. A label called
like a column becomes `label_NAME`. The file is written in row groups: its rows are never in memory all at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from sidelight.exporter.server_metrics.source import SCHEMA_VERSION, Metric, MetricsSource, key, label_columns, named
from sidelight.scraper.exposition import HistogramColumns, Series, histograms
from sidelight.scraper.series.resets import rising, rising_histogram
from sidelight.scraper.series.table import EndpointSeries, Float64, Int64
from sidelight.scraper.window.window import ScrapeSelection, select_scrapes

ROWS = 2**18  # of one row group, about 30 MB before they are written

_TEXTS = ("endpoint_url", "metric_name", "metric_type", "unit", "description")
_NUMBERS = ("value", "sum", "count")
_LAST = ("bucket_le", "bucket_count")
_FIXED = {*_TEXTS, "timestamp_ns", *_NUMBERS, *_LAST}
_WORDS = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Rows [n] of one series: what is the same in all of them, and what is not. NaN and -1 are null."""

    texts: Mapping[str, str | None]
    labels: Mapping[str, str]
    at_ns: Int64
    numbers: Mapping[str, Float64]
    le: tuple[str, ...] = ()
    le_index: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One series to be written, by where it stands in its endpoint's matrix."""

    metric: Metric
    endpoint: EndpointSeries
    selection: ScrapeSelection
    of: Series | HistogramColumns
    column: int = -1


@np.errstate(over="ignore", invalid="ignore")  # what no number can hold is null
def write(source: MetricsSource, file: IO[bytes]) -> None:
    """Write the file. An endpoint whose scrapes the window cannot use has no rows; JSONL has its pages."""
    metrics = named(source.endpoints)
    usable = [
        (endpoint, selection)
        for endpoint in source.endpoints
        if isinstance(selection := select_scrapes(endpoint, source.window, source.slice_ns), ScrapeSelection)
    ]
    pieces = sorted(
        (piece for endpoint, selection in usable for piece in _pieces(endpoint, selection, metrics)),
        key=lambda piece: piece.metric.name,
    )
    columns = label_columns((label for piece in pieces for label, _ in piece.of.labels), _FIXED)
    label_of = dict(sorted((column, label) for label, column in columns.items()))
    schema = _schema(list(label_of))
    # Dictionaries are how it is written, not what a reader should see: the Arrow schema is left out.
    with pq.ParquetWriter(file, schema, compression="zstd", store_schema=False) as writer:
        for runs in _groups(run for piece in pieces for run in _runs(piece)):
            writer.write_table(_table(runs, schema, label_of), row_group_size=2 * ROWS)
        rate_s = {endpoint.url: selection.rate_s for endpoint, selection in usable}
        references_ns = {endpoint.url: int(endpoint.response_ns[selection.reference]) for endpoint, selection in usable}
        writer.add_key_value_metadata(_about(source, pieces, list(label_of), rate_s, references_ns))


def _schema(labels: Sequence[str]) -> pa.Schema:
    fields: list[pa.Field[Any]] = [pa.field(name, _WORDS) for name in _TEXTS]
    fields.append(pa.field("timestamp_ns", pa.int64()))
    fields += [pa.field(label, _WORDS) for label in labels]
    fields += [pa.field(name, pa.float64()) for name in _NUMBERS]
    return pa.schema([*fields, pa.field("bucket_le", _WORDS), pa.field("bucket_count", pa.float64())])


def _pieces(
    endpoint: EndpointSeries, selection: ScrapeSelection, metrics: Mapping[tuple[str, str], Metric]
) -> Iterator[_Piece]:
    for column, series in enumerate(endpoint.series):
        if series.type != "histogram":
            yield _Piece(metric=metrics[key(series)], endpoint=endpoint, selection=selection, of=series, column=column)
    for group in histograms(endpoint.series):
        yield _Piece(metric=metrics[group.family, "histogram"], endpoint=endpoint, selection=selection, of=group)


def _runs(piece: _Piece) -> Iterator[_Run]:
    return _of_histogram(piece, piece.of) if isinstance(piece.of, HistogramColumns) else _of_one(piece, piece.of)


def _of_one(piece: _Piece, series: Series) -> Iterator[_Run]:
    span = slice(piece.selection.reference, piece.selection.last + 1)
    stamps, labels = piece.endpoint.response_ns[span], dict(series.labels)
    values = piece.endpoint.values[span, piece.column]
    shown = ~np.isnan(values)
    part = "value"
    if series.type == "summary":
        part = next((name for name in ("sum", "count") if series.name == f"{series.family}_{name}"), "value")
    if series.type == "counter" or part != "value":
        cumulative = rising(piece.endpoint, piece.column, piece.selection.restarts).values[span]
        values = cumulative - cumulative[0]
    yield _Run(texts=_texts(piece), labels=labels, at_ns=stamps[shown], numbers={part: values[shown]})


def _of_histogram(piece: _Piece, group: HistogramColumns) -> Iterator[_Run]:
    endpoint, selection, texts, labels = piece.endpoint, piece.selection, _texts(piece), dict(group.labels)
    span = slice(selection.reference, selection.last + 1)
    if group.count < 0 and not group.buckets:
        return
    cumulative = rising_histogram(endpoint, group, selection.restarts)
    counts, sums, buckets = (
        values[span] - values[selection.reference] for values in (cumulative.count, cumulative.sum, cumulative.buckets)
    )
    counted = group.count if group.count >= 0 else group.buckets[-1]
    stamps = endpoint.response_ns[span]
    shown = np.isfinite(endpoint.values[span][:, [counted, *group.buckets]])
    width = max(len(group.buckets), 1)
    for start in range(0, len(stamps), max(1, ROWS // width)):
        rows = slice(start, start + max(1, ROWS // width))
        if not group.buckets:
            present = shown[rows, 0]
            numbers = {"sum": sums[rows][present], "count": counts[rows][present]}
            yield _Run(texts=texts, labels=labels, at_ns=stamps[rows][present], numbers=numbers)
            continue
        row, bucket = np.nonzero(shown[rows, 1:])
        numbers = {
            "sum": sums[rows][row],
            "count": counts[rows][row],
            "bucket_count": buckets[rows][row, bucket],
        }
        yield _Run(
            texts=texts,
            labels=labels,
            at_ns=stamps[rows][row],
            numbers=numbers,
            le=group.le,
            le_index=bucket.astype(np.int32),
        )


def _texts(piece: _Piece) -> dict[str, str | None]:
    metric = piece.metric
    return {
        "endpoint_url": piece.endpoint.url,
        "metric_name": metric.name,
        "metric_type": metric.type,
        "unit": metric.unit,
        "description": metric.description,
    }


def _groups(runs: Iterator[_Run]) -> Iterator[list[_Run]]:
    group: list[_Run] = []
    rows = 0
    for run in runs:
        group.append(run)
        rows += len(run.at_ns)
        if rows >= ROWS:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _table(runs: Sequence[_Run], schema: pa.Schema, label_of: Mapping[str, str]) -> pa.Table:
    lengths = np.array([len(run.at_ns) for run in runs])
    columns: list[pa.Array[Any]] = []
    for name in schema.names:
        if name == "timestamp_ns":
            columns.append(pa.array(np.concatenate([run.at_ns for run in runs])))
        elif name == "bucket_le":
            columns.append(_bucket_bounds(runs))
        elif name in _NUMBERS or name == "bucket_count":
            parts = [run.numbers.get(name) for run in runs]
            nothing = (np.full(length, np.nan) for length in lengths)
            whole = np.concatenate([gap if part is None else part for part, gap in zip(parts, nothing, strict=True)])
            columns.append(pa.array(whole, from_pandas=True))
        elif name in label_of:
            columns.append(_repeated([run.labels.get(label_of[name]) for run in runs], lengths))
        else:
            columns.append(_repeated([run.texts.get(name) for run in runs], lengths))
    return pa.Table.from_arrays(columns, schema=schema)


def _repeated(words: Sequence[str | None], lengths: Int64) -> pa.Array[Any]:
    codes: dict[str, int] = {}
    indices = np.array([-1 if word is None else codes.setdefault(word, len(codes)) for word in words], dtype=np.int32)
    return _dictionary(np.repeat(indices, lengths), list(codes))


def _bucket_bounds(runs: Sequence[_Run]) -> pa.Array[Any]:
    codes: dict[str, int] = {}
    parts = []
    for run in runs:
        if run.le_index is None:
            parts.append(np.full(len(run.at_ns), -1, dtype=np.int32))
        else:
            places = np.array([codes.setdefault(le, len(codes)) for le in run.le], dtype=np.int32)
            parts.append(places[run.le_index])
    return _dictionary(np.concatenate(parts), list(codes))


def _dictionary(codes: NDArray[np.int32], words: list[str]) -> pa.Array[Any]:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32(), mask=codes < 0), pa.array(words, pa.string()))


def _about(
    source: MetricsSource,
    pieces: Sequence[_Piece],
    labels: Sequence[str],
    rate_s: Mapping[str, float],
    references_ns: Mapping[str, int],
) -> dict[str, str]:
    """Return the file's metadata: AIPerf's keys as far as they apply, and those of Sidelight.

    No export time: the file is the same whenever it is written.
    """
    window, config = source.window, source.input_config
    metrics = {piece.metric.name: piece.metric.type for piece in pieces}
    kinds = Counter(metrics.values())
    known = {
        "schema_version": SCHEMA_VERSION,
        "benchmark_id": source.benchmark_id or "",
        "exporter": "sidelight",
        "time_filter_start_ns": window.start_ns,
        "time_filter_end_ns": window.end_ns,
        "profiling_duration_ns": window.end_ns - window.start_ns,
        "profiling_duration_seconds": window.duration_s,
        "input_config": dict(config),
        "model_names": [config["model"]] if config.get("model") else [],
        "concurrency": config.get("concurrency") or "",
        "endpoint_urls": source.urls,
        "endpoint_count": len(source.urls),
        "label_columns": list(labels),
        "label_count": len(labels),
        "metric_count": len(metrics),
        "metric_type_counts": dict(sorted(kinds.items())),
        "schema_note": "Label columns vary by endpoint/model. Use union_by_name=true for cross-file queries.",
    }
    sidelight = {"version": source.tool_version, "rate_seconds": rate_s, "reference_ns": references_ns}
    named_keys = {f"aiperf.{name}": value for name, value in known.items()}
    named_keys |= {f"sidelight.{name}": value for name, value in sidelight.items()}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in named_keys.items()}
