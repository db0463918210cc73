"""The live page after the load: the report's own numbers, until they were scraped."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
from dataclasses import replace
from html import unescape
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from golden_files import GOLDEN, evaluated, names
from logs import request_log
from msgspec import structs

from sidelight.correlator.opening import open_run
from sidelight.exporter.html.page import as_parts
from sidelight.exporter.prometheus.page import LivePage, families
from sidelight.exporter.prometheus.server import serving
from sidelight.exporter.prometheus.snapshot import EngineCounts, Snapshot
from sidelight.exporter.prometheus.table import ENGINE_HISTOGRAMS
from sidelight.exporter.report.verdict import verdict_of
from sidelight.loadgen.requests.table.fold import InFlightRequest
from sidelight.rundir.clock import anchor
from sidelight.rundir.columns import take
from sidelight.scraper.window.quantities import Histogram
from sidelight.scraper.window.window import Window
from sidelight.sidecar.live.final import final, linger, patience_s, recorded
from sidelight.sidecar.live.quantiles import estimated
from sidelight.sidecar.live.tally import Tally, TallySample
from sidelight.sidecar.live.view import LiveRun
from sidelight.sidecar.report.derive import derive_run

LATEST = Snapshot(version="1", run_id="r", phase="measure")


@pytest.mark.parametrize("name", names())
def test_the_final_numbers_are_those_of_the_report(name: str):
    """Requests, quantiles to the bit, and the sums of every part; of the engine, what the report calls resolved."""
    derived = evaluated(name)
    summary = derived.summary
    pages = {page.url: page for page in summary.server.endpoints}
    latest = replace(LATEST, engines=tuple(EngineCounts(endpoint=url) for url in pages))
    last = final(latest, derived.run, derived.parts, summary)
    assert last.client is not None
    assert last.parts is not None
    assert (last.client.requests["ok"], last.client.in_flight) == (summary.client.requests.ok, 0)
    shown = {level: last.client.quantiles.get(("ttft", level)) for level in ("0.5", "0.99")}
    ttft_ms = summary.client.ttft_ms
    assert shown == {
        level: None if value is None else pytest.approx(value / 1e3, rel=1e-12)
        for level, value in (("0.5", ttft_ms.p50), ("0.99", ttft_ms.p99))
    }
    verdict = verdict_of(summary)
    assert last.verdict == verdict
    page = as_parts(summary, recorded(derived))["sections"]
    text = unescape(re.sub("<[^>]*>", "", page)).replace("\N{NO-BREAK SPACE}", " ")
    assert verdict.headline in text
    queue = summary.correlation.breakdown.queue_ms
    sum_s = sum(histogram.sum_s for (part, _), histogram in last.parts.ttft.items() if part == "queue")
    if queue.mean is not None and not summary.correlation.breakdown.means_only:
        assert sum_s == pytest.approx(queue.mean * queue.count / 1e3, rel=1e-9)
    assert last.parts.pending == 0
    for engine in last.engines:
        queue_time = pages[engine.endpoint].queue_time
        if isinstance(queue_time, Histogram):
            is_resolved = "p99" in (queue_time.intervals or {}) and "p99" not in (queue_time.unresolved or ())
            shown_s = engine.quantiles.get(("queue_time", "0.99", "estimate"))
            assert shown_s == (queue_time.stats.p99 if is_resolved else None)


def test_quantiles_of_engines_while_a_run_goes_are_those_of_its_report(tmp_path: Path):
    """With the same pages, to the bit; of the measured phase, so that the warm-up is not in them."""
    shutil.copytree(GOLDEN / "vllm_spans", tmp_path / "run", ignore=shutil.ignore_patterns("expected"))
    derived = evaluated("vllm_spans")
    with LiveRun(tmp_path / "run", run_id="r", clock=anchor(), planned_s=None, stale_s=2.5) as live:
        live.enter("measure", start_ns=derived.summary.window.start_ns)
        live.snapshot()
        live.poll()
        (engine,) = live.snapshot().engines
    (reported,) = final(live.snapshot(), derived.run, derived.parts, derived.summary).engines
    assert {of for of, _, _ in engine.quantiles} == set(ENGINE_HISTOGRAMS)
    assert engine.quantiles == reported.quantiles
    window = Window(start_ns=derived.summary.window.start_ns, end_ns=derived.summary.window.end_ns)
    thinned = estimated(derived.run.endpoints[0], window, most_scrapes=20)
    assert thinned["ttft", "0.5", "estimate"] == pytest.approx(engine.quantiles["ttft", "0.5", "estimate"], rel=0.15)


def test_objectives_end_as_the_report_has_them(tmp_path: Path):
    """Values, verdicts and good requests to the digit, rates among them; and lateness."""
    shutil.copytree(GOLDEN / "two_engines", tmp_path / "run", ignore=shutil.ignore_patterns("expected"))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    manifest["config"]["slo"] = "ttft_p99<1000ms,tpot_p99<500ms,error_rate<1%,requests_per_s>1000,goodput>0.1"
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    derived = derive_run(open_run(tmp_path / "run"), ["json"])
    slo, page = derived.summary.client.slo, LivePage()
    page.update(final(LATEST, derived.run, derived.parts, derived.summary))
    assert slo is not None
    samples = {
        key: value
        for key, _, value in (line.rpartition(" ") for line in page.render().decode().splitlines() if line[0] != "#")
    }
    for each in slo.objectives:
        value = each.value if each.value_ms is None else each.value_ms * 1e-3
        shown = (float(samples[f'sidelight_slo_{name}{{objective="{each.name}"}}']) for name in ("value", "met"))
        assert [value, each.met] == list(shown)
    assert float(samples["sidelight_client_requests_good_total"]) == slo.good_requests > 0
    lateness = derived.summary.self_check.schedule_lateness_ms
    for quantile, value_ms in (("0.5", lateness.p50), ("0.99", lateness.p99)):
        shown_s = samples[f'sidelight_generator_schedule_lateness_quantile_seconds{{quantile="{quantile}"}}']
        assert float(shown_s) == pytest.approx(value_ms / 1e3, rel=1e-12)


@pytest.mark.parametrize("name", names())
def test_no_counter_of_the_client_falls_when_the_report_comes(name: str):
    """Prometheus takes a fall for a restart, and counts all anew: also where sums round otherwise, batch by batch."""
    derived = evaluated(name)
    log = take(derived.run.requests, derived.run.requests.phase == "measure")
    tally = Tally()
    for row in range(len(log)):
        tally.count(take(log, np.arange(len(log)) == row))
    latest = replace(LATEST, client=tally.client_counts(in_flight=0))
    last = final(latest, derived.run, derived.parts, derived.summary)
    before, after = (counters(snapshot) for snapshot in (latest, last))
    assert [] == [name for name, value in before.items() if after[name] < value]
    assert before == pytest.approx({name: after[name] for name in before}, rel=1e-9)


def counters(snapshot: Snapshot) -> dict[str, float]:
    """Return the client's counters by name and labels."""
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in families(snapshot)
        if family.name.startswith("sidelight_client") and family.type in ("counter", "histogram")
        for sample in family.samples
    }


