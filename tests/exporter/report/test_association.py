"""What the tail is made of in a sentence, associations in lines, and both as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import summaries
from msgspec import UNSET, convert, structs, to_builtins

from sidelight.correlator.statistics.association import Association
from sidelight.correlator.statistics.tail import PARTS, Tail, TailShares, Threshold
from sidelight.exporter.report.conclusion import conclusion
from sidelight.exporter.report.tables.server import association_line
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.tail import TailAttribution, tail_attribution
from sidelight.rundir.stats import Missing

FOUND = Association(
    client="ttft_ms",
    server="requests_waiting",
    combined="one",
    lag_s=0.5,
    rho=0.9,
    ci95=(0.7, 0.97),
    rho_lag0=0.88,
    ci95_lag0=(0.5, 0.98),
    partial_rho=0.8,
    given=("requests_running", "input_tokens"),
    pairs=397,
    blocks=50,
)
UNKNOWN = Association(client="ttft_ms", server="preemptions", combined="one", pairs=397, missing="it never changed")


def shares(**known: float) -> dict[str, float | None]:
    return dict.fromkeys(PARTS) | known


def tail(*, from_ms: float = 5000.0, **change: Any) -> Tail:
    """Ten requests at p99: 92 % queue."""
    usual = Tail(
        from_ms=from_ms,
        requests=10,
        explained=10,
        estimated=0,
        expected=0,
        mean_ms=6000.0,
        error_ms=0.0,
        share=shares(queue=0.92, prefill=0.05, network=0.01, other=0.02),
        above_median_ms=shares(queue=5500.0, prefill=20.0, network=0.0, other=10.0),
    )
    return structs.replace(usual, **change)


def shares_with(p99: Tail, **change: Any) -> TailShares:
    """1,000 requests whose TTFT varies by the queue, which dominates from 4 waiting requests on."""
    usual = TailShares(
        requests=1000,
        with_ttft=1000,
        blocks=40,
        variance_share=shares(queue=0.9, prefill=0.06, network=0.01, other=0.03),
        ci95={**dict.fromkeys(PARTS), "queue": (0.8, 0.95)},
        mean_share=shares(queue=0.1, prefill=0.8, network=0.05, other=0.05),
        merged={},
        quality={"exact": 1000},
        mean_s=0.8,
        std_s=0.7,
        p50_s=0.1,
        tails={"p95": structs.replace(p99, share=shares(prefill=0.7, queue=0.3)), "p99": p99},
        threshold=Threshold(waiting=4.0, requests=300, fewest=0.0),
    )
    return replace(usual, **change)


HALF = shares(queue=0.45, prefill=0.4, other=0.15)
REST = shares(queue=0.2, prefill=0.1, other=0.7)
UNSCRAPED = Threshold(waiting=None, requests=0, fewest=None, missing="not scraped")


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (shares_with(tail()), "The slowest 1 % (10 requests) spent 92 % of their TTFT in the engine's queue."),
        (shares_with(tail(), with_ttft=99), "The slowest 5 % (10 requests) spent 70 % of their TTFT in prefill."),
        (
            shares_with(tail(requests=1, explained=1)),
            "The slowest 1 % (1 request) spent 92 % of their TTFT in the engine's queue.",
        ),
        (
            shares_with(tail(share=shares(queue=0.999, prefill=0.001), estimated=10)),
            "The slowest 1 % (10 requests, estimated) spent over 99 % of their TTFT in the engine's queue.",
        ),
        (
            shares_with(tail(estimated=4, explained=8)),
            (
                "The slowest 1 % (10 requests, 8 of them with a breakdown, partly estimated) spent 92 % of their TTFT "
                "in the engine's queue."
            ),
        ),
        (
            shares_with(tail(share=shares(network=0.8, queue=0.2))),
            "The slowest 1 % (10 requests) spent 80 % of their TTFT outside the engine.",
        ),
        (
            shares_with(tail(share=shares(gateway=0.8, queue=0.2))),
            "The slowest 1 % (10 requests) spent 80 % of their TTFT in the gateway.",
        ),
        (
            shares_with(tail(share=REST)),
            "The slowest 1 % (10 requests) spent 70 % of their TTFT in the engine outside queue and prefill.",
        ),
        (
            shares_with(tail(share=REST), merged={"network and engine frontend": 1000}),
            (
                "The slowest 1 % (10 requests) spent 70 % of their TTFT in network and the API server (together: no "
                "source separates them)."
            ),
        ),
        (
            shares_with(tail(share=REST), merged={"network and engine frontend": 100}),
            "The slowest 1 % (10 requests) spent 70 % of their TTFT in the engine outside queue and prefill.",
        ),
        (
            shares_with(tail(share=HALF)),
            "The slowest 1 % (10 requests) spent 45 % of their TTFT in the engine's queue and 40 % in prefill.",
        ),
        (
            shares_with(tail(from_ms=108.0)),
            "TTFT hardly varies (p99 is 1.08 times p50): 80 % of it is spent in prefill.",
        ),
        (shares_with(tail(explained=4)), "Of the slowest 1 %, only 4 of 10 requests have a breakdown."),
        (Missing("no server was scraped"), "What makes slow requests slow is not known: no server was scraped."),
    ],
)
def test_the_sentence(shares: TailShares | Missing, expected: str):
    """Where the slow requests spent most of their TTFT; what is estimated, merged or unknown is said."""
    assert expected == tail_attribution(shares).sentence


@pytest.mark.parametrize(
    ("shares", "largest"),
    [
        (shares_with(tail()), "queue"),
        (shares_with(tail(from_ms=108.0)), "prefill"),
        (shares_with(tail(explained=4)), UNSET),
        (Missing("why"), UNSET),
    ],
)
def test_the_part_that_the_sentence_names_first_is_stated(shares: TailShares | Missing, largest: object):
    assert largest == tail_attribution(shares).largest


def as_json(tail: TailAttribution) -> dict[str, Any]:
    """Return the object as it is written: strict JSON that its type describes."""
    written: dict[str, Any] = json.loads(json.dumps(to_builtins(tail), allow_nan=False))
    assert tail == convert(written, TailAttribution)
    return written


def test_what_the_tail_is_made_of_is_strict_json():
    written = as_json(tail_attribution(shares_with(tail())))
    assert {"queue": 0.9, "gateway": None} == {name: written["variance_share"][name] for name in ("queue", "gateway")}
    assert [0.8, 0.95] == written["ci95"]["queue"]
    counts = {"below": 0, "queued_below": 0}
    assert {"waiting": 4.0, "requests": 300, "fewest": 0.0, **counts} == written["threshold"]
    assert 5500.0 == written["tail"]["p99"]["above_median_ms"]["queue"]
    assert "queue" == written["largest"]


def test_a_threshold_that_is_not_known_says_why():
    written = as_json(tail_attribution(shares_with(tail(), threshold=UNSCRAPED)))
    counts = {"requests": 0, "below": 0, "queued_below": 0}
    assert {"waiting": None, "fewest": None, "missing": "not scraped", **counts} == written["threshold"]


def test_a_tail_that_is_not_known_is_its_reason_and_the_sentence():
    said = "What makes slow requests slow is not known: why."
    assert {"missing": "why", "sentence": said} == as_json(tail_attribution(Missing("why")))


def test_associations_are_strict_json():
    """Intervals as lists, null for what is not known, and a reason only there."""
    known, unknown = json.loads(json.dumps(to_builtins([FOUND, UNKNOWN]), allow_nan=False))
    assert [FOUND, UNKNOWN] == convert([known, unknown], list[Association])
    assert [0.5, 0.98] == known["ci95_lag0"]
    assert "missing" not in known
    assert (None, None, "it never changed") == (unknown["rho"], unknown["ci95"], unknown["missing"])
    assert set(known) == set(unknown) - {"missing"}


def correlation_with(**change: Any) -> Correlation:
    return structs.replace(summaries.correlated(), **change)


def paragraphs(*, verdict: str = "stable", **change: Any) -> str:
    shown = summaries.summary(correlation_with(tail_attribution=tail_attribution(shares_with(tail(), **change))))
    stability = structs.replace(shown.methodology.stability, verdict=verdict)
    return " ".join(
        conclusion(structs.replace(shown, methodology=structs.replace(shown.methodology, stability=stability)))
    )


def test_a_queue_that_only_grew_has_no_threshold():
    """Its length is then a measure of time."""
    assert "Queueing takes over" in paragraphs()
    assert "Queueing takes over" not in paragraphs(verdict="growing")


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (
            Threshold(waiting=4.0, requests=300, fewest=0.0, below=1200, queued_below=7),
            "showed more than 3 waiting (300 requests; of the 1,200 others, 7 queued for most of their TTFT).",
        ),
        (Threshold(waiting=2.0, requests=300, fewest=0.0), "showed more than 1 waiting (300 requests; "),
        (Threshold(waiting=1.0, requests=300, fewest=0.0), "showed any request waiting (300 requests; "),
        (Threshold(waiting=2.0, requests=1000, fewest=2.0), ""),
        (Threshold(waiting=None, requests=0, fewest=0.0), ""),
        (UNSCRAPED, ""),
    ],
    ids=["several", "one", "any", "at every length seen", "never", "not scraped"],
)
def test_from_which_queue_on_is_said_where_it_is_known(threshold: Threshold, expected: str):
    text = paragraphs(threshold=threshold)
    assert expected in text
    assert bool(expected) == ("Queueing takes over" in text)


@pytest.mark.parametrize(
    ("variance", "expected"),
    [
        (shares(queue=0.95, prefill=0.05), "Differences in TTFT between requests come almost entirely from queueing."),
        (shares(queue=1.02, prefill=-0.02), "Differences in TTFT between requests come almost entirely from queueing."),
        (shares(queue=0.3, prefill=0.7), "Differences in TTFT between requests come mostly from prefill."),
        (HALF, ""),
    ],
)
def test_what_requests_differ_by_is_said_without_a_number(variance: dict[str, float | None], expected: str):
    """A share of 102 % is right, and nonsense to a reader; where no part is most of it there is no sentence."""
    text = paragraphs(variance_share=variance)
    assert expected in text
    assert bool(expected) == ("Differences" in text)


def test_a_ttft_that_hardly_varies_differs_by_nothing():
    assert "Differences" not in paragraphs(std_s=0.1)


def test_significant_correlations_share_a_line():
    """The strongest first; whatever has zero in its interval, no interval, or no answer is not in it."""
    associations = [
        structs.replace(FOUND, server="weaker", rho_lag0=-0.6, ci95_lag0=(-0.8, -0.2)),
        FOUND,
        structs.replace(FOUND, server="b", ci95_lag0=None),
        structs.replace(FOUND, server="c", ci95_lag0=(-0.1, 0.98)),
        UNKNOWN,
    ]
    scrape = "what the last scrape before submission showed"
    line = f"Rank correlation of TTFT with {scrape}: requests waiting 0.88, weaker -0.60."
    assert [f"{line} Others are not significant."] == list(association_line(associations))
    assert [] == list(association_line(associations[2:]))
