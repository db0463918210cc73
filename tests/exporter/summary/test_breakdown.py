"""Where the TTFT went: the object of the summary, the answer in a sentence, the table's rows, and what it rests on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import summaries
from documents import explained
from jsonschema import Draft202012Validator
from msgspec import UNSET, convert, to_builtins

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.estimate.table import QUALITIES
from sidelight.correlator.gateways import GatewayPart
from sidelight.exporter.document import Table
from sidelight.exporter.report.method import basis
from sidelight.exporter.report.sections import as_text
from sidelight.exporter.report.tables.breakdown import breakdown_table, breakdown_tables
from sidelight.exporter.report.verdict import verdict_of, where_it_went
from sidelight.exporter.summary.breakdown import NOT_SEEN, Coverage, Quality
from sidelight.exporter.summary.correlation import SEVERAL_CLOCKS, Correlation, ReceivedSpans, correlation
from sidelight.exporter.tables import PARTS
from sidelight.exporter.text import without_padding
from sidelight.recorded.gateway_spans import FirstBy
from sidelight.sidecar.options import schema

TTFT_PARTS = ("network_ms", "gateway_ms", "queue_ms", "prefill_ms", "other_ms")
MERGED = "network and engine frontend"


def table_of(shown: Correlation) -> list[list[str]]:
    """The rows of the table of parts, as words."""
    return words(breakdown_table(shown.breakdown))


def words(table: Table) -> list[list[str]]:
    return [line.split() for line in without_padding([table]).splitlines() if line.strip()]


def mixed(*pieces: tuple[int, Parts]) -> Parts:
    """The first so many requests of one table, the next of another."""
    columns: dict[str, Any] = {}
    for name in Parts.__dataclass_fields__:
        ends = np.cumsum([size for size, _ in pieces])
        cut = [getattr(table, name)[end - size : end] for (size, table), end in zip(pieces, ends, strict=True)]
        columns[name] = np.concatenate(cut)
    return Parts(**columns)


def passed(*, first_by: FirstBy) -> npt.NDArray[np.object_]:
    """100 requests that passed one gateway, whose first output is known by that."""
    gateway = GatewayPart(service="gate", part_s=0.001, request_s=0.001, at_most_s=np.nan, first_by=first_by)
    column = np.empty(100, dtype=np.object_)
    column.fill((gateway,))
    return column


def answer(shown: Correlation) -> str:
    """Where the TTFT went, as the report says it of a server that was scraped."""
    return where_it_went(summaries.summary(shown))


def test_the_answer_shares_the_ttft_out():
    """The largest part alone, where it is most of the time and no other has a fifth: the bar has the others."""
    assert "Of the mean TTFT, 75 % was spent in the engine's queue." == answer(summaries.correlated())
    two = replace(summaries.parts(), queue_s=np.full(100, 0.140), prefill_s=np.full(100, 0.040))
    sentence = "Of the mean TTFT, 70 % was spent in the engine's queue and 20 % in prefill."
    assert sentence == answer(correlation(summaries.findings(two)))


@pytest.mark.parametrize(("error_ms", "is_named"), [(0.0, True), (3.0, True), (149.0, True), (151.0, False)])
def test_an_estimate_within_its_own_error_has_no_share(error_ms: float, is_named: bool):
    """Nor is the tail said to be made of it, and nothing is advised against it."""
    shown = summaries.correlated()
    queue = msgspec.structs.replace(shown.breakdown.queue_ms, source="histogram", error_ms=error_ms)
    summary = summaries.summary(
        msgspec.structs.replace(shown, breakdown=msgspec.structs.replace(shown.breakdown, queue_ms=queue))
    )
    verdict = verdict_of(summary)
    shares = {part.part: part.share for part in verdict.parts}
    assert is_named == (shares["queue"] is not None)
    assert is_named == (verdict.cause == "queue")
    assert is_named == ("replica" in verdict.do)
    rows = {line.split()[0]: line for line in as_text(summary).splitlines() if "estimate" in line and line.strip()}
    assert is_named == ("75 %" in rows["queue"])


def test_of_parts_all_within_their_errors_none_has_a_share():
    """The sentence is of their errors alone."""
    shown = summaries.correlated()
    unsure = {
        name: msgspec.structs.replace(part, error_ms=1e4)
        for name in TTFT_PARTS
        if (part := getattr(shown.breakdown, name)).mean is not None
    }
    breakdown = msgspec.structs.replace(shown.breakdown, **unsure)
    assert "%" not in where_it_went(summaries.summary(msgspec.structs.replace(shown, breakdown=breakdown)))


def test_the_answer_gives_the_reason_where_there_is_none():
    """A missing breakdown is a reason, not a zero."""
    assert "No breakdown: no server offers queue and prefill times." == answer(
        summaries.uncorrelated("no server offers queue and prefill times")
    )


def test_a_server_without_a_metrics_page_is_answered_with_what_to_give():
    """The reason stands there once, and the server's section is left out."""
    reason = "http://127.0.0.1:8000/metrics: HTTP 404"
    nothing = msgspec.structs.replace(summaries.NO_SERVER, reason=reason)
    shown = summaries.summary(summaries.uncorrelated(reason), nothing)
    assert (f"No breakdown: no metrics page of this server could be read ({reason}).") == where_it_went(shown)
    assert 1 == " ".join(as_text(shown).split()).count(reason)