def test_what_was_due_counts_to_the_end_of_the_phase(tmp_path: Path):
    """Of a run that was stopped too: the live view counts until then, and a counter must not fall."""
    shutil.copytree(GOLDEN / "two_engines", tmp_path / "run", ignore=shutil.ignore_patterns("expected"))
    run = open_run(tmp_path / "run")
    phase = next(phase for phase in run.phases if phase.name == "measure")
    assert run.scheduled_by("measure") == len(run.offsets_ns["measure"])
    stop_ns = phase.start_ns + run.offsets_ns["measure"][3]
    stopped = [
        structs.replace(event, at_ns=stop_ns)
        if event.name == "phase_end" and event.data["phase"] == "measure"
        else event
        for event in run.events
    ]
    assert replace(run, events=tuple(stopped)).scheduled_by("measure") == 4
    assert run.scheduled_by("measure", stop_ns - 1) == 3
    assert run.scheduled_by("warmup-of-no-run") is None


def test_a_request_that_fails_behind_its_first_token_leaves_the_percentiles():
    """As in the report; until it has ended it counts with those that go on. The histogram counts it once."""
    tally = Tally()
    firsts = [
        InFlightRequest(phase="measure", index=index, trace_id="", submit_ns=0, first_token_ns=milliseconds * 1_000_000)
        for index, milliseconds in ((0, 10), (1, 20), (2, 3000))
    ]
    tally.begin(firsts, streamed=0)
    medians = [tally.samples["ttft"].quantiles[0]]
    row = {"submit": 0, "end": 4000}
    ended = [
        row | {"first": first, "last": first, "status": status}
        for first, status in ((10, "ok"), (20, "ok"), (3000, "failed"))
    ]
    tally.count(request_log(*ended))
    medians.append(tally.samples["ttft"].quantiles[0])
    assert (medians, sum(tally.ttft.counts)) == ([pytest.approx(0.02), pytest.approx(0.015)], 3)


def test_quantiles_are_of_all_values_but_in_a_view_that_counts_each_second():
    """20 slow ones behind 1,000 quick ones: a report's history has them at once, a live view may be a little behind."""
    for stale_ratio, p99_s in ((1.0, 9.0), (1.05, 0.1)):
        sample = TallySample()
        sample.add(np.full(1000, 0.1), stale_ratio)
        sample.add(np.full(20, 9.0), stale_ratio)
        assert p99_s == sample.quantiles[-1]


@pytest.mark.parametrize(
    ("scraped_s", "patience"), [((), 0.0), ((7.0,), 15.0), ((7.0, 8.0, 10.0), 6.0), ((0.0, 3600.0), 60.0)]
)
def test_the_next_scrape_is_waited_for_by_how_often_they_came(scraped_s: tuple[float, ...], patience: float):
    """Three of the longest interval, a minute at most; not at all without a scrape."""
    assert patience == patience_s(scraped_s)


