"""Tables as CSV: what we write, Python's `csv` reads as it was, and what it reads of a trace, we read.

What others call their labels and systems stands in cells: delimiters, quotes, formulas, controls and whole lines.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from exports import source_of
from faults.cases import Case, Kind, Setting, Try
from faults.differential import page
from series import endpoint_of

from sidelight.exporter.server_metrics import csv as server_metrics
from sidelight.exporter.server_metrics.json import document
from sidelight.loadgen.plan.traces import ArrivalTrace, read_trace
from sidelight.methodology.report.tables import as_csv
from sidelight.methodology.study.findings import Cell, ResultColumn, ResultTable
from sidelight.rundir.printable.text import defused

ODD = "ab,[;\"'=+-@\t\r\n #é€\u2028\u202e\x1b\x00"
FORMULAS = ("=1+1", "+x", "-2+3", "@SUM(1)", "\t=1", "-1", "+1e3", "-inf", "=", "# not a comment", "", " ")
NUMBERS = (0, -1, 2**70, 0.1 + 0.2, -0.0, 1e300, 5e-324, math.inf, -math.inf, math.nan, True, False, None)
BUCKETS = "buckets"
# Of labels, some of which are called like columns.
LABELS = ("a", "avg", "label_avg", "label_label_avg", "Endpoint", "Type", "Unit", "Description", "buckets", "total")
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
STAMPS: Mapping[str, Callable[[int], str]] = {
    "TIMESTAMP": lambda at_ns: f"{NOON + timedelta(seconds=at_ns // 10**9):%Y-%m-%d %H:%M:%S}.{at_ns % 10**9:09d}",
    "Timestamp": lambda at_ns: f"{at_ns // 10**9}.{at_ns % 10**9:09d}",
    "timestamp": lambda at_ns: f"{at_ns // 10**6}",
}
COUNTS = {
    "TIMESTAMP": ("ContextTokens", "GeneratedTokens"),
    "Timestamp": ("Request tokens", "Response tokens"),
    "timestamp": ("input_length", "output_length"),
}
EXACT_NS = {"TIMESTAMP": 1, "Timestamp": 1000, "timestamp": 10**6}


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


def odd(rng: random.Random) -> str:
    return rng.choice(FORMULAS) if rng.random() < 0.4 else "".join(rng.choices(ODD, k=rng.randrange(9)))


def cell(rng: random.Random) -> str:
    """Return a text without the one line break that `csv` writes as it is where lines end otherwise."""
    return odd(rng).replace("\r", "")


def computed(text: str) -> bool:
    """Tell whether a spreadsheet takes a cell for a formula; a number is none."""
    try:
        float(text)
    except ValueError:
        return text.lstrip().startswith(("=", "+", "-", "@"))
    return False


def of_study(rng: random.Random, _: Path) -> str:
    """Say what of a study's table is read otherwise than it was."""
    columns = tuple(ResultColumn(name=odd(rng), title="t") for _ in range(rng.randrange(1, 5)))
    rows: list[tuple[Cell, ...]] = [
        tuple(rng.choice(NUMBERS) if rng.random() < 0.5 else odd(rng) for _ in columns) for _ in range(rng.randrange(5))
    ]
    text = as_csv(ResultTable(name="odd", title="Odd", columns=columns, rows=tuple(rows)))
    expected = [[defused(column.name) for column in columns], *([cell_of(value) for value in row] for row in rows)]
    return _difference(read(text), expected)


def cell_of(value: Cell) -> str:
    """Return a value as a cell has it."""
    if isinstance(value, str):
        return defused(value)
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)


def of_server_metrics(rng: random.Random, _: Path) -> str:
    """Say what of an export of server metrics is read otherwise than its JSON has it."""
    text = ""
    while not text.strip():
        text = page(rng, openmetrics=False, labels=LABELS, odd=odd)
    url = rng.choice(("http://a:1/metrics", "http://b/=x,\"y\"?z='1'", "http://[::1]:2/m"))
    exported: Any = document(source_of(endpoint_of([text] * 3, url=url)))
    written = server_metrics.as_csv(exported)
    blocks = [read(block) for block in written.split("#\n", 1)[1].split("\n\n") if block.strip()]
    for header, *rows in blocks:
        if len(set(header)) != len(header):
            return f"columns of one name: {header}"
        if any(len(row) != len(header) for row in rows):
            return f"rows of other lengths than {header}"
    by_type = {block[1][1]: [dict(zip(block[0], row, strict=True)) for row in block[1:]] for block in blocks}
    for kind in {metric["type"] for metric in exported["metrics"].values()} | by_type.keys():
        listed = [(name, metric, series) for name, metric in exported["metrics"].items()
                  if metric["type"] == kind for series in metric["series"]]  # fmt: skip
        if wrong := _difference(list(map(seen, by_type.get(kind, []))), [seen_of(*each) for each in listed]):
            return f"{kind}: {wrong}"
    cells = [each for table in by_type.values() for row in table for each in row.items()]
    formulas = [cell for name, cell in cells if name != BUCKETS and computed(cell)]
    return f"formulas: {formulas}" if formulas else ""


