"""Steps of an engine where only spans of requests are known: laid between their first and last tokens.

A reply of n tokens has n - 1 steps between its first and its last. Each first and each last token ends a step, and
between two of them the batch is the same, so that steps of the duration fitted so far fill the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Texts, take
from sidelight.simulator.settings import SpeedProfile
from sidelight.twin.engine.steps import AnsweredRequests, EngineSteps, Prefills, StepWindows, held_tokens, running

MOST_SPANNED = 3000  # requests: what was before them has changed since, and costs
_MOST_STEPS = 500_000  # more are stated by nonsense
_SAME = 0.25  # of a step: stamps that are closer are of its end


@dataclass(frozen=True, slots=True, kw_only=True)
class SpannedRequests(AnsweredRequests):
    """Requests with the stamps of their first and last tokens alone; `served_by` names their engines."""

    first_s: Floats
    last_s: Floats
    served_by: Texts


def spanned_requests(log: RequestLog, parts: Parts, *, origin_ns: int | None = None) -> SpannedRequests:
    """Return the requests with a known prompt, output and first token.

    Those without a status are by their engine's span. Times count from `origin_ns`, or from the first of them.
    `parts` have the engine's time from first to last token; where it is NaN, the client's span ends with the last.
    """
    decode_s = np.where(np.isfinite(parts.decode_s), parts.decode_s, (log.end_ns - log.first_token_ns) / 1e9)
    usable = np.isin(log.status, ("ok", "")) & (log.submit_ns >= 0) & (log.first_token_ns >= log.submit_ns)
    usable &= (log.input_tokens > 0) & (log.output_tokens > 0) & ((decode_s > 0) | (log.output_tokens == 1))
    order = np.flatnonzero(usable)
    order = order[np.argsort(log.submit_ns[order], kind="stable")]
    used = take(log, order)
    if origin_ns is None:
        origin_ns = int(used.submit_ns[0]) if len(order) else 0
    first_s = (used.first_token_ns - origin_ns) / 1e9
    return SpannedRequests(
        submit_s=(used.submit_ns - origin_ns) / 1e9,
        prompt_tokens=used.input_tokens,
        cached_tokens=np.clip(used.cached_tokens, 0, used.input_tokens - 1),
        output_tokens=used.output_tokens,
        first_s=first_s,
        last_s=np.where(used.output_tokens > 1, first_s + decode_s[order], first_s),
        served_by=parts.engine[order],
    )


def from_origin(requests: SpannedRequests, origin_s: float) -> SpannedRequests:
    """Return requests with times that count from another moment."""
    moved = {name: getattr(requests, name) - origin_s for name in ("submit_s", "first_s", "last_s")}
    return replace(requests, **moved)


def laid_steps(
    requests: SpannedRequests, budget: int, before: tuple[EngineSteps, Prefills, SpeedProfile] | None
) -> EngineSteps:
    """Return steps that fill the time between first and last tokens.

    Their speed is that fitted to steps laid `before`, which also say when prompt tokens were computed. Without any, all
    are alike, and a prompt is of the stretch that ends with its first token.
    """
    decode_s, gaps = requests.last_s - requests.first_s, np.maximum(requests.output_tokens - 1, 1)
    usual_s = float(np.median((decode_s / gaps)[requests.output_tokens > 1]))
    alike = SpeedProfile(step_s=usual_s, prefill_token_s=0.0, sequence_s=0.0, kv_token_s=0.0, jitter_ratio=0.0)
    speed = before[2] if before else alike
    stamps_s = np.concatenate([requests.first_s, requests.last_s])
    order = np.argsort(stamps_s, kind="stable")
    together_s = _SAME * usual_s
    is_new = np.diff(stamps_s[order], prepend=-np.inf) > together_s
    place = np.empty(len(stamps_s), np.int64)
    place[order] = np.cumsum(is_new) - 1
    at_s = stamps_s[order][is_new]
    first, last = place[: len(requests)], place[len(requests) :]
    sequences = running(first, last, len(at_s))
    growing = requests.prompt_tokens + requests.output_tokens / 2
    kv_tokens = running(first, last, len(at_s), growing)
    if before is None:
        prompts = np.bincount(first, requests.prompt_tokens - requests.cached_tokens, len(at_s))
    else:
        ends = np.unique(np.concatenate([before[0].first, before[0].last]))
        prompts = np.diff(np.cumsum(before[1].tokens)[ends], prepend=0.0)
    shortest_s = max(usual_s / 10, float(at_s[-1] - at_s[0]) / _MOST_STEPS)
    step_s = np.maximum(shortest_s, speed.step_s + speed.sequence_s * sequences + speed.kv_token_s * kv_tokens)
    prefill_s = speed.prefill_token_s * prompts
    since_s = np.diff(at_s, prepend=at_s[0] - step_s[0] - prefill_s[0])
    chunks = np.maximum(1, np.ceil(prompts / budget))
    alone_s = np.minimum(since_s, chunks * step_s + prefill_s)  # of steps that end a time without decodes
    count = np.where(sequences > 0, np.maximum(1, np.rint((since_s - prefill_s) / step_s)), chunks).astype(np.int64)
    shared_s = np.where(sequences > 0, since_s, alone_s)
    ends = np.cumsum(count)
    number = np.arange(ends[-1]) - np.repeat(ends - count, count)
    # The prompts' own time comes last.
    even_s = np.maximum(shared_s - np.where(count > 1, prefill_s, 0.0), shared_s / 2) / count
    end_s = np.repeat(at_s - shared_s, count) + (number + 1) * np.repeat(even_s, count)
    end_s[ends - 1] = at_s
    first, last = ends[first] - 1, ends[last] - 1
    rows = np.flatnonzero(last > first)
    rows = rows[np.argsort(last[rows], kind="stable")]
    return EngineSteps(
        end_s=end_s,
        duration_s=np.where(np.repeat(sequences > 0, count), np.diff(end_s, prepend=np.nan), np.nan),
        decodes=running(first, last, len(end_s)).astype(np.int64),
        kv_tokens=held_tokens(requests.prompt_tokens, requests.output_tokens, first, last, len(end_s)),
        first=first,
        last=last,
        windows=StepWindows(since=first[rows], until=last[rows], steps=gaps[rows], duration_s=(decode_s / gaps)[rows]),
    )
