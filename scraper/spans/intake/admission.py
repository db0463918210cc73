"""Admission of exports from either wire: who may send, for how long, and while there is memory for it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from sidelight.rundir.process import MemoryLimit
from sidelight.scraper.spans.intake.export import ExportRefusal, incomplete, no_memory, turned_away, unauthorized
from sidelight.scraper.spans.spec import TRACES, ReceiverSpec

WHOLE_S = 10.0  # an exporter's own patience; after this its answer comes too late

# Takes a whole export of a signal (the second: of a wire), and returns the reply. Raises Refusal, MemoryError.
Take = Callable[[str, str, bytes], Awaitable[bytes]]


class Admission:
    """Admission of exports. Those that are refused are counted by kind, and of each kind the first is said."""

    def __init__(self, spec: ReceiverSpec, take: Take, *, say_once: Callable[[str, str], None]) -> None:
        self.limit_bytes = spec.limit_bytes
        self.refused: Counter[str] = Counter()
        self.is_ending = False
        self._guard, self._memory = spec.guard, MemoryLimit(spec.memory_bytes)
        self._take, self._say_once = take, say_once

    async def admit(self, signal: str, via: str, authorization: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Read an export and take it. Raises Refusal, which is then counted and said already."""
        try:
            if not self._guard.admits(authorization):
                raise unauthorized()
            self.require_memory()
            async with asyncio.timeout(WHOLE_S):
                return await self._take(signal, via, await read())
        except TimeoutError:
            raise self._counted(signal, via, turned_away(f"not taken within {WHOLE_S:g} s")) from None
        except MemoryError:
            raise self._counted(signal, via, no_memory(self._memory.most_bytes)) from None
        except ExportRefusal as refusal:
            raise self._counted(signal, via, refusal) from None
        except asyncio.CancelledError:
            self._counted(signal, via, self.departure())
            raise

    def require_memory(self) -> None:
        """Raise Refusal where the process is at its limit of memory."""
        if self._memory.is_reached():
            raise no_memory(self._memory.most_bytes)

    def departure(self) -> ExportRefusal:
        """Return the refusal of an export that does not come whole, by who ended it."""
        return turned_away("the receiver ends") if self.is_ending else incomplete()

    def note_noise(self, text: str) -> None:
        """Count a peer that does not speak HTTP."""
        self.refused["malformed"] += 1
        self._say_once("noise", f"at the port for spans over http: {text}")

    def _counted(self, signal: str, via: str, refusal: ExportRefusal) -> ExportRefusal:
        self.refused[refusal.count] += 1
        of = "spans" if signal == TRACES else signal
        self._say_once(refusal.count, f"an export of {of} over {via} is refused: {refusal.text}")
        return refusal