@pytest.mark.parametrize(
    ("server_requests", "comparable"), [(98, True), (100, True), (102, True), (97, False), (103, False), (0, False)]
)
def test_comparable_is_within_two_percent(server_requests: int, comparable: bool):
    """The engine may have finished 2 % more or fewer than succeeded here."""
    findings = summaries.findings(whole=summaries.means(server_requests=server_requests))
    assert comparable == correlation(findings).comparable


def test_the_table_has_every_part_with_its_share_source_and_error():
    """Also what the network and the rest consist of; an error stands where there is one, and no word like exact."""
    rows = table_of(summaries.correlated())
    spans = ["engine", "spans"]
    assert ["outside", "the", "engine", "5.00", "5.00", "5.00", "2", "%", *spans] in rows
    assert ["to", "the", "engine", "2.00", "2.00", "2.00", "1", "%", *spans, "±0.50"] in rows
    assert ["queue", "150.0", "150.0", "150.0", "75", "%", "█" * 6, *spans] in rows
    frontend = ["API", "server:", "tokenise,", "wait,", "output"]
    assert [*frontend, "13.0", "13.0", "13.0", "6", "%", *spans] in rows
    assert ["blank", "output", "2.00", "2.00", "2.00", "1", "%", "client"] in rows
    assert ["TTFT", "200.0", "200.0", "200.0", "100", "%", "client"] == rows[-2]
    assert ["connect", "and", "send", "0.50", "0.50", "0.50", "before", "TTFT"] == rows[-1]


def test_a_row_of_exact_requests_and_one_estimate_says_so():
    """The error is that of an estimated request, not of all."""
    of = mixed((99, summaries.parts()), (1, summaries.parts("histogram")))
    shown = summaries.correlated(summaries.findings(of))
    assert (1, 0.3) == (shown.breakdown.queue_ms.estimated, shown.breakdown.queue_ms.error_ms)
    (row,) = (row for row in table_of(shown) if row[0] == "queue")
    assert ["99", "exact,", "1", "estimate", "±3.00"] == row[-5:]


def test_a_network_that_was_not_seen_is_neither_0_nor_a_share():
    """Where requests begin at a gateway; the TTFT is then by its spans."""
    of = summaries.parts()
    unseen = replace(of, network_s=np.full(100, np.nan), gateway_s=of.network_s, gateways=passed(first_by="attribute"))
    shown = summaries.correlated(summaries.findings(unseen))
    network = shown.breakdown.network_ms
    assert (0, None, None, NOT_SEEN) == (network.count, network.mean, network.share_of_ttft, network.missing)
    rows = table_of(shown)
    assert ["network", "not", "seen"] in rows
    assert ["TTFT", "200.0", "200.0", "200.0", "100", "%", "gateway's", "spans"] in rows
    assert any("is not seen" in line for line in basis(shown))


