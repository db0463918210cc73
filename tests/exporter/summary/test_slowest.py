"""The slowest requests: which they are, and what ran beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import summaries
from golden_files import GOLDEN
from logs import request_log

from sidelight.correlator.exact.work import Stays
from sidelight.correlator.load.reuse import TOKENS, RequestReuse
from sidelight.correlator.opening import open_run
from sidelight.exporter.document import Table
from sidelight.exporter.evaluation.evaluate import evaluate
from sidelight.exporter.report.tables.slowest import slowest_section
from sidelight.exporter.summary.slowest import MOST, SlowRequest, engine_work, slowest
from sidelight.rundir.columns import take
from sidelight.rundir.fields import UNSET
from sidelight.rundir.stats import Missing

TTFT_MS = (50.0, 300.0, 200.0)


def three(reuse: RequestReuse | None = None) -> list[SlowRequest]:
    """Three requests, 100 ms apart, of which the engine was scraped at the second alone."""
    rows = [
        {"submit": 100 * at, "end": 100 * at + 400, "trace_id": f"t{at}", "declared": 7, "input": tokens}
        for at, tokens in enumerate((-1, 9, 9))
    ]
    parts = take(summaries.parts(), np.arange(3))
    parts = replace(parts, ttft_s=np.array(TTFT_MS) / 1e3)
    waiting = np.array([np.nan, 4.0, np.nan])
    beside = {"requests_waiting": waiting, "requests_running": Missing("not scraped")} | (
        reuse.tokens() if reuse else {}
    )
    return slowest(request_log(*rows), parts, beside, 0, reuse.engines() if reuse else None)


def test_the_longest_ttft_comes_first_with_its_parts_and_what_ran_beside_it():
    """Also of a run of three requests, from which no statistic of a tail could be made."""
    first, *others = three()

    assert ["t1", "t2", "t0"] == [request.trace_id for request in (first, *others)]
    assert (300.0, 150.0, 30.0, None) == (first.ttft_ms, first.queue_ms, first.prefill_ms, first.gateway_ms)
    assert (4.0, None, 1, 0.1) == (
        first.requests_waiting,
        first.requests_running,
        first.in_flight,
        first.submitted_s,
    )


def test_input_tokens_are_the_servers_else_the_tokenizers():
    assert [9, 9, 7] == [request.input_tokens for request in three()]


def test_the_reuse_of_their_prompts_is_shown_where_it_is_known():
    """Two engines; of the first request no tokens are known, and a router's expectation of none."""
    known = np.array([np.nan, 16.0, 0.0])
    reuse = RequestReuse(
        served_by=np.array(["", "a", "b"], dtype=object),
        endpoint=np.array(["", "a", "b"], dtype=object),
        expected_cached_tokens=np.full(3, np.nan),
        **dict.fromkeys(TOKENS, known),
    )
    requests = three(reuse)
    assert [("a", 16), ("b", 0), ("", None)] == [(each.served_by, each.evicted_tokens) for each in requests]
    breakdown = summaries.correlated().breakdown
    _, table = (block for block in slowest_section(requests, breakdown) if isinstance(block, Table))
    titles = [column.title for column in table.columns]
    assert ["served by", "cached", "new", "elsewhere", "evicted"] == titles[-5:]
    assert [["a", 16], ["b", 0], ["", None]] == [[row.cells[1], row.cells[-1]] for row in table.rows]
    assert 1 == sum(isinstance(block, Table) for block in slowest_section(three(), breakdown))


def test_there_are_five_at_most_and_none_without_a_first_token():
    log = request_log(*({"submit": at} for at in range(summaries.SIZE)))
    parts = summaries.parts()
    unknown = dict.fromkeys(("requests_waiting", "requests_running"), Missing("not scraped"))

    assert MOST == len(slowest(log, parts, unknown, 0))
    never = replace(parts, ttft_s=np.full(summaries.SIZE, np.nan))
    assert [] == slowest(log, never, unknown, 0)


def two_stays() -> Stays:
    """The second request waits 100 ms for the prefill of the first, and 50 ms for its own beside the first's output."""
    ms = np.array([[0, 0, 100, 300], [0, 100, 150, 160]]).T * 10**6
    queued_ns, scheduled_ns, first_ns, end_ns = ms
    return Stays(
        row=np.arange(2),
        engine=np.full(2, "e", dtype=np.object_),
        role=np.full(2, "", dtype=np.object_),
        queued_ns=queued_ns,
        scheduled_ns=scheduled_ns,
        first_ns=first_ns,
        end_ns=end_ns,
        tokens=np.array([400, 9]),
        requests=2,
        covered=1.0,
        uncounted=0,
    )


def test_a_wait_is_divided_among_what_the_engine_computed():
    rows = [{"submit": 0, "trace_id": f"t{at}", "workload_class": name} for at, name in enumerate(("batch", "chat"))]
    work = engine_work(request_log(*rows), two_stays(), [three()[0]], None)

    (wait,) = work.waits
    assert (150.0, 45.0, 100.0, 5.0, 0.0) == pytest.approx(
        (wait.wait_ms, wait.itself_ms, wait.prefill_ms, wait.decode_ms, wait.idle_ms)
    )
    first, second = wait.largest
    assert ("batch", "prefill", 400, pytest.approx(2 / 3)) == (
        first.workload_class, first.phase, first.tokens, first.used_ratio,
    )  # fmt: skip
    assert ("decode", pytest.approx(5.0)) == (second.phase, second.used_ms)
    assert {"batch": [], "chat": [("batch", "prefill"), ("batch", "decode")]} == {
        each.workload_class: [(use.workload_class, use.phase) for use in each.used] for each in work.classes
    }


@pytest.mark.parametrize(("server_over_client", "is_known"), [(None, True), (1.05, True), (1.06, False)])
def test_work_for_others_is_refused(server_over_client: float | None, is_known: bool):
    log = request_log(*({"submit": 0, "trace_id": f"t{at}"} for at in range(2)))
    assert is_known == (not engine_work(log, two_stays(), [], server_over_client).missing)


def test_replies_of_blanks_are_no_work_for_others():
    """They have no TTFT, and the engine's page counts them: 24 ended there for 22 with one here."""
    run = open_run(GOLDEN / "vllm_spans")
    blank = np.isin(np.arange(len(run.requests)), np.flatnonzero(run.requests.phase == "measure")[:2])
    requests = replace(run.requests, first_token_ns=np.where(blank, -1, run.requests.first_token_ns))
    correlation = evaluate(replace(run, requests=requests)).summary.correlation
    assert (24, 22) == (correlation.server_requests, correlation.client_requests)
    assert correlation.work.missing is UNSET
