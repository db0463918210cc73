"""Warm-up by the draft (warmup-requirements, warmup-verification, cold-start); all pure.

How a warm-up is run belongs to whoever runs it: send `more_requests` until it says none, drain, probe until `stable`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from loadgen.requests.table import RequestLog

DRAFT_REQUESTS = 100
DRAFT_OUTPUT_TOKENS = 10_000
PROBE_VARIATION = 0.10
PROBES = 3  # two consecutive pairs: one pair alone agrees by luck too often


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """How to warm up: `draft` asks for the draft's minimum, `count` for exactly `requests`, `none` is a cold start."""

    kind: Literal["draft", "count", "none"]
    requests: int


DRAFT = Warmup(kind="draft", requests=DRAFT_REQUESTS)
COLD_START = Warmup(kind="none", requests=0)


def parse_warmup(text: str) -> Warmup:
    """Read `draft`, `none` or a number of requests (0 is `none`). Raises ValueError with the cure."""
    named = {"draft": DRAFT, "none": COLD_START}
    if text in named:
        return named[text]
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--warmup: {text!r} is no warm-up; write draft, none, or a number of requests")
    return Warmup(kind="count", requests=int(text)) if int(text) else COLD_START


def more_requests(policy: Warmup, log: RequestLog) -> int:
    """How many requests more a warm-up needs, 0 when it is done; `log` holds what it has sent so far, drained.

    By the draft, 100 requests or 10,000 output tokens, whichever is greater: both are reached. Only requests that ended
    ok count. A reply without usage counts one token a content chunk, which is the least it can hold. By the tokens, the
    number is what the mean of the replies so far suggests; ask again when they have ended. Replies that tell neither
    usage nor chunks leave only the requests to count. A target that answers nothing is never warm: give up when a round
    brought no request that ended ok.
    """
    if policy.kind == "none":
        return 0
    if policy.kind == "count":
        return max(policy.requests - len(log), 0)
    requests, tokens = warmed(log)
    by_tokens = math.ceil((DRAFT_OUTPUT_TOKENS - tokens) * requests / tokens) if tokens else 0
    return max(DRAFT_REQUESTS - requests, by_tokens, 0)


def warmed(log: RequestLog) -> tuple[int, int]:
    """Requests that ended ok and the output tokens they brought, at least."""
    ok = log.status == "ok"
    tokens = np.where(log.output_tokens >= 0, log.output_tokens, np.diff(log.chunk_start))
    return int(ok.sum()), int(tokens[ok].sum())


def variation(probe_ttfts_ms: Sequence[float]) -> float:
    """The greatest change between consecutive probes among the last three, as a ratio of the earlier one of a pair.

    NaN when there are fewer than three; infinite when one of them failed (NaN, or not above zero).
    """
    last = list(probe_ttfts_ms)[-PROBES:]
    if len(last) < PROBES:
        return float("nan")
    if not all(math.isfinite(probe) and probe > 0 for probe in last):
        return float("inf")
    return max(abs(later - earlier) / earlier for earlier, later in pairwise(last))


def stable(probe_ttfts_ms: Sequence[float]) -> bool:
    """Whether the latency has settled: under 10 % variation across the last three probes (warmup-verification)."""
    return variation(probe_ttfts_ms) < PROBE_VARIATION


def statement(
    policy: Warmup,
    log: RequestLog,
    *,
    drained: bool,
    before_ms: Sequence[float] = (),
    after_ms: Sequence[float] = (),
) -> dict[str, Any]:
    """What the report says of the warm-up; `sentence` is the same for people.

    before_ms, after_ms   TTFT of the probes sent before and after it, in order; NaN for a probe that failed
    meets_draft           the `warmup` requirement: enough work and a drained queue; null for a cold start, where the
                          draft wants none
    """
    requests, tokens = warmed(log)
    cold = policy.kind == "none"
    enough = requests >= DRAFT_REQUESTS and tokens >= DRAFT_OUTPUT_TOKENS
    change = variation(after_ms)
    known = math.isfinite(change)
    return {
        "policy": policy.kind,
        "cold_start": cold,
        "requests_ok": requests,
        "output_tokens": tokens,
        "drained": None if cold else drained,
        "meets_draft": None if cold else enough and drained,
        "probes_before_ms": [value if math.isfinite(value) else None for value in before_ms],
        "probes_after_ms": [value if math.isfinite(value) else None for value in after_ms],
        "probe_variation": change if known else None,
        "stable": stable(after_ms) if after_ms and not cold else None,
        **({} if known or cold else {"missing": _why_untold(after_ms)}),
        "sentence": _sentence(policy, requests, tokens, drained=drained, after_ms=after_ms),
    }


def _why_untold(after_ms: Sequence[float]) -> str:
    if not after_ms:
        return "no probe was sent after the warm-up"
    if len(after_ms) < PROBES:
        return f"{len(after_ms)} probes after the warm-up; {PROBES} are needed"
    return "a probe failed"


def _sentence(policy: Warmup, requests: int, tokens: int, *, drained: bool, after_ms: Sequence[float]) -> str:
    if policy.kind == "none":
        return "Cold start: no warm-up, the first requests are part of the measurement."
    said = f"Warm-up: {requests:,} requests and {tokens:,} output tokens, {'drained' if drained else 'not drained'}"
    asked = f"{DRAFT_REQUESTS} requests or {DRAFT_OUTPUT_TOKENS:,} output tokens, whichever is greater"
    if requests < DRAFT_REQUESTS or tokens < DRAFT_OUTPUT_TOKENS:
        said += f" (the draft asks for {asked})"
    if not after_ms:
        return f"{said}; not probed."
    if not math.isfinite(variation(after_ms)):
        return f"{said}; {_why_untold(after_ms)}."
    settled = "stable" if stable(after_ms) else "not stable"
    return f"{said}; probes {settled}, within {100 * variation(after_ms):.0f} %."
