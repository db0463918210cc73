from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from recordings import request_log
from series import PREFILL, QUEUE, WAITING, gauge, histogram, scraped

from sidelight.correlator.load.reuse import request_reuse
from sidelight.exporter.evaluation.correlation import ONLY_GREW, correlation_of
from sidelight.exporter.evaluation.evaluate import evaluate
from sidelight.exporter.evaluation.measured import measured_run, window_of
from sidelight.exporter.report.sections import as_text
from sidelight.exporter.report.verdict import where_it_went
from sidelight.recorded.events import Event
from sidelight.recorded.run import Run
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import build
from sidelight.scraper.spans.requests import engine_spans
from sidelight.scraper.targets.scrape import Scrape

SECOND = 10**9


def request(*, sent_s: float, ended_s: float, status: str = "ok") -> dict[str, Any]:
    """Return a whole reply, or one that hung until it was given up."""
    sent_ns, ended_ns = int(sent_s * SECOND), int(ended_s * SECOND)
    sent = dict.fromkeys(("scheduled_ns", "dispatch_ns", "connected_ns", "submit_ns"), sent_ns)
    heard = ("first_read_ns", "first_output_ns", "last_output_ns", "first_token_ns", "last_token_ns")
    received = {**dict.fromkeys(heard, ended_ns), "http_status": 200} if status == "ok" else {}
    return {"phase": "measure", "status": status, "endpoint_url": "u", "end_ns": ended_ns, **sent, **received}


SGLANG = (
    histogram("sglang:queue_time_seconds", 1, 0.1, buckets=())
    + histogram("sglang:per_stage_req_latency_seconds", 1, 0.1, buckets=(), labels='stage="prefill_forward"')
    + gauge("sglang:token_usage", 0.5)
)
OTHER_MOMENT = (
    "sglang:queue_time_seconds is observed not when a request ends, but at its first forward: over a window it speaks "
    "of other requests than those that ended"
)
MANIFEST = {
    "run_id": "r",
    "tool": {"name": "sidelight", "version": "0"},
    "status": "complete",
    "started_ns": 0,
    "started_at": "1970-01-01T00:00:00.000Z",
    "config": {"slice_duration": 2.0, "concurrency": 1},
}


def scrape_at(second: int, page: str) -> Scrape:
    return scraped(second * SECOND, page, error="" if page else "connect: Connection refused")


def run_of(*requests: dict[str, Any], status: str = "complete", phase_end_s: float = 30) -> Run:
    """Return a run measured from 1 s on."""
    marks = (("phase_start", 1), ("phase_end", phase_end_s))
    return Run(
        path=Path(),
        manifest=MANIFEST | {"status": status},
        requests=request_log(requests),
        worker_stats=(),
        endpoints=(),
        spans=engine_spans([]),
        events=tuple(Event(at_ns=int(at * SECOND), name=name, data={"phase": "measure"}) for name, at in marks),
    )


def test_a_request_that_hung_does_not_stretch_the_window():
    """Throughput is over the time in which the engine answered, not over the wait for what never came."""
    run = run_of(
        request(sent_s=1, ended_s=3),
        request(sent_s=2, ended_s=4),
        request(sent_s=2, ended_s=19, status="cancelled"),
    )
    assert (1 * SECOND, 4 * SECOND) == (window_of(run).start_ns, window_of(run).end_ns)


def test_a_submission_is_within_the_window_whatever_became_of_it():
    """An engine that died early does not make the load shorter."""
    run = run_of(request(sent_s=1, ended_s=2), request(sent_s=9, ended_s=10, status="failed"))
    assert 9 * SECOND == window_of(run).end_ns


def test_a_run_that_the_user_stopped_was_measured_until_then():
    run = run_of(request(sent_s=1, ended_s=2), status="interrupted", phase_end_s=7)
    assert 7 * SECOND == window_of(run).end_ns


def test_a_run_that_never_came_to_measuring_has_an_empty_window():
    run = run_of()
    unmeasured = Run(
        path=run.path,
        manifest={"started_ns": 5},
        requests=run.requests,
        worker_stats=(),
        endpoints=(),
        spans=engine_spans([]),
        events=(),
    )
    assert (5, 5) == (window_of(unmeasured).start_ns, window_of(unmeasured).end_ns)


@pytest.mark.parametrize(
    ("page", "server_missing", "why"),
    [
        (SGLANG, None, OTHER_MOMENT),
        ("", None, "no scrape succeeded"),
        ("x 1\n", None, "the page shows no engine that is known"),
        (None, "no page anywhere", "no page anywhere"),
        (None, None, "no server offers queue and prefill times"),
    ],
)
def test_why_the_ttft_is_not_broken_down_is_the_servers_own_reason(
    page: str | None, server_missing: str | None, why: str
):
    """In the summary, of each of its requests, and in the report's sentence."""
    bare = run_of(request(sent_s=1, ended_s=3), request(sent_s=2, ended_s=4))
    endpoints = build(rows([] if page is None else [scrape_at(second, page) for second in range(6)]))
    run = replace(bare, manifest=MANIFEST | {"server_missing": server_missing}, endpoints=endpoints)
    summary = evaluate(run).summary
    assert why == summary.correlation.missing
    assert [2] == list(summary.correlation.none_reasons.values())
    cure = "no metrics page of this server could be read"
    assert where_it_went(summary).startswith(f"No breakdown: {why if page is not None else cure}")


