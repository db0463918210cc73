"""The AIPerf-compatible exports of server metrics, `server_metrics_export.*`: the table of their formats.

A new format is one module here, with a function `write`, and one row in EXPORTS: the command line and the report read
the table. The table itself needs no numpy, so that `--help` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import IO, TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sidelight.exporter.server_metrics.source import MetricsSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One format; the module of its name writes it, by `write(content, file)`.

    content   `statistics`: the document of `json.document`, statistics of the measured window;
              `series`: the `MetricsSource`, every series at every scrape, of which files grow large
    """

    name: str
    content: Literal["statistics", "series"]

    @property
    def file(self) -> str:
        """Return the name of its file in a run directory."""
        return f"server_metrics_export.{self.name}"


EXPORTS = (
    Export(name="json", content="statistics"),
    Export(name="csv", content="statistics"),
    Export(name="jsonl", content="series"),
    Export(name="parquet", content="series"),
)


def server_metrics_files(
    source: MetricsSource, formats: Collection[str]
) -> Iterator[tuple[str, Callable[[IO[bytes]], object]]]:
    """Yield the name and writer of each file with a format in `formats`. Others are ignored.

    The same source gives the same bytes.
    """
    statistics = cache(partial(import_module("sidelight.exporter.server_metrics.json").document, source))
    for export in EXPORTS:
        if export.name in formats:
            write = import_module(f"sidelight.exporter.server_metrics.{export.name}").write
            yield export.file, partial(write, statistics() if export.content == "statistics" else source)
