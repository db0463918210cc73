"""What stands below the heading of a report, worst first."""

from __future__ import annotations

import msgspec
import pytest
import summaries

from sidelight.exporter.report.alerts import alerts
from sidelight.exporter.report.verdict import verdict_of
from sidelight.methodology.compliance.runs import RunStatement

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


def test_an_address_stays_as_it_is_at_the_begin_of_a_sentence():
    """All others begin with a capital letter."""
    whole = replace(summaries.summary(summaries.correlated()), warnings=["http://a:1 refuses it", "it was refused"])
    assert ["http://a:1 refuses it.", "It was refused."] == [each for each in alerts(whole) if "refuse" in each]


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


@pytest.mark.parametrize(
    ("failed", "kind", "concluded"),
    [(9, "reset", True), (10, "reset", False), (10, "connect", False), (10, "http_429", False), (10, "odd", False)],
)
def test_nothing_is_concluded_where_too_many_failed(failed: int, kind: str, concluded: bool):
    """From a tenth on: where the wait of the others went is not the service's, and the advice is of the failures."""
    whole = summaries.summary(summaries.correlated())
    requests = replace(whole.client.requests, sent=100, ok=100 - failed, failed=failed)
    client = replace(whole.client, requests=requests, errors={kind: failed})
    verdict = verdict_of(replace(whole, client=client))
    assert ("failing", "server") == (verdict.state, verdict.cause)
    assert concluded == bool(verdict.parts)
    assert kind == "odd" or verdict.do.lower().startswith(("find out", "send less"))


def test_the_advice_on_resets_holds_for_those_before_any_response():
    """Connections may be closed in the middle of a reply, or before its first byte."""
    whole = summaries.summary(summaries.correlated())
    requests = replace(whole.client.requests, sent=3, ok=0, failed=3)
    verdict = verdict_of(replace(whole, client=replace(whole.client, requests=requests, errors={"reset": 3})))
    assert verdict.do.startswith("Find out what closes connections before replies have ended")
