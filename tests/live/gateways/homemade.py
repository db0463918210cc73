"""A gateway that no catalogue can know: aiohttp with OpenTelemetry's own instrumentation, as anybody would write it.

It holds each call of a model back by HOLD_MS, as authentication would, and passes it on to ENGINE. It sets no attribute
and sends no span that the instrumentation does not send by itself. Spans go to OTEL_EXPORTER_OTLP_ENDPOINT by gRPC.
"""

import asyncio
import os
from collections.abc import AsyncIterator

from aiohttp import ClientSession, ClientTimeout, web
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.aiohttp_client import AioHttpClientInstrumentor
from opentelemetry.instrumentation.aiohttp_server import AioHttpServerInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

HOLD_S = float(os.environ["HOLD_MS"]) / 1e3
SESSION = web.AppKey("session", ClientSession)


async def forward(request: web.Request) -> web.StreamResponse:
    """Pass a request on, and its reply back piece by piece."""
    body = await request.read()
    if request.method == "POST":
        await asyncio.sleep(HOLD_S)
    headers = {"Content-Type": request.content_type}
    async with request.app[SESSION].request(request.method, request.path_qs, data=body, headers=headers) as reply:
        answer = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.content_type})
        await answer.prepare(request)
        async for piece in reply.content.iter_any():
            await answer.write(piece)
        return answer


async def session(app: web.Application) -> AsyncIterator[None]:
    """Keep the connections to the engine while the gateway runs."""
    async with ClientSession(os.environ["ENGINE"], timeout=ClientTimeout(total=None)) as connections:
        app[SESSION] = connections
        yield


def main() -> None:
    """Serve at PORT of the loopback."""
    provider = TracerProvider()  # OTEL_SERVICE_NAME names it
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(insecure=True)))
    trace.set_tracer_provider(provider)
    AioHttpServerInstrumentor().instrument()
    AioHttpClientInstrumentor().instrument()
    app = web.Application()
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", forward)
    web.run_app(app, host="127.0.0.1", port=int(os.environ["PORT"]), print=None)


if __name__ == "__main__":
    main()
