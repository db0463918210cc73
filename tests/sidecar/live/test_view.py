"""The view of a run while it goes, from the logs alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from golden_files import GOLDEN, names
from msgspec import structs
from sent_requests import parts, planned
from series import scraped

from sidelight.exporter.prometheus.page import LivePage
from sidelight.loadgen.records import RequestPart, WorkerStat, append_record, read_log, read_plan
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.table.fold import RequestFold
from sidelight.recorded.directory import MANIFEST, RAW
from sidelight.rundir.clock import AnchoredClock, anchor
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.series.log import ScrapeLog
from sidelight.sidecar.live.view import Described, LiveRun

PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n"
URL = "http://127.0.0.1:8000/metrics"
LOOKS = 5  # at the growing logs


def grow(live: LiveRun, recorded: Path, raw: Path) -> None:
    """Write the logs of a recorded run piece by piece, and look at each."""
    for look in range(LOOKS):
        for log in recorded.iterdir():
            data = log.read_bytes()
            step = len(data) if log.name.startswith("plan-") else -(-len(data) // LOOKS)
            with (raw / log.name).open("ab") as file:
                file.write(data[look * step : (look + 1) * step])
        live.poll()


def test_an_engine_that_is_down_is_said_to_be_and_its_last_gauges_are_not_shown(tmp_path: Path):
    """From when it has not answered for as long as was said, until it answers again."""
    (tmp_path / RAW).mkdir()
    log = ScrapeLog(tmp_path / RAW / "scrapes-0.log")
    seen = []
    with LiveRun(tmp_path, run_id="r", clock=anchor(), planned_s=None, stale_s=2.5, loaded=False) as live:
        for second, error in enumerate(["", "refused", "refused", "refused", ""]):
            log.append(scraped(second * 10**9, PAGE, url=URL, error=error))
            live.poll()
            view = live.view()
            seen.append((dict(view.silent), view.running))
    log.close()
    assert [({}, 7.0)] * 3 + [({URL: "since 00:00:00 UTC: refused"}, None), ({}, 7.0)] == seen


def test_what_cannot_be_read_or_counted_is_counted_as_an_error_and_the_rest_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A record that cannot be read, and a page that cannot be shown: the request between them counts all the same."""
    raw = tmp_path / RAW
    raw.mkdir()
    with FrameLog(raw / "plan-measure.log") as plan, FrameLog(raw / "requests-0.log") as log:
        append_record(plan, planned(0, 2))
        log.append(b"no record")
        for part in parts(0, 2):
            append_record(log, part)
    scrapes = ScrapeLog(raw / "scrapes-0.log")
    scrapes.append(scraped(10**9, PAGE, url=URL))
    scrapes.close()
    monkeypatch.setattr("sidelight.sidecar.live.engine.EngineView.take", lambda *_: 1 / 0)
    page = LivePage()
    with LiveRun(tmp_path, run_id="r", clock=anchor(), planned_s=None, stale_s=2.5) as live:
        live.enter("measure")
        live.poll()
        page.update(live.snapshot())
        assert (1, 1, 2) == (live.view().sent, live.view().ok, live.errors)
    assert b'sidelight_live_errors_total{run_id="r"} 2.0' in page.render().splitlines()


def test_an_engine_has_the_version_that_it_said_elsewhere(tmp_path: Path):
    """vLLM's page states none; the one behind the first URL is the leading engine's alone, as in the report."""
    raw = tmp_path / RAW
    raw.mkdir()
    log = ScrapeLog(raw / "scrapes-0.log")
    log.append(scraped(10**9, "# TYPE dynamo_frontend_queued_requests gauge\ndynamo_frontend_queued_requests 1\n"))
    log.append(scraped(10**9, PAGE.replace("running", "waiting"), url=URL))
    log.close()
    described = Described(engine_version="0.32.0")
    with LiveRun(tmp_path, run_id="r", clock=anchor(), planned_s=None, stale_s=2.5, described=described) as live:
        live.poll()
        snapshot = live.snapshot()
    assert {"dynamo": "", "vllm": "0.32.0"} == {engine.engine: engine.version for engine in snapshot.engines}
    assert {"engine": "vllm", "version": "0.32.0"} == snapshot.about


