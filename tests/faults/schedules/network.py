"""A network in memory: connections whose bytes take their time, stop, or end in a reset, as a seed says.

It carries what the product sends over sockets, byte for byte. gRPC, whose sockets are its library's own, is in
`calls`.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from faults.schedules.processes import Process, is_ghost, running
from faults.schedules.virtual_time import VirtualLoop

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HOST = "127.0.0.1"
_FIRST_PORT = 20_000


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How a network is: of connections, the share that is reset, or silent from some byte on; how long bytes take."""

    resets: float = 0.0
    silences: float = 0.0
    slow: float = 0.0
    delay_s: float = 0.001
    slow_s: float = 4.0


class NetworkLoop(VirtualLoop):
    """A virtual loop with a network."""

    network: Network

    async def create_connection(
        self, factory: Callable[[], Any], _host: Any = None, port: int = 0, *, sock: Any = None, **_: Any
    ) -> tuple[End, Any]:
        half = sock or await self.network.connect(port)
        protocol = factory()
        return End(self.network, half, protocol).begin(), protocol

    async def create_server(self, factory: Callable[[], Any], *, sock: Listener, **_: Any) -> Listener:
        self.network.answer(sock, factory)
        return sock

    async def getaddrinfo(self, _host: Any, port: Any, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (HOST, port))]


class Network:
    """Owns the ports; each connection draws its fate when it is made."""

    def __init__(self, loop: NetworkLoop, rng: random.Random, weather: Weather) -> None:
        self.loop, self.rng, self.weather = loop, rng, weather
        loop.network = self
        self.is_calm = False
        self.listeners: dict[int, Listener] = {}
        self.ends: dict[End, None] = {}
        self._port = _FIRST_PORT

    def names(self) -> list[str]:
        """Return whose connections are open, and whose ports: of processes that were started."""
        open_ends = [end.process for end in self.ends] + [listener.process for listener in self.listeners.values()]
        return [process.name for process in open_ends if process is not None]

    def delay_s(self) -> float:
        """Return how long the next bytes take."""
        if not self.is_calm and self.rng.random() < self.weather.slow:
            return self.rng.uniform(0.0, self.weather.slow_s)
        return self.rng.uniform(0.2, 2.0) * self.weather.delay_s

    def listen(self, place: tuple[str, int], **_: Any) -> Listener:
        """Stand in for `socket.create_server`."""
        if is_ghost():
            raise OSError(errno.EIO, "this process was killed")
        port = place[1]
        if port in self.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        while not port or port in self.listeners:
            port = self._port = self._port + 1
        listener = Listener(self, port, running.get())
        self.listeners[port] = listener
        return listener

    async def connect(self, port: int) -> Half:
        """Return our half of a new connection. Raises OSError."""
        await asyncio.sleep(self.delay_s())
        listener = self.listeners.get(port)
        if listener is None or is_ghost():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        ours, theirs = Half.pair(self)
        listener.arrive(theirs)
        return ours

    async def serve(self, port: int, answer: Answer) -> Listener:
        """Serve as a peer that is not under test, in the process that asks for it."""
        listener = self.listen((HOST, port))
        self.answer(listener, lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), answer))
        return listener

    def answer(self, listener: Listener, factory: Callable[[], Any]) -> None:
        """Give each connection of a listener a protocol, in the process that asks for it."""

        def accept() -> None:
            half, _ = listener.accept()
            End(self, half, factory()).begin()

        context = contextvars.copy_context()
        listener.watch(lambda: context.run(accept))


class Listener:
    """A socket that listens."""

    def __init__(self, network: Network, port: int, process: Process | None) -> None:
        self.port, self.process, self._network = port, process, network
        self._waiting: list[Half] = []
        self._callback: Callable[[], object] | None = None
        self._context = contextvars.copy_context()
        if process is not None:
            process.at_death.append(self.close)

    def setblocking(self, _: object) -> None:
        """Take what a socket takes."""

    def getsockname(self) -> tuple[str, int]:
        return HOST, self.port

    def watch(self, callback: Callable[[], object] | None) -> None:
        self._callback = callback
        self._tell()

    def arrive(self, half: Half) -> None:
        self._waiting.append(half)
        self._tell()

    def accept(self) -> tuple[Half, tuple[str, int]]:
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.pop(0), (HOST, 1)

    def close(self) -> None:
        if self._network.listeners.get(self.port) is self:
            del self._network.listeners[self.port]
        for half in self._waiting:
            half.other.reset()
        self._waiting.clear()

    def _tell(self) -> None:
        if self._waiting and self._callback is not None:
            self._network.loop.call_soon(self._callback, context=self._context)


