"""Results as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return a table with a column for each key of the first row; numbers with a fraction have three digits."""
    if not rows:
        return "nothing was measured"
    lines = [[f"{value:.3g}" if isinstance(value, float) else f"{value}" for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in ([*rows[0]], ["---"] * len(rows[0]), *lines))
