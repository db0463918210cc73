"""The AIPerf-compatible exports of server metrics, `server_metrics_export.*`: which formats there are, and their files.

JSON and CSV hold statistics of the measured window; JSONL and Parquet every series at every scrape, and are large.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from json import dumps
from pathlib import Path

from exporter.server_metrics.csv import as_csv
from exporter.server_metrics.json import document
from exporter.server_metrics.jsonl import write_jsonl
from exporter.server_metrics.parquet import write_parquet
from exporter.server_metrics.source import Source

FORMATS = ("json", "csv", "jsonl", "parquet")


def server_metrics_files(source: Source, formats: Collection[str]) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Give the name of each file whose format is asked for, and what writes it to a path. Other formats are not ours.

    The same source gives the same bytes.
    """
    if {"json", "csv"} & set(formats):
        statistics = document(source)
        if "json" in formats:
            text = dumps(statistics, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
            yield "server_metrics_export.json", partial(_write_text, text)
        if "csv" in formats:
            yield "server_metrics_export.csv", partial(_write_text, as_csv(statistics))
    if "jsonl" in formats:
        yield "server_metrics_export.jsonl", partial(write_jsonl, source)
    if "parquet" in formats:
        yield "server_metrics_export.parquet", partial(write_parquet, source)


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8", newline="")
