"""Sentences on prompts that caches did not hold."""

from __future__ import annotations

import pytest

from sidelight.correlator.load.reuse import EndpointReuse, PrefixReuse
from sidelight.exporter.report.tables.server import reuse_lines

TOKENS = EndpointReuse(requests=4, prompt_tokens=1000, cached_tokens=500, new_tokens=400, elsewhere_tokens=100)


@pytest.mark.parametrize(("endpoints", "lines"), [(("a",), 1), (("a", "b"), 2)])
def test_routing_is_advised_on_where_there_are_several_endpoints(endpoints: tuple[str, ...], lines: int):
    said = list(reuse_lines(PrefixReuse(total=TOKENS, endpoints=dict.fromkeys(endpoints, TOKENS))))
    assert lines == len(said)
    assert ["50 %", "40 %", "10 %"] == [f"{number} %" for number in (50, 40, 10) if f"{number} % " in said[0]]


def test_nothing_is_said_without_counts():
    assert [] == list(reuse_lines(PrefixReuse(missing="not stated")))
