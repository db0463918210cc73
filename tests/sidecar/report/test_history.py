"""`openmetrics.txt`: what the live page could have shown at each step, as Prometheus takes it in afterwards."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import promql
import pytest
from golden_files import GOLDEN
from prometheus_client.openmetrics.parser import _parse_sample
from prometheus_client.samples import Sample

from sidelight.correlator.opening import open_run
from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.evaluation.times import correlated
from sidelight.exporter.prometheus.page import families
from sidelight.exporter.prometheus.remote_write import write
from sidelight.rundir.access import Access
from sidelight.rundir.columns import take
from sidelight.scraper.window.quantities import Histogram
from sidelight.sidecar.formats import OPENMETRICS
from sidelight.sidecar.report.derive import derive_run
from sidelight.sidecar.report.history import history

PROMTOOL = shutil.which("promtool")
RUNS = ["vllm_spans", "vllm_plain", "two_engines"]
Derived = Callable[[str], Evaluated]


def fresh(name: str, place: Path) -> Evaluated:
    path = place / name
    shutil.copytree(GOLDEN / name, path, ignore=shutil.ignore_patterns("expected"))
    return derive_run(open_run(path), ["openmetrics"])


@pytest.fixture(scope="module")
def derived(tmp_path_factory: pytest.TempPathFactory) -> Derived:
    """Recorded runs by their names, each derived once."""
    return cache(lambda name: fresh(name, tmp_path_factory.mktemp("derived")))


def samples(run: Evaluated) -> list[Sample]:
    """Return the samples of the file, line by line: the library's reader of whole files drops later points of
    histograms, and promtool, which is who reads it, has a test of its own.
    """
    return list(_samples(run.run.path))


@cache
def _samples(path: Path) -> list[Sample]:
    lines = (path / OPENMETRICS).read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "# EOF"
    return [_parse_sample(line) for line in lines if not line.startswith("#")]


def last(points: list[Sample], name: str, **labels: str) -> float:
    """Return the sum of the last values of all series of a name with these labels."""
    values = {
        tuple(sorted(point.labels.items())): point.value
        for point in points
        if point.name == name and labels.items() <= point.labels.items()
    }
    assert values, f"no {name}{labels}"
    return math.fsum(values.values())


@pytest.mark.parametrize("name", RUNS)
def test_the_last_point_of_each_series_is_the_reports_number(name: str, derived: Derived):
    """Requests, the client's TTFT and its parts, to 1e-9."""
    run = derived(name)
    points, summary = samples(run), run.summary
    ttft, parts = summary.client.ttft_ms, summary.correlation.breakdown
    assert last(points, "sidelight_client_requests_total", status="ok") == summary.client.requests.ok
    assert last(points, "sidelight_client_ttft_seconds_count") == ttft.count
    assert last(points, "sidelight_client_ttft_seconds_sum") == pytest.approx(ttft.mean * ttft.count / 1e3, rel=1e-9)
    queue = parts.queue_ms
    assert last(points, "sidelight_ttft_part_seconds_count", part="queue") >= queue.count
    assert last(points, "sidelight_ttft_part_seconds_sum", part="queue") == pytest.approx(
        queue.mean * queue.count / 1e3, rel=1e-9
    )


def test_what_was_due_sent_and_good_ends_as_the_report_has_it(derived: Derived):
    """Of a run with a schedule and objectives: all that was due, all that was sent, nothing pending, each verdict."""
    run = derived("two_engines")
    points, summary = samples(run), run.summary
    due, sent = (last(points, f"sidelight_client_requests_{name}_total") for name in ("scheduled", "submitted"))
    assert (due, sent) == (summary.workload.planned_requests, summary.client.requests.sent)
    assert last(points, "sidelight_breakdown_pending") == 0
    assert summary.client.slo is not None
    assert last(points, "sidelight_client_requests_good_total") == summary.client.slo.good_requests
    for objective in summary.client.slo.objectives:
        assert last(points, "sidelight_slo_met", objective=objective.name) == objective.met
        assert last(points, "sidelight_slo_value", objective=objective.name) == objective.value_ms * 1e-3


def test_percentiles_of_the_engine_are_of_what_it_had_shown_by_then(derived: Derived):
    """There are some before the last point, which are the report's to the bit."""
    run = derived("vllm_spans")
    engine_s = [
        point.value
        for point in samples(run)
        if point.name == "sidelight_engine_quantile_seconds"
        and (point.labels["of"], point.labels["quantile"], point.labels["bound"]) == ("ttft", "0.5", "estimate")
    ]
    (page,) = run.summary.server.endpoints
    assert isinstance(page.ttft, Histogram)
    assert engine_s[-1] == page.ttft.stats.p50
    assert len(engine_s) > 1


def test_a_ttft_counts_from_its_first_token_on(derived: Derived):
    """At each step as many as had come by then, and tokens as their chunks came."""
    run = derived("vllm_plain")
    log = take(run.run.requests, run.run.requests.phase == "measure")
    counted = 0
    for at_ns, snapshot in history(run.run, run.parts, run.summary):
        assert snapshot.client is not None
        assert snapshot.client.ttft is not None
        come = (log.first_token_ns >= 0) & (log.first_token_ns <= at_ns)
        assert sum(snapshot.client.ttft.counts) == come.sum()
        ended = log.output_tokens[(log.end_ns <= at_ns) & (log.output_tokens > 0)].sum()
        assert snapshot.client.output_tokens >= ended
        counted += int((come & (log.end_ns > at_ns)).sum())
    assert counted


