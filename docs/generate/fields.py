"""Tables of a page from the types of `summary.json` or of a study's `result.json`.

A table stands between two comments. The first names a Struct, the field that holds it where names shall begin with it,
and the fields wanted where that is not all of them:

    <!-- fields of Throughput in throughput: duration_s requests_per_s -->
    <!-- end -->

Of a Struct inside, the row of the field that holds it has the names, unless a page has a table of it. A unit is shown
where neither name nor meaning states it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rundir.stats import STATISTICS

TABLE = re.compile(r"(<!-- fields of (\w+)(?: in ([\w.*\[\]]+))?(?:: ([\w ]+?))? -->)\n.*?<!-- end -->", re.DOTALL)
# A reader finds a number in a cell of so many words; what is beyond stands below the table.
MOST_WORDS = 29
# Counts and pure numbers need none.
UNITS = {"ms", "s", "ns", "W", "J", "%", "bytes", "tokens", "degrees Celsius"}


@dataclass(frozen=True)
class Row:
    """One name of a table, and its meaning."""

    name: str
    meaning: str


def with_tables(text: str, definitions: dict[str, Any], listed: set[str], folder: str = "") -> str:
    """Return a page with its tables of fields written again; Structs `listed` have tables of their own.

    Links in descriptions are relative to `folder`, as seen from the page.
    """
    said = set(re.findall(r"`([a-z0-9_]+)`", TABLE.sub("", text)))
    for struct, _, wanted in (match.group(2, 3, 4) for match in TABLE.finditer(text)):
        said |= set(wanted.split() if wanted else definitions[struct]["properties"])

    def table(match: re.Match[str]) -> str:
        struct, holder, wanted = match.group(2, 3, 4)
        properties = definitions[struct]["properties"]
        rows = []
        for name in wanted.split() if wanted else [name for name in properties if name != "missing"]:
            meaning = re.sub(r"\]\((?=[a-z-]+\.md)", f"]({folder}", _meaning(name, properties[name]))
            inside = dict.fromkeys(_inside(definitions, properties[name], listed))
            new = [] if said.issuperset(inside) else [below for below in inside if f"`{below}`" not in meaning]
            said.update(inside)
            names = ", ".join(f"`{below}`" for below in new)
            rows.append(Row(f"{holder}.{name}" if holder else name, f"{meaning}: {names}" if names else meaning))
        return f"{match[1]}\n{_table(rows)}\n<!-- end -->"

    return TABLE.sub(table, text)


def tabulated(text: str) -> set[str]:
    """Return the Structs that a page has tables of."""
    return {match[2] for match in TABLE.finditer(text)}


def _inside(definitions: dict[str, Any], field: dict[str, Any], listed: set[str]) -> Iterator[str]:
    """Give the names in the Struct that a field holds, but for statistics."""
    for held in re.findall(r"#/\$defs/(\w+)", str(field)):
        for name, inner in definitions[held]["properties"].items() if held not in listed else ():
            if name not in {*STATISTICS, "count", "missing"}:
                yield name
                yield from _inside(definitions, inner, listed)


def _meaning(name: str, field: dict[str, Any]) -> str:
    text = field.get("description", "").replace("|", "\\|").rstrip(".")
    unit = field.get("unit", "")
    stated = unit not in UNITS and ("/" not in unit or " " in unit)
    stated = stated or name.endswith((f"_{unit}", f"_{unit.replace('/', '_per_')}"))
    return text if stated or unit in text.split() else f"{text} ({unit})"


def _table(rows: list[Row]) -> str:
    lines, notes = ["| name | meaning |", "|---|---|"], []
    for meaning, group in groupby(rows, lambda row: row.meaning):
        names = ", ".join(f"`{row.name}`" for row in group)
        cell, rest = _cut(meaning)
        lines.append(f"| {names} | {cell} |")
        notes += [f"- {names}: {rest}"] if rest else []
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _cut(text: str) -> tuple[str, str]:
    """Return a cell's clauses, and those that make it too long."""
    if len(text.split()) <= MOST_WORDS:
        return text, ""
    for ends in (".;", ".;:,"):
        clauses = re.split(rf"(?<=[{ends}]) ", text)
        fitting = [n for n in range(1, len(clauses) + 1) if len(" ".join(clauses[:n]).split()) <= MOST_WORDS]
        if fitting:
            break
    count = max(fitting, default=len(clauses))
    return " ".join(clauses[:count]).rstrip(".;:,"), " ".join(clauses[count:])
