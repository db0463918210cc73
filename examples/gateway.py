"""A gateway that tells Sidelight how long it took: it passes `traceparent` on and sends one span a request.

pip install aiohttp opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 python examples/gateway.py
"""

import asyncio
import os
import time

import aiohttp
from aiohttp import web
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

ENGINE = os.environ.get("ENGINE", "http://127.0.0.1:8000")
provider = TracerProvider(resource=Resource.create({"service.name": "my-gateway"}))
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=1000))
tracer = provider.get_tracer("my-gateway")


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass one request on to the engine, and its reply back as it comes."""
    caller = propagate.extract(request.headers)  # the client's traceparent
    with tracer.start_as_current_span("chat", context=caller, kind=trace.SpanKind.SERVER) as span:
        begin_s, first = time.monotonic(), True
        if request.path.endswith("/chat/completions"):  # not of other paths: each such span counts as a call of a model
            span.set_attribute("gen_ai.operation.name", "chat")
        body = await request.read()
        await asyncio.sleep(0.05)  # in place of what your gateway does: authentication, routing, limits
        headers = {"Content-Type": request.content_type}
        propagate.inject(headers)  # the engine's span becomes a child of this one
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, ENGINE + request.path_qs, data=body, headers=headers) as reply,
        ):
            answer = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
            await answer.prepare(request)
            async for chunk in reply.content.iter_any():
                if first:  # the attribute that makes the gateway's part exact, in seconds
                    span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - begin_s)
                    first = False
                await answer.write(chunk)
            return answer


if __name__ == "__main__":
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    web.run_app(app, host="127.0.0.1", port=9000)
