"""Steps of an engine, as the stamps of its replies' tokens show them.

All sequences of a batch get their tokens at the same time, so tokens that arrive together are of one step. What ran in
it is known from the requests: a decode of each that had its first token before it and its last not yet; and of the
prompts those tokens that the step's budget let through before their first output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Bools, Floats, Ints, ragged, take

#: Tokens are of one step where less than this share of the usual time between two tokens of a reply is between them.
_TOGETHER = 0.5
_NO_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRequests:
    """Columns of requests that were answered whole, by ascending submission; times are seconds from the first one's."""

    submit_s: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.submit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedRequests(AnsweredRequests):
    """Requests with the stamps of all chunks: those of request i from `token_s[start[i]]` to `start[i + 1]`."""

    token_s: Floats = field(metadata=ragged("start"))
    start: Ints

    @property
    def tokens_per_chunk(self) -> float:
        """Return 1 where every chunk is a token; replies of one token count for nothing."""
        many = self.output_tokens > 1
        return float(self.output_tokens[many].sum() / max(1, np.diff(self.start)[many].sum()))

    @property
    def first_s(self) -> Floats:
        return self.token_s[self.start[:-1]]

    @property
    def last_s(self) -> Floats:
        return self.token_s[self.start[1:] - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWindows:
    """Stretches of steps with a known duration [m]: those behind `since` up to `until`, in the order of these.

    They are `steps`, of the mean `duration_s`: a stall cuts a step in two.
    """

    since: Ints
    until: Ints
    steps: Ints
    duration_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """Steps in order [k]: their ends, durations and decodes, and the windows of them that a fit rests on.

    duration_s   time between two tokens of a reply, the median of the replies; NaN of a step in which nothing decoded
    kv_tokens    what the decodes hold in the KV cache, their new token included
    first, last  the steps of each request's first and last token [n]
    coherence    share of the sequences under way that got a token in a step, in the mean: 1 of one engine
    """

    end_s: Floats
    duration_s: Floats
    decodes: Ints
    kv_tokens: Floats
    first: Ints
    last: Ints
    windows: StepWindows
    coherence: float = 1.0

    @property
    def is_whole(self) -> Bools:
        """Return a mask of the steps of known duration: they began when another ended."""
        return np.isfinite(self.duration_s)


def streamed_requests(log: RequestLog) -> StreamedRequests:
    """Return the requests with a known prompt, output and token stamps."""
    usable = (log.status == "ok") & (log.submit_ns >= 0) & (log.input_tokens > 0) & (log.output_tokens > 0)
    usable &= (np.diff(log.chunk_start) > 0) & (log.choices <= 1)
    order = np.flatnonzero(usable)
    order = order[np.argsort(log.submit_ns[order], kind="stable")]
    used = take(log, order)
    origin_ns = int(used.submit_ns[0]) if len(order) else 0
    return StreamedRequests(
        submit_s=(used.submit_ns - origin_ns) / 1e9,
        prompt_tokens=used.input_tokens,
        cached_tokens=np.clip(used.cached_tokens, 0, used.input_tokens - 1),
        output_tokens=used.output_tokens,
        token_s=(used.chunk_ns - origin_ns) / 1e9,
        start=used.chunk_start,
    )


def steps_of(requests: StreamedRequests) -> EngineSteps:
    """Return the steps of an engine by the tokens of its replies; one has at least two."""
    owner = np.repeat(np.arange(len(requests)), np.diff(requests.start))
    order = np.argsort(requests.token_s, kind="stable")
    stamps = requests.token_s[order]
    is_next = np.diff(owner) == 0
    gaps_s = np.diff(requests.token_s)[is_next]
    step = np.cumsum(_begins(stamps, owner[order], _TOGETHER * float(np.median(gaps_s[gaps_s > 0])))) - 1
    count = int(step[-1]) + 1
    sizes = np.bincount(step, minlength=count)
    of_token = np.empty(len(step), np.int64)
    of_token[order] = step
    first, last = of_token[requests.start[:-1]], of_token[requests.start[1:] - 1]
    decodes = running(first, last, count).astype(np.int64)
    expected = decodes + np.bincount(first, minlength=count)
    windows = _windows(gaps_s, of_token[:-1][is_next], of_token[1:][is_next])
    duration_s = np.full(count, np.nan)
    duration_s[windows.until] = windows.duration_s
    return EngineSteps(
        end_s=stamps[np.cumsum(sizes) - sizes + (sizes - 1) // 2],
        duration_s=duration_s,
        decodes=decodes,
        kv_tokens=held_tokens(requests.prompt_tokens, requests.output_tokens, first, last, count),
        first=first,
        last=last,
        windows=take(windows, windows.duration_s > 0),
        coherence=float(np.mean(sizes / np.maximum(expected, 1))),
    )


def _begins(stamps: Floats, owners: Ints, together_s: float) -> Bools:
    """Return the tokens that begin a step: those behind a pause, and a second one of a request."""
    begins = np.diff(stamps, prepend=-np.inf) > together_s
    seen: set[int] = set()
    for at, (owner, begin) in enumerate(zip(owners.tolist(), begins.tolist(), strict=True)):
        if begin or owner in seen:
            begins[at] = True
            seen.clear()
        seen.add(owner)
    return begins


def _windows(gaps_s: Floats, before: Ints, step: Ints) -> StepWindows:
    """Return the windows of steps that end gaps, each with its median gap."""
    order = np.lexsort((gaps_s, step))
    until, first, sizes = np.unique(step[order], return_index=True, return_counts=True)
    middle = order[first + (sizes - 1) // 2]
    return StepWindows(since=before[middle], until=until, steps=np.ones_like(until), duration_s=gaps_s[middle])


def running(first: Ints, last: Ints, count: int, each: Floats | None = None) -> Floats:
    """Return the number of decodes in each step, or the sum over them of `each`."""
    change = np.bincount(first + 1, each, count + 2) - np.bincount(last + 1, each, count + 2)
    return np.cumsum(change)[:count]


def held_tokens(prompt_tokens: Ints, output_tokens: Ints, first: Ints, last: Ints, count: int) -> Floats:
    """Return the tokens that the decodes of each step hold: of each its prompt, and one more with each step."""
    decodes = last > first
    begin, end, prompt = first[decodes] + 1, last[decodes] + 1, prompt_tokens[decodes]
    a_step = np.maximum(output_tokens[decodes] - 1, 1) / (end - begin)
    level, rise = np.zeros(count + 1), np.zeros(count + 1)
    np.add.at(level, begin, prompt)
    np.add.at(level, end, -prompt - a_step * (end - begin))
    np.add.at(rise, begin, a_step)
    np.add.at(rise, end, -a_step)
    return (np.cumsum(level) + np.cumsum(np.cumsum(rise)))[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefills:
    """Prompt tokens computed in each step [k], tokens held by these prompts, and their number.

    `begin` is the step in which each request's prefill began [n].
    """

    tokens: Floats
    held: Floats
    prompts: Ints
    begin: Ints


def prefills_of(
    requests: AnsweredRequests, steps: EngineSteps, *, budget: int, seats: int | None, frontend_s: float
) -> Prefills:
    """Return the prefills of steps: prompts as they came, within the budget that decodes leave.

    The last chunk of a prompt is in the step of its first output, and the first as early as the prompt came, which is
    `frontend_s` after its submission, as a seat was free, and as all steps between were full.
    """
    count = len(steps.end_s)
    left = (budget - steps.decodes).tolist()
    free = (np.full(count, _NO_LIMIT) if seats is None else seats - steps.decodes).tolist()
    tokens, held, prompts = [0.0] * count, [0.0] * count, [0] * count
    begins = np.empty(len(requests), np.int64)
    uncached = (requests.prompt_tokens - requests.cached_tokens).tolist()
    cached, first = requests.cached_tokens.tolist(), steps.first.tolist()
    came = np.searchsorted(steps.end_s, requests.submit_s + frontend_s).tolist()
    for number in np.lexsort((requests.submit_s, steps.first)).tolist():
        end, remaining, done = first[number], uncached[number], cached[number]
        begin, room = end, 0
        while begin - 1 > came[number] and free[begin - 1] > 0 and 0 < left[begin - 1] < remaining - room:
            room += left[begin - 1]
            begin -= 1
        begins[number] = begin
        for at in range(begin, end + 1):
            chunk = remaining if at == end else min(remaining, left[at])
            left[at] -= chunk
            remaining -= chunk
            done += chunk
            tokens[at] += chunk
            held[at] += done
            prompts[at] += 1
            free[at] -= 1
    return Prefills(tokens=np.array(tokens), held=np.array(held), prompts=np.array(prompts), begin=begins)