def test_scrapes_are_counted_as_they_were_recorded(derived: Derived):
    """Those that answered and those that failed, of which alerts are; the time that the last one took."""
    run = derived("two_engines")
    points = samples(run)
    for page in run.run.endpoints:
        counts = {"ok": len(page.response_ns), "failed": len(page.failures)}
        for outcome, count in counts.items():
            assert last(points, "sidelight_scrapes_total", endpoint=page.url, outcome=outcome) == count
        took_s = (page.response_ns[-1] - page.request_ns[-1]) / 1e9
        assert last(points, "sidelight_scrape_duration_seconds", endpoint=page.url) == took_s
        answered_s = last(points, "sidelight_engine_last_answer_timestamp_seconds", endpoint=page.url)
        assert answered_s == page.response_ns[-1] / 1e9


@pytest.mark.parametrize("name", RUNS)
def test_points_bear_the_stamps_of_the_run(name: str, derived: Derived):
    """From its first event to its last, ascending in each series, in whole ms as a remote write has them; no counter
    falls.
    """
    run = derived(name)
    before: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    for point in samples(run):
        key = (point.name, tuple(sorted(point.labels.items())))
        earlier = before.setdefault(key, point)
        assert float(point.timestamp) >= float(earlier.timestamp)
        if point.name.endswith(("_total", "_count", "_bucket")) and not point.name.startswith("sidelight_engine"):
            assert point.value >= earlier.value, key
        before[key] = point
    times = [float(point.timestamp) for point in before.values()]
    assert all(at_s == round(at_s, 3) for at_s in times)
    events = [event.at_ns / 1e9 for event in run.run.events]
    assert min(times) >= min(events) - 60
    assert max(times) <= max(events) + 60


def test_the_end_is_later_than_what_a_server_may_have(derived: Derived):
    """Whether the last step of a run that was killed arrived is not known: a server that has it takes nothing older."""
    run = derived("vllm_spans")
    whole = [at_ns for at_ns, _ in history(run.run, run.parts, run.summary)]
    sent_ns = whole[-1] + 2 * 10**9
    after = [at_ns for at_ns, _ in history(run.run, run.parts, run.summary, after_ns=whole[0], sent_ns=sent_ns)]
    assert after[:-1] == whole[1:-1]
    assert sent_ns // 10**6 < after[-1] // 10**6


@pytest.mark.parametrize("name", RUNS)
def test_the_engine_is_the_reports(name: str, derived: Derived):
    """By name and version, which vLLM's page does not state."""
    run = derived(name)
    engine = run.summary.server.engine
    assert engine is not None
    assert engine.version
    info = [point.labels for point in samples(run) if point.name in ("sidelight_run_info", "sidelight_engine_info")]
    assert {(engine.name, engine.version)} == {
        (labels["engine"], labels["version"]) for labels in info if labels["engine"]
    }


def test_every_series_bears_the_run_and_its_tags(tmp_path: Path):
    """As on the live page: else two runs that are sent to one Prometheus are one series there."""
    whole = fresh("vllm_plain", tmp_path)
    run = whole.run
    run.manifest["config"]["tag"] = ["build=1234", "note=a=b"]
    steps = history(run, correlated(run).parts, whole.summary)
    labels = {"run_id": run.manifest["run_id"], "build": "1234", "note": "a=b"}
    shown = [sample.labels for _, snapshot in steps for family in families(snapshot) for sample in family.samples]
    assert shown
    assert all(labels.items() <= each.items() for each in shown)


def test_prometheus_takes_it_in(tmp_path: Path, derived: Derived):
    """promtool makes blocks of it."""
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    run = derived("vllm_plain")
    command = [
        PROMTOOL,
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        str(run.run.path / OPENMETRICS),
        str(tmp_path / "db"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "db").glob("*/meta.json"))


async def test_prometheus_holds_the_reports_numbers_after_a_remote_write(tmp_path: Path, derived: Derived):
    """Requests and the sum of TTFT to 1e-9; sent again, which it refuses as old, they are what they were. Exemplars
    are requests of their buckets.
    """
    if promql.PROMETHEUS is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    run = derived("vllm_spans")
    ttft, end_s = run.summary.client.ttft_ms, max(float(point.timestamp) for point in samples(run))
    async with promql.prometheus(scraping=[], directory=tmp_path) as base_url:
        for again in (False, True):
            url = f"{base_url}/api/v1/write"
            sent = await write(history(run.run, run.parts, run.summary), url, Access(), report=lambda _: None)
            assert again or sent.reason == ""
            ok = await promql.value_at(base_url, 'sidelight_client_requests_total{status="ok"}', end_s)
            sum_s = await promql.value_at(base_url, "sidelight_client_ttft_seconds_sum", end_s)
            assert (ok, sum_s) == (
                run.summary.client.requests.ok,
                pytest.approx(ttft.mean * ttft.count / 1e3, rel=1e-9),
            )
        ttft_exemplars = await promql.exemplars(base_url, "sidelight_client_ttft_seconds_bucket", since_s=end_s - 600)
        queue_exemplars = await promql.exemplars(
            base_url, 'sidelight_ttft_part_seconds_bucket{part="queue"}', since_s=end_s - 600
        )
    rows, parts = {trace: row for row, trace in enumerate(run.run.requests.trace_id)}, run.parts
    for exemplars, values_s in ((ttft_exemplars, parts.ttft_s), (queue_exemplars, parts.queue_s)):
        assert exemplars
        for exemplar in exemplars:
            assert values_s[rows[exemplar.trace_id]] == pytest.approx(exemplar.value)
            assert exemplar.value <= float(exemplar.series["le"])


def test_the_same_run_gives_the_same_file(tmp_path: Path):
    """Byte for byte."""
    files = [(fresh("two_engines", tmp_path / place).run.path / OPENMETRICS).read_bytes() for place in ("a", "b")]
    assert files[0] == files[1]
