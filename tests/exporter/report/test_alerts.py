"""What stands below the heading of a report, worst first."""

from __future__ import annotations

import msgspec
import pytest
import summaries

from exporter.report.alerts import alerts
from methodology.compliance.runs import RunStatement

replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("ok", "status", "order"),
    [
        (50, "complete", ["Doubt.", "What happened."]),
        (40, "complete", ["What happened.", "Doubt."]),
        (50, "interrupted", ["What happened.", "Doubt."]),
    ],
)
def test_what_became_of_requests_stands_before_doubts_of_their_times(ok: int, status: str, order: list[str]):
    """Of a server that was killed, the first line spoke of gaps between chunks that were 7 ms off."""
    whole = summaries.summary(summaries.correlated())
    requests = replace(whole.client.requests, sent=50, ok=ok)
    whole = replace(
        whole,
        status=status,
        warnings=["what happened"],
        client=replace(whole.client, requests=requests),
        self_check=replace(whole.self_check, first_line="doubt"),
    )
    assert order == list(alerts(whole))


def test_what_the_server_contradicts_of_the_declaration_stands_first():
    """Numbers of a system other than declared are misread, however sound they are."""
    whole = summaries.summary(summaries.correlated())
    statement = RunStatement(
        verdict="not compliant",
        sentence="",
        contradictions=["prefix caching is declared off, but is on in this run by its page"],
        requirements={},
    )
    methodology = replace(whole.methodology, tests={"ttft": statement})
    whole = replace(whole, warnings=["what happened"], methodology=methodology)
    first = "Prefix caching is declared off, but is on in this run by its page."
    assert [first, "What happened."] == list(alerts(whole))[:2]
