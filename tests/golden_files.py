"""Run directories under `tests/golden` and the files that were derived of them: derive again, keep, compare.

A directory there has the `manifest.json` and the logs of a recorded run, and in `expected/` each file that
`sidelight report` derives from them: what people read in a diff as it is, the rest compressed, Parquet as rows of JSON.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from sidelight.correlator.opening import open_run
from sidelight.exporter.evaluation.evaluate import Evaluated, evaluate
from sidelight.sidecar.report import derive as report

GOLDEN = Path(__file__).parent / "golden"
FORMATS = ("json", "csv", "jsonl", "parquet", "text")
MANIFEST, RAW, EXPECTED = "manifest.json", "raw", "expected"
PLAIN = ("summary.json", "report.txt")
# Sums and logarithms differ in their last bits from CPU to CPU, and what is left near zero of a difference in many
# more: with AVX-512 switched off, an error of 0.00014 ms moved by 7e-11.
RELATIVE, ABSOLUTE = 1e-9, 1e-9
SHOWN_CHARACTERS = 100
NOTHING = object()
_SPLIT = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field of a derived file that is not what it was. A side that has no such field is NOTHING."""

    file: str
    field: str
    old: object
    new: object

    def __str__(self) -> str:
        return f"{self.file}: {self.field}: {_shown(self.old)} -> {_shown(self.new)}"


def names() -> list[str]:
    """Return the names of all recorded runs."""
    return sorted(path.parent.name for path in GOLDEN.glob(f"*/{MANIFEST}"))


@cache
def evaluated(name: str) -> Evaluated:
    """Return what a recorded run is evaluated to, once for all tests of a process that only look at it."""
    return evaluate(open_run(GOLDEN / name))


def copied(name: str, into: Path) -> Path:
    """Copy a recorded run into an existing directory, without what was derived of it, and return where."""
    return Path(shutil.copytree(GOLDEN / name, into / name, ignore=shutil.ignore_patterns(EXPECTED)))


def derive(name: str, into: Path) -> Path:
    """Copy a recorded run into an existing directory, derive all its files, and return where."""
    run = copied(name, into)
    report.derive(run, FORMATS)
    return run


def derived(run: Path) -> dict[str, str]:
    """Return the derived files of a run directory as texts by their names."""
    return {path.name: _text(path) for path in sorted(run.iterdir()) if path.name not in (MANIFEST, RAW)}


def expected(name: str) -> dict[str, str]:
    """Return what is kept of a recorded run's derived files, as `derived` does."""
    return dict(_expected(path) for path in sorted((GOLDEN / name / EXPECTED).glob("*")))


def keep(name: str, file: str, text: str | None) -> None:
    """Keep the text of a derived file, or nothing of one that is derived no more."""
    path = GOLDEN / name / EXPECTED / (file if file in PLAIN else f"{file}.xz")
    if text is None:
        path.unlink()
        return
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode() if file in PLAIN else lzma.compress(text.encode(), preset=9))


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Difference]:
    """Give what differs between two sets of derived files, field by field.

    Where texts are not equal, floats may differ by RELATIVE or by ABSOLUTE. Integers may not (a stamp in ns has 19
    digits), nor may words, the order of keys, the layout, or a line of report.txt, whose numbers are rounded.
    """
    for file in sorted({*old, *new}):
        if file not in old or file not in new:
            yield Difference(file=file, field="whole", old=old.get(file, NOTHING), new=new.get(file, NOTHING))
        elif old[file] != new[file]:
            differing = list(_differences("", _parsed(file, old[file]), _parsed(file, new[file])))
            if not differing and _words(old[file]) != _words(new[file]):
                differing = [("layout", *_first_line_that_differs(old[file], new[file]))]
            yield from (Difference(file=file, field=field, old=was, new=now) for field, was, now in differing)


def _text(path: Path) -> str:
    return _rows(path) if path.suffix == ".parquet" else path.read_bytes().decode()


def _rows(path: Path) -> str:
    """Return a Parquet file as JSON lines: the columns' types and the file's own metadata, then its rows."""
    table = pq.read_table(path)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    head = {"columns": {column.name: str(column.type) for column in table.schema}, "metadata": metadata}
    return "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in (head, *table.to_pylist()))


def _expected(path: Path) -> tuple[str, str]:
    if path.suffix == ".xz":
        return path.stem, lzma.decompress(path.read_bytes()).decode()
    return path.name, path.read_bytes().decode()


def _parsed(file: str, text: str) -> Any:
    """Return a derived file as fields in fields, lines and rows by their number."""
    match file.rpartition(".")[2]:
        case "json":
            return json.loads(text)
        case "jsonl":
            return {f"line {n}": json.loads(line) for n, line in enumerate(text.splitlines(), 1)}
        case "parquet":
            head, *rows = (json.loads(line) for line in text.splitlines())
            return {"schema": head} | {f"row {n}": row for n, row in enumerate(rows, 1)}
        case "csv":
            return dict(_csv_lines(text))
        case _:
            return {f"line {n}": line for n, line in enumerate(text.splitlines(), 1)}


def _csv_lines(text: str) -> Iterator[tuple[str, Any]]:
    """Give the rows of a file of several blocks, each with a header of its own behind an empty line."""
    header: Sequence[str] = ()
    for number, row in enumerate(csv.reader(io.StringIO(text, newline="")), 1):
        if header and row:
            columns = [*header, *(f"column {n}" for n in range(len(header) + 1, len(row) + 1))]
            yield f"line {number}", dict(zip(columns, map(_number, row), strict=False))
        else:
            yield f"line {number}", list(row)
            header = row


def _number(field: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(field)
        except ValueError:
            continue
    return field


def _differences(field: str, old: Any, new: Any) -> Iterator[tuple[str, object, object]]:
    """Give the fields of two parsed files that differ, each with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*old, *new)):
            inner = f"{field}.{key}" if field else str(key)
            yield from _differences(inner, old.get(key, NOTHING), new.get(key, NOTHING))
        if old.keys() == new.keys() and list(old) != list(new):
            yield f"{field or 'whole'}, order of keys", list(old), list(new)
    elif isinstance(old, list) and isinstance(new, list):
        for n, (was, now) in enumerate(zip_longest(old, new, fillvalue=NOTHING)):
            yield from _differences(f"{field}[{n}]", was, now)
    elif not _equal(old, new):
        yield field, old, new


def _equal(old: object, new: object) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        close = math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return close or (math.isnan(old) and math.isnan(new))
    return type(old) is type(new) and old == new


def _words(text: str) -> list[str]:
    """Return what of a text is not a number."""
    return [word for word in _SPLIT.split(text) if word]


def _first_line_that_differs(old: str, new: str) -> tuple[object, object]:
    pairs = zip_longest(old.splitlines(), new.splitlines(), fillvalue=NOTHING)
    return next(((was, now) for was, now in pairs if _words(str(was)) != _words(str(now))), (old, new))


def _shown(value: object) -> str:
    if value is NOTHING:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
