"""The verdict on a run: the same words and digits in every output, and a state that follows from the summary."""

from __future__ import annotations

import dataclasses
import math
import shutil
from io import StringIO
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import summaries
from golden_files import GOLDEN, names
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from verdict_words import of_markdown, of_page, plain, words_of

import sidelight
from sidelight.correlator.exact.table import UNDIVIDED
from sidelight.correlator.opening import open_run
from sidelight.correlator.parts import E2E_PARTS
from sidelight.correlator.statistics.queueing import KvLoads, WhileWaiting
from sidelight.exporter.report.advice import Advice, Observations, mean_shares
from sidelight.exporter.report.method import method
from sidelight.exporter.report.verdict import Current, current_verdict, verdict_blocks, verdict_of
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.verdict import Subject
from sidelight.exporter.text import render
from sidelight.loadgen.requests.rates import Outage
from sidelight.loadgen.requests.self_check.nodes import NodeSummary
from sidelight.loadgen.requests.slo.results import ObjectiveResult, SloResult
from sidelight.recorded.nodes import ClockExchange, NodeClock, encode_clock
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.engines.catalogue import EngineLimits
from sidelight.sidecar.report.derive import derive_run
from sidelight.twin.seats import MoreSeats, PredictedChange

replace = msgspec.structs.replace
OBJECTIVE = ObjectiveResult(
    text="ttft_p99<500ms", metric="ttft", statistic="p99", unit="ms", bound=500.0, value=summaries.BLOCK.p99,
    bound_ms=500.0, value_ms=summaries.BLOCK.p99, count=100, requests=100, failed_requests=0, left_out_requests=0,
    met=True,
)  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_every_output_has_the_same_words_and_digits(name: str, tmp_path: Path):
    """Text, page, Markdown, JSON and the library, to the digit."""
    path = tmp_path / name
    shutil.copytree(GOLDEN / name, path, ignore=shutil.ignore_patterns("expected"))
    derived = derive_run(open_run(path), ["text", "html", "markdown"])
    verdict = verdict_of(derived.summary)
    written = msgspec.json.decode((path / "summary.json").read_bytes(), type=Summary)
    run = sidelight.open_run(path)
    assert verdict == written.verdict == run.verdict
    report, page, comment = ((path / f"report.{kind}").read_text(encoding="utf-8") for kind in ("txt", "html", "md"))
    outputs = {
        "text": plain(report),
        "page": of_page(page),
        "markdown": of_markdown(comment),
        "notebook": of_page(run._repr_html_()),
        "notebook's markdown": of_markdown(run._repr_markdown_()),
    }
    assert [] == [(kind, text) for kind, whole in outputs.items() for text in words_of(verdict) if text not in whole]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_it_fits_a_terminal_and_says_all_of_it_without_colours(width: int):
    """No line is wider, the bar neither, and no word is lost."""
    verdict = verdict_of(summaries.summary(summaries.correlated()))
    console = Console(width=width, color_system=None, file=StringIO())
    console.print(render(verdict_blocks(verdict)))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert [] == [each for each in words_of(verdict) if each not in plain(text)]


def run_with(**sections: Any) -> Summary:
    """Return a run whose TTFT is mostly queueing."""
    return replace(summaries.summary(summaries.correlated()), **sections)


def client(**changes: Any) -> Any:
    counts = changes.pop("requests", {})
    whole = summaries.client()
    return replace(whole, requests=replace(whole.requests, **counts), **changes)


def slo(met: bool | None) -> SloResult:
    objective = replace(OBJECTIVE, met=met, missing="nothing was measured" if met is None else msgspec.UNSET)
    return SloResult(text="", met=met, good_requests=100, undetermined_requests=0, objectives=[objective])


BLOCKED = summaries.summary(summaries.correlated())
LEAD_MS, MARGIN_MS = 120.0, summaries.BLOCK.p99 - OBJECTIVE.bound  # of queue over prefill, and beyond the objective


