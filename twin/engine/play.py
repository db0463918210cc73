"""A load on an engine of known speed, played by events: the scheduler's rules without the contents of tokens.

The rules are those of the simulated engine (`simulator.engine.scheduler`): one token budget a step, decodes first, then
the prefill under way, then requests as they came while seats, budget and KV blocks last; where blocks run out, the
request admitted last gives up its own and computes them again. Between two events steps are alike and computed at once,
so that the cost is per request and prefill step, not per token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np

from sidelight.rundir.columns import Floats, Ints
from sidelight.simulator.settings import EngineSettings

Router = Literal["round-robin", "least-requests"]
#: Limits that requests wait for, by vLLM's names: seats, the budget of a step, and blocks.
SETTINGS = SEATS, BUDGET, BLOCKS = "max-num-seqs", "max-num-batched-tokens", "kv-blocks"
_DRAWN = 4096  # jitters at a time
MOST_STEPS = 1024  # at once
_STEPS = np.arange(MOST_STEPS)
_STRETCH = 32  # steps whose factors stay together


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests for an engine in the order of sending; tokens are int64 [n], and an output has at least one.

    `arrival_s` is when each reaches the engine of an open loop [n]. None: a closed loop, whose `concurrency` requests
    come at 0, and each next one `think_s` after one has ended.
    """

    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    arrival_s: Floats | None = None
    concurrency: int = 1
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """Times of a played load in seconds [n]: arrival at the engine, first and last token; and the engine's work.

    `busy_s` is the time with work, and `waited_s` that of it in which a request waited for a limit, by SETTINGS.
    `preemptions` counts requests that gave up their blocks, each time.
    """

    arrival_s: Floats
    first_s: Floats
    last_s: Floats
    busy_s: float
    waited_s: Mapping[str, float]
    most_running: int
    preemptions: int


class StepFactors(NamedTuple):
    """Factors on the durations of single steps, in their order: of decodes alone, and of those that prefill.

    What delays a step by chance is a larger part of a short one.
    """

    decode: Floats
    prefill: Floats


