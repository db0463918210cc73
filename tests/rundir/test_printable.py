"""Values as a line of blocks."""

from __future__ import annotations

import pytest

from rundir.printable import sparkline


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.0, 1.0, None, 2.0], "▁▅ █"),
        ([1811.969102, -1.0], "█▁"),  # seven times it, divided by it, is more than seven
        ([0.0, 0.0], "▁▁"),
        ([], ""),
    ],
)
def test_heights_are_shares_of_the_largest_value(values: list[float | None], line: str):
    """The largest is always the highest block."""
    assert line == sparkline(values)
