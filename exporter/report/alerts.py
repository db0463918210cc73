"""What changes how all else is read, each once: overload, failures, an early end, damage, distrust."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.summary.result import Summary


def alerts(summary: Summary) -> Iterator[str]:
    """Yield them, worst first."""
    if first_line := summary.self_check.first_line:
        yield first_line
    yield from summary.warnings