@pytest.mark.parametrize(
    ("with_gateway", "label"), [(0, "outside the engine"), (100, "network"), (30, "rest outside the engine")]
)
def test_the_network_is_called_so_only_where_no_gateway_can_be_in_it(with_gateway: int, label: str):
    """In the table and the summary; else it is all that is outside the engine."""
    of = summaries.parts()
    gateway_s = np.where(np.arange(100) < with_gateway, 0.001, np.nan)
    findings = summaries.findings(replace(of, gateway_s=gateway_s, gateways=passed(first_by="attribute")))
    shown = summaries.correlated(findings)
    assert label == shown.breakdown.network_label
    assert [*label.split(), "5.00"] in [row[: len(label.split()) + 1] for row in table_of(shown)]


@pytest.mark.parametrize(
    ("at_most_ms", "label", "known_from"), [(8.0, "gateway, inbound", True), (np.nan, "gateway", False)]
)
def test_what_a_gateway_took_before_its_call_is_known_beside_estimates_too(
    at_most_ms: float, label: str, *, known_from: bool
):
    """By its own spans, exactly; what it took of a TTFT that is estimated is as sure as that."""
    columns = {"gateway_s": 0.006, "gateway_request_s": 0.006, "gateway_at_most_s": at_most_ms / 1e3}
    of = replace(summaries.parts("histogram"), **{name: np.full(100, value) for name, value in columns.items()})
    of = replace(of, gateways=passed(first_by="" if known_from else "attribute"))
    shown = summaries.correlated(summaries.findings(of))
    gateway, before = shown.breakdown.gateway_ms, shown.breakdown.gateway_request_ms
    assert (("trace", 0.0) if known_from else ("histogram", 1.0)) == (gateway.source, gateway.error_ms)
    assert ("trace", 0.0, label) == (before.source, before.error_ms, shown.breakdown.gateway_label)
    (row,) = (row for row in table_of(shown) if row[0].startswith("gateway"))
    assert known_from == (row[-2:] == ["gateway's", "spans"])


def test_the_round_trip_stands_beside_what_it_does_not_explain():
    """Neither has an error: it was measured on connections of its own; without a measurement there is no row."""
    of = replace(summaries.parts(), round_trip_s=np.full(100, 0.001), beyond_round_trip_s=np.full(100, 0.004))
    rows = table_of(summaries.correlated(summaries.findings(of)))
    assert ["TCP", "round", "trip", "1.00", "1.00", "1.00", "0", "%", "client"] in rows
    assert ["proxies", "and", "HTTP", "4.00", "4.00", "4.00", "2", "%", "engine", "spans"] in rows
    assert not any(row[:1] == ["TCP"] for row in table_of(summaries.correlated()))
    assert "no round trip was measured" == summaries.correlated().breakdown.round_trip_ms.missing


def test_the_table_is_whole_however_long_the_wait():
    """Nothing is cut off where a TTFT is half an hour."""
    long = summaries.parts("histogram", ttft_ms=1_800_200.0)
    rows = table_of(summaries.correlated(summaries.findings(replace(long, queue_s=np.full(100, 1800.15)))))
    numbers = ["1,800,150.0"] * 3
    assert ["queue", *numbers, "100", "%", "█" * 8, "estimate", "±3.00"] in rows


def test_estimates_show_their_standard_error():
    """And what is unknown has no row."""
    rows = table_of(summaries.correlated(summaries.findings(summaries.parts("histogram"))))
    assert ["queue", "150.0", "150.0", "150.0", "75", "%", "█" * 6, "estimate", "±3.00"] in rows
    assert not any(row[:1] in (["to"], ["gateway"]) for row in rows)


