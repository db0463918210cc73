"""What the tail is made of in a sentence, associations in lines, and both as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import summaries
from msgspec import convert, structs, to_builtins

from correlator.statistics.association import Association
from correlator.statistics.tail import PARTS, Tail, TailShares, Threshold
from exporter.report.association import association_rows, variance_rows
from exporter.summary.correlation import Correlation
from exporter.summary.tail import TailAttribution, sentence, tail_attribution
from rundir.stats import Missing

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


def shares(**told: float) -> dict[str, float | None]:
    return dict.fromkeys(PARTS) | told


def tail(*, from_ms: float = 5000.0, **change: Any) -> Tail:
    """Ten requests at p99: 92 % queue."""
    made = Tail(
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
    return structs.replace(made, **change)


def blamed(p99: Tail, **change: Any) -> TailShares:
    """1,000 requests whose TTFT varies by the queue, which dominates from 4 waiting requests on."""
    made = TailShares(
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
    return replace(made, **change)


QUEUEING = "p99 TTFT is queueing: 92 % of it"
FROM_3 = ", starting when waiting > 3"
UNSCRAPED = Threshold(waiting=None, requests=0, fewest=None, missing="not scraped")
HALF = shares(queue=0.45, prefill=0.4, other=0.15)
REST = shares(queue=0.2, prefill=0.1, other=0.7)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (blamed(tail()), f"{QUEUEING}{FROM_3}."),
        (blamed(tail(), with_ttft=99), "p95 TTFT is prefill: 70 % of it."),
        (blamed(tail(requests=2, explained=2)), f"{QUEUEING}{FROM_3} (the slowest 2 requests)."),
        (blamed(tail(requests=1, explained=1), threshold=UNSCRAPED), f"{QUEUEING} (the slowest request)."),
        (
            blamed(tail(estimated=10, expected=3), threshold=UNSCRAPED),
            f"{QUEUEING} (estimated, 3 of them never observed, standard error at most 0.0 %).",
        ),
        (blamed(tail(), threshold=Threshold(waiting=None, requests=0, fewest=0.0)), f"{QUEUEING}."),
        (blamed(tail(), threshold=UNSCRAPED), f"{QUEUEING}."),
        (
            blamed(tail(), threshold=Threshold(waiting=2.0, requests=1000, fewest=2.0)),
            f"{QUEUEING}, at every length of the queue seen (waiting >= 2).",
        ),
        (blamed(tail(share=shares(queue=0.999, prefill=0.001))), f"p99 TTFT is queueing: over 99 % of it{FROM_3}."),
        (blamed(tail(estimated=10, error_ms=30.0)), f"{QUEUEING}{FROM_3} (estimated, standard error at most 0.5 %)."),
        (
            blamed(tail(estimated=4, explained=8, error_ms=None)),
            f"{QUEUEING}{FROM_3} (of 8 of 10 requests, estimated for 4 of 8 requests).",
        ),
        (blamed(tail(share=shares(network=0.8, queue=0.2))), "p99 TTFT is time outside the engine: 80 % of it."),
        (blamed(tail(share=shares(gateway=0.8, queue=0.2))), "p99 TTFT is the gateway: 80 % of it."),
        (blamed(tail(share=REST)), "p99 TTFT is the engine outside queue and prefill: 70 % of it."),
        (
            blamed(tail(share=REST), merged={"network and engine frontend": 1000}),
            "p99 TTFT is what no source separates (network and engine frontend): 70 % of it.",
        ),
        (
            blamed(tail(share=REST), merged={"network and engine frontend": 100}),
            "p99 TTFT is the engine outside queue and prefill: 70 % of it.",
        ),
        (
            blamed(tail(from_ms=108.0), requests=600, quality={"shared": 600}),
            "TTFT hardly varies (p99 is 1.08 times p50); prefill is 80 % of it (of 600 of 1000 requests, estimated).",
        ),
        (blamed(tail(share=HALF)), "No part is most of the p99 TTFT: queueing is 45 %, prefill is 40 %."),
        (blamed(tail(from_ms=108.0)), "TTFT hardly varies (p99 is 1.08 times p50); prefill is 80 % of it."),
        (
            blamed(tail(from_ms=108.0), quality={"exact": 999, "shared": 1}),
            "TTFT hardly varies (p99 is 1.08 times p50); prefill is 80 % of it (estimated for 1 of 1000 requests).",
        ),
        (
            blamed(tail(explained=4)),
            "What the p99 TTFT is made of is not known: 4 of the 10 requests there have a breakdown.",
        ),
        (Missing("no server was scraped"), "What makes slow requests slow is not known: no server was scraped."),
    ],
)
def test_the_sentence(found: TailShares | Missing, expected: str):
    """What is most of the slow requests' TTFT, from which queue on; what is estimated, merged or unknown is said."""
    assert expected == sentence(found)


