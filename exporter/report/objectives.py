"""The service level objectives and whether they were met."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from exporter.report.format import ms
from exporter.summary.result import Summary


def objectives(summary: Summary) -> Iterator[Text]:
    """Yield a line for each objective: met or not, and by what value; none where none was given."""
    slo = summary.client.slo
    for objective in slo.objectives if slo else ():
        verdict = {True: "met", False: "MISSED", None: "unknown"}[objective.met]
        value = f"{ms(objective.value_ms)} ms" if objective.value_ms is not None else objective.missing or "-"
        yield Text(f"objective {objective.text}: {verdict}, {value}", style="green" if objective.met else "bold red")