def held_up(error_ms: float) -> Any:
    """Return a self-check of which the TTFT, with a median of 200 ms, may be so far off."""
    error = BLOCKED.self_check.error_ms
    ttft = replace(error.ttft, p99=error_ms, median=200.0, limit=4.0)
    return replace(BLOCKED.self_check, error_ms=replace(error, ttft=ttft))


HELD_UP, TOO_FAR_OFF = held_up(LEAD_MS - 1), held_up(LEAD_MS + 1)
GROWING = replace(
    BLOCKED.methodology, stability=replace(BLOCKED.methodology.stability, verdict="growing", capacity_per_s=3.0)
)
PREFILLED = summaries.parts()
PREFILLED = summaries.correlated(
    summaries.findings(dataclasses.replace(PREFILLED, queue_s=PREFILLED.prefill_s, prefill_s=PREFILLED.queue_s))
)
WHOLE = summaries.parts(reason=UNDIVIDED)
WHOLE = dataclasses.replace(WHOLE, queue_s=WHOLE.queue_s * math.nan, prefill_s=WHOLE.queue_s)
WITH_QUEUE = summaries.correlated(summaries.findings(WHOLE))
NO_PARTS = summaries.uncorrelated("no page")
NEARLY = replace(slo(True), objectives=[replace(OBJECTIVE, bound=1200.0, bound_ms=1200.0)])
UNDECIDED = replace(BLOCKED.methodology, stability=replace(BLOCKED.methodology.stability, verdict="undecided"))
RESTARTED = "the engine at http://e/metrics restarted (1 x): its counts from just before that are lost"
LOST = Outage(at_s=12.0, at_ns=1_764_338_551_000_000_000, errors={"connect": 48})


def of_decode_engine() -> Correlation:
    """Requests whose replies tell a decode engine's times alone: 185 of 200 ms are not separated."""
    whole = summaries.parts("response")
    unknown_s = whole.queue_s * math.nan
    merged = np.full(len(whole), "network, queue and prefill", dtype=object)
    known = {"first_step_s": whole.ttft_s - 0.185, "other_s": 0 * whole.ttft_s + 0.185, "merged": merged}
    columns = dict.fromkeys(("network_s", "queue_s", "prefill_s"), unknown_s)
    return summaries.correlated(summaries.findings(dataclasses.replace(whole, **columns, **known)))


def test_what_is_not_separated_is_not_called_the_engine():
    """Beside it stands what the prefill engine's page tells of it."""
    run = run_with(correlation=of_decode_engine())
    headline = verdict_of(run).headline
    assert headline.startswith("Not judged: what no source separates (network, queue and prefill) stands out")
    line = "By its page the prefill engine's queue took 150.0 ms of that, its prefill 30.0 ms (means)."
    assert line in list(method(run))
    assert line not in list(method(run_with()))


def test_a_prefill_with_its_queue_may_be_a_wait():
    """Of an engine whose span is not divided any further."""
    verdict = verdict_of(run_with(correlation=WITH_QUEUE))
    assert verdict.headline.startswith("Not judged: the prefill engine with its queue stands out")
    assert "no wait stands out" not in verdict.why
    assert "prefill with its queue" in [part.label for part in verdict.parts]


def test_a_queue_that_is_mostly_loads_of_caches_is_called_so():
    """Where nothing says what is good enough, the headline names what stands out."""
    correlation = summaries.correlated()
    for load_ms, cause in ((1e6, "the load of KV caches"), (0.0, "queueing")):
        loads = KvLoads(before_ms=0.0, load_ms=load_ms, error_ms=0.0, after_ms=0.0)
        evidence = replace(correlation.evidence, kv_loads=loads)
        verdict = verdict_of(summaries.summary(replace(correlation, evidence=evidence)))
        assert f"Not judged: {cause} stands out" in verdict.headline