def play(
    load: EngineLoad,
    engine: EngineSettings,
    *,
    replicas: int = 1,
    router: Router = "round-robin",
    seed: int | None = None,
    factors: StepFactors | None = None,
    by_size: Floats | None = None,
) -> EngineTimes:
    """Play a load to its end. Prefixes are cached as the load says; jitter is drawn by `seed`, or the engine's.

    With `factors` steps are longer by stretches of these, drawn from them as they stand, in place of the engine's
    jitter; with `by_size` all but their prefill is by that of their number of sequences too, the last for all beyond.
    Equal `replicas` share an open loop by turns, or each request goes to the one that has the fewest, to within a step;
    of a closed loop each has its part. Their work is added up. Cost: some 15 us a request and as much a prefill step.
    """
    requests = _Requests(load)
    seed = engine.seed if seed is None else seed
    is_balanced = router == "least-requests" and load.arrival_s is not None
    players = [
        _Player(
            requests,
            engine,
            [] if is_balanced else range(at, len(load.prompt_tokens), replicas),
            concurrency=max(1, load.concurrency // replicas),
            seed=np.random.SeedSequence(seed, spawn_key=(at,) if at else ()),
            factors=factors,
            by_size=[1.0] if by_size is None else by_size.tolist(),
        )
        for at in range(replicas)
    ]
    if is_balanced:
        _balance(players, requests.arrival)
    for player in players:
        player.run()
    return EngineTimes(
        arrival_s=np.array(requests.arrival),
        first_s=np.array(requests.first),
        last_s=np.array(requests.last),
        busy_s=sum(each.busy_s for each in players),
        waited_s={name: sum(each.waited_s[name] for each in players) for name in SETTINGS},
        most_running=max(each.most_running for each in players),
        preemptions=sum(each.preemptions for each in players),
    )


def _balance(players: Sequence[_Player], arrival_s: Sequence[float]) -> None:
    """Give each request, when it arrives, to the player that has the fewest; of equal ones to the next in turn."""
    turn, count = -1, len(players)
    for number in sorted(range(len(arrival_s)), key=lambda each: arrival_s[each]):
        for player in players:
            player.run(arrival_s[number])
        turn = min(range(turn + 1, turn + 1 + count), key=lambda each: players[each % count].held) % count
        players[turn].come(number)


class _Requests:
    """The state of requests under all players."""

    def __init__(self, load: EngineLoad) -> None:
        self.cached: Sequence[int] = np.minimum(load.cached_tokens, load.prompt_tokens - 1).tolist()
        self.length: list[int] = load.prompt_tokens.tolist()  # tokens before the next output
        self.to_come: list[int] = load.output_tokens.tolist()  # outputs
        self.longest = int((load.prompt_tokens + load.output_tokens).max(initial=0))
        n = len(self.length)
        self.arrival: list[float] = [0.0] * n if load.arrival_s is None else load.arrival_s.tolist()
        self.first, self.last = [-1.0] * n, [-1.0] * n
        self.think_s = None if load.arrival_s is not None else load.think_s


class _Player:
    """The state of an engine under a load; times are seconds, lengths tokens.

    A running decode holds one token more with each step, so its length stays a constant above the step's number.
    """

    def __init__(
        self,
        requests: _Requests,
        engine: EngineSettings,
        numbers: Sequence[int],
        *,
        concurrency: int,
        seed: np.random.SeedSequence,
        factors: StepFactors | None,
        by_size: Sequence[float],
    ) -> None:
        self.requests, self.engine = requests, engine
        self.by_size = [*by_size, *[by_size[-1]] * max(0, engine.max_num_seqs + 1 - len(by_size))]
        ratio = engine.speed.jitter_ratio
        self.jitters = _Jitters(ratio, seed, factors and factors.decode)
        self.of_prefills = _Jitters(ratio, seed, factors.prefill) if factors else self.jitters
        self.now_s = 0.0
        self.held = 0  # requests that have come and not ended
        self.later = iter(numbers)  # of a closed loop
        self.coming: list[tuple[float, int]] = []
        for number in numbers if requests.think_s is None else islice(self.later, concurrency):
            self.come(number)
        self.waiting: deque[int] = deque()
        self.prefill: int | None = None  # the request whose prefill is under way
        self.computed = 0  # of its tokens
        self.decodes: dict[int, tuple[int, int]] = {}  # in the order of admission: (its last step, length less step)
        self.ends: list[tuple[int, int]] = []  # the same, by their last steps; also of preempted ones
        self.step = 0
        self.kv = 0  # tokens that decodes hold
        self.free = engine.kv_blocks
        # Then blocks need no count: each has those of the longest.
        self.is_roomy = engine.kv_blocks >= engine.max_num_seqs * (self._blocks(requests.longest) + 1)
        self.rows = [0] * engine.block_size  # decodes by (length less step) modulo the block size
        self.busy_s, self.waited_s = 0.0, dict.fromkeys(SETTINGS, 0.0)
        self.most_running = self.preemptions = 0

    def come(self, number: int) -> None:
        self.held += 1
        heappush(self.coming, (self.requests.arrival[number], number))

    def run(self, until_s: float = math.inf) -> None:
        """Run to the end, or to the end of the step at a time."""
        while self.now_s < until_s:
            self._take_in()
            has_seat = len(self.decodes) < self.engine.max_num_seqs
            if self.prefill is not None or (self.waiting and has_seat) or (self.decodes and not self._roomy(1)):
                self._step()
            elif self.decodes:
                self._decode(until_s)
            elif self.coming:
                self.now_s = self.coming[0][0]
            else:
                break

    def _take_in(self) -> None:
        while self.coming and self.coming[0][0] <= self.now_s:
            self.waiting.append(heappop(self.coming)[1])

    def _decode(self, until_s: float) -> None:
        """Run the steps up to the next event: an end, a request that finds a seat, or scarce blocks."""
        speed, n = self.engine.speed, len(self.decodes)
        while self.ends[0][1] not in self.decodes or self.decodes[self.ends[0][1]][0] != self.ends[0][0]:
            heappop(self.ends)
        steps = min(self.ends[0][0] - self.step, MOST_STEPS)
        while steps > 1 and not self._roomy(steps):
            steps //= 2
        by_size = self.by_size[n]
        first_s = (speed.step_s + speed.sequence_s * n + speed.kv_token_s * (self.kv + n)) * by_size
        if steps == 1:
            self._advance(1, first_s * self.jitters.take())
            return
        jitters = self.jitters.some(steps)
        ends_s = ((first_s + by_size * speed.kv_token_s * n * _STEPS[:steps]) * jitters).cumsum()
        if self.coming and n < self.engine.max_num_seqs:
            until_s = min(until_s, self.coming[0][0])
        steps = min(steps, int(ends_s.searchsorted(until_s - self.now_s)) + 1)
        self.jitters.at += steps
        self._advance(steps, float(ends_s[steps - 1]))

    def _step(self) -> None:
        """Run one step that prefills, or for which blocks may be too few."""
        speed = self.engine.speed
        preempted = self._make_room()
        decodes = len(self.decodes)
        budget = self.engine.max_num_batched_tokens - decodes
        tokens = sequences = held = 0
        done: list[int] = []
        short_of_blocks = preempted
        grown = self._grown(1)
        while budget > 0:
            number = self.prefill
            if number is None:
                number = self._admit(budget, decodes + len(done), grown, preempted=preempted)
            if number is None:
                short_of_blocks |= bool(self.waiting) and decodes + len(done) < self.engine.max_num_seqs
                break
            chunk = min(self.requests.length[number] - self.computed, budget)
            budget -= chunk
            tokens += chunk
            sequences += 1
            self.computed += chunk
            held += self.computed
            if self.computed < self.requests.length[number]:
                break
            self.prefill = None
            done.append(number)
        if not (decodes or sequences):
            return
        self.most_running = max(self.most_running, decodes + sequences)
        rest_s = (
            speed.step_s + speed.sequence_s * (decodes + sequences) + speed.kv_token_s * (self.kv + decodes + held)
        ) * self.by_size[decodes + sequences]
        jitters = self.of_prefills if tokens else self.jitters
        duration_s = (rest_s + speed.prefill_token_s * tokens) * jitters.take()
        if budget <= 0 and (self.waiting or self.prefill is not None):
            self.waited_s[BUDGET] += duration_s
        elif short_of_blocks:
            self.waited_s[BLOCKS] += duration_s
        self._advance(1, duration_s)
        for number in done:
            self._emit(number)

    def _admit(self, budget: int, running: int, grown: int, *, preempted: bool) -> int | None:
        """Begin the prefill of the next waiting request, if it finds room, and return it."""
        if preempted or not self.waiting or running >= self.engine.max_num_seqs:
            return None
        number = self.waiting[0]
        cached = self.requests.cached[number]
        blocks = self._blocks(cached + min(self.requests.length[number] - cached, budget))
        if blocks > self.free - grown:
            return None
        self.waiting.popleft()
        self.prefill, self.computed = number, cached
        self.free -= blocks
        return number

    def _make_room(self) -> bool:
        """Preempt the requests admitted last until the others have blocks for the next step."""
        preempted = False
        while True:
            chunk = 0
            if self.prefill is not None:
                budget = self.engine.max_num_batched_tokens - len(self.decodes)
                goal = self.computed + min(self.requests.length[self.prefill] - self.computed, budget)
                chunk = self._blocks(goal) - self._blocks(self.computed)
            if self._grown(1) + chunk <= self.free or not (self.decodes or self.prefill is not None):
                self.free -= chunk
                return preempted
            preempted = True
            self.preemptions += 1
            if self.prefill is not None:
                self.free += self._blocks(self.computed)
                self.waiting.appendleft(self.prefill)
                self.prefill = None
                continue
            number = next(reversed(self.decodes))
            end, above = self.decodes.pop(number)
            length = above + self.step
            self._leave(above)
            self.requests.length[number], self.requests.to_come[number] = length + 1, end - self.step
            self.waiting.appendleft(number)

    def _emit(self, number: int) -> None:
        """Give a prefilled request its next token, and let it decode the others."""
        if self.requests.first[number] < 0:
            self.requests.first[number] = self.now_s
        if self.requests.to_come[number] <= 1:
            self.free += self._blocks(self.requests.length[number])
            self._end(number)
            return
        above = self.requests.length[number] - self.step
        self.kv += self.requests.length[number]
        self.rows[above % self.engine.block_size] += 1
        self.decodes[number] = last, _ = self.step + self.requests.to_come[number] - 1, above
        heappush(self.ends, (last, number))

    def _advance(self, steps: int, duration_s: float) -> None:
        self.free -= self._grown(steps)
        self.step += steps
        self.kv += steps * len(self.decodes)
        self.now_s += duration_s
        self.busy_s += duration_s
        if self.waiting and len(self.decodes) >= self.engine.max_num_seqs:
            self.waited_s[SEATS] += duration_s
        while self.ends and self.ends[0][0] <= self.step:
            end, number = heappop(self.ends)
            if self.decodes.get(number, (-1, 0))[0] == end:
                self._leave(self.decodes.pop(number)[1])
                self._end(number)

    def _leave(self, above: int) -> None:
        """Give back the blocks of a decode."""
        length = above + self.step
        self.kv -= length
        self.free += self._blocks(length)
        self.rows[above % self.engine.block_size] -= 1

    def _end(self, number: int) -> None:
        self.requests.last[number] = self.now_s
        self.held -= 1
        if self.requests.think_s is not None and (after := next(self.later, None)) is not None:
            self.requests.arrival[after] = self.now_s + self.requests.think_s
            self.come(after)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.engine.block_size)

    def _roomy(self, steps: int) -> bool:
        """Return whether there are blocks for a number of further steps."""
        most = (steps // self.engine.block_size + 1) * len(self.decodes)
        return most <= self.free or self._grown(steps) <= self.free

    def _grown(self, steps: int) -> int:
        """Return the number of blocks that decodes take in further steps: each at the end of a full one."""
        if self.is_roomy:
            return 0
        size = self.engine.block_size
        rounds, rest = divmod(steps, size)
        return rounds * len(self.decodes) + sum(self.rows[-(self.step + ahead) % size] for ahead in range(rest))


def stretches(random: np.random.Generator, size: int, length: int, count: int) -> Ints:
    """Return at least `count` positions below `size`, in stretches: bursts stay bursts."""
    starts = random.integers(0, size, -(-count // length))
    return np.asarray((starts[:, None] + np.arange(length)).ravel() % size)


class _Jitters:
    """Factors on the durations of steps, in the order of steps; `at` is the next."""

    def __init__(self, ratio: float, seed: np.random.SeedSequence, factors: Floats | None) -> None:
        self.ratio, self.factors = ratio, factors
        self.random = np.random.default_rng(seed)
        self.drawn: Floats = np.empty(0)
        self.listed: list[float] = []
        self.at = 0

    def some(self, count: int) -> Floats:
        """Return the next factors, and leave them."""
        if self.at + count > len(self.drawn):
            fresh = self._draw(max(count, _DRAWN))
            self.drawn = np.concatenate([self.drawn[self.at :], fresh])
            self.listed = self.drawn.tolist()
            self.at = 0
        return self.drawn[self.at : self.at + count]

    def _draw(self, count: int) -> Floats:
        if self.factors is None:
            return self.random.lognormal(-self.ratio * self.ratio / 2, self.ratio, count)
        drawn: Floats = self.factors[stretches(self.random, len(self.factors), _STRETCH, count)]
        return drawn

    def take(self) -> float:
        self.some(1)
        self.at += 1
        return self.listed[self.at - 1]