class Half:
    """One side of a connection. What is sent comes to the other in order, after a while, or never."""

    other: Half

    def __init__(self, network: Network) -> None:
        self.network, self.end = network, None
        self._inbox: list[Callable[[End], object]] = []
        self._due_s = 0.0
        rng, weather = network.rng, network.weather
        fate = 1.0 if network.is_calm else rng.random()
        self._breaks = (
            "reset" if fate < weather.resets else "silence" if fate < weather.resets + weather.silences else ""
        )
        self._left = rng.choice((0, 1, rng.randrange(1, 400), rng.randrange(1, 4000)))  # bytes until it breaks
        self.end: End | None = None
        self.is_over = False

    @classmethod
    def pair(cls, network: Network) -> tuple[Half, Half]:
        ours, theirs = cls(network), cls(network)
        ours.other, theirs.other = theirs, ours
        return ours, theirs

    # As a socket has them; asyncio and aiohttp ask for no more.
    type, family, proto = socket.SOCK_STREAM, socket.AF_INET, 0

    def setblocking(self, _: object) -> None:
        """Take what a socket takes."""

    def close(self) -> None:
        """End it, where no transport does."""
        if self.end is None:
            self.send_end()

    def send(self, data: bytes) -> None:
        if self._breaks and len(data) >= self._left:
            data, is_reset = data[: self._left], self._breaks == "reset"
            self._left = 0
            if data:
                self._later(lambda end: end.take(data))
            if is_reset:
                self._later(lambda end: end.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")))
                self.network.loop.call_later(self.network.delay_s(), self.reset, context=contextvars.Context())
            return
        self._left -= len(data)
        self._later(lambda end: end.take(data))

    def send_end(self) -> None:
        if not self.is_over and not (self._breaks == "silence" and self._left <= 0):
            self._later(lambda end: end.finish())
        self.is_over = True

    def reset(self) -> None:
        """Let this side see a reset."""
        self._act(lambda end: end.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")))

    def open(self, end: End) -> None:
        self.end = end
        for act in self._inbox:
            end.act(act)
        self._inbox.clear()

    def _later(self, act: Callable[[End], object]) -> None:
        loop = self.network.loop
        self._due_s = max(self._due_s + 1e-6, loop.time() + self.network.delay_s())  # in order
        loop.call_at(self._due_s, self.other._act, act, context=contextvars.Context())

    def _act(self, act: Callable[[End], object]) -> None:
        if self.end is None:
            self._inbox.append(act)
        else:
            self.end.act(act)


class End(asyncio.Transport):
    """A transport at one half of a connection; it is its process's, and breaks off with it."""

    def __init__(self, network: Network, half: Half, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._network, self._half, self._protocol = network, half, protocol
        self._context = contextvars.copy_context()
        self._is_closing = self._is_paused = False
        self._acts: list[Callable[[End], object]] = []  # that are still to be seen
        self.process = running.get()
        network.ends[self] = None
        if self.process is not None:
            self.process.at_death.append(self.die)

    def begin(self) -> End:
        self._protocol.connection_made(self)
        self._half.open(self)
        return self

    def act(self, act: Callable[[End], object]) -> None:
        self._acts.append(act)
        self._go_on()

    def _go_on(self) -> None:
        while self._acts and not self._is_paused and not (self.process and self.process.is_dead):
            self._context.copy().run(self._acts.pop(0), self)

    def take(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def finish(self) -> None:
        if not self._is_closing and not self._protocol.eof_received():
            self.close()

    def fail(self, error: Exception) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._half.is_over = True
            self._lost(error)

    def die(self) -> None:
        """End with the process: the other side sees a reset."""
        if not self._half.is_over:
            self._half.is_over = True
            self._half._later(lambda end: end.fail(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")))
        self._network.ends.pop(self, None)

    def write(self, data: Any) -> None:
        if not self._is_closing and not is_ghost():
            self._half.send(bytes(data))

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not is_ghost():
                self._half.send_end()
            self._network.loop.call_soon(self._lost, None, context=self._context)

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not is_ghost():
                self.die()
            self._network.loop.call_soon(self._lost, None, context=self._context)

    def _lost(self, error: Exception | None) -> None:
        self._network.ends.pop(self, None)
        if self.process is not None and self.die in self.process.at_death:
            self.process.at_death.remove(self.die)
        self._protocol.connection_lost(error)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._network.loop.call_soon(self._go_on, context=contextvars.Context())

    def is_reading(self) -> bool:
        return not self._is_paused and not self._is_closing

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": (HOST, 1), "sockname": (HOST, 2)}.get(name, default)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._half.send_end()

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass
