"""The simulated engine in virtual time: a load is played as fast as it can be computed, without sockets and sleeping.

The engine, its page and its truth are those of the server; between its client and it are a network that always takes
as long, and nothing else. The same settings and loads give the same requests, token stamps and pages, to the byte.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from simulator.engine.history import EngineRequest, RequestRecord, StepOutcome
from simulator.engine.scheduler import Engine
from simulator.settings import SimulatorSettings
from simulator.telemetry.pages import page_of

#: Where virtual time begins: int64 ns Unix.
EPOCH_NS = 1_700_000_000 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent, and when.

    requests     in order; an endless iterator will do where something else ends the load
    offsets_ns   of an open loop: when each is sent, from the start, ascending; None: a closed loop
    concurrency  of a closed loop: how many are in flight; the next is sent when one ends
    duration_s   nothing is sent from then on; None: until the requests or their offsets end
    """

    requests: Iterable[EngineRequest]
    offsets_ns: Sequence[int] | None = None
    concurrency: int = 1
    duration_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Exchange:
    """One request as its client saw it, and the truth about it; stamps are int64 ns.

    `token_ns` is when each token reached the client, `end_ns` when the reply ended. `status` is that of HTTP, `error`
    what a refusal says. `record` is None where the engine never finished it.
    """

    request: EngineRequest
    submit_ns: int
    token_ns: array[int] = field(default_factory=lambda: array("q"))
    end_ns: int = -1
    status: int = 200
    error: str = ""
    record: RequestRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A scrape: when it was asked for and answered at the scraper, int64 ns, and what the engine showed in between."""

    request_ns: int
    response_ns: int
    body: bytes
    content_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of a load: its requests in the order of submission, and its scrapes.

    `end_ns` is the end of the load: the stated duration, else the last submission. `steps` is what each step did, where
    that was asked for.
    """

    start_ns: int
    end_ns: int
    exchanges: list[Exchange]
    pages: list[Page]
    steps: list[StepOutcome]


class VirtualServer:
    """Own one engine, its page and its time, which goes on from load to load."""

    def __init__(self, settings: SimulatorSettings, *, network_s: float = 0.0, shown: bool = True) -> None:
        """`network_s` is how long a request and the first byte of its reply are on the way, together.

        Without `shown` there is no page, and loads are played faster.
        """
        self.now_ns = EPOCH_NS
        self.engine = Engine(settings.engine_settings)
        self._page = page_of(settings, lambda: self.now_ns, start_s=EPOCH_NS / 1e9) if shown else None
        self._rendered: tuple[bytes, str] | None = None
        self._way_ns = round(network_s * 1e9 / 2)

    def play(self, load: Load, *, scrape_s: float | None = None, keep_steps: bool = False) -> Played:
        """Play a load until its last request has ended; with `scrape_s`, a page at its start and at such intervals.

        The last scrape comes after that end.
        """
        client = _Client(load, self.now_ns)
        scrapes = _Scrapes(self.now_ns, scrape_s if self._page else None)
        steps: list[StepOutcome] = []
        while True:
            for exchange in client.due(self.now_ns - self._way_ns):
                arrival_ns = exchange.submit_ns + self._way_ns
                client.running[self.engine.submit(exchange.request, arrival_ns)] = exchange
            duration_s = self.engine.begin_step(self.now_ns)
            if duration_s is not None:
                at_ns = self.now_ns + round(duration_s * 1e9)
            elif (next_ns := client.next_ns()) is not None:
                at_ns = next_ns + self._way_ns
            else:
                break
            # A page shows nothing of a step before it has ended.
            self._scrape(scrapes, at_ns)
            self.now_ns = at_ns
            if duration_s is not None:
                outcome = self.engine.finish_step(at_ns)
                self._deliver(client, outcome)
                if keep_steps:
                    steps.append(outcome)
        self._scrape(scrapes, max(self.now_ns, client.end_ns), last=True)
        return Played(
            start_ns=client.start_ns, end_ns=client.end_ns, exchanges=client.sent, pages=scrapes.pages, steps=steps
        )

    def _deliver(self, client: _Client, outcome: StepOutcome) -> None:
        """Hand the tokens of a step to the client, who has them later by the network, and show the step."""
        arrival_ns = outcome.at_ns + self._way_ns
        finished = iter(outcome.finished)
        for output in outcome.tokens:
            client.running[output.number].token_ns.append(arrival_ns)
            if output.finish_reason is not None:
                client.finish(output.number, arrival_ns, next(finished))
        if self._page is not None:
            self._page.observe(outcome)
            self._rendered = None

    def _scrape(self, scrapes: _Scrapes, before_ns: int, *, last: bool = False) -> None:
        """Render the pages that are due before a moment, and with `last` the first after it."""
        if self._page is None:
            return
        for at_ns in scrapes.due(before_ns, last=last):
            self.now_ns = at_ns
            if self._rendered is None:
                self._rendered = self._page.page()
            body, content_type = self._rendered
            scrapes.pages.append(
                Page(
                    request_ns=at_ns - self._way_ns,
                    response_ns=at_ns + self._way_ns,
                    body=body,
                    content_type=content_type,
                )
            )


class _Client:
    """Own what was sent of a load, and know what is sent next; a request is submitted at the moment that is due."""

    def __init__(self, load: Load, start_ns: int) -> None:
        self.start_ns = start_ns
        self.sent: list[Exchange] = []
        #: Those in the engine, by its number.
        self.running: dict[int, Exchange] = {}
        self._requests = iter(load.requests)
        self._until_ns = None if load.duration_s is None else start_ns + round(load.duration_s * 1e9)
        due_ns = [0] * load.concurrency if load.offsets_ns is None else sorted(load.offsets_ns)
        self._due_ns = deque(start_ns + offset_ns for offset_ns in due_ns)
        self._is_closed = load.offsets_ns is None

    @property
    def end_ns(self) -> int:
        """Return when the load ended: as stated, else with the last submission."""
        return self._until_ns or max((exchange.submit_ns for exchange in self.sent[-1:]), default=self.start_ns)

    def next_ns(self) -> int | None:
        """Return when the next request is due, None when none is."""
        if not self._due_ns or (self._until_ns is not None and self._due_ns[0] >= self._until_ns):
            return None
        return self._due_ns[0]

    def due(self, now_ns: int) -> Iterator[Exchange]:
        """Send what is due by now."""
        while (at_ns := self.next_ns()) is not None and at_ns <= now_ns:
            self._due_ns.popleft()
            request = next(self._requests, None)
            if request is None:
                self._due_ns.clear()
                return
            exchange = Exchange(request=request, submit_ns=at_ns)
            self.sent.append(exchange)
            yield exchange

    def finish(self, number: int, at_ns: int, record: RequestRecord) -> None:
        """End a request; a closed loop sends the next at once."""
        exchange = self.running.pop(number)
        exchange.end_ns, exchange.record = at_ns, record
        if self._is_closed:
            self._due_ns.append(at_ns)


class _Scrapes:
    """Own the scrapes of a load, and know when the next is due."""

    def __init__(self, start_ns: int, every_s: float | None) -> None:
        self.pages: list[Page] = []
        self._next_ns = start_ns
        self._every_ns = None if every_s is None else round(every_s * 1e9)

    def due(self, before_ns: int, *, last: bool) -> Iterator[int]:
        """Give the moments that are due before another, and with `last` the first from there on."""
        while self._every_ns is not None and (self._next_ns < before_ns or last):
            last = last and self._next_ns < before_ns
            at_ns, self._next_ns = self._next_ns, self._next_ns + self._every_ns
            yield at_ns