def test_exact_times_are_the_servers_percentiles_in_a_run_too_short_to_estimate():
    """Two that ended between two scrapes, 40 and 60 ms in the queue by their replies: the buckets say up to 0.3 s."""
    bare = run_of(request(sent_s=1, ended_s=3), request(sent_s=1, ended_s=3))
    times = {f"server_{name}_ms": np.array([40.0, 60.0]) for name in ("queue", "prefill")}
    requests = replace(bare.requests, timings_source=np.full(2, "vllm", dtype=np.object_), **times)
    pages = [
        "".join(histogram(family, count, sum_s, buckets=(("0.3", count),)) for family in (QUEUE, PREFILL))
        for count, sum_s in ((0, 0.0), (2, 0.1))
    ]
    endpoints = build(rows([scrape_at(1, pages[0]), scrape_at(4, pages[1])]))
    run = replace(bare, manifest=MANIFEST, requests=requests, endpoints=endpoints)
    percentiles = evaluate(run).summary.correlation.server_percentiles.queue_ms
    assert ("client spans", 1.0, 50.0) == (
        percentiles.source,
        percentiles.covered_ratio,
        pytest.approx(percentiles.p50),
    )
    assert percentiles.p50 == pytest.approx(percentiles.intervals["p50"].low)


def overloaded() -> Run:
    """Return 200 requests in 40 s to an engine that serves one a second, whose replies and page show the queue."""
    rows_of = [request(sent_s=1 + n / 5, ended_s=2 + n) for n in range(200)]
    queue_ms = [1e3 * (row["end_ns"] - row["submit_ns"]) / SECOND - 900.0 for row in rows_of]
    times = {"server_queue_ms": np.array(queue_ms), "server_prefill_ms": np.full(200, 100.0)}
    bare = run_of(*rows_of, phase_end_s=202)
    requests = replace(bare.requests, timings_source=np.full(200, "vllm", dtype=np.object_), **times)
    pages = [scrape_at(second, gauge(WAITING, max(0, 5 * min(second, 41) - second))) for second in range(1, 202)]
    config = MANIFEST["config"] | {"concurrency": None, "rate": 5.0, "arrival": "uniform"}
    return replace(bare, manifest=MANIFEST | {"config": config}, requests=requests, endpoints=build(rows(pages)))


def test_an_overloaded_run_is_called_so():
    """With what was offered, what was served, how many were open; its throughput includes the drain."""
    run = overloaded()
    summary = evaluate(run).summary
    stability, rates = summary.methodology.stability, summary.client.rates
    assert (stability.verdict, stability.queued_ratio) == ("growing", 1.0)
    assert stability.capacity_per_s == pytest.approx(1.0, rel=0.15)
    assert rates.offered_requests_per_s == pytest.approx(5.0)
    assert rates.served_requests_per_s == pytest.approx(1.0, rel=0.15)
    assert (161, 39) == (rates.open_at_end, rates.ended_in_load)
    assert rates.drain_s == pytest.approx(summary.window.end_ns / SECOND - 40.8)


def test_no_length_of_a_queue_that_only_grew_is_a_threshold():
    """It says how long the load had lasted; neither summary nor report name a number of waiting requests."""
    run = overloaded()
    unaware = correlation_of(measured_run(run), request_reuse(run, None, pools=False)).tail_attribution.threshold
    assert unaware
    assert unaware.waiting is not None
    summary = evaluate(run).summary
    threshold = summary.correlation.tail_attribution.threshold
    assert threshold
    assert (None, ONLY_GREW.reason) == (threshold.waiting, threshold.missing)
    text = as_text(msgspec.structs.replace(summary, config=summary.config | {"duration": 40.0, "requests": None}))
    assert "served 0.98 of 5 requests/s" in text
    assert "Queueing takes over" not in text


@pytest.mark.parametrize(
    ("command", "tests", "stated"),
    [
        ("run", ["ttft"], "no test of the draft was run; this is a plain measurement"),
        ("test", [], "this run is a step of a study, whose compliance.json says which requirements are met"),
    ],
)
def test_a_step_of_a_study_states_no_compliance_of_its_own(command: str, tests: list[str], stated: str):
    """It would be that with another test; the study states that of its own."""
    run = run_of(request(sent_s=2, ended_s=3))
    run = replace(run, manifest={**run.manifest, "command": ["sidelight", command, "capacity"]})
    methodology = evaluate(run).summary.methodology
    assert tests == [*methodology.tests]
    assert stated == methodology.missing
