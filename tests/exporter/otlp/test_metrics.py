"""A run as OTLP metrics: GenAI metrics by the conventions, and the live page, with the run's own numbers and stamps."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from golden_files import evaluated
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint, Metric
from waiting import BOUND_S

from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.otlp.metrics import metric_exports
from sidelight.exporter.otlp.send import send
from sidelight.exporter.prometheus.remote_write import write
from sidelight.rundir.access import Access
from sidelight.rundir.columns import take
from sidelight.scraper.spans.spec import METRICS
from sidelight.sidecar.cli.measuring import free_pair
from sidelight.sidecar.report.history import history
from sidelight.sidecar.report.span_export import span_source

VICTORIA = shutil.which("victoria-metrics")
START_NS = 10**18
CLIENT = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "server.address", "server.port"}


@pytest.fixture(scope="module")
def run() -> Evaluated:
    return evaluated("vllm_spans")


def steps(run: Evaluated) -> Iterator[Any]:
    return history(run.run, run.parts, run.summary)


def metrics(run: Evaluated) -> dict[str, list[Metric]]:
    """Return the metrics of a run by name, in the order of their exports."""
    by_name: dict[str, list[Metric]] = {}
    for batch in metric_exports(span_source(run), steps(run), start_ns=START_NS):
        (resource,) = encode_metrics(batch).resource_metrics
        (scope,) = resource.scope_metrics
        for metric in scope.metrics:
            by_name.setdefault(metric.name, []).append(metric)
    return by_name


def last(metrics: dict[str, list[Metric]], name: str, **labels: str) -> list[HistogramDataPoint]:
    """Return the last points of a histogram's series that have these attributes."""
    newest: dict[bytes, HistogramDataPoint] = {}
    for metric in metrics[name]:
        for point in metric.histogram.data_points:
            if labels.items() <= attributes(point).items():
                newest[b"".join(each.SerializeToString() for each in point.attributes)] = point
    return list(newest.values())


def attributes(point: HistogramDataPoint) -> dict[str, str]:
    return {each.key: each.value.string_value or str(each.value.int_value) for each in point.attributes}


OPERATION = "gen_ai.client.inference.operation"


def test_each_metric_ends_at_what_was_observed(run: Evaluated):
    """Of the measured phase, and with all that the conventions ask for."""
    log = take(run.run.requests, run.run.requests.phase == "measure")
    every, ok = metrics(run), log.status == "ok"
    chunk_s = (log.first_output_ns - log.submit_ns)[log.first_output_ns >= 0] / 1e9
    for name, values, required in (
        ("gen_ai.client.operation.duration", ((log.end_ns - log.dispatch_ns) / 1e9)[ok], CLIENT),
        ("gen_ai.client.operation.time_to_first_chunk", chunk_s, CLIENT),
        ("gen_ai.client.token.usage", log.input_tokens[log.input_tokens >= 0], CLIENT | {"gen_ai.token.type"}),
        (f"{OPERATION}.input_tokens", log.input_tokens[ok & (log.input_tokens >= 0)], CLIENT),
        (f"{OPERATION}.output_tokens", log.output_tokens[ok & (log.output_tokens >= 0)], CLIENT),
    ):
        points = [
            point
            for point in last(every, name)
            if "error.type" not in attributes(point) and attributes(point).get("gen_ai.token.type") != "output"
        ]
        assert sum(point.count for point in points) == len(values)
        assert sum(point.sum for point in points) == pytest.approx(values.sum(), rel=1e-12)
        for point in points:
            assert required <= attributes(point).keys()
            assert attributes(point)["run_id"] == run.summary.run_id
            assert point.start_time_unix_nano == START_NS
            counted = np.bincount(np.searchsorted(point.explicit_bounds, values), minlength=len(point.bucket_counts))
            assert len(points) > 1 or counted.tolist() == list(point.bucket_counts)
    units = {name: metric[0].unit for name, metric in every.items() if name.startswith("gen_ai")}
    of_tokens = ("gen_ai.client.token.usage", f"{OPERATION}.input_tokens", f"{OPERATION}.output_tokens")
    assert units == {**dict.fromkeys(units, "s"), **dict.fromkeys(of_tokens, "{token}")}
    bounds = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
    assert bounds == list(last(every, "gen_ai.client.operation.duration")[0].explicit_bounds)


