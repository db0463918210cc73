"""The service level objectives: whether each was met, by what value, and of how many requests it speaks."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.report.format import Prose
from exporter.summary.result import Summary
from loadgen.requests.slo.results import ObjectiveResult
from rundir.printable.numbers import cell, count_of, ms


def objectives(summary: Summary) -> Iterator[Prose]:
    """Yield a line for each objective; none where none was given."""
    slo = summary.client.slo
    for objective in slo.objectives if slo else ():
        verdict = {True: "met", False: "MISSED", None: "not known"}[objective.met]
        style = "green" if objective.met else "bold red"
        yield Prose(f"Objective {objective.text}: {verdict}, {evidence(objective)}", style)


def evidence(objective: ObjectiveResult) -> str:
    """Return the deciding value of an objective, and its number of requests."""
    more = objective.left_out_requests
    left_out = f"; {more} more {'has' if more == 1 else 'have'} no value" if more else ""
    if objective.value is None:
        return f"{objective.missing}{left_out}"
    failed = f", of which {objective.failed_requests} failed" if objective.failed_requests else ""
    whole = count_of(objective.requests, "request")
    return f"{_value(objective.value, objective.unit)} over {whole}{failed}{left_out}"


def _value(value: float, unit: str) -> str:
    if unit == "ms":
        return f"{ms(value)} ms"
    return f"{100 * value:.3g} %" if unit == "ratio" else f"{cell(value)} {unit}"
