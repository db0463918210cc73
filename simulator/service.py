"""What those who serve requests work with, whatever protocol they speak."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from simulator.dialects import Told
from simulator.driver import EngineDriver, TokenStream
from simulator.history import EngineRequest
from simulator.pages import EnginePage
from simulator.requests import Generation
from simulator.settings import SimulatorSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The engine in real time, its page, its settings and its clock (ns Unix)."""

    settings: SimulatorSettings
    driver: EngineDriver
    page: EnginePage
    clock: Callable[[], int]


SERVICE = web.AppKey("service", Service)


@asynccontextmanager
async def submitted(
    service: Service, generation: Generation, response_id: str, arrival_ns: int, traceparent: str = ""
) -> AsyncIterator[tuple[TokenStream, Told]]:
    """Hand a request to the engine; it is abandoned at the end of the block unless it has finished.

    Raises EngineStoppedError when the engine does not run any more.
    """
    request = EngineRequest(
        request_id=response_id,
        prompt_token_ids=generation.prompt_token_ids,
        max_tokens=generation.max_tokens,
        ignore_eos=generation.ignore_eos,
        streamed=generation.stream,
        traceparent=traceparent,
    )
    told = Told(
        response_id=response_id,
        model=service.settings.model,
        created_s=arrival_ns // 1_000_000_000,
        prompt_tokens=len(generation.prompt_token_ids),
    )
    stream = service.driver.submit(request, arrival_ns)
    try:
        yield stream, told
    finally:
        service.driver.abandon(stream)