@pytest.mark.parametrize(
    ("summary", "state", "cause"),
    [
        (run_with(), "not_judged", "queue"),
        (run_with(client=client(slo=slo(True))), "healthy", "queue"),
        (run_with(client=client(slo=slo(False))), "missed", "queue"),
        (run_with(client=client(slo=slo(None))), "not_judged", "queue"),
        (run_with(methodology=UNDECIDED), "not_judged", "queue"),
        (run_with(methodology=UNDECIDED, correlation=PREFILLED), "healthy", "prefill"),
        (run_with(methodology=GROWING, client=client(slo=slo(True))), "overloaded", "queue"),
        (run_with(self_check=TOO_FAR_OFF, methodology=GROWING), "untrusted", "generator"),
        (run_with(self_check=TOO_FAR_OFF, client=client(slo=slo(True))), "untrusted", "generator"),
        (run_with(self_check=HELD_UP, methodology=GROWING), "overloaded", "queue"),
        (run_with(self_check=HELD_UP, client=client(slo=slo(True))), "healthy", "queue"),
        (run_with(self_check=HELD_UP, client=client(slo=NEARLY)), "untrusted", "generator"),
        (run_with(self_check=HELD_UP, client=client(slo=slo(True)), correlation=NO_PARTS), "healthy", "none"),
        (run_with(self_check=HELD_UP, correlation=NO_PARTS), "untrusted", "generator"),
        (run_with(client=client(requests={"ok": 98, "failed": 2})), "failing", "server"),
        (run_with(client=client(requests={"ok": 199, "sent": 200, "failed": 1})), "not_judged", "queue"),
        (run_with(client=client(outage=LOST), self_check=HELD_UP), "failing", "server"),
        (run_with(client=client(requests={"ok": 60, "failed": 40}), warnings=[RESTARTED]), "failing", "server"),
        (run_with(integrity=replace(BLOCKED.integrity, disagreements=["x"]), methodology=GROWING), "untrusted", "data"),
        (run_with(client=client(requests={"ok": 0, "sent": 0})), "not_judged", "none"),
        (summaries.summary(summaries.uncorrelated("no page")), "healthy", "none"),
    ],
    ids=[
        "a wait without an objective", "met", "missed", "unknown", "too short", "too short, without a wait",
        "overloaded", "held up", "held up, with an objective", "held up by less than the cause leads",
        "held up by less than matters", "held up by more than the objective's margin", "held up, without parts",
        "held up, with figures alone", "two in a hundred", "one in two hundred", "no answer",
        "restarted", "damaged", "nothing sent", "no page",
    ],
)  # fmt: skip
def test_the_state_follows_from_the_summary(summary: Summary, state: str, cause: str):
    """Records before failures, failures before the load generator, that before the load and its objectives."""
    verdict = verdict_of(summary)
    assert (state, cause) == (verdict.state, verdict.cause)


def two_nodes(error_ms: float) -> Any:
    """Return a client of two nodes that sent the same, one of them with a clock that may be so far off."""
    node = NodeSummary(
        node="a", workers=[0], sent=100, ok=100, ttft_ms=BLOCKED.client.ttft_ms, first_late_ms=None, order_ms=None,
        late_orders=0, clock_error_ms=error_ms, machine=None,
    )  # fmt: skip
    return client(by_node=[node, replace(node, node="b", clock_error_ms=0.5)], requests={"sent": 200, "ok": 200})


SPANNED = replace(
    BLOCKED.correlation, coverage=replace(BLOCKED.correlation.coverage, trace=1.0, response=0.0, histogram=0.0)
)
ESTIMATED = replace(
    BLOCKED.correlation, coverage=replace(BLOCKED.correlation.coverage, trace=0.0, response=0.0, histogram=1.0)
)


@pytest.mark.parametrize(
    ("error_ms", "correlation", "cause"),
    [
        (2 * LEAD_MS + 2, ESTIMATED, "clock"),
        (2 * LEAD_MS - 2, ESTIMATED, "queue"),
        (9.0, ESTIMATED, "queue"),
        (2 * LEAD_MS + 2, SPANNED, "queue"),
    ],
    ids=["estimates", "a clear cause", "within the limit", "spans"],
)
def test_a_clock_costs_trust_where_it_could_change_the_cause(error_ms: float, correlation: Correlation, cause: str):
    """Half of the requests are off by it; durations of spans are of one clock each."""
    verdict = verdict_of(run_with(client=two_nodes(error_ms), correlation=correlation))
    assert (cause == "clock", cause) == (verdict.state == "untrusted", verdict.cause)
    assert ("the clock of node a" in verdict.headline) == ("clock of node a" in verdict.do) == (cause == "clock")


