"""An engine's page: what it counted up to the moment at which it is asked, over as many lives as it has."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.schedules.network import Listener, Network
from faults.schedules.traffic import Request, now_ms
from faults.schedules.virtual_time import Time

PORT = 8000
URL = f"http://127.0.0.1:{PORT}/metrics"
FINISHED, PAGES, STARTED = "vllm:request_success_total", "vllm:pages_total", "process_start_time_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One page: when it was made, ns by the monotonic clock, in which life, and how many requests it counts."""

    at_ns: int
    life: int
    finished: int


@dataclass(kw_only=True)
class Engine:
    """Counts the requests that ended since it began; `cut` is the share of pages of which only a part is sent."""

    network: Network
    clock: Time
    rng: random.Random
    requests: Sequence[Request]
    cut: float = 0.0
    served: list[Served] = field(default_factory=list)
    _life: int = 0
    _began_ms: float = 0.0
    _listener: Listener | None = None

    async def begin(self) -> None:
        """Begin a life: counters start from nothing."""
        self._life += 1
        self._began_ms = now_ms(self.clock)
        self._listener = await self.network.serve(PORT, self._answer)

    def end(self) -> None:
        """Answer no more."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _page(self) -> bytes:
        finished = [request for request in self.requests if self._began_ms <= request.end_ms <= now_ms(self.clock)]
        self.served.append(Served(at_ns=self.clock.now_ns, life=self._life, finished=len(finished)))
        lines = [
            f"# TYPE {FINISHED} counter",
            f'{FINISHED}{{model_name="m",finished_reason="stop"}} {len(finished)}',
            f"# TYPE {PAGES} counter",
            f"{PAGES} {len(self.served)}",
            f"# TYPE {STARTED} gauge",
            f"{STARTED} {1e9 + self._life}",
        ]
        for name in ("queue", "prefill"):
            total_s = sum(getattr(request, f"{name}_ms") for request in finished) / 1e3
            family = f"vllm:request_{name}_time_seconds"
            lines += [
                f"# TYPE {family} histogram",
                f'{family}_bucket{{model_name="m",le="+Inf"}} {len(finished)}',
                f'{family}_sum{{model_name="m"}} {total_s!r}',
                f'{family}_count{{model_name="m"}} {len(finished)}',
            ]
        return "".join(f"{line}\n" for line in lines).encode()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        life = self._life
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                if life != self._life:
                    return
                page = self._page()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(page)}\r\n\r\n"
                is_cut = not self.network.is_calm and self.rng.random() < self.cut
                writer.write(head.encode() + (page[: self.rng.randrange(len(page))] if is_cut else page))
                if is_cut:
                    return
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