def as_json(tail: TailAttribution) -> dict[str, Any]:
    """Return the object as it is written: strict JSON that its type describes."""
    written: dict[str, Any] = json.loads(json.dumps(to_builtins(tail), allow_nan=False))
    assert tail == convert(written, TailAttribution)
    return written


def test_what_the_tail_is_made_of_is_strict_json():
    found = as_json(tail_attribution(blamed(tail())))
    assert {"queue": 0.9, "gateway": None} == {name: found["variance_share"][name] for name in ("queue", "gateway")}
    assert [0.8, 0.95] == found["ci95"]["queue"]
    assert {"waiting": 4.0, "requests": 300, "fewest": 0.0} == found["threshold"]
    assert 5500.0 == found["tail"]["p99"]["above_median_ms"]["queue"]
    assert sentence(blamed(tail())) == found["sentence"]


def test_a_threshold_that_is_not_known_says_why():
    found = as_json(tail_attribution(blamed(tail(), threshold=UNSCRAPED)))
    assert {"waiting": None, "requests": 0, "fewest": None, "missing": "not scraped"} == found["threshold"]


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


def lines(*found: Association) -> list[str]:
    return list(association_rows(correlation_with(association=list(found))))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {},
            [
                "0.88 at submission (95 % interval 0.50 to 0.98)",
                "0.80 given the rest (requests_running, input_tokens)",
                "0.90 0.5 s after submission (the best of 33 lags, so optimistic)",
            ],
        ),
        (
            {"lag_s": 0.0, "partial_rho": None, "blocks": 5},
            ["0.88 at submission (95 % interval 0.50 to 0.98; the interval is a guess, from 5 blocks)"],
        ),
        (
            {"lag_s": -1.5, "partial_rho": None},
            [
                "0.88 at submission (95 % interval 0.50 to 0.98)",
                "0.90 1.5 s before submission (the best of 33 lags, so optimistic)",
            ],
        ),
    ],
)
def test_a_line_says_how_sure_it_is(change: dict[str, Any], expected: list[str]):
    """The correlation without lag and its interval first; the best lag is called what it is."""
    assert [f"ttft_ms and requests_waiting: rank correlation {'; '.join(expected)}"] == lines(
        structs.replace(FOUND, **change)
    )


def test_what_is_not_told_apart_from_chance_shares_a_line():
    """Whatever has zero in its interval, no interval, or nothing to show without lag."""
    found = [
        structs.replace(FOUND, server="a", ci95_lag0=(-0.1, 0.98)),
        structs.replace(FOUND, server="b", ci95_lag0=None),
        structs.replace(FOUND, server="c", rho_lag0=None, ci95_lag0=None),
    ]
    assert ["ttft_ms and a (0.88), b (0.88), c: not distinguishable from chance"] == lines(*found)


def test_what_is_not_known_for_one_reason_shares_a_line():
    found = [
        UNKNOWN,
        structs.replace(UNKNOWN, server="kv_cache_usage"),
        structs.replace(UNKNOWN, server="x", missing="why"),
    ]
    assert [
        "ttft_ms and preemptions, kv_cache_usage: not known, it never changed",
        "ttft_ms and x: not known, why",
    ] == lines(*found)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "queueing makes 90 % of its variance (95 % interval 80 to 95 %), prefill 6 %"),
        (
            {"blocks": 5, "ci95": dict.fromkeys(PARTS) | {"queue": (0.6, 1.3)}},
            (
                "queueing makes 90 % of its variance (95 % interval 60 to 100 %; the interval is a guess, from 5 "
                "blocks), prefill 6 %"
            ),
        ),
        ({"ci95": dict.fromkeys(PARTS)}, "queueing makes 90 % of its variance, prefill 6 %"),
        (
            {"variance_share": shares(queue=1.2, other=-0.2), "ci95": dict.fromkeys(PARTS) | {"queue": (1.1, 1.3)}},
            "queueing makes 120 % of its variance (95 % interval 110 to 130 %)",
        ),
    ],
    ids=["interval", "a guess, cut at the whole", "no interval", "more than the whole"],
)
def test_a_line_says_what_the_ttft_varies_by(change: dict[str, Any], expected: str):
    """The largest share with its interval, then those worth naming."""
    rows = variance_rows(correlation_with(tail_attribution=tail_attribution(blamed(tail(), **change))))
    assert [f"How the TTFT varies: {expected}."] == list(rows)


def test_no_line_says_what_is_not_known():
    assert [] == list(variance_rows(correlation_with(tail_attribution=tail_attribution(Missing("why")))))
