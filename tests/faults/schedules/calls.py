"""gRPC as its servers see it: calls that reach the handlers of a server, without its library's sockets and threads."""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any

from faults.schedules.network import HOST, Network
from faults.schedules.processes import is_ghost, running
from grpc import aio


class CallFailed(Exception):
    """A call that was not answered, or not with a reply; the text is its status."""


class _Aborted(Exception):
    """What ends a handler that has refused its call."""


class _Context:
    def __init__(self, body: bytes) -> None:
        self.status = ""
        self._bodies = [body]

    async def read(self) -> Any:
        return self._bodies.pop() if self._bodies else aio.EOF

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, code: Any, details: str = "", _: Any = ()) -> None:
        self.status = f"{code.name}: {details}"
        raise _Aborted


class Server:
    """Stands in for the server of `grpc.aio`."""

    network: Network  # that the next servers are in

    def __init__(self, **_: Any) -> None:
        self._handlers: list[Any] = []
        self._calls: dict[asyncio.Task[Any], None] = {}
        self._context = contextvars.copy_context()
        self._listener: Any = None

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        self._handlers += handlers

    def add_insecure_port(self, address: str) -> int:
        port = int(address.rpartition(":")[2])
        try:
            self._listener = self.network.listen((HOST, port))
        except OSError as error:
            raise RuntimeError(str(error)) from error
        self._listener.server = self
        return int(self._listener.port)

    async def start(self) -> None:
        """Answer from now on."""

    async def stop(self, grace: float) -> None:
        self._listener.close()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        for call in list(self._calls):
            call.cancel()

    async def take(self, method: str, body: bytes) -> bytes:
        """Answer a call in this server's process. Raises CallFailed."""
        context = _Context(body)
        handler = next(filter(None, (each.service(SimpleNamespace(method=method)) for each in self._handlers)))

        async def answer() -> bytes:
            return bytes(await handler.stream_unary((), context))

        call = self._context.copy().run(asyncio.get_running_loop().create_task, answer())
        self._calls[call] = None
        call.add_done_callback(lambda done: self._calls.pop(done, None))
        try:
            await asyncio.wait([call])
            return call.result()
        except _Aborted:
            raise CallFailed(context.status) from None
        except asyncio.CancelledError:
            if not call.cancelled():  # who asked has gone, which its server learns
                call.cancel()
                raise
            raise CallFailed("CANCELLED") from None


async def call(network: Network, port: int, method: str, body: bytes) -> bytes:
    """Make a call as an exporter does. Raises CallFailed, and waits for ever where the network is silent."""
    rng, weather = network.rng, network.weather
    await asyncio.sleep(network.delay_s())
    fate = 1.0 if network.is_calm else rng.random()
    is_heard = rng.random() < 0.7  # of one that breaks
    listener = network.listeners.get(port)
    if listener is None or (fate < weather.resets and not is_heard):
        raise CallFailed("UNAVAILABLE: connection refused")
    server: Server = listener.server
    process = server._context.get(running)
    asking = asyncio.ensure_future(server.take(method, body))
    try:
        if process is None:
            return await asking
        dying = asyncio.ensure_future(process.ended.wait())
        await asyncio.wait([asking, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if process.is_dead:
            raise CallFailed("UNAVAILABLE: connection reset")
        reply = await asking
    finally:
        asking.cancel()
    if fate < weather.resets or is_ghost():
        raise CallFailed("UNAVAILABLE: connection reset")
    if fate < weather.resets + weather.silences:
        await asyncio.Event().wait()
    await asyncio.sleep(network.delay_s())
    return reply