def test_sources_are_put_together_request_by_request():
    """Half by spans, a quarter by replies, a fifth estimated, a twentieth not at all: shares are of the covered."""
    of = mixed(
        (50, summaries.parts()),
        (25, summaries.parts("response", merged=MERGED)),
        (20, summaries.parts("histogram", reason="no span of it came")),
        (5, summaries.parts("none", reason="it was cancelled")),
    )
    shown = summaries.correlated(summaries.findings(of))
    breakdown = shown.breakdown
    assert Coverage(trace=0.5, response=0.25, histogram=0.2, none=0.05) == shown.coverage
    assert Quality(exact=75, by_time=0, tight=0, shared=20, mixed_traffic=0, prior=0, none=5) == shown.quality
    assert {"it was cancelled": 5} == shown.none_reasons
    assert {MERGED: 25} == breakdown.merged
    network = breakdown.network_ms
    assert (70, 5.0, "mixed") == (network.count, network.mean, network.source)
    assert pytest.approx(1) == sum(getattr(breakdown, name).share_of_ttft or 0.0 for name in TTFT_PARTS)
    assert pytest.approx(3.0 * (20 / 95) ** 0.5) == breakdown.queue_ms.error_ms
    assert [
        (
            "Of 100 requests, 50 were matched to engine spans, 25 were timed by the server's replies or records, 20 "
            "were estimated from the engine's histograms, 5 were without a breakdown (it was cancelled)."
        ),
        "20 requests were estimated although spans or timings came: no span of it came.",
        "The part `other` of 25 requests includes network and the API server: no source separates them.",
        "The engine's clock is 30.0 ms ahead of ours, known within 0.50 ms; this is corrected.",
    ] == list(basis(shown))


def test_slices_are_of_the_requests_submitted_in_them():
    """Their means add up to their TTFT, and how sure they are is never dropped."""
    of = mixed((20, summaries.parts()), (30, summaries.parts("histogram")), (50, summaries.parts("none", reason="why")))
    slices = correlation(summaries.findings(of)).timeslices
    assert [(20, 20), (20, 20), (20, 10), (20, 0), (20, 0)] == [(piece.requests, piece.covered) for piece in slices]
    for piece in slices[:3]:
        assert pytest.approx(piece.ttft_ms) == sum(getattr(piece, name) or 0.0 for name in TTFT_PARTS)
    assert [0, 20, 10] == [piece.quality.shared for piece in slices[:3]]
    assert [0.0, 4.0, 4.0] == [piece.error_ms for piece in slices[:3]]
    assert ("why", 200.0, None) == (slices[3].missing, slices[3].ttft_ms, slices[3].queue_ms)


def test_classes_and_urls_are_groups_of_their_own():
    """Only where there are several; together they are the whole."""
    findings = summaries.findings()
    classes = np.array(["chat"] * 30 + ["code"] * 70, dtype=np.object_)
    shown = correlation(replace(findings, workload_class=classes))
    assert ({"chat": 30, "code": 70}, {}) == (
        {name: group.requests for name, group in shown.classes.items()},
        shown.urls,
    )
    assert 150.0 == shown.classes["code"].breakdown.queue_ms.mean
    assert Coverage(trace=1.0, response=0.0, histogram=0.0, none=0.0) == shown.classes["chat"].coverage
    _, table = breakdown_tables(shown)
    assert ["code", "70", "200.0", "5.00", "150.0", "30.0", "15.0"] == words(table)[-1]


def test_means_stand_in_where_no_request_has_a_breakdown():
    """Of a run too short to be attributed; not where the engine served others too."""
    why = "in fewer than 5 scrape intervals did requests of ours end"
    alone = summaries.findings(summaries.parts("none", reason=why), why=why)
    shared = replace(alone, means=summaries.means(server_requests=150))
    shown = correlation(alone)
    queue = shown.breakdown.queue_ms
    assert (150.0, 0.75, "histogram", None) == (queue.mean, queue.share_of_ttft, queue.source, queue.p99)
    assert (why, 1.0, UNSET) == (shown.breakdown.means_only, shown.coverage.none, shown.missing)
    assert "Of the mean TTFT, 75 % was spent in the engine's queue." == answer(shown)
    counts = f"Only means are known: over 100 requests by the client's count and 100 by the engine's ({why})."
    assert [counts] == list(basis(shown))
    sure = correlation(replace(alone, means=replace(summaries.means(), ci90_s={"queue": (0.14, 0.16)})))
    assert ((140.0, 160.0), UNSET) == (sure.breakdown.queue_ms.mean_ci90, sure.breakdown.prefill_ms.mean_ci90)
    rows = {row[0]: row for row in table_of(sure)}
    assert ["140.0", "to", "160.0"] == rows["queue"][-3:]
    assert 2 == len(list(basis(sure)))
    assert f"{why}; and the engine finished 150 requests where 100 of ours succeeded" in (
        correlation(shared).missing or ""
    )


@pytest.mark.parametrize(
    "stated", [{"queue_s": 10.0}, {"prefill_s": 99.0}, {"queue_s": -1.0}, {"outside_s": -0.05}, {"outside_s": 0.05}]
)
def test_means_that_cannot_be_parts_of_the_ttft_are_no_breakdown(stated: dict[str, float]):
    """Of a page that states a queue of 10 s where clients waited 0.2 s, or ms for s; stamps may be late by some ms."""
    why = "in fewer than 5 scrape intervals did requests of ours end"
    alone = summaries.findings(summaries.parts("none", reason=why), why=why)
    shown = correlation(replace(alone, means=replace(summaries.means(), **stated)))
    assert (True, None, None) == (shown.comparable, shown.breakdown.queue_ms.mean, shown.breakdown.other_ms.mean)
    assert "cannot be parts of a mean TTFT of 200.0 ms" in (shown.missing or "")
    assert UNSET == correlation(replace(alone, means=replace(summaries.means(), prefill_s=0.055))).missing


def test_means_of_a_drained_run_are_the_engines_and_say_why():
    """Of an engine whose histograms are observed at different moments; what passed outside is then known as well."""
    unseen = summaries.findings(summaries.parts("none", reason="elsewhere"), why="elsewhere")
    proven = replace(unseen, means=replace(summaries.means(), outside_s=0.006, proof="100 of each"))
    shown = correlation(proven)
    means = [getattr(shown.breakdown, name).mean for name in ("network_ms", "queue_ms", "prefill_ms", "other_ms")]
    assert [6.0, 150.0, 30.0, 14.0] == pytest.approx(means)
    assert (0.0, "100 of each", UNSET) == (
        shown.breakdown.queue_ms.error_ms,
        shown.breakdown.means_only,
        shown.missing,
    )


def test_a_part_that_only_some_requests_know_says_how_many():
    """Its mean is theirs alone, and may be larger than that of the TTFT."""
    parts = summaries.parts()
    queue_s = np.where(np.arange(len(parts)) < 98, 0.15, np.nan)
    rows = {row[0]: row for row in table_of(correlation(summaries.findings(replace(parts, queue_s=queue_s))))}
    assert ["engine", "spans,", "98", "requests"] == rows["queue"][-4:]
    assert ["engine", "spans"] == rows["prefill"][-2:]


def test_the_wait_for_a_scheduler_is_a_row_of_its_own():
    """Of what is in the engine outside queue and prefill; where no source states it, it says where it is."""
    parts = summaries.parts()
    intake = replace(parts, scheduler_intake_s=np.full(len(parts), 0.012), engine_frontend_s=np.full(len(parts), 0.001))
    shown = correlation(summaries.findings(intake))
    assert ["scheduler", "intake", "12.0", "12.0", "12.0", "6", "%", "engine", "spans"] in table_of(shown)
    unknown = correlation(summaries.findings()).breakdown.scheduler_intake_ms
    assert (None, "no source separates it: included in engine_frontend_ms") == (unknown.mean, unknown.missing)


def test_end_to_end_has_its_parts_too():
    """5 + 150 + 30 + 1000 of decoding and 15 that are left: 1,200 ms."""
    e2e = correlation(summaries.findings()).breakdown.e2e
    names = ("e2e_ms", "network_ms", "queue_ms", "prefill_ms", "decode_ms", "other_ms")
    assert [1200.0, 5.0, 150.0, 30.0, 1000.0, 15.0] == [getattr(e2e, name).mean for name in names]
    assert pytest.approx(1000 / 1200) == e2e.decode_ms.share_of_e2e


