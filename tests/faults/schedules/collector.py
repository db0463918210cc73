"""The next collector, which takes exports over HTTP: it is away for a while, or busy."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from faults.schedules.network import Listener, Network

PORT = 4400


@dataclass(kw_only=True)
class Collector:
    """What it took, in order; `busy` is the share of exports that are to come again."""

    network: Network
    rng: random.Random
    busy: float = 0.0
    taken: list[bytes] = field(default_factory=list)
    _listener: Listener | None = None

    async def come(self) -> None:
        """Listen."""
        if self._listener is None:
            self._listener = await self.network.serve(PORT, self._answer)

    def go(self) -> None:
        """Listen no more; connections that are open stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = int(head.partition("content-length:")[2].partition("\r\n")[0])
                export = await reader.readexactly(size)
                if not self.network.is_calm and self.rng.random() < self.busy:
                    reply = b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
                else:
                    self.taken.append(export)
                    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
                writer.write(reply)
                await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