def test_a_clock_is_judged_by_its_recorded_exchanges(tmp_path: Path):
    """Each took 800 ms there and back: the node's clock is known to 400 ms, by which estimates may be off."""
    shutil.copytree(GOLDEN / "vllm_plain", tmp_path / "run", ignore=shutil.ignore_patterns("expected"))
    begin_ns, bound_ns = int(open_run(tmp_path / "run").requests.dispatch_ns[0]), 400_000_000
    with FrameLog(tmp_path / "run" / "raw" / "clocks-0.log") as log:
        log.append(encode_clock(NodeClock(node="delta-3", workers=(0,), offset_ns=0)))
        exchange = (begin_ns, begin_ns + bound_ns, begin_ns + 2 * bound_ns)
        log.append(encode_clock(ClockExchange(*exchange)))
    summary = derive_run(open_run(tmp_path / "run"), []).summary
    assert [400.0] == [node.clock_error_ms for node in summary.client.by_node or ()]
    assert summary.verdict
    assert ("untrusted", "clock") == (summary.verdict.state, summary.verdict.cause)


@given(st.tuples(st.floats(20.1, 1e4), st.floats(20.1, 1e4)), st.sampled_from([None, slo(True), slo(False), NEARLY]))
def test_a_smaller_error_never_costs_trust(errors_ms: tuple[float, float], objectives: SloResult | None):
    """Up to where an objective or the cause could be another, the state is the judgement; beyond it, it is distrust."""
    less, more = (
        verdict_of(run_with(self_check=held_up(error_ms), client=client(slo=objectives)))
        for error_ms in sorted(errors_ms)
    )
    assert more.state in {less.state, "untrusted"}
    margins_ms = [LEAD_MS, *([abs(each.value - each.bound) for each in objectives.objectives] if objectives else [])]
    assert (more.state == "untrusted") == (max(errors_ms) >= min(margins_ms))


def test_a_large_error_stands_beside_its_figures():
    """Also where the state is the judgement; a small one does not."""
    shown = {
        error_ms: {figure.name: figure.text for figure in verdict_of(run_with(self_check=held_up(error_ms))).figures}
        for error_ms in (19.0, 50.0)
    }
    assert ("180 ms", "180 ms ± 50 ms") == (shown[19.0]["ttft_p50"], shown[50.0]["ttft_p50"])


def test_an_objective_of_a_percentile_stands_beside_its_figure():
    """With its bound and whether it was met; one of another number has a line of its own."""
    shown = {figure.name: figure for figure in verdict_of(run_with(client=client(slo=slo(False)))).figures}
    assert ("1,234 ms (< 500 ms: MISSED)", True) == (shown["ttft_p99"].text, shown["ttft_p99"].bad)
    assert ("180 ms", False) == (shown["ttft_p50"].text, shown["ttft_p50"].bad)


def test_of_an_engine_that_restarted_the_verdict_says_that_it_answers_again():
    """Who is on call looks for why it ended, not for whether it runs."""
    verdict = verdict_of(run_with(client=client(requests={"ok": 60, "failed": 40}), warnings=[RESTARTED]))
    assert verdict.headline.endswith("the engine restarted, and answers again.")
    assert verdict.do.endswith("it runs again.")


def test_since_when_a_server_fails_is_a_time_of_day_and_an_offset():
    verdict = verdict_of(run_with(client=client(outage=LOST)))
    assert "since 14:02:31 UTC, 12.0 s into the load" in verdict.headline


SEEN = Observations(
    breakdown=BLOCKED.correlation.breakdown,
    shares=mean_shares(BLOCKED.correlation.breakdown),
    waited=WhileWaiting(
        scrapes=20, running_p50=8.0, running_most=8.0, at_most_ratio=0.9, kv_cache_p50=0.1, kv_cache_max=0.2
    ),
    limits=EngineLimits(running="--max-num-seqs"),
)
FEW_TIMED = msgspec.structs.replace(SEEN.breakdown.ttft_ms, count=19)
FEW_SEEN = dataclasses.replace(SEEN, breakdown=msgspec.structs.replace(SEEN.breakdown, ttft_ms=FEW_TIMED))
QUIET = Current(
    served_per_s=4.0, offered_per_s=4.1, ttft_ms={"p50": 180.0, "p99": 1234.0}, sent=100, failed=0, silent={},
    ended=True, waiting=[0.0, 0.0], observed=SEEN, queue=None,
)  # fmt: skip
QUEUED = Advice(seen="some reason", cure="some cure")
FEW_MET = (msgspec.structs.replace(OBJECTIVE, requests=19),)
ALL_MET = (msgspec.structs.replace(OBJECTIVE, bound_ms=2000.0),)


WAITED = replace(BLOCKED.correlation.evidence, while_waiting=SEEN.waited)


@pytest.mark.parametrize(
    ("queue_s", "finished", "missing", "cause", "words"),
    [
        (0.15, 20, {}, "queue", "no span of a client"),
        (0.15, 20, {}, "queue", "TTFT 180 ms, queue 150 ms"),
        (0.15, 20, {"no_client_span": 20}, "queue", "20 engine requests"),
        (0.05, 20, {}, "none", "Have clients and engines send their spans"),
        (0.05, 20, {"no_client_span": 20}, "none", "Have clients, or the gateway"),
        (0.05, 0, {}, "none", "no request was seen"),
    ],
)
def test_a_watch_without_clients_spans_is_explained_by_pages(
    queue_s: float, finished: int, missing: dict[str, int], cause: str, words: str
):
    """As the panel does while it goes on; without the cause where the queue is a small part of the engine's TTFT."""
    seen = summaries.server(
        queue_time=summaries.histogram(queue_s, queue_s), requests_finished=summaries.counter(finished, finished / 10)
    )
    verdict = verdict_of(
        run_with(
            watch=replace(summaries.WATCH, missing=missing),
            client=client(requests={"sent": 0}),
            server=seen,
            correlation=replace(BLOCKED.correlation, evidence=WAITED),
        )
    )
    assert ("not_judged", cause) == (verdict.state, verdict.cause)
    assert words in " ".join(words_of(verdict))


@pytest.mark.parametrize(
    ("high", "begins"), [(7200.0, "With 32 in place of 16"), (16000.0, "It may not help: with 32")]
)
def test_more_running_requests_are_advised_with_what_they_would_bring(high: float, begins: str):
    """Only where the interval is below the run's TTFT is it said to help."""
    more = MoreSeats(
        now=16,
        then=32,
        ttft_p99_ms=PredictedChange(now=15100.0, estimate=5900.0, low=4800.0, high=high),
        tpot_p50_ms=PredictedChange(now=17.0, estimate=27.0, low=24.0, high=30.0),
    )
    waited = replace(BLOCKED.correlation, evidence=WAITED)
    verdict = verdict_of(run_with(correlation=waited, methodology=GROWING, more_seats=more))
    assert begins in verdict.do
    assert all(words in verdict.do for words in ("5.9 s", "15.1 s", "27 ms", "17 ms"))
    without = verdict_of(run_with(correlation=waited, methodology=GROWING, more_seats=MoreSeats(missing="no fit")))
    assert verdict.do.startswith(without.do)