def test_what_the_engine_said_of_each_request_is_in_the_server_metrics(run: Evaluated):
    """By its spans; else its page's own histograms stand for them, whose start it does not say."""
    plain = evaluated("vllm_plain")
    *_, (_, snapshot) = steps(plain)
    (of_page,) = last(metrics(plain), "gen_ai.server.time_to_first_token")
    assert (of_page.sum, of_page.start_time_unix_nano) == (snapshot.engines[0].histograms["ttft"].sum_s, 0)
    breakdown, every = run.summary.correlation.breakdown, metrics(run)
    (first,) = last(every, "gen_ai.server.time_to_first_token")
    assert first.count == breakdown.queue_ms.count
    assert first.sum >= (breakdown.queue_ms.mean + breakdown.prefill_ms.mean) * first.count / 1e3
    assert attributes(first)["gen_ai.provider.name"] == "vllm"


def test_decoding_that_the_client_measured_is_not_what_the_engine_said(run: Evaluated):
    """Its own time to the first token is, where its spans state that alone."""
    parts = replace(run.parts, decode_source=np.full(len(run.parts), "client", dtype=np.object_))
    every = metrics(replace(run, parts=parts))
    assert {"gen_ai.server.time_to_first_token"} == {name for name in every if name.startswith("gen_ai.server.")}


def test_exemplars_are_requests_of_their_bucket(run: Evaluated):
    """Each is sent once."""
    log = run.run.requests
    ttft_s = dict(zip(log.trace_id, (log.first_output_ns - log.submit_ns) / 1e9, strict=True))
    seen = []
    for metric in metrics(run)["gen_ai.client.operation.time_to_first_chunk"]:
        for point in metric.histogram.data_points:
            for exemplar in point.exemplars:
                assert ttft_s[exemplar.trace_id.hex()] == pytest.approx(exemplar.as_double)
                assert exemplar.time_unix_nano <= point.time_unix_nano
                seen.append(exemplar.trace_id)
    assert 0 < len(seen) == len(set(seen))


@asynccontextmanager
async def victoria(directory: Path) -> AsyncIterator[str]:
    """Run a real VictoriaMetrics on loopback that shows at once what it was given; give its URL."""
    if VICTORIA is None:
        pytest.skip("victoria-metrics is not installed (Debian package victoria-metrics)")
    address = free_pair()
    options = (f"-httpListenAddr={address}", "-retentionPeriod=100y", "-search.latencyOffset=0s")
    with (directory / "victoria.log").open("wb") as log:
        storage = f"-storageDataPath={directory / 'victoria'}"
        process = await asyncio.create_subprocess_exec(VICTORIA, storage, *options, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(BOUND_S):
            while await _asked(f"http://{address}/health") != "OK":
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield f"http://{address}"
    finally:
        process.terminate()
        await process.wait()


async def _asked(url: str, **parameters: str) -> str:
    try:
        async with aiohttp.ClientSession() as session, session.get(url, params=parameters) as response:
            return await response.text()
    except aiohttp.ClientConnectionError:
        return ""


async def _value(url: str, expr: str, at_s: float) -> float:
    """Return a value of VictoriaMetrics at a moment, once it shows one."""
    await _asked(f"{url}/internal/force_flush")
    async with asyncio.timeout(BOUND_S):
        while True:
            reply = json.loads(await _asked(f"{url}/api/v1/query", query=expr, time=str(at_s)))
            if reply["data"]["result"]:
                (series,) = reply["data"]["result"]
                return float(series["value"][1])
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("way", ["remote write", "OTLP"])
async def test_victoriametrics_holds_the_reports_numbers(run: Evaluated, tmp_path: Path, way: str):
    """Count and sum of TTFT to 1e-9, also when the run is sent twice."""
    end_s = list(steps(run))[-1][0] / 1e9
    name = "sidelight_client_ttft_seconds" if way == "remote write" else "sidelight.client_ttft"
    async with victoria(tmp_path) as url:
        for _ in range(2):
            if way == "remote write":
                written = await write(steps(run), f"{url}/api/v1/write", Access(), report=print)
                assert written.reason == ""
            else:
                exports = metric_exports(span_source(run), steps(run), start_ns=START_NS)
                where = f"{url}/opentelemetry/v1/metrics"
                sent = await asyncio.to_thread(send, exports, METRICS, where, Access(), report=print)
                if "unsupported path" in sent.reason:
                    pytest.skip("this victoria-metrics is too old to take OTLP")
                assert (sent.given_up, sent.rejected) == (False, 0)
            ttft = run.summary.client.ttft_ms
            assert await _value(url, f'{{__name__="{name}_count"}}', end_s) == ttft.count
            sum_s = await _value(url, f'{{__name__="{name}_sum"}}', end_s)
            assert sum_s == pytest.approx(ttft.mean * ttft.count / 1e3, rel=1e-9)
