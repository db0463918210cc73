"""docs/reference/metrics.md says what every number of the client's side is."""

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
        for found in properties.values():
            yield from names(found)


@pytest.mark.parametrize("part", ["client", "self_check", "methodology", "workload", "window", "tool"])
def test_every_number_is_explained(part: str):
    """Each name stands in the document in backticks."""
    explained = set(re.findall(r"`([a-z0-9_]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert set() == {part, *names(SCHEMA["properties"][part])} - explained - EXPLAINED
