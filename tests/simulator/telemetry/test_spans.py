"""The spans of the simulated engines: what a collector gets is what the engine knows, in the form of each."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from waiting import BOUND_S

from sidelight.simulator.engine.history import RequestRecord
from sidelight.simulator.server import running
from sidelight.simulator.settings import EngineSettings, SettingsError, SimulatorSettings, speed_profile
from sidelight.simulator.telemetry.spans import EXPORT, SpanExporter, export
from sidelight.simulator.telemetry.truth import TruthLog

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
LATENCY = "gen_ai.latency."


@dataclass(slots=True)
class Collector:
    """What a collector was sent, and the status with which it refuses."""

    port: int = 0
    refuse: grpc.StatusCode | None = None
    tried: int = 0
    spans: list[tuple[str, Span]] = field(default_factory=list)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def take(self, body: bytes, context: Any) -> bytes:
        async with self.news:
            self.tried += 1
            self.news.notify_all()
        if self.refuse is not None:
            await context.abort(self.refuse, "not now")
        received = [
            (scope.scope.name, span)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        async with self.news:
            self.spans += received
            self.news.notify_all()
        return b""

    async def until(self, *, spans: int = 0, tried: int = 0) -> None:
        async with asyncio.timeout(BOUND_S), self.news:
            await self.news.wait_for(lambda: len(self.spans) >= spans and self.tried >= tried)


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    receiver = Collector()
    service, _, method = EXPORT[1:].partition("/")
    server = aio.server()
    rpc: Any = grpc.unary_unary_rpc_method_handler(receiver.take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: rpc}),))
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield receiver
    await server.stop(0)


def record(traceparent: str = SAMPLED, *, number: int = 1) -> RequestRecord:
    return RequestRecord(
        request_id=f"chatcmpl-{number}",
        arrival_ns=10**18,
        dispatched_ns=10**18 + 1,
        queued_ns=10**18 + 3,
        scheduled_ns=10**18 + 1003,
        first_token_ns=10**18 + 5_000_003,
        finished_ns=10**18 + 9_000_007,
        prompt_tokens=7,
        cached_tokens=0,
        output_tokens=5,
        max_tokens=6,
        finish_reason="stop",
        preemptions=0,
        traceparent=traceparent,
    )


def spans_of(records: Sequence[RequestRecord], engine: str = "vllm") -> list[Span]:
    request = export(tuple(records), SimulatorSettings(engine=engine))
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def attributes(span: Span) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, str(attribute.value.WhichOneof("value")))
        for attribute in span.attributes
    }


def test_a_span_of_vllm_has_the_differences_of_the_true_stamps():
    """To the bit, in seconds; it stands under the client's span, from arrival to end."""
    (span,) = spans_of([record()])
    assert ("llm_request", TRACE, PARENT) == (span.name, span.trace_id.hex(), span.parent_span_id.hex())
    assert (10**18, 10**18 + 9_000_007) == (span.start_time_unix_nano, span.end_time_unix_nano)
    values = attributes(span)
    expected = {
        "time_in_queue": 1000 / 1e9,
        "time_in_model_prefill": 4_999_000 / 1e9,
        "time_in_model_decode": 4_000_004 / 1e9,
        "time_in_model_inference": 8_999_004 / 1e9,
        "time_to_first_token": 5_000_003 / 1e9,
        "e2e": 9_000_007 / 1e9,
    }
    assert expected == {name.removeprefix(LATENCY): values[name] for name in values if name.startswith(LATENCY)}
    assert ("chatcmpl-1", 7, 5, 6) == (
        values["gen_ai.request.id"],
        values["gen_ai.usage.prompt_tokens"],
        values["gen_ai.usage.completion_tokens"],
        values["gen_ai.request.max_tokens"],
    )