def seen(row: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a row says, its labels without their names: of some the column is called otherwise."""
    kind = row["Type"]
    ours = {*server_metrics._STATISTICS[kind], "Endpoint", "Type", "Metric", "Unit", "Description"}
    packed = row[BUCKETS] if kind == "histogram" else ""
    ours |= {BUCKETS} if kind == "histogram" else set()
    stats = {name: cell for name, cell in row.items() if name in server_metrics._STATISTICS[kind] and cell}
    labels = [cell for name, cell in row.items() if name not in ours and cell]
    return row["Metric"], row["Unit"], row["Description"], stats, Counter(labels), packed


def seen_of(name: str, metric: Mapping[str, Any], series: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the same as the JSON has it."""
    labels = Counter(cell for value in series.get("labels", {}).values() if (cell := defused(value)))
    stats = {name: str(value) for name, value in series["stats"].items()}
    packed = ";".join(f"{le}={count}" for le, count in (series.get("buckets") or {}).items())
    return defused(name), metric.get("unit", ""), defused(metric["description"]), stats, labels, packed


def of_trace(rng: random.Random, place: Path) -> str:
    """Say what we read of a trace otherwise than `csv` does, however it is quoted, ended and packed."""
    at, header, rows = _trace(rng)
    file = io.StringIO()
    quoting = rng.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC))
    writer = csv.writer(file, quoting=quoting, lineterminator=rng.choice(("\n", "\r\n")))
    for row in (header, *rows):
        writer.writerow(row)
        if rng.random() < 0.1:
            file.write("\n")
    text = file.getvalue()
    data = (codecs.BOM_UTF8 if rng.random() < 0.2 else b"") + text.encode()
    is_packed = rng.random() < 0.2
    path = place / f"{rng.getrandbits(64):x}.csv"
    path.write_bytes(gzip.compress(data) if is_packed else data)
    try:
        trace = read_trace(path)
    finally:
        path.unlink()
    return _difference(_read(trace, at), list(_expected(text, at)))


def _trace(rng: random.Random) -> tuple[str, list[str], list[list[str]]]:
    """Return the name of a trace's stamps, its header and its rows, among columns of others."""
    at = rng.choice(list(STAMPS))
    names = [at, *COUNTS[at], *(f"{cell(rng).strip()} {number}" for number in range(rng.randrange(3)))]
    rng.shuffle(names)
    rows = []
    for number in range(rng.randrange(1, 7)):
        at_ns = rng.randrange(10**12) // EXACT_NS[at] * EXACT_NS[at]
        sized = {name: str(1 if not number else rng.choice((0, 7, 10**6))) for name in COUNTS[at]}
        row = [STAMPS[at](at_ns) if name == at else sized.get(name) or cell(rng) for name in names]
        rows.append([f" {text}" if name in sized and rng.random() < 0.1 else text
                     for name, text in zip(names, row, strict=True)])  # fmt: skip
    return at, names, rows


def _read(trace: ArrivalTrace, at: str) -> list[tuple[int, int, int]]:
    offsets = (round(offset / EXACT_NS[at]) for offset in trace.offsets_ns.tolist())
    return list(zip(offsets, trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def _expected(text: str, at: str) -> Iterator[tuple[int, int, int]]:
    """Yield the requests that can be sent in their order, as `csv` reads them."""
    inputs, outputs = COUNTS[at]
    requests = [(_stamp_ns(at, row[at]), int(row[inputs]), int(row[outputs]))
                for row in csv.DictReader(io.StringIO(text, newline=""))]  # fmt: skip
    sent = sorted((each for each in requests if each[1] and each[2]), key=lambda each: each[0])
    yield from (((each[0] - sent[0][0]) // EXACT_NS[at], *each[1:]) for each in sent)


def _stamp_ns(at: str, cell: str) -> int:
    if at == "timestamp":
        return int(cell) * 10**6
    whole, _, fraction = cell.rpartition(".")
    if at == "Timestamp":
        return int(whole) * 10**9 + int(fraction) // 1000 * 1000
    return int((datetime.fromisoformat(f"{whole}+00:00") - NOON).total_seconds()) * 10**9 + int(fraction)


def _difference(ours: Sequence[object], theirs: Sequence[object]) -> str:
    for place, (read_as, meant) in enumerate(zip(ours, theirs, strict=False)):
        if read_as != meant:
            return f"row {place} is {read_as}, not {meant}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} rows, not {len(theirs)}"


ROWS: Mapping[str, Callable[[random.Random, Path], str]] = {
    "server-metrics": of_server_metrics,
    "study": of_study,
    "trace": of_trace,
}


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    def attempt(case: Case) -> str:
        return ROWS[case.row](case.random(), setting.place)

    yield attempt


TABLES = Kind(name="tables", rows={"server-metrics": 60, "study": 200, "trace": 200}, opened=opened)
