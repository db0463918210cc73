"""Results as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a table with a column for each key of the first row; fractions have three digits, NaN is a dash."""
    if not rows:
        return "nothing was measured"
    lines = [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([*rows[0]], ["---"] * len(rows[0]), *lines))


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return f"{value}"
    return "-" if math.isnan(value) else f"{value:.3g}"
