"""Requests at an engine that batches continuously, as their clients saw them, and the engine's records of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import recordings

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.scraper.perf_metrics import Timings

EPOCH_NS = 1_700_000_000 * 10**9
URL = "http://engine.test:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What goes on at an engine; times in s, shares 0 to 1.

    rate_per_s    of arrivals, `batch` at a time and at least `gap_s` apart; not of a closed loop of `concurrency`
    network_s     least and mean further network time to or from the engine, exponential beyond the least
    stalls_per_s  how often the server, and the client, do nothing for 5 to 50 ms: what comes then is stamped after it
    unmatched     share of requests of other clients; cancelled: of ours, by their end
    lost          share of records that could not be read; clock_s: by how much the clock may be misread
    """

    requests: int = 300
    rate_per_s: float = 20.0
    batch: int = 1
    gap_s: float = 0.0
    concurrency: int = 0
    slots: int = 32
    tokens: tuple[int, int] = (20, 60)
    prefill_s: tuple[float, float] = (0.0, 0.03)
    network_s: tuple[float, float] = (0.3e-3, 0.3e-3)
    stalls_per_s: float = 0.0
    unmatched: float = 0.0
    cancelled: float = 0.0
    lost: float = 0.0
    clock_s: float = 0.0
    streamed: bool = True


@dataclass(slots=True)
class _Request:
    submit_s: float
    arrival_s: float
    prefill_s: float
    left: int
    ours: bool
    scheduled_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    output_s: float = 0.0
    end_s: float = 0.0


class _Play:
    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self.world, self.rng = world, rng
        self.requests: list[_Request] = []
        self.to_come: list[tuple[float, int]] = []
        self.server, self.client = self._stalls(), self._stalls()

    def _stalls(self) -> Callable[[float], float]:
        """Return a function that takes a moment to when it is noticed."""
        count = int(self.world.stalls_per_s * 1000)
        begin = np.sort(self.rng.uniform(0, 1000, count))
        end = begin + self.rng.uniform(0.005, 0.05, count)

        def noticed(at_s: float) -> float:
            place = int(np.searchsorted(begin, at_s)) - 1
            return at_s if place < 0 or end[place] <= at_s else float(end[place]) + 1e-5

        return noticed

    def network_s(self) -> float:
        least_s, more_s = self.world.network_s
        return least_s + float(self.rng.exponential(more_s))

    def submit(self, at_s: float) -> None:
        request = _Request(
            submit_s=at_s,
            arrival_s=self.server(at_s + self.network_s()),
            prefill_s=float(self.rng.uniform(*self.world.prefill_s)),
            left=int(self.rng.integers(*self.world.tokens)),
            ours=bool(self.rng.random() >= self.world.unmatched),
        )
        heapq.heappush(self.to_come, (request.arrival_s, len(self.requests)))
        self.requests.append(request)

    def arrive(self) -> None:
        world = self.world
        if world.concurrency:
            for _ in range(world.concurrency):
                self.submit(float(self.rng.uniform(0, 0.05)))
            return
        at_s = 0.0
        while len(self.requests) < world.requests:
            at_s += world.gap_s + float(self.rng.exponential(world.batch / world.rate_per_s))
            for place in range(world.batch):
                self.submit(at_s + place * 2e-4)

    def end(self, request: _Request, at_s: float) -> None:
        request.last_s, request.end_s = at_s, max(request.output_s, self.client(at_s + self.network_s()))
        if self.world.concurrency and len(self.requests) < self.world.requests:
            self.submit(request.end_s + 1e-4)

    def run(self) -> None:
        self.arrive()
        now_s, waiting, running = 0.0, list[_Request](), list[_Request]()
        while self.to_come or waiting or running:
            if not waiting and not running:
                now_s = max(now_s, self.to_come[0][0])
            while self.to_come and self.to_come[0][0] <= now_s:
                waiting.append(self.requests[heapq.heappop(self.to_come)[1]])
            new = waiting[: self.world.slots - len(running)][:4]
            del waiting[: len(new)]
            for request in new:
                request.scheduled_s = now_s
            now_s += 0.01 * float(self.rng.lognormal(0, 0.05)) + sum(request.prefill_s for request in new)
            for request in new:
                request.first_s, request.output_s = now_s, self.client(now_s + self.network_s())
            running += new
            for request in running:
                request.left -= 1
                if request.left <= 0:
                    self.end(request, now_s)
            running = [request for request in running if request.left > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The client's requests, the engine's records in any order, and what was true of each request: [n, 2] queue and
    prefill in s, and which record is its own [n], -1 for one that was lost.
    """

    requests: RequestLog
    timings: Timings
    true_s: npt.NDArray[np.float64]
    record: npt.NDArray[np.int64]


def played(world: World, seed: int) -> Played:
    """Let it all happen."""
    rng = np.random.default_rng(np.random.SeedSequence(seed))
    play = _Play(world, rng)
    play.run()
    ours = [request for request in play.requests if request.ours]
    off_s = float(rng.uniform(-world.clock_s, world.clock_s))
    recorded = [request for request in play.requests if rng.random() >= world.lost]
    rng.shuffle(recorded)  # type: ignore[arg-type]  # a list of anything will do
    places = {id(request): place for place, request in enumerate(recorded)}
    return Played(
        requests=recordings.request_log([_row(request, world, rng) for request in ours]),
        timings=records(recorded, off_s=off_s, error_s=world.clock_s),
        true_s=np.array(
            [(request.scheduled_s - request.arrival_s, request.first_s - request.scheduled_s) for request in ours]
        ).reshape(-1, 2),
        record=np.array([places.get(id(request), -1) for request in ours], dtype=np.int64),
    )


def _row(request: _Request, world: World, rng: np.random.Generator) -> dict[str, object]:
    return {
        "status": "cancelled" if rng.random() < world.cancelled else "ok",
        "http_status": 200,
        "endpoint_url": URL,
        "submit_ns": _ns(request.submit_s),
        "first_output_ns": _ns(request.output_s) if world.streamed else -1,
        "end_ns": _ns(request.end_s),
    }


def records(recorded: list[_Request], *, off_s: float = 0.0, error_s: float = 0.0) -> Timings:
    """Return the engine's records by a clock that is off."""

    def stamps(name: str) -> npt.NDArray[np.int64]:
        return np.array([_ns(getattr(request, name) + off_s) for request in recorded], dtype=np.int64)

    def between(begin: str, end: str) -> npt.NDArray[np.float64]:
        return np.array([getattr(request, end) - getattr(request, begin) for request in recorded], dtype=np.float64)

    return Timings(
        url=np.full(len(recorded), f"{URL}/perf_metrics", dtype=np.object_),
        arrival_ns=stamps("arrival_s"),
        first_token_ns=stamps("first_s"),
        last_token_ns=stamps("last_s"),
        error_ns=np.full(len(recorded), round(error_s * 1e9), dtype=np.int64),
        queue_s=between("arrival_s", "scheduled_s"),
        prefill_s=between("scheduled_s", "first_s"),
        decode_s=between("first_s", "last_s"),
        ttft_s=between("arrival_s", "first_s"),
        e2e_s=between("arrival_s", "last_s"),
    )


def _ns(at_s: float) -> int:
    return EPOCH_NS + round(at_s * 1e9)