@pytest.mark.parametrize(
    ("now", "state", "cause", "words"),
    [
        ({}, "not_judged", "queue", "Raise that limit (--max-num-seqs)"),
        ({"objectives": ALL_MET}, "healthy", "queue", "every objective was met"),
        ({"objectives": slo(False).objectives}, "missed", "queue", "ttft_p99<500ms (1,234 ms)"),
        ({"served_per_s": 2.0, "waiting": [1.0, 9.0]}, "overloaded", "queue", "send less than 2 requests/s"),
        ({"served_per_s": 2.0, "waiting": [9.0, 1.0]}, "not_judged", "queue", "no objective"),
        ({"failures": 7, "failing": "14:02:31 UTC", "error": "connect"}, "failing", "server", "since 14:02:31 UTC"),
        ({"silent": {"http://e": "since 14:02:31 UTC: timeout"}, "ended": False}, "failing", "server", "14:02:31"),
        ({"silent": {"http://e": "since 14:02:31 UTC: timeout"}}, "not_judged", "queue", "no objective"),
        ({"failed": 3}, "failing", "server", "3 of 100"),
        ({"observed": None}, "not_judged", "none", "too few requests"),
        ({"observed": None, "objectives": ALL_MET}, "healthy", "none", "every objective was met"),
        ({"observed": None, "objectives": FEW_MET}, "not_judged", "none", "too few requests"),
        ({"objectives": slo(None).objectives}, "not_judged", "queue", "nothing was measured"),
        ({"offered_per_s": None, "more_waiting_per_s": 2.0, "waiting": [1.0, 9.0]}, "overloaded", "queue", "than 4"),
        ({"observed": None, "served_per_s": 2.0, "waiting": [1.0, 9.0]}, "overloaded", "queue", "Add a replica"),
        ({"observed": None, "objectives": slo(False).objectives}, "missed", "none", "spans"),
        ({"offered_per_s": None, "more_waiting_per_s": 0.9, "waiting": [1.0, 9.0]}, "not_judged", "queue", "no obj"),
        ({"observed": FEW_SEEN, "objectives": slo(False).objectives}, "missed", "none", "Wait for more requests"),
        ({"observed": None, "unread": "HTTP 404"}, "healthy", "none", "Name the engine's metrics page"),
        ({"observed": None, "unread": "HTTP 404", "sent": 19}, "not_judged", "none", "HTTP 404"),
        ({"observed": None, "unseen": 160}, "not_judged", "none", "160 engine requests"),
        ({"observed": None, "unseen": 160}, "not_judged", "none", "Have clients"),
        ({"observed": None, "unseen": 160, "objectives": ALL_MET}, "healthy", "none", "Have clients"),
        ({"observed": None, "sent": 0}, "not_judged", "none", "no span of a client"),
        (
            {"observed": None, "queue": QUEUED, "means_ms": {"TTFT": 9.0, "queue": 4.0}},
            "not_judged",
            "none",
            "Some cure",
        ),
        (
            {"observed": None, "queue": QUEUED, "means_ms": {"TTFT": 9.0, "queue": 3.0}},
            "not_judged",
            "none",
            "Wait for",
        ),
        ({"observed": None, "queue": QUEUED, "means_ms": {"TTFT": 9.0}}, "not_judged", "none", "Some cure"),
        ({"failed": 3, "restarted_s": 13.2}, "failing", "server", "it runs again"),
        ({"failed": 3, "restarted_s": 13.2, "ended": False}, "failing", "server", "whether it still runs"),
        ({"restarted_s": 13.2}, "not_judged", "queue", "The engine restarted 13 s ago."),
        ({"late_ms": 900.0}, "untrusted", "generator", "900 ms late"),
        ({"late_ms": 900.0, "objectives": ALL_MET}, "untrusted", "generator", "--workers"),
        ({"late_ms": 19.0}, "not_judged", "queue", "no objective"),
        ({"late_ms": 900.0, "sent": 19}, "not_judged", "queue", "no objective"),
        ({"late_ms": 900.0, "failures": 7}, "failing", "server", "no request has succeeded"),
    ],
)
def test_the_state_of_a_moment_follows_from_its_counts(now: dict[str, Any], state: str, cause: str, words: str):
    """Failures before overload, that before objectives, these before the parts of the TTFT."""
    verdict = current_verdict(dataclasses.replace(QUIET, **now))
    assert (state, cause) == (verdict.state, verdict.cause)
    assert words in " ".join(words_of(verdict))


def test_every_part_may_be_the_cause():
    """Of the TTFT and the end-to-end time: the schema knows each."""
    assert {part.name for part in E2E_PARTS} <= set(get_args(Subject))