@pytest.mark.parametrize(
    ("offset_ms", "error_ms", "said"),
    [
        (0.1, 0.3, "Clock offset to the engine is known within 0.40 ms."),
        (250.0, 0.3, "The engine's clock is 250.0 ms behind ours, known within 0.30 ms; this is corrected."),
    ],
)
def test_the_clock_is_stated_with_its_error(offset_ms: float, error_ms: float, said: str):
    offset = replace(summaries.CLOCK, offset_ns=int(offset_ms * 1e6), error_ns=int(error_ms * 1e6))
    assert said in list(basis(summaries.correlated(summaries.findings(clock=offset))))


def test_requests_that_a_page_never_showed_are_said_to_be_less_sure():
    """They are expected alone, as requests that were cancelled are: vLLM counts what has ended."""
    shown = summaries.correlated()
    shown = msgspec.structs.replace(shown, quality=msgspec.structs.replace(shown.quality, mixed_traffic=3, prior=2))
    said = "; 3 of them less surely: beside other traffic; 2 of them less surely: the metrics page was silent."
    assert next(basis(shown)).endswith(said)


def test_a_clock_that_contradicts_itself_is_stated():
    """The report itself says why the network's time to the engine is missing."""
    offset = replace(summaries.NO_CLOCK, pairs=100, reason="several engines' clocks differ")
    said = "The engine's clock cannot be compared with ours: several engines' clocks differ."
    assert said in list(basis(summaries.correlated(summaries.findings(clock=offset))))


def test_several_engines_clocks_are_listed_and_the_largest_error_is_stated():
    """Those that are not known are named, three of them; the rest is counted."""
    near, far = summaries.CLOCK, replace(summaries.CLOCK, offset_ns=5 * 10**9, error_ns=2_000_000)
    known = {"http://a": near, "pod at http://b": far}
    shown = summaries.correlated(replace(summaries.findings(), clocks=known))
    assert {
        "offset_ms": None,
        "error_ms": 2.0,
        "pairs": 200,
        "left_out": 0,
        "reason": SEVERAL_CLOCKS,
        "engines": {
            "http://a": {"offset_ms": -30.0, "error_ms": 0.5, "pairs": 100, "left_out": 0, "reason": None},
            "pod at http://b": {"offset_ms": 5000.0, "error_ms": 2.0, "pairs": 100, "left_out": 0, "reason": None},
        },
    } == to_builtins(shown.clock)
    said = "The clocks of 2 engines are from 30.0 ms ahead of ours to 5,000.0 ms behind ours, known within 2.00 ms"
    assert [f"{said}; this is corrected."] == [line for line in basis(shown) if "clock" in line]
    unknown = replace(summaries.NO_CLOCK, pairs=7, reason="one side only")
    mixed_up = known | {f"http://{name}": unknown for name in "wxyz"}
    lines = list(basis(summaries.correlated(replace(summaries.findings(), clocks=mixed_up))))
    cannot = [f"The clock of an engine cannot be compared with ours: http://{name}: one side only." for name in "wxy"]
    assert [f"{said}; this is corrected.", *cannot, "Nor can those of 1 more."] == lines[-5:]


def test_of_several_engines_one_contradicts_itself():
    """Why its requests have no network times is the reason of the part that is missing."""
    clocks = {
        "a": replace(summaries.NO_CLOCK, reason="one side only"),
        "b": replace(summaries.NO_CLOCK, reason="was set"),
    }
    findings = replace(summaries.findings(summaries.parts("response")), clocks=clocks)
    assert "in network_ms: one side only; was set" == correlation(findings).breakdown.request_network_ms.missing


@pytest.mark.parametrize(("spans", "said"), [(100, True), (0, False), (None, False)])
def test_spans_that_came_and_were_not_joined_are_said(spans: int | None, said: bool):
    """Where none came, `run` has warned of that already."""
    findings = summaries.findings(summaries.parts("histogram", reason="its span tells impossible times"))
    counts = dict.fromkeys(ReceivedSpans.__struct_fields__, 0)
    received = None if spans is None else ReceivedSpans(**counts | {"spans": spans})
    shown = summaries.correlated(replace(findings, spans=received))
    line = "100 requests were estimated although spans or timings came: its span tells impossible times."
    assert said == (line in list(basis(shown)))


