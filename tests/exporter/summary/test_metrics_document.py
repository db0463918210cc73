"""docs/reference/metrics.md says what every number of summary.json is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exporter.summary.result import schema
from rundir.stats import STATISTICS

DOCUMENT = Path(__file__).parents[3] / "docs/reference/metrics.md"
SCHEMA = schema()
# Statistics and reasons are explained once, at the top.
EXPLAINED = {*STATISTICS, "count", "missing"}


def names(node: Any) -> Iterator[str]:
    """Give the names of what a schema describes, however deep; those of classes and of errors are the user's."""
    for definition in re.findall(r'"#/\$defs/(\w+)"', json.dumps(node)):
        properties = SCHEMA["$defs"][definition]["properties"]
        yield from properties
        for field in properties.values():
            yield from names(field)


STRUCTS = {"Summary": SCHEMA, **SCHEMA["$defs"]}
TABLES = re.findall(r"<!-- fields of (\w+)(?: in \w+)?(?:: ([\w ]+?))? -->", DOCUMENT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("struct", STRUCTS)
def test_every_struct_has_a_table(struct: str):
    """Each field is a row of one, or a statistic, or holds a Struct that has a table."""
    properties = STRUCTS[struct]["properties"]
    listed = {name for table, names in TABLES if table == struct for name in (names.split() or properties)}
    held = {
        name
        for name, field in properties.items()
        if {held for held, _ in TABLES} & set(re.findall(r"#/\$defs/(\w+)", json.dumps(field)))
    }
    assert set() == set(properties) - listed - held - EXPLAINED


@pytest.mark.parametrize("part", sorted(SCHEMA["properties"]))
def test_every_number_is_explained(part: str):
    """Each name stands in the document in backticks."""
    explained = set(re.findall(r"`([a-z0-9_]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert set() == {part, *names(SCHEMA["properties"][part])} - explained - EXPLAINED