def test_tensorrt_llms_queue_begins_with_the_arrival():
    """As its source has it; the prefill is not said, and the id is a number."""
    (span,) = spans_of([record()], "trtllm")
    assert 1003 / 1e9 == attributes(span)[f"{LATENCY}time_in_queue"]
    assert f"{LATENCY}time_in_model_prefill" not in attributes(span)
    assert isinstance(attributes(span)["gen_ai.request.id"], int)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_what_is_not_sampled_has_no_span(engine: str):
    """What came without a traceparent, or with a broken one, begins a trace of its own."""
    assert [] == spans_of([record(UNSAMPLED)], engine)
    for broken in ("", "00-abc-def-01", f"00-{TRACE}-{PARENT}-01\n"):
        spans = spans_of([record(broken, number=1), record(broken, number=2)], engine)
        assert 2 == len({span.trace_id for span in spans})
        assert TRACE not in {span.trace_id.hex() for span in spans}
        assert {16} == {len(span.trace_id) for span in spans}
        assert (engine == "sglang") == all(span.trace_id.startswith(bytes(8)) for span in spans)
        assert b"" == spans[0].parent_span_id
    spans = spans_of([record(number=number) for number in range(9)], engine)
    assert len(spans) == len({span.span_id for span in spans})


async def test_what_a_client_sent_is_the_parent_of_what_a_collector_gets(collector: Collector, tmp_path: Path):
    """The whole server: each request that finished, once, with its true times; those that were refused or not sampled
    are not there.
    """
    settings = SimulatorSettings(
        otlp_endpoint=f"http://127.0.0.1:{collector.port}", engine_settings=EngineSettings(speed=speed_profile("fast"))
    )
    truth = TruthLog(tmp_path / "truth")
    async with running(settings, truth=truth) as url, aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
        for path, traceparent, more in (
            ("/v1/chat/completions", SAMPLED, {}),
            ("/v1/completions", SAMPLED.replace(TRACE[:4], "ffff"), {"prompt": "a"}),
            ("/v1/chat/completions", UNSAMPLED, {}),
            ("/v1/chat/completions", SAMPLED, {"max_tokens": -1}),
            ("/api/chat", SAMPLED.replace(TRACE[:4], "eeee"), {"stream": False, "model": settings.model}),
        ):
            async with session.post(url + path, json={**body, **more}, headers={"traceparent": traceparent}) as reply:
                await reply.read()
        await collector.until(spans=3)
    assert {scope for scope, _ in collector.spans} == {"vllm.tracing.otel"}
    by_trace = {span.trace_id.hex(): attributes(span) for _, span in collector.spans}
    assert {TRACE, f"ffff{TRACE[4:]}", f"eeee{TRACE[4:]}"} == by_trace.keys()
    true = {request.request_id: request for request in truth.records}
    for values in by_trace.values():
        record = true[values["gen_ai.request.id"]]
        assert (record.scheduled_ns - record.queued_ns) / 1e9 == values[f"{LATENCY}time_in_queue"]
        assert (record.finished_ns - record.arrival_ns) / 1e9 == values[f"{LATENCY}e2e"]


async def test_a_batch_that_was_not_taken_is_sent_again(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Said once; what is added meanwhile comes with it; what is left at the end is sent then."""
    monkeypatch.setattr("sidelight.simulator.telemetry.spans.EXPORT_EVERY_S", 0.01)
    monkeypatch.setattr("sidelight.simulator.telemetry.spans.END_WITHIN_S", BOUND_S)
    collector.refuse = grpc.StatusCode.UNAVAILABLE
    async with SpanExporter(f"127.0.0.1:{collector.port}", SimulatorSettings()) as exporter:
        exporter.add(record(number=1))
        await collector.until(tried=2)
        collector.refuse = None
        exporter.add(record(number=2))
        await collector.until(spans=2)
        exporter.add(record(number=3))
    ids = [attributes(span)["gen_ai.request.id"] for _, span in collector.spans]
    assert ["chatcmpl-1", "chatcmpl-2", "chatcmpl-3"] == ids
    assert 1 == capsys.readouterr().err.count("simulator: spans do not reach")


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "http://h", "https://h:1", "http://h:1/v1/traces", "http://h:x"])
def test_an_invalid_endpoint_is_refused(url: str):
    """With an example of a valid one."""
    with pytest.raises(SettingsError, match=rf"--otlp-endpoint {re.escape(url)}: must be http://HOST:PORT \(gRPC\)"):
        SimulatorSettings(otlp_endpoint=url)
