"""Whole runs with an engine that sends spans: as users start them, over loopback, against the engine's own truth."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from processes import engine, sidelight
from served import collector

from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import ReceiverSpec
from sidelight.sidecar.cli.measuring import free_pair
from sidelight.sidecar.run import Run, open_run

LOAD = ("--rate", "20", "--requests", "40", "--warmup", "2", "--listen", "off", "--quiet")
TTFT = ("to the engine", "engine frontend", "queue", "prefill", "from the engine", "blank output")


def truth(path: Path) -> dict[str, dict[str, Any]]:
    """What the engine knows of each request, by the id in its reply; a health probe is none."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["response_id"]: record for record in records if record["role"] == "request"}


async def probed(url: str, times: int) -> None:
    """Ask for an engine's health."""
    async with ClientSession() as client:
        for _ in range(times):
            async with client.get(f"{url}/health") as response:
                assert 200 == response.status


def queue_and_prefill(run: Run) -> dict[str, tuple[float, float]]:
    return {
        str(name): (queue_s, prefill_s)
        for name, queue_s, prefill_s in zip(
            run.spans.request_id, run.spans.queue_s.tolist(), run.spans.prefill_s.tolist(), strict=True
        )
    }


async def joined(path: Path, name: str, *passed_on: str, probes: int = 0) -> Run:
    """Run with an engine that sends spans, after so many probes of its health; queue and prefill are the engine's own
    to the bit, and all is counted.
    """
    address = free_pair()
    options = ("--engine", name, "--otlp-endpoint", f"http://{address}", "--truth", path / "truth")
    with engine(*options) as (url, _):
        await probed(url, probes)
        spans = ("--otlp-listen", address, *passed_on)
        done = await asyncio.to_thread(sidelight, "run", "--url", url, *LOAD, *spans, "--out", path / "run")
    assert 0 == done.code, done.err
    run = open_run(path / "run")
    true = truth(path / "truth")
    assert 43 == len(true)  # with two to warm up, and the one that was asked before
    assert {
        name: (
            (record["scheduled_ns"] - record["queued_ns"]) / 1e9,
            (record["first_token_ns"] - record["scheduled_ns"]) / 1e9,
        )
        for name, record in true.items()
    } == queue_and_prefill(run)
    summary = json.loads((path / "run" / "summary.json").read_text())
    assert probes == summary["correlation"]["spans"]["health_probes"]
    assert {"trace": 1.0, "response": 0.0, "histogram": 0.0, "none": 0.0} == summary["correlation"]["coverage"]
    assert run.span_counts is not None
    assert run.span_counts.exports == run.span_counts.forwarded
    assert 0 == run.receiver_deaths
    (event,) = [event for event in run.events if event.name == "spans"]
    # One request was asked before the run, and is none of its own.
    assert (len(true) - 1, 0) == (event.data["awaited"], event.data["missing"])
    return run


async def test_every_export_is_passed_on_with_the_header(tmp_path: Path):
    """The header reaches the collector over HTTP, and does not stand in the run directory.

    SGLang's probes are left out and counted, and the wait between its two processes is its own to the bit.
    """
    async with collector((200, {})) as (behind, taken):
        passed_on = ("--otlp-forward", behind, "--otlp-header", "X-Team: hush")
        run = await joined(tmp_path, "sglang", *passed_on, probes=2)
    true = truth(tmp_path / "truth")
    assert {name: (record["queued_ns"] - record["dispatched_ns"]) / 1e9 for name, record in true.items()} == dict(
        zip(map(str, run.spans.request_id), run.spans.scheduler_intake_s.tolist(), strict=True)
    )
    assert run.span_counts is not None
    assert len(taken) == run.span_counts.forwarded
    assert {"hush"} == {headers["X-Team"] for headers, _ in taken}
    assert "hush" not in (tmp_path / "run" / "manifest.json").read_text()


async def test_client_and_engine_stand_in_one_waterfall(tmp_path: Path):
    """At one collector each engine span is a child of its request's; the phases beside it add up to the client's TTFT.

    The engine's spans are passed on over gRPC, ours are sent over HTTP.
    """
    exports: list[ExportTraceServiceRequest] = []
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0")
    async with Receiver(spec, log=None, say=print, deliver=lambda _, export: exports.append(export)) as behind:
        to = ("--otlp-forward", f"grpc://127.0.0.1:{behind.grpc_port}")
        run = await joined(tmp_path, "vllm", *to, "--otlp-export", f"http://127.0.0.1:{behind.http_port}")
    assert run.span_counts is not None
    assert run.span_counts.forwarded == sum(not is_ours(export) for export in exports)
    ours, engines = (
        [span for export in exports if is_ours(export) == is_sidelights for span in spans_of(export)]
        for is_sidelights in (True, False)
    )
    clients = {(span.trace_id, span.span_id): span for span in ours if not span.parent_span_id}
    assert run.requests.trace_id.tolist() == [trace.hex() for trace, _ in clients]
    # The engine tells of a request before the run as well, by which the target was tried.
    assert set(clients) <= {(span.trace_id, span.parent_span_id) for span in engines}
    waits_ns = dict.fromkeys(clients, 0)
    for span in ours:
        if span.name in TTFT:
            waits_ns[span.trace_id, span.parent_span_id] += span.end_time_unix_nano - span.start_time_unix_nano
    ttft_ns = run.requests.first_token_ns - run.requests.submit_ns
    assert waits_ns.keys() == clients.keys()
    assert ttft_ns.tolist() == pytest.approx(list(waits_ns.values()), rel=0, abs=10)


def is_ours(export: ExportTraceServiceRequest) -> bool:
    """Tell by their resource whether spans are the client's."""
    attributes = [attribute for resource in export.resource_spans for attribute in resource.resource.attributes]
    return "sidelight" in {attribute.value.string_value for attribute in attributes if attribute.key == "service.name"}


def spans_of(export: ExportTraceServiceRequest) -> list[Span]:
    return [span for resource in export.resource_spans for scope in resource.scope_spans for span in scope.spans]


def test_for_an_engine_without_tracing_the_run_says_how_to_switch_it_on(tmp_path: Path):
    """The run is whole without spans; it says that none came, where to, and the engine's own switch."""
    with engine() as (url, _):
        done = sidelight("run", "--url", url, *LOAD, "--otlp-listen", "127.0.0.1:0", "--out", tmp_path / "r")
    assert 0 == done.code, done.err
    run = open_run(tmp_path / "r")
    assert (0, 0) == (len(run.spans), run.receiver_deaths)
    (note,) = [note for note in run.notes if "no span was received" in note]
    assert "127.0.0.1:0" not in note
    assert note.endswith("switch tracing on in the engine (vLLM: --otlp-traces-endpoint http://HOST:4317)")


def test_a_scrape_may_receive_spans_alone(tmp_path: Path):
    """With no page at all; and a page that does not answer is a note, not the end."""
    scrape = ("scrape", "--otlp-listen", "127.0.0.1:0", "--duration", "0.2", "--quiet")
    done = sidelight(*scrape, "--out", tmp_path / "alone")
    assert 0 == done.code, done.err
    assert (tmp_path / "alone/raw/spans-0.log").exists()
    done = sidelight(*scrape, "--metrics", f"http://{free_pair()}/metrics", "--out", tmp_path / "unanswered")
    assert 0 == done.code, done.err
    assert any("no server metrics" in note for note in open_run(tmp_path / "unanswered").notes)
