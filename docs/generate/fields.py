"""Lists of names and meanings from the types of `summary.json` or of a study's `result.json`.

A list stands between two comments. The first names a Struct, the field that holds it where names shall begin with it,
and the fields wanted where that is not all of them (`: NAMES`), or those left out (`but NAMES`):

    <!-- fields of Throughput in throughput: duration_s requests_per_s -->
    <!-- end -->

Of a Struct inside, the line of the field that holds it has the names, unless a page has a list of it. A unit is shown
where neither name nor meaning states it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sidelight.rundir.stats import STATISTICS

LIST = re.compile(
    r"(<!-- fields of (\w+)(?: in ([\w.*\[\]]+))?(?:(?:: | but )([\w ]+?))? -->)\n.*?<!-- end -->", re.DOTALL
)
# Counts and pure numbers need none.
UNITS = {"ms", "s", "ns", "W", "J", "%", "bytes", "tokens", "degrees Celsius"}


@dataclass(frozen=True)
class Row:
    """One name, and its meaning."""

    name: str
    meaning: str


def with_lists(text: str, definitions: dict[str, Any], listed: set[str], folder: str = "") -> str:
    """Return a page with its lists of fields written again; Structs `listed` have lists of their own.

    Links in descriptions are relative to `folder`, as seen from the page.
    """
    said = set(re.findall(r"`([a-z0-9_]+)`", LIST.sub("", text)))
    for match in LIST.finditer(text):
        said |= set(_wanted(match, definitions))

    def written(match: re.Match[str]) -> str:
        holder, properties = match[3], definitions[match[2]]["properties"]
        rows = []
        for name in _wanted(match, definitions):
            meaning = re.sub(r"\]\((?=[a-z-]+\.md)", f"]({folder}", _meaning(name, properties[name]))
            inside = dict.fromkeys(_inside(definitions, properties[name], listed))
            new = [] if said.issuperset(inside) else [below for below in inside if f"`{below}`" not in meaning]
            said.update(inside)
            names = ", ".join(f"`{below}`" for below in new)
            rows.append(Row(f"{holder}.{name}" if holder else name, f"{meaning}: {names}" if names else meaning))
        return f"{match[1]}\n{_list(rows)}\n<!-- end -->"

    return LIST.sub(written, text)


def listed_structs(text: str) -> set[str]:
    """Return the Structs that a page has lists of."""
    return {match[2] for match in LIST.finditer(text)}


def _wanted(match: re.Match[str], definitions: dict[str, Any]) -> list[str]:
    names = (match[4] or "").split()
    if f": {match[4]}" in match[1]:
        return names
    return [name for name in definitions[match[2]]["properties"] if name not in {"missing", *names}]


def _inside(definitions: dict[str, Any], field: dict[str, Any], listed: set[str]) -> Iterator[str]:
    """Give the names in the Struct that a field holds, but for statistics."""
    for held in re.findall(r"#/\$defs/(\w+)", str(field)):
        for name, inner in definitions[held]["properties"].items() if held not in listed else ():
            if name not in {*STATISTICS, "count", "missing"}:
                yield name
                yield from _inside(definitions, inner, listed)


def _meaning(name: str, field: dict[str, Any]) -> str:
    text = field.get("description", "").rstrip(".")
    unit = field.get("unit", "")
    stated = unit not in UNITS and ("/" not in unit or " " in unit)
    stated = stated or name.endswith((f"_{unit.lower()}", f"_{unit.replace('/', '_per_')}"))
    stated = stated or re.search(rf"(?<![a-z'/]){re.escape(unit)}(?![a-z/])", text) is not None
    return text if stated else f"{text} ({unit})"


def _list(rows: list[Row]) -> str:
    lines = []
    for meaning, group in groupby(rows, lambda row: row.meaning):
        names = ", ".join(f"`{row.name}`" for row in group)
        lines.append(f"- {names}: {meaning}")
    return "\n".join(lines)
