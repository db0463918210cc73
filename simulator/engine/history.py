"""Inputs and outputs of the engine, as plain records.

All stamps are int64 nanoseconds of whatever clock drives the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: What a reply says that ends with an engine which ran out of memory.
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
#: What a step does: only prefills, only output tokens, or both.
StepKind = Literal["prefill", "decode", "mixed"]

#: A user's request; a liveness probe that generates a token; the prefill of a prompt that several samples then share.
Role = Literal["request", "probe", "prefix"]


class Meeting(NamedTuple):
    """The meeting of two engines that share a request.

    `number` is the room's. The request was handed to this engine at `begun_ns`, and the other was there at
    `opened_ns`. A prefill engine sends the KV cache in `send_ns` after its first token.
    """

    number: int
    begun_ns: int
    opened_ns: int
    send_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request to the engine, with a prompt of at least one token.

    `max_tokens` is at least 1. `traceparent` is the header of that name as it came, empty for none; `client_id` the
    client's own id where replies do not carry it. `samples` is the number of replies to the prompt that the client
    wants, and this is one of them. The lower `priority`, the sooner it is scheduled, where priorities count. Only
    requests of the same `cache_salt` share cached prefixes. With `remote_prefill` another engine computed the prompt,
    and what it has of it is loaded. `adapter` is the LoRA adapter that it runs with, empty for none. `meeting` is that
    of two engines that had the request at once, as SGLang's.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = True
    streamed: bool = True
    traceparent: str = ""
    client_id: str = ""
    role: Role = "request"
    samples: int = 1
    priority: int = 0
    cache_salt: str = ""
    remote_prefill: bool = False
    adapter: str = ""
    meeting: Meeting | None = None


class StepTimes(NamedTuple):
    """A step that computed for a request: a chunk of its prefill, or one more output token."""

    begin_ns: int
    end_ns: int
    is_prefill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The true history of one request that finished or was aborted; stamps are int64 ns.

    `dispatched_ns` is when it was handed to the engine, `queued_ns` when the engine took it in between two steps,
    `scheduled_ns` when it was scheduled for the first time; the last two, like `first_token_ns`, are -1 where an abort
    came first. `later_wait_ns` is what it waited for its next scheduling after it gave up its blocks. `cached_tokens`
    are the prompt tokens found in the prefix cache at that first time, of which `host_tokens` in host memory.
    `finish_reason` is "stop", "length", "abort" or, of an engine that ran out of memory, "error". `lost_tokens` were in
    the KV cache when it was preempted, all `preemptions` together. From `load_ns` to `loaded_ns` the last
    `loaded_tokens` of the prompt were loaded from another engine; -1 without. `accepted` counts its drafts by how many
    of their tokens were accepted, from 0 on, and `draft_tokens` are those of all its drafts. `meeting` is as of the
    request. `steps` are kept only by an engine that was asked for them.
    """

    request_id: str
    arrival_ns: int
    dispatched_ns: int = -1
    queued_ns: int
    scheduled_ns: int
    first_token_ns: int
    finished_ns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int
    finish_reason: str
    preemptions: int
    lost_tokens: int = 0
    later_wait_ns: int = 0
    streamed: bool = True
    traceparent: str = ""
    client_id: str = ""
    role: Role = "request"
    samples: int = 1
    host_tokens: int = 0
    load_ns: int = -1
    loaded_ns: int = -1
    loaded_tokens: int = 0
    adapter: str = ""
    accepted: tuple[int, ...] = ()
    draft_tokens: int = 0
    meeting: Meeting | None = None
    steps: tuple[StepTimes, ...] = ()

    @property
    def accepted_tokens(self) -> int:
        """Return the draft tokens that were accepted."""
        return sum(tokens * drafts for tokens, drafts in enumerate(self.accepted))

    @property
    def recovered(self) -> bool:
        """Return whether the request was preempted and finished all the same."""
        return self.preemptions > 0 and self.finish_reason in ("stop", "length")

    # Of a request that finished, in seconds.

    @property
    def wait_s(self) -> float:
        """Return the time from arrival to the first scheduling."""
        return (self.scheduled_ns - self.arrival_ns) / 1e9

    @property
    def queue_s(self) -> float:
        """Return the time from intake by the engine to the first scheduling."""
        return (self.scheduled_ns - self.queued_ns) / 1e9

    @property
    def prefill_s(self) -> float:
        return (self.first_token_ns - self.scheduled_ns) / 1e9

    @property
    def decode_s(self) -> float:
        return (self.finished_ns - self.first_token_ns) / 1e9

    @property
    def inference_s(self) -> float:
        return (self.finished_ns - self.scheduled_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        return (self.first_token_ns - self.arrival_ns) / 1e9

    @property
    def e2e_s(self) -> float:
        return (self.finished_ns - self.arrival_ns) / 1e9


class TokenOutput(NamedTuple):
    """One token of one request; `interval_ns` is the time since the last step that gave it tokens.

    It is None for its first token, and for those after the first of a step.
    """

    number: int
    token_id: int
    output_tokens: int
    interval_ns: int | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCompleted:
    """A prefill was completed: the time since arrival and since it was first scheduled, the prompt's length and how
    much of it was cached, of that in host memory, and loaded from another engine.
    """

    ttft_ns: int
    prefill_ns: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int = 0
    loaded_tokens: int = 0
    streamed: bool = True
    role: Role = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestScheduled:
    """A request was scheduled for the first time: how long it had waited, and its prompt."""

    queue_ns: int
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraction:
    """A running request that gave up its blocks, and its output tokens until then.

    `output_tokens` is their number.
    """

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillWork:
    """Prefill work of a step: requests, computed tokens, and tokens from the prefix cache, of them in host memory.

    The `fresh` ones leave out what is done again after a retraction, so that over a run they add up to the prompts.
    """

    requests: int
    computed_tokens: int
    cached_tokens: int
    fresh_computed_tokens: int
    fresh_cached_tokens: int
    fresh_host_tokens: int = 0


class KvFetch(NamedTuple):
    """Requests that load their KV cache, by vLLM's names of the stages, after a step.

    `load_s` are the durations of the loads that ended since the step before.
    """

    waiting_to_start: int = 0
    in_progress: int = 0
    completed_waiting: int = 0
    load_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The work of one step, and the state of the engine after it.

    `running` and `waiting` count requests (those not yet taken in are in neither). `intake_ns` is the time from arrival
    to the queue of each request taken in, `chunk_ns` the time of each chunk that left its prefill unfinished;
    `decode_requests` had one token each; `kv_tokens` are those of the sequences in the step. Unused blocks that still
    hold a known prefix are `evictable_blocks`. `lost` are the requests, by number, that ended with an engine without
    memory. A step that computes for no request waits for loads of `kv_fetch`. `drafts` are pairs of how many tokens
    were proposed to a request, and how many of them accepted. Of the waiting, `put_off` wait for another adapter to go.
    `computed` are the tokens of the step by the ids of requests. The host cache holds `host_blocks`.
    """

    begin_ns: int
    at_ns: int
    intake_ns: tuple[int, ...]
    admissions: tuple[RequestScheduled, ...]
    chunk_ns: tuple[int, ...]
    retractions: tuple[Retraction, ...]
    prefill: PrefillWork
    decode_requests: int
    kv_tokens: int
    used_blocks: int
    evictable_blocks: int
    tokens: tuple[TokenOutput, ...]
    first_tokens: tuple[PrefillCompleted, ...]
    finished: tuple[RequestRecord, ...]
    running: int
    waiting: int
    lost: tuple[tuple[int, RequestRecord], ...] = ()
    kv_fetch: KvFetch = field(default_factory=KvFetch)
    drafts: tuple[tuple[int, int], ...] = ()
    put_off: int = 0
    computed: tuple[tuple[str, int], ...] = ()
    host_blocks: int = 0

    @property
    def kind(self) -> StepKind:
        """Return the kind of the step."""
        if not self.prefill.requests:
            return "decode"
        return "mixed" if self.decode_requests else "prefill"
