"""A load on an engine of known speed, played by events: the scheduler's rules without the contents of tokens.

The rules are those of the simulated engine (`simulator.engine.scheduler`): one token budget a step, decodes first, then
the prefill under way, then requests as they came while seats, budget and KV blocks last; where blocks run out, the
request admitted last gives up its own and computes them again. Between two events steps are alike and computed at once,
so that the cost is per request and prefill step, not per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from sidelight.rundir.columns import Floats, Ints
from sidelight.simulator.settings import EngineSettings

_DRAWN = 4096  # jitters at a time
_MOST_STEPS = 1024  # at once
_STRETCH = 32  # steps whose factors stay together


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests for an engine in the order of sending; tokens are int64 [n], and an output has at least one.

    `arrival_s` is when each reaches the engine of an open loop [n], ascending. None: a closed loop, whose `concurrency`
    requests come at 0, and each next one `think_s` after one has ended.
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

    `busy_s` is the time with work; in `seats_s` of it a request waited for a seat, in `budget_s` for the budget of a
    step, in `blocks_s` for KV blocks. `preemptions` counts requests that gave up their blocks, each time.
    """

    arrival_s: Floats
    first_s: Floats
    last_s: Floats
    busy_s: float
    seats_s: float
    budget_s: float
    blocks_s: float
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
    seed: int | None = None,
    factors: StepFactors | None = None,
    by_size: Floats | None = None,
) -> EngineTimes:
    """Play a load to its end. Prefixes are cached as the load says; jitter is drawn by `seed`, or the engine's.

    With `factors` steps are longer by stretches of these, drawn from them as they stand, in place of the engine's
    jitter; with `by_size` all but their prefill is by that of their number of sequences too, the last for all beyond.
    Cost: some 15 us a request and as much a prefill step.
    """
    ratio, seed = engine.speed.jitter_ratio, engine.seed if seed is None else seed
    jitters = _Jitters(ratio, seed, factors and factors.decode)
    of_prefills = jitters if factors is None else _Jitters(ratio, seed, factors.prefill)
    return _Player(load, engine, jitters, of_prefills, [1.0] if by_size is None else by_size.tolist()).run()


