from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from msgspec import to_builtins

from sidelight.loadgen.requests import warmup

NAN = float("nan")


def _replies(count: int, tokens: int, **more: object) -> list[dict[str, object]]:
    return [{"submit": 0, "end": 10, "output": tokens} | more for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("draft", warmup.BY_THE_DRAFT), ("none", warmup.COLD_START), ("0", warmup.COLD_START),
        ("25", warmup.Warmup(kind="count", requests=25)),
    ],
)  # fmt: skip
def test_a_policy_is_read(text: str, expected: warmup.Warmup):
    """The draft's, an exact number, or a cold start."""
    assert expected == warmup.parse_warmup(text)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "some", "²"])
def test_what_is_no_policy_is_refused(text: str):
    """With the cure."""
    with pytest.raises(ValueError, match="write draft, none, or a number of requests"):
        warmup.parse_warmup(text)


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        ([], 100),
        (_replies(60, 1000), 40),
        (_replies(100, 100), 0),
        (_replies(100, 50), 100),
        (_replies(100, 99), 2),
        (_replies(99, 1000), 1),
        (_replies(100, 1000, status="failed"), 100),
        (_replies(100, -1, chunks=tuple(range(100))), 0),
        (_replies(100, -1), 0),
    ],
    ids=[
        "nothing yet", "many tokens, few requests", "both", "half the tokens", "a token each short",
        "one request short",
        "all failed", "no usage, chunks count", "no token told at all",
    ],
)  # fmt: skip
def test_the_draft_asks_for_requests_and_tokens(rows: list[dict[str, object]], more: int):
    """100 requests or 10,000 output tokens, whichever is greater: the number still to send."""
    log = request_log(*rows)
    assert more == warmup.more_requests(warmup.BY_THE_DRAFT, log)


@given(st.integers(1, 400), st.integers(1, 500))
def test_as_many_more_as_it_says_are_enough(count: int, tokens: int):
    """When further replies are like those before, one more round ends the warm-up."""
    more = warmup.more_requests(warmup.BY_THE_DRAFT, request_log(*_replies(count, tokens)))
    assert 0 == warmup.more_requests(warmup.BY_THE_DRAFT, request_log(*_replies(count + more, tokens)))


@pytest.mark.parametrize(("sent", "more"), [(0, 25), (24, 1), (25, 0), (26, 0)])
def test_an_exact_number_is_exact(sent: int, more: int):
    """Whatever became of them."""
    policy = warmup.parse_warmup("25")
    assert more == warmup.more_requests(policy, request_log(*_replies(sent, 5, status="failed")))


def test_a_cold_start_needs_none():
    """Nothing is sent before the measurement."""
    assert 0 == warmup.more_requests(warmup.COLD_START, request_log())


@pytest.mark.parametrize(
    ("probes", "stable"),
    [
        ([], False), ([100.0], False), ([100.0, 100.0], False),
        ([100.0, 109.9, 100.0], True), ([100.0, 110.0, 110.0], False), ([100.0, 90.5, 90.5], True),
        ([500.0, 100.0, 101.0, 99.0], True), ([100.0, 100.0, 150.0], False), ([100.0, 150.0, 150.0], False),
        ([100.0, NAN, 100.0], False), ([100.0, 0.0, 100.0], False),
    ],
)  # fmt: skip
def test_probes_settle(probes: list[float], stable: bool):
    """Under 10 % from one to the next, over the last three; a failed probe settles nothing."""
    assert stable == warmup.stable(probes)


def test_a_statement_says_what_was_done():
    """Enough, drained and settled."""
    log = request_log(*_replies(120, 100))
    got = warmup.statement(warmup.BY_THE_DRAFT, log, drained=True, before_ms=[900.0], after_ms=[100.0, 104.0, 101.0])
    assert (True, True, 120, 12_000) == (got.meets_draft, got.stable, got.requests_ok, got.output_tokens)
    assert "Warm-up: 120 requests and 12,000 output tokens, drained; probes stable, within 4 %." == got.sentence
    json.dumps(to_builtins(got), allow_nan=False)


def test_a_statement_says_what_is_short():
    """By the draft's measure, whatever was asked for; and why nothing is known of the probes."""
    got = warmup.statement(
        warmup.parse_warmup("5"), request_log(*_replies(5, 10)), drained=False, after_ms=[NAN, 1.0, 1.0]
    )
    assert (False, False, "a probe failed") == (got.meets_draft, got.stable, got.missing)
    assert [None, 1.0, 1.0] == got.probes_after_ms
    assert (
        "Warm-up: 5 requests and 50 output tokens, not drained (the draft asks for 100 requests or 10,000 output "
        "tokens, whichever is greater); a probe failed."
    ) == got.sentence
    json.dumps(to_builtins(got), allow_nan=False)


def test_a_cold_start_is_stated():
    """The draft wants it said clearly."""
    got = warmup.statement(warmup.COLD_START, request_log(), drained=True)
    assert (True, None, None) == (got.cold_start, got.meets_draft, got.drained)
    assert got.sentence.startswith("Cold start: no warm-up")
