"""docs/reference/metrics says what every number of summary.json is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from documents import explained

from sidelight.exporter.summary.result import schema
from sidelight.rundir.stats import STATISTICS

SCHEMA = schema()
PAGES = {
    "client": ("client", "objectives", "other-benchmarks"),
    "correlation": ("correlation", "breakdown"),
    "self_check": ("self-check",),
}
ON_A_PAGE_OF_THEIR_OWN = {"client", "correlation", "self_check", "server", "hardware", "methodology"}


def names(node: Any) -> Iterator[str]:
    """Give the names of what a schema describes, however deep; those of classes and of errors are the user's."""
    for definition in re.findall(r'"#/\$defs/(\w+)"', json.dumps(node)):
        properties = SCHEMA["$defs"][definition]["properties"]
        yield from properties
        for field in properties.values():
            yield from names(field)


@pytest.mark.parametrize("part", sorted(SCHEMA["properties"]))
def test_every_number_is_explained(part: str):
    """Each name stands on the pages of its section in backticks; statistics and reasons on the first."""
    pages = PAGES.get(part, (part,)) if part in ON_A_PAGE_OF_THEIR_OWN else ("run",)
    assert set() == {part, *names(SCHEMA["properties"][part])} - explained("README", *pages) - {*STATISTICS, "missing"}