class _Player:
    """The state of an engine under a load; times are seconds, lengths tokens.

    A running decode holds one token more with each step, so its length stays a constant above the step's number.
    """

    def __init__(
        self,
        load: EngineLoad,
        engine: EngineSettings,
        jitters: _Jitters,
        of_prefills: _Jitters,
        by_size: Sequence[float],
    ) -> None:
        self.load, self.engine = load, engine
        self.by_size = [*by_size, *[by_size[-1]] * max(0, engine.max_num_seqs + 1 - len(by_size))]
        self.cached: Sequence[int] = np.minimum(load.cached_tokens, load.prompt_tokens - 1).tolist()
        self.length: list[int] = load.prompt_tokens.tolist()  # tokens before the next output
        self.to_come: list[int] = load.output_tokens.tolist()  # outputs
        n = len(self.length)
        self.arrival, self.first, self.last = [0.0] * n, [-1.0] * n, [-1.0] * n
        self.jitters, self.of_prefills = jitters, of_prefills
        self.now_s = 0.0
        self.next = n if load.arrival_s is not None else min(load.concurrency, n)
        at_s = [0.0] * self.next if load.arrival_s is None else load.arrival_s.tolist()
        self.coming = [(each_s, number) for number, each_s in enumerate(at_s)]
        heapify(self.coming)
        self.waiting: deque[int] = deque()
        self.prefill: int | None = None  # the request whose prefill is under way
        self.computed = 0  # of its tokens
        self.decodes: dict[int, tuple[int, int]] = {}  # in the order of admission: (its last step, length less step)
        self.ends: list[tuple[int, int]] = []  # the same, by their last steps; also of preempted ones
        self.step = 0
        self.kv = 0  # tokens that decodes hold
        self.free = engine.kv_blocks
        self.rows = [0] * engine.block_size  # decodes by (length less step) modulo the block size
        self.busy_s = self.seats_s = self.budget_s = self.blocks_s = 0.0
        self.most_running = self.preemptions = 0

    def run(self) -> EngineTimes:
        while True:
            self._take_in()
            has_seat = len(self.decodes) < self.engine.max_num_seqs
            if self.prefill is not None or (self.waiting and has_seat) or (self.decodes and not self._roomy(1)):
                self._step()
            elif self.decodes:
                self._decode()
            elif self.coming:
                self.now_s = self.coming[0][0]
            else:
                break
        return EngineTimes(
            arrival_s=np.array(self.arrival),
            first_s=np.array(self.first),
            last_s=np.array(self.last),
            busy_s=self.busy_s,
            seats_s=self.seats_s,
            budget_s=self.budget_s,
            blocks_s=self.blocks_s,
            most_running=self.most_running,
            preemptions=self.preemptions,
        )

    def _take_in(self) -> None:
        while self.coming and self.coming[0][0] <= self.now_s:
            at_s, number = heappop(self.coming)
            self.arrival[number] = at_s
            self.waiting.append(number)

    def _decode(self) -> None:
        """Run the steps up to the next event: an end, a request that finds a seat, or scarce blocks."""
        speed, n = self.engine.speed, len(self.decodes)
        while self.ends[0][1] not in self.decodes or self.decodes[self.ends[0][1]][0] != self.ends[0][0]:
            heappop(self.ends)
        steps = min(self.ends[0][0] - self.step, _MOST_STEPS)
        while steps > 1 and not self._roomy(steps):
            steps //= 2
        by_size = self.by_size[n]
        first_s = (speed.step_s + speed.sequence_s * n + speed.kv_token_s * (self.kv + n)) * by_size
        if steps == 1:
            self._advance(1, first_s * self.jitters.take())
            return
        jitters = self.jitters.some(steps)
        ends_s = np.cumsum((first_s + by_size * speed.kv_token_s * n * np.arange(steps)) * jitters)
        if self.coming and n < self.engine.max_num_seqs:
            steps = min(steps, int(np.searchsorted(ends_s, self.coming[0][0] - self.now_s)) + 1)
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
            chunk = min(self.length[number] - self.computed, budget)
            budget -= chunk
            tokens += chunk
            sequences += 1
            self.computed += chunk
            held += self.computed
            if self.computed < self.length[number]:
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
            self.budget_s += duration_s
        elif short_of_blocks:
            self.blocks_s += duration_s
        self._advance(1, duration_s)
        for number in done:
            self._emit(number)

    def _admit(self, budget: int, running: int, grown: int, *, preempted: bool) -> int | None:
        """Begin the prefill of the next waiting request, if it finds room, and return it."""
        if preempted or not self.waiting or running >= self.engine.max_num_seqs:
            return None
        number = self.waiting[0]
        cached = self.cached[number]
        blocks = self._blocks(cached + min(self.length[number] - cached, budget))
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
                goal = self.computed + min(self.length[self.prefill] - self.computed, budget)
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
            self.length[number], self.to_come[number] = length + 1, end - self.step
            self.waiting.appendleft(number)

    def _emit(self, number: int) -> None:
        """Give a prefilled request its next token, and let it decode the others."""
        if self.first[number] < 0:
            self.first[number] = self.now_s
        if self.to_come[number] <= 1:
            self.free += self._blocks(self.length[number])
            self._end(number)
            return
        above = self.length[number] - self.step
        self.kv += self.length[number]
        self.rows[above % self.engine.block_size] += 1
        self.decodes[number] = last, _ = self.step + self.to_come[number] - 1, above
        heappush(self.ends, (last, number))

    def _advance(self, steps: int, duration_s: float) -> None:
        self.free -= self._grown(steps)
        self.step += steps
        self.kv += steps * len(self.decodes)
        self.now_s += duration_s
        self.busy_s += duration_s
        if self.waiting and len(self.decodes) >= self.engine.max_num_seqs:
            self.seats_s += duration_s
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
        self.last[number] = self.now_s
        if self.load.arrival_s is None and self.next < len(self.length):
            heappush(self.coming, (self.now_s + self.load.think_s, self.next))
            self.next += 1

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.engine.block_size)

    def _roomy(self, steps: int) -> bool:
        """Return whether there are blocks for a number of further steps."""
        most = (steps // self.engine.block_size + 1) * len(self.decodes)
        return most <= self.free or self._grown(steps) <= self.free

    def _grown(self, steps: int) -> int:
        """Return the number of blocks that decodes take in further steps: each at the end of a full one."""
        size = self.engine.block_size
        rounds, rest = divmod(steps, size)
        return rounds * len(self.decodes) + sum(self.rows[-(self.step + ahead) % size] for ahead in range(rest))


class _Jitters:
    """Factors on the durations of steps, in the order of steps; `at` is the next."""

    def __init__(self, ratio: float, seed: int, factors: Floats | None) -> None:
        self.ratio, self.factors = ratio, factors
        self.random = np.random.default_rng(np.random.SeedSequence(seed))
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
        starts = self.random.integers(0, len(self.factors), -(-count // _STRETCH))
        drawn: Floats = self.factors[(starts[:, None] + np.arange(_STRETCH)).ravel() % len(self.factors)]
        return drawn

    def take(self) -> float:
        """Take the next factor."""
        self.some(1)
        self.at += 1
        return self.listed[self.at - 1]
