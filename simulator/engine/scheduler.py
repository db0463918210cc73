"""A continuous-batching engine as a discrete-event model, without a clock.

Time is an argument (`now_ns`): a test passes virtual time, the server the monotonic clock, and the engine does the
same in both. One step is `begin_step`, which schedules and says how long the step takes, and `finish_step`, which
gives the tokens of that step. What happens in between waits for the next step.

The rules are those of vLLM's V1 scheduler: first come, first served, unless another policy is set; one token budget a
step, of which decodes and half-done prefills are served before new requests; KV blocks are taken as they are needed;
when they run out, the request that was admitted last, or with priorities the least urgent, gives up its blocks and
computes them again later. KV caches are loaded from another engine as vLLM does it asynchronously: the load begins
where the request could have been scheduled, with the blocks of its whole prompt, and others go on meanwhile. From host
memory they are loaded within the step that first computes for the request.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

import numpy as np

from sidelight.simulator.engine.blocks import BlockPool, cache_root, extend_chain
from sidelight.simulator.engine.history import (
    EngineRequest,
    KvFetch,
    PrefillCompleted,
    RequestRecord,
    Retraction,
    StepOutcome,
    StepTimes,
    TokenOutput,
)
from sidelight.simulator.engine.replies import accepted_drafts, reply_key, reply_token
from sidelight.simulator.engine.sequences import (
    EngineSequence,
    EngineStep,
    admission_of,
    completion_of,
    prefill_work,
    record_of,
)
from sidelight.simulator.engine.tokenizer import END_OF_SEQUENCE
from sidelight.simulator.settings import KV_HOST_BYTES_PER_S, KV_TOKEN_BYTES, EngineSettings

_HOUR_NS = 3600 * 10**9
_NO_LIMIT = 1 << 62
#: The most that a step takes which only waits for loads.
_POLL_S = 2e-3


class SimulatedEngine:
    """The queue, the running batch and the KV blocks of one engine.

    The same settings, submissions and times give the same history.
    """

    def __init__(self, settings: EngineSettings, *, keep_steps: bool = False, start_ns: int | None = None) -> None:
        """With `keep_steps` the record of a request has every step that computed for it.

        Its steps drift away from `start_ns`, or from when the first begins.
        """
        self.settings = settings
        self._keep_steps = keep_steps
        self.pool = BlockPool(settings.kv_blocks, settings.block_size, settings.kv_host_blocks)
        self._jitter = np.random.default_rng(np.random.SeedSequence(settings.seed))
        self._live: dict[int, EngineSequence] = {}
        self._arrived: deque[EngineSequence] = deque()
        self._waiting: deque[EngineSequence] = deque()
        self._loading: list[EngineSequence] = []
        self._loaded: list[EngineSequence] = []
        self._running: list[EngineSequence] = []
        self._adapters: list[str] = []  # those that are held, the last used last
        self._has_adapters = self._has_loads = False  # else no step looks at all that wait
        self._step: EngineStep | None = None
        self._start_ns = start_ns
        self.submitted = 0

    def submit(self, request: EngineRequest, arrival_ns: int, dispatched_ns: int = -1) -> int:
        """Hand a request over and return its number; the engine takes it in before its next step.

        `dispatched_ns` is now, where it is later than the arrival. Prompt and output together are at most
        max_model_len, which the reader of requests ensures.
        """
        number = self.submitted
        self.submitted += 1
        sequence = EngineSequence(
            number=number,
            request=request,
            arrival_ns=arrival_ns,
            dispatched_ns=max(arrival_ns, dispatched_ns),
            key=reply_key(self.settings.seed, request.prompt_token_ids),
            root=cache_root(request.cache_salt),
            token_ids=list(request.prompt_token_ids),
        )
        block_size = self.pool.block_size
        extend_chain(
            sequence.chain, sequence.token_ids, len(sequence.token_ids) // block_size, block_size, sequence.root
        )
        self._has_adapters |= bool(request.adapter)
        self._has_loads |= request.remote_prefill and self.settings.kv_async
        self._live[number] = sequence
        self._arrived.append(sequence)
        return number

    def abort(self, number: int, now_ns: int) -> RequestRecord | None:
        """Drop a request, wherever it is, and return its record; None when it has finished already.

        What a step in flight computes for it is lost.
        """
        sequence = self._live.pop(number, None)
        if sequence is None:
            return None
        for queue in (self._arrived, self._waiting, self._loading, self._loaded, self._running):
            if sequence in queue:
                queue.remove(sequence)
        self.pool.release(sequence.blocks)
        return record_of(sequence, now_ns, "abort")

    def abandon(self, number: int) -> None:
        """Let a request go on until its next or second output shows a disconnected client."""
        if (sequence := self._live.get(number)) is not None:
            sequence.is_abandoned = True

    @property
    def abandoned(self) -> tuple[int, ...]:
        """Return the numbers of the requests that were abandoned and have not ended."""
        return tuple(number for number, sequence in self._live.items() if sequence.is_abandoned)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; false, and nothing forgotten, while a request holds blocks."""
        return self.pool.forget()

    def begin_step(self, now_ns: int) -> float | None:
        """Schedule a step and return its duration in seconds; None without work.

        Requests that have arrived are taken in first.
        """
        if self._start_ns is None:
            self._start_ns = now_ns
        step = EngineStep(begin_ns=now_ns, budget=self.settings.max_num_batched_tokens)
        while self._arrived:
            sequence = self._arrived.popleft()
            sequence.queued_ns = now_ns
            step.intake_ns.append(now_ns - sequence.arrival_ns)
            self._enqueue(sequence)
        self._end_loads(step, now_ns)
        self._schedule_running(step)
        if not step.retractions:
            self._schedule_waiting(step, now_ns)
        if not (step.chunks or self._loading or self._loaded):
            return None
        self._step = step
        if not step.chunks:
            next_s = min((sequence.loaded_ns - now_ns for sequence in self._loading), default=0) / 1e9
            return min(max(next_s, 1e-4), _POLL_S)
        return step.held_s + self._duration_s(step)

    def finish_step(self, now_ns: int) -> StepOutcome:
        """End the step in flight and return its outcome.

        Raises RuntimeError without a step in flight.
        """
        step = self._step
        if step is None:
            raise RuntimeError("no step was begun")
        self._step = None
        prefill, kv_tokens = prefill_work(step)
        lost = self._lose_all(now_ns) if len(step.chunks) >= (self.settings.oom_at or _NO_LIMIT) else ()
        tokens: list[TokenOutput] = []
        first_tokens: list[PrefillCompleted] = []
        chunk_ns: list[int] = []
        finished: list[RequestRecord] = []
        for sequence, chunk_tokens in step.chunks:
            if sequence.number not in self._live:
                continue
            if self._keep_steps:
                sequence.steps.append(StepTimes(step.begin_ns, now_ns, sequence.is_prefill(chunk_tokens)))
            self._store(sequence, chunk_tokens)
            if sequence.computed < len(sequence.token_ids):
                chunk_ns.append(now_ns - max(sequence.last_chunk_ns, sequence.scheduled_ns))
                sequence.last_chunk_ns = now_ns
                continue
            if sequence.first_token_ns < 0:
                first_tokens.append(completion_of(sequence, now_ns))
            tokens += self._outputs(sequence, step, now_ns)
            if (reason := tokens[-1].finish_reason) is not None:
                finished.append(self._finish(sequence, now_ns, reason))
        self._end_loads(step, now_ns)
        return StepOutcome(
            begin_ns=step.begin_ns,
            at_ns=now_ns,
            intake_ns=tuple(step.intake_ns),
            admissions=tuple(step.admissions),
            chunk_ns=tuple(chunk_ns),
            retractions=tuple(step.retractions),
            prefill=prefill,
            decode_requests=len(step.chunks) - prefill.requests,
            kv_tokens=kv_tokens,
            used_blocks=self.pool.used,
            evictable_blocks=self.pool.evictable,
            tokens=tuple(tokens),
            first_tokens=tuple(first_tokens),
            finished=tuple(finished),
            running=len(self._running),
            waiting=len(self._waiting) + len(self._loading) + len(self._loaded),
            lost=lost,
            kv_fetch=self._kv_fetch(step),
            drafts=tuple(step.drafts),
            put_off=len(self._waiting) - sum(1 for _ in self._runnable()) if self._has_adapters else 0,
            host_blocks=self.pool.host_used,
            computed=tuple((sequence.request.request_id, tokens) for sequence, tokens in step.chunks),
        )

    def _kv_fetch(self, step: EngineStep) -> KvFetch:
        return KvFetch(
            waiting_to_start=sum(_is_to_load(sequence) for sequence in self._waiting) if self._has_loads else 0,
            in_progress=len(self._loading),
            completed_waiting=len(self._loaded),
            load_s=tuple(step.load_s),
        )

    def _lose_all(self, now_ns: int) -> tuple[tuple[int, RequestRecord], ...]:
        """End all requests, and forget all that the KV cache holds."""
        lost = tuple((number, record_of(sequence, now_ns, "error")) for number, sequence in self._live.items())
        for sequence in self._live.values():
            self.pool.release(sequence.blocks)
        for queue in (self._live, self._arrived, self._waiting, self._loading, self._loaded, self._running):
            queue.clear()
        self.pool.forget()
        return lost

    def _enqueue(self, sequence: EngineSequence, *, again: bool = False) -> None:
        """Put a request into the queue where the policy says; of first come, first served, `again` is its front."""
        policy = self.settings.policy
        if policy == "priority":
            insort(self._waiting, sequence, key=lambda each: each.urgency)
        elif policy == "shortest-first":
            insort(self._waiting, sequence, key=lambda each: each.brevity)
        elif again:
            self._waiting.appendleft(sequence)
        else:
            self._waiting.append(sequence)

    def _schedule_running(self, step: EngineStep) -> None:
        """Give the running sequences their share, oldest first.

        At most the youngest is half-way through its prefill, because nothing is admitted before that is done: so
        all decodes come before the chunked prefill.
        """
        at = 0
        while at < len(self._running) and step.budget > 0:
            sequence = self._running[at]
            chunk_tokens = min(len(sequence.token_ids) - sequence.computed, step.budget)
            drafted = self._drafted(sequence, chunk_tokens, step.budget) if self.settings.draft_tokens else 0
            while not self.pool.grow(sequence.blocks, sequence.computed + chunk_tokens + drafted):
                victim = self._victim()
                at -= self._preempt(victim, step)
                if victim is sequence:
                    break
            else:
                step.chunks.append((sequence, chunk_tokens))
                step.budget -= chunk_tokens + drafted
                sequence.drafted = drafted
                at += 1

    def _drafted(self, sequence: EngineSequence, chunk_tokens: int, budget: int) -> int:
        """Return the number of draft tokens to verify with a request's next one; none while it computes its prompt."""
        if sequence.is_prefill(chunk_tokens):
            return 0
        room = self.settings.max_model_len - len(sequence.token_ids) - 1
        return max(0, min(self.settings.draft_tokens, budget - chunk_tokens, room))

    def _schedule_waiting(self, step: EngineStep, now_ns: int) -> None:
        """Admit waiting requests in order while seats, budget and blocks last.

        Those whose loads have ended come first.
        """
        while self._loaded and step.budget > 0 and len(self._running) < self.settings.max_num_seqs:
            self._admit(self._loaded.pop(0), step, now_ns)
        while self._waiting and step.budget > 0 and len(self._running) < self.settings.max_num_seqs:
            sequence = next(self._runnable(), None)
            if sequence is None:
                return
            # The last token is always computed: its result is the next token.
            usable = (len(sequence.token_ids) - 1) // self.pool.block_size
            shared = self.pool.match(sequence.chain[:usable]) if self.settings.prefix_caching else []
            known = len(shared)
            if self.settings.kv_host_blocks and self.settings.prefix_caching:
                known += self.pool.match_host(sequence.chain[known:usable])
            cached = known * self.pool.block_size
            host_tokens = cached - len(shared) * self.pool.block_size
            tokens = len(sequence.token_ids) - cached
            blocks = self.pool.take(shared, cached + (tokens if _is_to_load(sequence) else min(tokens, step.budget)))
            if blocks is None:
                return
            self._waiting.remove(sequence)
            sequence.blocks = blocks
            sequence.computed = cached
            for block in range(len(shared), known):
                self.pool.register(blocks[block], sequence.chain[block])
            step.held_s += host_tokens * KV_TOKEN_BYTES / KV_HOST_BYTES_PER_S
            if sequence.scheduled_ns < 0:
                sequence.cached_tokens, sequence.host_tokens = cached, host_tokens
            step.cached += cached
            if not _is_to_load(sequence):
                self._admit(sequence, step, now_ns, host_tokens)
                continue
            load_ns = now_ns + round(step.held_s * 1e9)
            load_s = self.settings.kv_latency_s + tokens * KV_TOKEN_BYTES / self.settings.kv_bytes_per_s
            sequence.load_ns, sequence.loaded_ns = load_ns, load_ns + round(load_s * 1e9)
            sequence.loaded_tokens = tokens
            if self.settings.kv_async:
                self._loading.append(sequence)
            else:
                step.held_s += load_s
                self._store(sequence, tokens - 1)
                self._admit(sequence, step, now_ns)

    def _admit(self, sequence: EngineSequence, step: EngineStep, now_ns: int, host_tokens: int = 0) -> None:
        """Add a request with its blocks to the running ones and to the step."""
        self._running.append(sequence)
        self._hold_adapter(sequence.request.adapter, step)
        if sequence.scheduled_ns < 0:
            sequence.scheduled_ns = now_ns
            step.admissions.append(admission_of(sequence, now_ns))
        else:
            sequence.later_wait_ns += now_ns - sequence.retracted_ns
        fresh = sequence.reach(sequence.computed)
        step.fresh_cached += fresh
        step.fresh_host += min(fresh, host_tokens)
        chunk_tokens = min(len(sequence.token_ids) - sequence.computed, step.budget)
        step.chunks.append((sequence, chunk_tokens))
        step.budget -= chunk_tokens

    def _runnable(self) -> Iterator[EngineSequence]:
        """Yield the waiting requests that may run beside the adapters of others, in order."""
        if not self._has_adapters:  # the rule costs a look at all running requests
            yield from self._waiting
            return
        running = {each.request.adapter for each in self._running} - {""}
        is_full = len(running) >= self.settings.max_loras
        yield from (each for each in self._waiting if not is_full or each.request.adapter in running | {""})

    def _hold_adapter(self, adapter: str, step: EngineStep) -> None:
        """Load an adapter unless it is held; the one unused for the longest gives way."""
        if not adapter:
            return
        if adapter in self._adapters:
            self._adapters.remove(adapter)
        else:
            step.held_s += self.settings.lora_load_s
        self._adapters = [*self._adapters, adapter][-self.settings.max_loras :]

    def _end_loads(self, step: EngineStep, now_ns: int) -> None:
        """Store loaded prompts, but for the last token: it is computed, since its result is the next one."""
        for sequence in [each for each in self._loading if each.loaded_ns <= now_ns]:
            self._loading.remove(sequence)
            self._loaded.append(sequence)
            self._store(sequence, len(sequence.token_ids) - 1 - sequence.computed)
            step.load_s.append((sequence.loaded_ns - sequence.load_ns) / 1e9)

    def _victim(self) -> EngineSequence:
        """Return the running request that gives up its blocks."""
        if self.settings.policy == "priority":
            return max(self._running, key=lambda each: each.urgency)
        return self._running[-1]

    def _preempt(self, sequence: EngineSequence, step: EngineStep) -> int:
        """Take the blocks of a running request, and its share of the step; return how many such shares it had."""
        self._running.remove(sequence)
        shares = [chunk for chunk in step.chunks if chunk[0] is sequence]
        for chunk in shares:
            step.chunks.remove(chunk)
            step.budget += chunk[1] + sequence.drafted
        sequence.drafted = 0
        self.pool.release(sequence.blocks)
        sequence.lost_tokens += sequence.computed
        sequence.computed = 0
        sequence.preemptions += 1
        sequence.retracted_ns = step.begin_ns
        prompt_tokens = len(sequence.request.prompt_token_ids)
        step.retractions.append(Retraction(prompt_tokens=prompt_tokens, output_tokens=sequence.output_tokens))
        self._enqueue(sequence, again=True)
        return len(shares)

    def _duration_s(self, step: EngineStep) -> float:
        speed = self.settings.speed
        prefill_tokens = kv_tokens = 0
        for sequence, chunk_tokens in step.chunks:
            kv_tokens += sequence.computed + chunk_tokens
            if sequence.is_prefill(chunk_tokens):
                prefill_tokens += chunk_tokens
        duration_s = (
            speed.step_s
            + speed.prefill_token_s * prefill_tokens
            + speed.sequence_s * len(step.chunks)
            + speed.kv_token_s * kv_tokens
        )
        if self.settings.drift_per_h:
            hours = (step.begin_ns - (self._start_ns or 0)) / _HOUR_NS
            duration_s *= (1 + self.settings.drift_per_h) ** hours
        jitter = speed.jitter_ratio
        return self.settings.slow * duration_s * float(self._jitter.lognormal(-jitter * jitter / 2, jitter))

    def _store(self, sequence: EngineSequence, chunk_tokens: int) -> None:
        """Store a chunk in the KV cache, and register the blocks it filled."""
        block_size = self.pool.block_size
        first = sequence.computed // block_size
        sequence.computed += chunk_tokens
        full = sequence.computed // block_size
        if full == first or not self.settings.prefix_caching:
            return
        extend_chain(sequence.chain, sequence.token_ids, full, block_size, sequence.root)
        for block in range(first, full):
            self.pool.register(sequence.blocks[block], sequence.chain[block])

    def _outputs(self, sequence: EngineSequence, step: EngineStep, now_ns: int) -> list[TokenOutput]:
        """Return a request's next token, behind the draft tokens that the step accepted.

        As in vLLM, what is accepted beyond the reply's end counts as accepted.
        """
        outputs, drafted, accepted = [], sequence.drafted, 0
        if drafted:
            accepted = accepted_drafts(sequence.key, sequence.output_tokens, drafted, self.settings.accept_ratio)
            step.drafts.append((drafted, accepted))
            sequence.drafted, sequence.draft_tokens = 0, sequence.draft_tokens + drafted
            sequence.accepted = sequence.accepted or [0] * (self.settings.draft_tokens + 1)
            sequence.accepted[accepted] += 1
        for place in range(1 + accepted):
            if place:
                self._store(sequence, 1)
            outputs.append(self._next_token(sequence, now_ns))
            if outputs[-1].finish_reason is not None:
                break
        return outputs

    def _next_token(self, sequence: EngineSequence, now_ns: int) -> TokenOutput:
        request = sequence.request
        eos_chance = 0.0 if request.ignore_eos else self.settings.eos_chance
        token_id = reply_token(sequence.key, sequence.output_tokens, eos_chance=eos_chance)
        is_first = sequence.first_token_ns < 0 or sequence.last_token_ns == now_ns
        interval_ns = None if is_first else now_ns - sequence.last_token_ns
        if sequence.first_token_ns < 0:
            sequence.first_token_ns = now_ns
        sequence.last_token_ns = now_ns
        sequence.output_tokens += 1
        sequence.token_ids.append(token_id)
        finish_reason = None
        if token_id == END_OF_SEQUENCE:
            finish_reason = "stop"
        elif sequence.output_tokens == request.max_tokens:
            finish_reason = "length"
        elif sequence.is_abandoned and sequence.output_tokens > 1:
            finish_reason = "abort"
        return TokenOutput(
            number=sequence.number,
            token_id=token_id,
            output_tokens=sequence.output_tokens,
            interval_ns=interval_ns,
            finish_reason=finish_reason,
        )

    def _finish(self, sequence: EngineSequence, now_ns: int, finish_reason: str) -> RequestRecord:
        del self._live[sequence.number]
        self._running.remove(sequence)
        self.pool.release(sequence.blocks)
        return record_of(sequence, now_ns, finish_reason)


def _is_to_load(sequence: EngineSequence) -> bool:
    """Return whether a request's prompt is to be loaded: once, since what is lost of it later is computed again."""
    return sequence.request.remote_prefill and sequence.load_ns < 0