def test_objectives_stand_as_the_requests_that_ended_have_them(tmp_path: Path):
    """Of the measured phase alone; before anything ended only their bounds are known."""
    raw = tmp_path / RAW
    raw.mkdir()
    described = Described(slo=parse_slo("ttft_p99<1ms,error_rate<1%,goodput>1000"))
    clock = anchor()
    with LiveRun(tmp_path, run_id="r", clock=clock, planned_s=None, stale_s=2.5, described=described) as live:
        empty = live.slo()
        assert empty is not None
        assert [None] * 3 == [each.met for each in empty.objectives]
    with LiveRun(tmp_path, run_id="r", clock=clock, planned_s=None, stale_s=2.5, described=described) as live:
        with FrameLog(raw / "plan-measure.log") as plan, FrameLog(raw / "requests-0.log") as log:
            for index in range(3):
                append_record(plan, planned(index, 2))
                for part in parts(index, 2):
                    append_record(log, part)
        live.enter("measure", start_ns=clock.now_ns() - 10**9)
        live.poll()
        client = live.snapshot().client
        assert client is not None
        assert client.slo is not None
        shown = {each.name: (each.value, each.met) for each in client.slo.objectives}
        assert {"ttft_p99": (pytest.approx(0.000997), True), "error_rate": (0.0, True)} == {
            name: state for name, state in shown.items() if name != "goodput"
        }
        goodput, met = shown["goodput"]
        assert goodput is not None
        assert (True, False, 3) == (0 < goodput <= 3, met, client.good)


def test_a_load_that_a_number_of_requests_ends_is_planned_until_the_last_is_due(tmp_path: Path):
    """Of an open loop, whose plan says when that is."""
    (tmp_path / RAW).mkdir()
    with FrameLog(tmp_path / RAW / "plan-measure.log") as plan:
        for index in range(3):
            append_record(plan, structs.replace(planned(index, 2), offset_ns=index * 10**9))
    with LiveRun(tmp_path, run_id="r", clock=anchor(), planned_s=None, stale_s=2.5) as live:
        live.enter("measure")
        live.poll()
        assert live.view().planned_s == 2.0


