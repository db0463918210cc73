"""The engine's own state of its requests and of its step, and reports of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sidelight.simulator.engine.history import (
    EngineRequest,
    PrefillCompleted,
    PrefillWork,
    RequestRecord,
    RequestScheduled,
    Retraction,
    StepTimes,
)


@dataclass(slots=True, kw_only=True, eq=False)
class EngineSequence:
    """The engine's own state of one request; the only records here that change.

    `prefilled` is how much of the prompt was computed or found cached at best, before or since a retraction; `drafted`
    the draft tokens of the step in flight.
    """

    number: int
    request: EngineRequest
    arrival_ns: int
    dispatched_ns: int
    key: int
    root: int
    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    computed: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    preemptions: int = 0
    lost_tokens: int = 0
    queued_ns: int = -1
    scheduled_ns: int = -1
    first_token_ns: int = -1
    last_token_ns: int = 0
    last_chunk_ns: int = -1
    retracted_ns: int = -1
    later_wait_ns: int = 0
    prefilled: int = 0
    is_abandoned: bool = False
    load_ns: int = -1
    loaded_ns: int = -1
    loaded_tokens: int = 0
    drafted: int = 0
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    steps: list[StepTimes] = field(default_factory=list)

    @property
    def urgency(self) -> tuple[int, int]:
        """Return the sort key of priorities, the least first."""
        return self.request.priority, self.arrival_ns

    @property
    def brevity(self) -> tuple[int, int]:
        """Return the sort key of prompt lengths, the shortest first."""
        return len(self.request.prompt_token_ids), self.arrival_ns

    def is_prefill(self, chunk_tokens: int) -> bool:
        """Return whether a chunk of `chunk_tokens` is part of a prefill. Anything else is one more output token."""
        return chunk_tokens > 1 or self.first_token_ns < 0

    def reach(self, tokens: int) -> int:
        """Record the tokens present from the start; return the number of new prompt tokens.

        New are those that never were there before.
        """
        before = self.prefilled
        self.prefilled = max(before, min(tokens, len(self.request.prompt_token_ids)))
        return self.prefilled - before


@dataclass(slots=True, kw_only=True)
class EngineStep:
    """The step in flight: tokens computed per sequence, and the effects of its scheduling."""

    begin_ns: int
    chunks: list[tuple[EngineSequence, int]] = field(default_factory=list)
    budget: int
    intake_ns: list[int] = field(default_factory=list)
    admissions: list[RequestScheduled] = field(default_factory=list)
    retractions: list[Retraction] = field(default_factory=list)
    cached: int = 0
    fresh_cached: int = 0
    fresh_host: int = 0
    load_s: list[float] = field(default_factory=list)
    held_s: float = 0.0
    drafts: list[tuple[int, int]] = field(default_factory=list)


def prefill_work(step: EngineStep) -> tuple[PrefillWork, int]:
    """Return a step's prefill work, and the tokens that its sequences then hold.

    The step's tokens are not stored yet.
    """
    chunks = [(sequence, tokens) for sequence, tokens in step.chunks if sequence.is_prefill(tokens)]
    prefill = PrefillWork(
        requests=len(chunks),
        computed_tokens=sum(tokens for _, tokens in chunks),
        cached_tokens=step.cached,
        fresh_computed_tokens=sum(sequence.reach(sequence.computed + tokens) for sequence, tokens in chunks),
        fresh_cached_tokens=step.fresh_cached,
        fresh_host_tokens=step.fresh_host,
    )
    return prefill, sum(sequence.computed + tokens for sequence, tokens in step.chunks)


def admission_of(sequence: EngineSequence, now_ns: int) -> RequestScheduled:
    return RequestScheduled(
        queue_ns=now_ns - sequence.queued_ns,
        prompt_tokens=len(sequence.request.prompt_token_ids),
        cached_tokens=sequence.cached_tokens,
        host_tokens=sequence.host_tokens,
    )


def completion_of(sequence: EngineSequence, now_ns: int) -> PrefillCompleted:
    return PrefillCompleted(
        ttft_ns=now_ns - sequence.arrival_ns,
        prefill_ns=now_ns - sequence.scheduled_ns,
        streamed=sequence.request.streamed,
        role=sequence.request.role,
        loaded_tokens=sequence.loaded_tokens,
        prompt_tokens=len(sequence.request.prompt_token_ids),
        cached_tokens=sequence.cached_tokens,
        host_tokens=sequence.host_tokens,
    )


def record_of(sequence: EngineSequence, finished_ns: int, finish_reason: str) -> RequestRecord:
    return RequestRecord(
        request_id=sequence.request.request_id,
        arrival_ns=sequence.arrival_ns,
        dispatched_ns=sequence.dispatched_ns,
        queued_ns=sequence.queued_ns,
        scheduled_ns=sequence.scheduled_ns,
        first_token_ns=sequence.first_token_ns,
        finished_ns=finished_ns,
        prompt_tokens=len(sequence.request.prompt_token_ids),
        cached_tokens=sequence.cached_tokens,
        host_tokens=sequence.host_tokens,
        output_tokens=sequence.output_tokens,
        max_tokens=sequence.request.max_tokens,
        finish_reason=finish_reason,
        preemptions=sequence.preemptions,
        lost_tokens=sequence.lost_tokens,
        later_wait_ns=sequence.later_wait_ns,
        streamed=sequence.request.streamed,
        traceparent=sequence.request.traceparent,
        client_id=sequence.request.client_id,
        role=sequence.request.role,
        samples=sequence.request.samples,
        load_ns=sequence.load_ns,
        loaded_ns=sequence.loaded_ns,
        loaded_tokens=sequence.loaded_tokens,
        adapter=sequence.request.adapter,
        accepted=tuple(sequence.accepted),
        draft_tokens=sequence.draft_tokens,
        meeting=sequence.request.meeting,
        steps=tuple(sequence.steps),
    )
