"""The simulated engine in virtual time: a load is played as fast as it can be computed, without sockets and sleeping.

The engine, its gateway, its page and its truth are those of the server; before them is a network that always takes as
long, and a client that loses no time. The same settings and loads give the same requests, token stamps and pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from sidelight.simulator.api.gateway import SimulatedGateway
from sidelight.simulator.api.requests import RefusedError
from sidelight.simulator.engine.history import OUT_OF_MEMORY, EngineRequest, RequestRecord, StepOutcome
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.telemetry.pages import page_of

#: Where virtual time begins: int64 ns Unix.
EPOCH_NS = 1_700_000_000 * 10**9
#: A refusal is no work, but takes some time: else a closed loop would be refused for ever at one instant.
_REFUSAL_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLoad:
    """Requests to send, and their schedule.

    requests     in order; an endless iterator will do where something else ends the load
    offsets_ns   of an open loop: when each is sent, from the start, ascending; None: a closed loop
    concurrency  of a closed loop: number of requests in flight; the next is sent when one ends
    duration_s   nothing is sent from then on; None: until the requests or their offsets end
    """

    requests: Iterable[EngineRequest]
    offsets_ns: Sequence[int] | None = None
    concurrency: int = 1
    duration_s: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class VirtualExchange:
    """One request as its client saw it, and the truth about it; stamps are int64 ns.

    `token_ns` is when each token reached the client, `end_ns` when the reply ended. `status` is that of HTTP, `error`
    what failed, as a request log has it. `record` is None where the engine never saw it. `held` tokens are held back,
    others were let go until `released_ns`.
    """

    request: EngineRequest
    submit_ns: int
    token_ns: array[int] = field(default_factory=lambda: array("q"))
    end_ns: int = -1
    status: int = 200
    error: str = ""
    record: RequestRecord | None = None
    held: int = 0
    released_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPage:
    """A scrape: its request and answer at the scraper, int64 ns, and the engine's values."""

    request_ns: int
    response_ns: int
    body: bytes
    content_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Results of a load: its requests in order of submission, its scrapes, and requested steps.

    `end_ns` is the end of the load: the stated duration, else the last submission.
    """

    start_ns: int
    end_ns: int
    exchanges: list[VirtualExchange]
    pages: list[VirtualPage]
    steps: list[StepOutcome]


class VirtualServer:
    """An engine, its gateway, its page and its time, which continues from load to load."""

    def __init__(
        self,
        settings: SimulatorSettings,
        *,
        network_s: float = 0.0,
        shown: bool = True,
        start_ns: int = EPOCH_NS,
        keep_steps: bool = False,
    ) -> None:
        """Create the engine. `network_s` is the time on the way of a request and its reply's first byte, together.

        Without `shown` there is no page, and loads are played faster. `keep_steps` is that of the engine.
        """
        self.now_ns = start_ns
        self.engine = SimulatedEngine(settings.engine_settings, keep_steps=keep_steps, start_ns=start_ns)
        self.gateway = SimulatedGateway(settings.gateway, settings.engine_settings.seed)
        self._page = page_of(settings, lambda: self.now_ns, start_s=start_ns / 1e9) if shown else None
        self._rendered: tuple[bytes, str] | None = None
        self.way_ns = round(network_s * 1e9 / 2)

    def play(self, load: SimulatedLoad, *, scrape_s: float | None = None, keep_steps: bool = False) -> Played:
        """Play a load until its last request has ended; with `scrape_s`, a page at its start and at such intervals.

        The last scrape comes after that end.
        """
        traffic = _Traffic(load, self)
        scrapes = _Scrapes(self.now_ns, scrape_s if self._page else None)
        steps: list[StepOutcome] = []
        while True:
            traffic.advance(self.now_ns)
            duration_s = self.engine.begin_step(self.now_ns)
            at_ns = traffic.next_ns if duration_s is None else self.now_ns + round(duration_s * 1e9)
            if at_ns is None:
                break
            # A page shows nothing of a step before it has ended.
            self._scrape(scrapes, at_ns)
            traffic.advance(at_ns - 1)
            self.now_ns = at_ns
            if duration_s is not None:
                outcome = self.engine.finish_step(at_ns)
                traffic.deliver(outcome)
                self._show(outcome)
                if keep_steps:
                    steps.append(outcome)
        self.now_ns = max(self.now_ns, traffic.end_ns)
        self._scrape(scrapes, self.now_ns, last=True)
        return Played(
            start_ns=traffic.start_ns, end_ns=traffic.end_ns, exchanges=traffic.sent, pages=scrapes.pages, steps=steps
        )

    def _show(self, outcome: StepOutcome) -> None:
        if self._page is not None:
            self._page.observe(outcome)
            for _, record in outcome.lost:
                self._page.abort(record)
            self._rendered = None

    def _scrape(self, scrapes: _Scrapes, before_ns: int, *, last: bool = False) -> None:
        """Render the pages due before a moment, and with `last` the first after it."""
        if self._page is None:
            return
        for at_ns in scrapes.due(before_ns, last=last):
            self.now_ns = at_ns
            if self._rendered is None:
                self._rendered = self._page.page()
            body, content_type = self._rendered
            scrapes.pages.append(
                VirtualPage(
                    request_ns=at_ns - self.way_ns,
                    response_ns=at_ns + self.way_ns,
                    body=body,
                    content_type=content_type,
                )
            )


class _Traffic:
    """Sent requests of a load, and the events to come between clients and engine.

    Events are in order of time.
    """

    def __init__(self, load: SimulatedLoad, server: VirtualServer) -> None:
        self.start_ns = server.now_ns
        self.sent: list[VirtualExchange] = []
        self._server = server
        self._running: dict[int, VirtualExchange] = {}  # by the engine's numbers
        self._requests = iter(load.requests)
        self._until_ns = None if load.duration_s is None else self.start_ns + round(load.duration_s * 1e9)
        self._is_closed = load.offsets_ns is None
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._scheduled = 0
        for offset_ns in [0] * load.concurrency if load.offsets_ns is None else load.offsets_ns:
            self._submit_at(self.start_ns + offset_ns)

    @property
    def end_ns(self) -> int:
        """Return the end of the load: the stated one, else the last submission."""
        return self._until_ns or max((exchange.submit_ns for exchange in self.sent), default=self.start_ns)

    @property
    def next_ns(self) -> int | None:
        """Return the time of the next event, None without any."""
        return self._events[0][0] if self._events else None

    def advance(self, now_ns: int) -> None:
        """Run the events due by now."""
        while self._events and self._events[0][0] <= now_ns:
            at_ns, _, event = heappop(self._events)
            event(at_ns)

    def deliver(self, outcome: StepOutcome) -> None:
        """Send the tokens of a step, and end the requests it ended."""
        finished = iter(outcome.finished)
        for output in outcome.tokens:
            exchange = self._running[output.number]
            is_last = output.finish_reason is not None
            self._release(exchange, outcome.at_ns, is_last=is_last)
            if is_last:
                exchange.record = next(finished)
                self._at(exchange.released_ns, partial(self._end, self._running.pop(output.number)))
        for number, record in outcome.lost:
            exchange = self._running.pop(number)
            exchange.record, exchange.error = record, f"server: {OUT_OF_MEMORY}"
            self._at(outcome.at_ns, partial(self._end, exchange))

    def _release(self, exchange: VirtualExchange, at_ns: int, *, is_last: bool) -> None:
        """Release a token, or hold it back until the guardrail has enough to check."""
        way_ns, gateway = self._server.way_ns, self._server.gateway.settings
        exchange.held += 1
        if exchange.held >= gateway.hold_tokens or is_last:
            looked_at_ns = max(at_ns, exchange.released_ns) + round(gateway.hold_s * 1e9)
            exchange.released_ns = looked_at_ns if gateway.hold_tokens else at_ns
            exchange.token_ns.extend([exchange.released_ns + way_ns] * exchange.held)
            exchange.held = 0

    def _at(self, at_ns: int, event: Callable[[int], None]) -> None:
        """Schedule an event. Events at the same moment run in the order of scheduling."""
        self._scheduled += 1
        heappush(self._events, (at_ns, self._scheduled, event))

    def _submit_at(self, at_ns: int) -> None:
        if self._until_ns is None or at_ns < self._until_ns:
            self._at(at_ns, self._submit)

    def _submit(self, at_ns: int) -> None:
        request = next(self._requests, None)
        if request is not None:
            exchange = VirtualExchange(request=request, submit_ns=at_ns)
            self.sent.append(exchange)
            self._at(at_ns + self._server.way_ns, partial(self._arrive, exchange))

    def _arrive(self, exchange: VirtualExchange, at_ns: int) -> None:
        try:
            self._server.gateway.admit()
        except RefusedError as error:
            self._refuse(at_ns + _REFUSAL_NS, exchange, error)
            return
        wait_s = self._server.gateway.input_s(len(exchange.request.prompt_token_ids))
        self._at(at_ns + round(wait_s * 1e9), partial(self._checked, exchange))

    def _checked(self, exchange: VirtualExchange, at_ns: int) -> None:
        try:
            self._server.gateway.check(exchange.request.prompt_token_ids)
        except RefusedError as error:
            self._server.gateway.leave()
            self._refuse(at_ns + _REFUSAL_NS, exchange, error)
            return
        self._running[self._server.engine.submit(exchange.request, at_ns)] = exchange

    def _refuse(self, at_ns: int, exchange: VirtualExchange, error: RefusedError) -> None:
        exchange.status, exchange.error = error.status, f"http_{error.status}: {error.message}"
        self._answered(at_ns, exchange)

    def _end(self, exchange: VirtualExchange, at_ns: int) -> None:
        self._server.gateway.leave()
        self._answered(at_ns, exchange)

    def _answered(self, at_ns: int, exchange: VirtualExchange) -> None:
        """End a request at its client; a closed loop sends the next at once."""
        exchange.end_ns = at_ns + self._server.way_ns
        if self._is_closed:
            self._submit_at(exchange.end_ns)


class _Scrapes:
    """The scrapes of a load, and the time of the next."""

    def __init__(self, start_ns: int, every_s: float | None) -> None:
        self.pages: list[VirtualPage] = []
        self._next_ns = start_ns
        self._every_ns = None if every_s is None else round(every_s * 1e9)

    def due(self, before_ns: int, *, last: bool) -> Iterator[int]:
        """Yield the moments due before another, and with `last` the first from there on."""
        while self._every_ns is not None and (self._next_ns < before_ns or last):
            last = last and self._next_ns < before_ns
            at_ns, self._next_ns = self._next_ns, self._next_ns + self._every_ns
            yield at_ns