def test_a_ttft_counts_with_the_first_token_and_tokens_as_they_come(tmp_path: Path):
    """Of a reply that goes on; once it has ended they are what its usage says, and nothing counts twice."""
    (tmp_path / RAW).mkdir()
    pieces, page, seen = parts(0, 5), LivePage(), []
    with LiveRun(tmp_path, run_id="r", clock=anchor(), planned_s=None, stale_s=2.5) as live:
        live.enter("measure")
        with FrameLog(tmp_path / RAW / "plan-measure.log") as plan, FrameLog(tmp_path / RAW / "requests-0.log") as log:
            append_record(plan, planned(0, 5))
            for part in pieces:
                append_record(log, part)
                live.poll()
                view, client = live.view(), live.snapshot().client
                assert client is not None
                assert client.ttft is not None
                seen.append((sum(client.ttft.counts), client.output_tokens, view.ttft_p50_ms))
        page.update(live.snapshot())
    ttft_ms = pytest.approx(997 / 1e6)
    # Five chunks; of the last three reads, they could be a finish reason, usage and the end.
    assert seen == [(1, tokens, ttft_ms) for tokens in (1, 1, 1, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize("name", names())
def test_first_tokens_of_recorded_runs_are_those_of_the_table(name: str):
    """Of every protocol that was recorded, looked at after each record of the log."""
    manifest = json.loads((GOLDEN / name / "manifest.json").read_text(encoding="utf-8"))
    fold = RequestFold(run_id=manifest["run_id"], protocol=manifest["config"].get("endpoint", "chat"))
    for plan in sorted((GOLDEN / name / RAW).glob("plan-*.log")):
        for request in read_plan(plan):
            fold.plan(request)
    said = []
    for log in sorted((GOLDEN / name / RAW).glob("requests-*.log")):
        for record in read_log(log):
            if isinstance(record, RequestPart):
                fold.add(record)
                said += fold.first_tokens()
    table = fold.table()
    stamps_ns = dict(zip(table.index.tolist(), table.first_token_ns.tolist(), strict=True))
    assert all(first.first_token_ns == stamps_ns[first.index] for first in said)
    assert said or name == "torn"  # whose replies are in one part each
    assert len({first.index for first in said}) == len(said)
    open_tokens = sum(fold.streamed.values())
    assert 0 <= open_tokens <= np.diff(table.chunk_start)[table.status == "in_flight"].sum()


def test_a_view_has_the_parts_of_the_page_without_one(tmp_path: Path):
    """Where a panel wants them: the means of what the page counts, of requests whose spans came."""
    recorded = GOLDEN / "vllm_spans"
    manifest = json.loads((recorded / MANIFEST).read_text(encoding="utf-8"))
    ended_ns, run_id = manifest["ended_ns"], manifest["run_id"]
    (tmp_path / RAW).mkdir()
    clock = AnchoredClock(offset_ns=ended_ns, monotonic_ns=lambda: 0)
    described = Described(slo=parse_slo("ttft_p99<1s"))
    with LiveRun(tmp_path, run_id=run_id, clock=clock, planned_s=None, stale_s=9.0, described=described) as live:
        live.shows_parts = True
        live.enter("measure", start_ns=ended_ns - 10**9)
        grow(live, recorded / RAW, tmp_path / RAW)
        view, counts = live.view(), live.snapshot().parts
    assert counts is not None
    sums_s = {part: 0.0 for part, _ in counts.ttft}
    for (part, _), observed in counts.ttft.items():
        sums_s[part] += observed.sum_s
    assert view.verdict is not None
    shown_ms, requests = {part.part: part.mean_ms for part in view.verdict.parts}, sum(counts.requests.values())
    assert {part: pytest.approx(1e3 * sums_s[part] / requests) for part in shown_ms} == shown_ms
    assert sum(shown_ms.values()) > 1
    assert view.lateness_p99_ms is not None
    assert [] == view.objectives
    (figure,) = (figure for figure in view.verdict.figures if figure.name == "ttft_p99")
    assert "(< 1,000 ms: met)" in figure.text


def test_no_part_is_the_largest_while_requests_only_fail(tmp_path: Path):
    """As the page has it: the server's death is not its queue."""
    manifest = json.loads((GOLDEN / "vllm_spans" / MANIFEST).read_text(encoding="utf-8"))
    ended_ns = manifest["ended_ns"]
    (tmp_path / RAW).mkdir()
    looks = count()
    clock = AnchoredClock(offset_ns=ended_ns, monotonic_ns=lambda: next(looks) * 10**9)
    seen = []
    with LiveRun(tmp_path, run_id=manifest["run_id"], clock=clock, planned_s=None, stale_s=9.0) as live:
        live.shows_parts = True
        live.enter("measure", start_ns=ended_ns - 10**9)
        grow(live, GOLDEN / "vllm_spans" / RAW, tmp_path / RAW)
        for failures in (0, 5):
            with (
                FrameLog(tmp_path / RAW / "plan-measure.log") as plan,
                FrameLog(tmp_path / RAW / "requests-9.log") as log,
            ):
                for index in range(100, 100 + failures):
                    append_record(plan, planned(index, 2))
                    failed = {"seq": 0, "worker": 9, "status": 500, "submit_ns": ended_ns, "end_ns": ended_ns + 1}
                    append_record(log, structs.replace(parts(index, 0)[-1], **failed))
            for _ in range(LOOKS):
                live.poll()
            counts = live.snapshot().parts
            assert counts is not None
            seen.append(list(counts.largest))
    assert [["queue"], []] == seen


SHOW = """
import sys
from pathlib import Path
from sidelight.exporter.prometheus.events import EventStream
from sidelight.rundir.clock import anchor
from sidelight.sidecar.live.view import LiveRun

stream = EventStream()
with LiveRun(Path(sys.argv[1]), run_id="r", clock=anchor(), planned_s=None, stale_s=2.5, stream=stream) as live:
    live.enter("warmup")
    live.snapshot()
    live.poll()
    before = set(sys.modules)
    live.enter("measure", start_ns=1)
    live.poll()
    live.publish()
    late = sorted(set(sys.modules) - before)
    print([name for name in late if name.startswith(("scipy", "sidelight.exporter.html"))], live.snapshot().run_id)
"""


def test_the_measured_phase_waits_for_no_large_import(tmp_path: Path):
    """SciPy takes a core for 0.2 s, and what browsers are sent as long: both are there by the end of the warm-up."""
    shutil.copytree(GOLDEN / "vllm_plain" / RAW, tmp_path / RAW)
    done = subprocess.run([sys.executable, "-c", SHOW, tmp_path], capture_output=True, text=True, check=True)
    assert "[] r" == done.stdout.strip()


def test_what_is_scheduled_submitted_and_in_flight_is_as_the_plan_and_the_workers_say(tmp_path: Path):
    """What was sent and has written nothing is in flight; what should have been sent by now is scheduled."""
    raw = tmp_path / RAW
    raw.mkdir()
    with FrameLog(raw / "plan-warmup.log") as plan, FrameLog(raw / "requests-0.log") as log:
        append_record(plan, structs.replace(planned(0, 2), phase="warmup"))
        for part in parts(0, 2):
            append_record(log, part)
        append_record(log, WorkerStat(worker=0, at_ns=1, cpu_ns=1, started=4, in_flight=3))
        append_record(log, WorkerStat(worker=1, at_ns=1, cpu_ns=1, started=2, in_flight=2))
    with FrameLog(raw / "plan-measure.log") as plan:
        for index, offset_s in enumerate((0, 1, 2, 3600), start=1):
            append_record(plan, structs.replace(planned(index, 2), offset_ns=offset_s * 10**9))
    clock = anchor()
    with LiveRun(tmp_path, run_id="r", clock=clock, planned_s=None, stale_s=2.5) as live:
        live.enter("measure", start_ns=clock.now_ns() - 60 * 10**9)
        live.poll()
        client = live.snapshot().client
        assert client is not None
        assert (3, 5, 5) == (client.scheduled, client.submitted, client.in_flight)
        assert (5, 5) == (live.view().sent, live.view().in_flight)


def test_the_offered_rate_does_not_fall_while_the_last_requests_are_waited_for(tmp_path: Path):
    """Of a run of so many requests, whose plan says when the last was due."""
    (tmp_path / RAW).mkdir()
    with FrameLog(tmp_path / RAW / "plan-measure.log") as plan:
        for index in range(1, 13):
            append_record(plan, structs.replace(planned(index, 2), offset_ns=index * 250_000_000))
    clock = anchor()
    with LiveRun(tmp_path, run_id="r", clock=clock, planned_s=None, stale_s=2.5) as live:
        live.enter("measure", start_ns=clock.now_ns() - 60 * 10**9)
        live.poll()
        client = live.snapshot().client
    assert client is not None
    assert 4.0 == client.rates["offered"]


def test_a_queue_that_is_no_number_is_unknown(tmp_path: Path):
    """Two pages that say 1e308: the panel and the page go on."""
    (tmp_path / RAW).mkdir()
    log = ScrapeLog(tmp_path / RAW / "scrapes-0.log")
    page = PAGE.replace("running", "waiting").replace(" 7", " 1e308")
    clock = anchor()
    for url in (URL, f"{URL}/2"):
        log.append(scraped(clock.now_ns(), page, url=url))
    log.close()
    with LiveRun(tmp_path, run_id="r", clock=clock, planned_s=None, stale_s=1e6) as live:
        live.enter("measure")
        live.poll()
        assert [1e308, 1e308] == [engine.gauges["requests_waiting"] for engine in live.snapshot().engines]
        assert (None, 0) == (live.view().waiting, live.errors)