def test_requests_that_did_not_succeed_are_counted():
    """The breakdown is of whatever had a first token; the client's statistics are not."""
    shown = summaries.correlated(replace(summaries.findings(), ok=np.arange(100) >= 16))
    assert 16 == shown.not_ok
    assert "All 100 requests (16 of which did not end ok) were matched to engine spans." in list(basis(shown))
    assert where_it_went(summaries.summary(shown)).startswith("Of the mean TTFT of the 100 requests with a")


@pytest.mark.parametrize(("sent", "which"), [(100, ""), (103, " with a first token")])
def test_requests_without_a_first_token_are_not_among_all(sent: int, which: str):
    """As of blank replies: of 23 requests "all 22" were estimated."""
    assert f"All 100 requests{which} were matched to engine spans." in list(basis(summaries.correlated(), sent))


@pytest.mark.parametrize(("divided", "said"), [(100, False), (0, True)])
def test_where_nothing_depends_on_the_clocks_that_is_said(divided: int, *, said: bool):
    """Behind a gateway, they were known within 54 ms, and no number was the worse for it."""
    shown = summaries.correlated()
    parts = shown.breakdown
    network = msgspec.structs.replace(parts.network_ms, count=100)
    there = msgspec.structs.replace(parts.request_network_ms, count=divided)
    parts = msgspec.structs.replace(parts, network_ms=network, request_network_ms=there)
    shown = msgspec.structs.replace(shown, breakdown=parts)
    assert said == any(line.startswith("No time above depends on the clocks") for line in basis(shown))


def test_where_none_succeeded_the_reason_is_that():
    """They had first tokens, so that it is not for want of these."""
    nothing = summaries.findings(summaries.parts("none", reason="it failed"), whole=summaries.means(missing="no cell"))
    why = (
        "none of the 100 requests that had a first token succeeded, and engines report only requests that they finished"
    )
    assert why == correlation(replace(nothing, ok=np.zeros(100, dtype=np.bool_))).missing


def test_replies_in_one_piece_are_described_by_their_end_to_end_time():
    """They have no TTFT; where the rest went is known all the same."""
    whole = replace(summaries.parts(), ttft_s=np.full(100, np.nan))
    findings = summaries.findings(whole, whole=summaries.means(missing="no request with a first token ended here"))
    assert "Of the mean end-to-end time, 83 % was spent in decoding." == answer(correlation(findings))


@pytest.mark.parametrize(
    "shown",
    [
        summaries.correlated(),
        summaries.correlated(summaries.findings(summaries.parts("histogram"))),
        summaries.correlated(summaries.findings(summaries.parts("response", merged=MERGED))),
        summaries.correlated(summaries.findings(summaries.parts("none", reason="why"), why="why")),
        summaries.uncorrelated("reason"),
    ],
)
def test_the_object_is_strict_json_and_fits_its_schema(shown: Correlation):
    written = json.loads(json.dumps(to_builtins(shown), allow_nan=False))
    assert shown == convert(written, Correlation)
    whole = schema.summary()
    part = {"$defs": whole["$defs"], **whole["properties"]["correlation"]}
    assert [] == [f"{error.json_path}: {error.message}" for error in Draft202012Validator(part).iter_errors(written)]
    assert set(QUALITIES) == set(written["quality"])


def test_the_document_names_every_part_and_column():
    """What stands under `correlation` and in requests.parquet can be looked up; associations and the tail elsewhere."""
    shown = to_builtins(summaries.correlated(summaries.findings(summaries.parts("none", reason="why"), why="why")))
    log_columns = set(PARTS) | {f"breakdown_{name}" for name in ("source", "error_ms", "quality", "merged", "reason")}
    names = {*shown, *shown["breakdown"], *log_columns, "engine_span_id"} - {
        "breakdown",
        "association",
        "tail_attribution",
    }
    assert set() == names - explained("correlation", "breakdown")
