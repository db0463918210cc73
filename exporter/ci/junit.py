"""`junit.xml`: a test case for each objective and for the trust in the measurement, for what shows results of tests.

An objective that was missed is a failure, one without a value is skipped; where the load generator cannot be trusted
its case is skipped, since the run's exit code does not depend on it either. A run that did not end by itself, that lost
a share of its load, or whose records are damaged, is an error.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from msgspec import UNSET

from sidelight.exporter.document import without_controls
from sidelight.exporter.report.alerts import damage_lines, failed_line, loss_lines
from sidelight.exporter.report.conclusion import evidence
from sidelight.exporter.report.verdict import verdict_of
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.slo.results import ObjectiveResult

ANSWERED = "the server answered until the end of the load"
TRUST, ENDED = "the load generator's own error is within its limits", "the run ended and its records are whole"


def as_junit(summary: Summary) -> str:
    """Return the file as XML in the form that Jenkins, GitLab and GitHub's actions read."""
    summary = without_controls(summary)
    cases = [
        _ended(summary),
        _answered(summary),
        *map(_objective, summary.client.slo.objectives if summary.client.slo else ()),
        _trust(summary),
    ]
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    attributes = {
        "name": f"sidelight {summary.run_id}",
        "timestamp": summary.started_at.removesuffix("Z"),
        "time": f"{summary.window.duration_s:.3f}",
        "tests": str(len(cases)),
        **{name: str(_count(cases, outcome)) for name, outcome in counts.items()},
    }
    suite = ET.Element("testsuite", attributes)
    for case in cases:
        case.set("classname", "sidelight")
        suite.append(case)
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _objective(objective: ObjectiveResult) -> ET.Element:
    outcome = {True: "", False: "failure", None: "skipped"}[objective.met]
    return _case(objective.text, outcome, evidence(objective))


def _trust(summary: Summary) -> ET.Element:
    check = summary.self_check
    if check.trusted is None:
        return _case(TRUST, "skipped", check.verdict)
    return _case(TRUST, "" if check.trusted else "skipped", check.first_line or check.statement or check.verdict)


def _ended(summary: Summary) -> ET.Element:
    damage = list(damage_lines(summary.integrity))
    losses = list(loss_lines(summary.integrity))
    sound = summary.status == "complete" and not damage and not losses
    return _case(ENDED, "" if sound else "error", _joined([*losses, *damage, f"the run is {summary.status}"]))


def _answered(summary: Summary) -> ET.Element:
    requests, outage = summary.client.requests, summary.client.outage
    lines = [verdict_of(summary).headline, failed_line(summary)] if outage is not UNSET else []
    ended = f"{requests.ok:,} of {requests.sent:,} requests ended ok"
    return _case(ANSWERED, "error" if lines else "", _joined([*lines, ended]))


def _joined(lines: list[str]) -> str:
    return "; ".join(line.rstrip(".") for line in lines)


def _case(name: str, outcome: str, message: str) -> ET.Element:
    """Return a case; what passed has its evidence as output."""
    case = ET.Element("testcase", name=name)
    if outcome:
        ET.SubElement(case, outcome, message=message)
    else:
        ET.SubElement(case, "system-out").text = message
    return case


def _count(cases: Sequence[ET.Element], outcome: str) -> int:
    return sum(case.find(outcome) is not None for case in cases)