async def test_the_page_is_served_until_it_was_scraped_once():
    """A scrape within the time has the final numbers, and ends the wait."""
    page = LivePage()
    page.update(LATEST)
    async with serving(page, "127.0.0.1", 0) as url:
        waiting = asyncio.ensure_future(linger(page, Snapshot(version="1", run_id="r", phase="done"), 600.0))
        await asyncio.sleep(0)
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            text = await reply.text()
        assert 'phase="done"' in text
        assert await waiting


async def test_a_scraper_that_gave_up_has_not_seen_the_last_page():
    """While the report is made none is answered: the page is not closed for one that came then and left."""
    page = LivePage()
    async with serving(page, "127.0.0.1", 0) as url:
        host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
        with socket.create_connection((host, int(port))) as gone:
            gone.sendall(b"GET /metrics HTTP/1.1\r\nHost: sidecar\r\n\r\n")
        done = Snapshot(version="1", run_id="r", phase="done")
        assert not await linger(page, done, 0.5)
        waiting = asyncio.ensure_future(linger(page, done, 600.0))
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert b'phase="done"' in await response.read()
        assert await waiting


async def test_a_page_that_was_never_scraped_is_not_kept():
    """And no longer than was asked for; a cancelled wait, as by Ctrl-C, ends it without an error."""
    page = LivePage()
    page.update(LATEST)
    assert not await linger(page, LATEST, None)
    assert not await linger(page, LATEST, 0.01)
    waiting = asyncio.ensure_future(linger(page, LATEST, 600.0))
    await asyncio.sleep(0)
    waiting.cancel()
    assert not await waiting


async def test_ctrl_c_does_not_wait_for_a_browser_that_does_not_read():
    """The report is written by then: the run ends as if the browser had gone."""
    page = LivePage()
    page.stream.publish(b"an event", b"")
    browser = page.stream.events()
    await anext(browser)
    waiting = asyncio.ensure_future(linger(page, LATEST, 0.0))
    for _ in range(10):  # past the wait for a scraper, of no time
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    assert not await waiting
    await browser.aclose()


def test_rates_verdicts_and_classes_end_as_the_report_has_them():
    """Tiles show the throughput and the realised rate to the digit, and tables whether the generator is trusted."""
    derived = evaluated("two_engines")
    summary = derived.summary
    last = final(LATEST, derived.run, derived.parts, summary)
    assert last.client is not None
    throughput, rates = summary.client.throughput, summary.client.rates
    assert last.client.rates["output_tokens"] == throughput.output_tokens_per_s
    assert last.client.rates["requests"] == throughput.requests_per_s
    assert last.client.rates["sent"] == rates.realised_requests_per_s
    assert ("goodput" in last.client.rates) == (throughput.goodput_requests_per_s is not None)
    assert last.verdicts.get("generator") == summary.self_check.trusted
    assert {"ask", "chat"} == last.client.class_requests.keys()
    for name, requests in summary.client.classes.items():
        assert last.client.class_requests[name] == requests.requests.ok
        assert last.client.class_quantiles[name, "ttft", "0.99"] == pytest.approx((requests.ttft_ms.p99 or 0) / 1e3)


def test_parts_that_the_report_estimates_lower_do_not_fall():
    """Prometheus would take that for a restart and count all anew; the means are the report's all the same."""
    derived = evaluated("vllm_plain")
    plain = final(LATEST, derived.run, derived.parts, derived.summary).parts
    assert plain is not None
    later = {
        key: replace(each, counts=(0.0, *each.counts[:-1]), sum_s=2 * each.sum_s) for key, each in plain.ttft.items()
    }
    earlier = {
        key: replace(each, counts=(sum(each.counts), *(0.0 for _ in each.counts[1:]))) for key, each in later.items()
    }
    for shown in (later, earlier):
        latest = replace(LATEST, parts=replace(plain, ttft=shown))
        last = final(latest, derived.run, derived.parts, derived.summary)
        before, after = (counters(snapshot) for snapshot in (latest, last))
        assert [] == [name for name, value in before.items() if after[name] < value]
        assert last.parts is not None
        assert last.parts.ttft_means_s == plain.ttft_means_s
    queue = derived.summary.correlation.breakdown.queue_ms
    assert plain.ttft_means_s is not None
    assert plain.ttft_means_s["queue"] == pytest.approx((queue.mean or 0) / 1e3, rel=1e-9)


def test_parts_below_nothing_leave_the_means_of_the_ttft_whole():
    """A stamp that is a little late makes a part negative; its histogram counts that as nothing, the mean does not."""
    derived = evaluated("vllm_plain")
    parts = derived.parts
    late_s = np.where(np.arange(len(parts.ttft_s)) % 3, 0.0, parts.network_s + 0.002)
    late = replace(parts, network_s=parts.network_s - late_s, other_s=parts.other_s + late_s)
    last = final(LATEST, derived.run, late, derived.summary).parts
    assert last is not None
    assert last.ttft_means_s is not None
    queue = derived.summary.correlation.breakdown.queue_ms
    assert last.ttft_means_s["queue"] / sum(last.ttft_means_s.values()) == pytest.approx(queue.share_of_ttft)
