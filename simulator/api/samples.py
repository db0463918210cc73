"""Several replies to one prompt, as SGLang streams them: the prompt is prefilled once, then each reply is a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace

from aiohttp import web

from sidelight.simulator.api.requests import Generation
from sidelight.simulator.api.responses import DONE, ReplyInfo, event_template, token_events, usage_event
from sidelight.simulator.api.service import SERVICE, reply_id, submitted, whole
from sidelight.simulator.engine.driver import TokenStream
from sidelight.simulator.engine.history import Role, TokenOutput


async def several(
    request: web.Request, generation: Generation, arrival_ns: int, *, chat: bool, client_id: str, traceparent: str
) -> web.StreamResponse:
    """Answer with the interleaved events of `generation.samples` replies, each with its own index and id.

    Raises EngineStoppedError where the engine stops.
    """
    service = request.app[SERVICE]
    async with AsyncExitStack() as stack:

        async def submit(wanted: Generation, role: Role) -> tuple[TokenStream, ReplyInfo]:
            name = reply_id(service, "", client_id)
            return await stack.enter_async_context(
                submitted(service, wanted, name, arrival_ns, traceparent, client_id=client_id, role=role)
            )

        prefix, _ = await submit(replace(generation, max_tokens=1), "prefix")
        await whole(prefix)
        replies = [await submit(generation, "request") for _ in range(generation.samples)]
        templates = [
            event_template(info, chat=chat, continuous_usage=generation.continuous_usage, choice=index)
            for index, (_, info) in enumerate(replies)
        ]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        output_tokens = 0
        with suppress(ConnectionResetError):
            async with aclosing(_interleaved([stream for stream, _ in replies])) as arriving:
                async for index, outputs in arriving:
                    if not response.prepared:
                        await response.prepare(request)
                    output_tokens += len(outputs)
                    await response.write(token_events(templates[index], outputs))
            usage = usage_event(templates[0], output_tokens) if generation.include_usage else b""
            await response.write(usage + DONE)
            await response.write_eof()
        return response


async def _interleaved(streams: Sequence[TokenStream]) -> AsyncGenerator[tuple[int, list[TokenOutput]], None]:
    """Yield the tokens of streams as they come, with the stream's index, until all end."""
    waiting = {asyncio.ensure_future(stream.take()): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            ready, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                index, outputs = waiting.pop(task), task.result()
                if outputs[-1].finish_reason is None:
                    waiting[asyncio.ensure_future(streams[index].take())] = index
                yield index, outputs
    finally:
        for task in waiting:
            task.cancel()
