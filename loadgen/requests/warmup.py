"""Warm-up by the draft (warmup-requirements, warmup-verification, cold-start); all pure.

How a warm-up is run is the caller's business: send `more_requests` until it says none, drain, probe until `stable`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
import numpy as np

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir import fields
from sidelight.rundir.fields import UNSET, Count, doc

AFTER = "after:"  # as the option says it; behind it stands what warmed the target up
DRAFT_REQUESTS = 100
DRAFT_OUTPUT_TOKENS = 10_000
PROBE_VARIATION = 0.10
PROBES = 3  # two consecutive pairs: one pair alone agrees by luck too often


Kind = Literal["draft", "count", "none", "earlier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """The warm-up policy and its number of requests.

    `draft` asks for the draft's minimum, `count` for exactly `requests`, `none` is a cold start, `earlier` is none of
    its own: the load of the name `after` came before.
    """

    kind: Kind
    requests: int
    after: str = ""


class WarmupStatement(msgspec.Struct, frozen=True, kw_only=True):
    """The report's statement of the warm-up."""

    policy: Annotated[
        Kind,
        doc(
            "`draft`: 100 requests and 10,000 output tokens; `count`: as many as asked for; `none`: a cold "
            "start; `earlier`: an earlier load had warmed the target up",
            source="draft `warmup-requirements`, `cold-start`",
        ),
    ]
    cold_start: Annotated[bool, doc("whether there was no warm-up on purpose", source="draft `cold-start`")]
    requests_ok: Annotated[Count, doc("requests that ended ok", "requests", source="draft `warmup-requirements`")]
    output_tokens: Annotated[
        Count, doc("output tokens that they brought, at least", "tokens", source="draft `warmup-requirements`")
    ]
    drained: Annotated[
        bool | None,
        doc(
            "whether everything had ended before the measurement; null without a warm-up of its own",
            source="draft `warmup-requirements`",
        ),
    ]
    meets_draft: Annotated[
        bool | None,
        doc(
            "whether it is the draft's minimum, drained; null without one of its own",
            source="draft `warmup-requirements`",
        ),
    ]
    probes_before_ms: Annotated[
        list[float | None],
        doc("TTFT of the probes before the warm-up; null: failed", "ms", source="draft `warmup-verification`"),
    ]
    probes_after_ms: Annotated[
        list[float | None],
        doc("TTFT of the probes after the warm-up; null: failed", "ms", source="draft `warmup-verification`"),
    ]
    probe_variation: Annotated[
        float | None,
        doc(
            "the greatest change between consecutive probes of the last three",
            "ratio",
            source="draft `warmup-verification`",
        ),
    ]
    stable: Annotated[
        bool | None,
        doc("whether `probe_variation` is below 10 %; null where not probed", source="draft `warmup-verification`"),
    ]
    missing: fields.Missing = UNSET
    sentence: Annotated[str, doc("all of it in one sentence")]


BY_THE_DRAFT = Warmup(kind="draft", requests=DRAFT_REQUESTS)
COLD_START = Warmup(kind="none", requests=0)


def parse_warmup(text: str) -> Warmup:
    """Read `draft`, `none`, `after:NAME` or a number of requests (0 is `none`). Raises ValueError with the cure."""
    named = {"draft": BY_THE_DRAFT, "none": COLD_START}
    if text in named:
        return named[text]
    if text.startswith(AFTER):
        return Warmup(kind="earlier", requests=0, after=text.removeprefix(AFTER))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--warmup: {text!r} is not a warm-up; write draft, none, or a number of requests")
    return Warmup(kind="count", requests=int(text)) if int(text) else COLD_START


def more_requests(policy: Warmup, log: RequestLog) -> int:
    """Return the number of further requests a warm-up needs, 0 when it is done.

    `log` holds the requests that it has sent so far, drained.

    By the draft, 100 requests or 10,000 output tokens, whichever is greater: both are reached. Only requests that ended
    ok count. A reply without usage counts one token a content chunk, which is the least it can hold. By the tokens, the
    number is what the mean of the replies so far suggests; ask again when they have ended. Of replies with neither
    usage nor chunks only the requests count. A target that answers nothing is never warm: give up when a round
    brought no request that ended ok.
    """
    if policy.kind in ("none", "earlier"):
        return 0
    if policy.kind == "count":
        return max(policy.requests - len(log), 0)
    requests, tokens = warmed(log)
    by_tokens = math.ceil((DRAFT_OUTPUT_TOKENS - tokens) * requests / tokens) if tokens else 0
    return max(DRAFT_REQUESTS - requests, by_tokens, 0)


def warmed(log: RequestLog) -> tuple[int, int]:
    """Return the requests that ended ok and the output tokens that they brought, at least."""
    ok = log.status == "ok"
    tokens = np.where(log.output_tokens >= 0, log.output_tokens, np.diff(log.chunk_start))
    return int(ok.sum()), int(tokens[ok].sum())


def variation(probe_ttfts_ms: Sequence[float]) -> float:
    """Return the greatest change between consecutive probes of the last three.

    It is a ratio of the earlier probe of a pair.

    NaN when there are fewer than three; infinite when one of them failed (NaN, or not above zero).
    """
    last = list(probe_ttfts_ms)[-PROBES:]
    if len(last) < PROBES:
        return float("nan")
    if not all(math.isfinite(probe) and probe > 0 for probe in last):
        return float("inf")
    return max(abs(later - earlier) / earlier for earlier, later in pairwise(last))


def stable(probe_ttfts_ms: Sequence[float]) -> bool:
    """Return whether the latency has settled.

    It has settled with under 10 % variation in the last three probes (warmup-verification).
    """
    return variation(probe_ttfts_ms) < PROBE_VARIATION


def statement(
    policy: Warmup,
    log: RequestLog,
    *,
    drained: bool,
    before_ms: Sequence[float] = (),
    after_ms: Sequence[float] = (),
) -> WarmupStatement:
    """Return the report's statement of the warm-up.

    before_ms, after_ms   TTFT of the probes sent before and after it, in order; NaN for a probe that failed
    """
    requests, tokens = warmed(log)
    cold, sends = policy.kind == "none", policy.kind in ("draft", "count")
    enough = requests >= DRAFT_REQUESTS and tokens >= DRAFT_OUTPUT_TOKENS
    change = variation(after_ms)
    known = math.isfinite(change)
    return WarmupStatement(
        policy=policy.kind,
        cold_start=cold,
        requests_ok=requests,
        output_tokens=tokens,
        drained=drained if sends else None,
        meets_draft=enough and drained if sends else None,
        probes_before_ms=[value if math.isfinite(value) else None for value in before_ms],
        probes_after_ms=[value if math.isfinite(value) else None for value in after_ms],
        probe_variation=change if known else None,
        stable=stable(after_ms) if after_ms and sends else None,
        missing=UNSET if known or not sends else _why_unknown(after_ms),
        sentence=_sentence(policy, requests, tokens, drained=drained, after_ms=after_ms),
    )


def _why_unknown(after_ms: Sequence[float]) -> str:
    if not after_ms:
        return "no probe was sent after the warm-up"
    if len(after_ms) < PROBES:
        return f"{len(after_ms)} probes after the warm-up; {PROBES} are needed"
    return "a probe failed"


def _sentence(policy: Warmup, requests: int, tokens: int, *, drained: bool, after_ms: Sequence[float]) -> str:
    if policy.kind == "none":
        return "Cold start: no warm-up, the first requests are part of the measurement."
    if policy.kind == "earlier":
        return f"No warm-up of its own: the load of {policy.after} had warmed the system up."
    text = f"Warm-up: {requests:,} requests and {tokens:,} output tokens, {'drained' if drained else 'not drained'}"
    minimum = f"{DRAFT_REQUESTS} requests or {DRAFT_OUTPUT_TOKENS:,} output tokens, whichever is greater"
    if requests < DRAFT_REQUESTS or tokens < DRAFT_OUTPUT_TOKENS:
        text += f" (the draft asks for {minimum})"
    if not after_ms:
        return f"{text}; not probed."
    if not math.isfinite(variation(after_ms)):
        return f"{text}; {_why_unknown(after_ms)}."
    settled = "stable" if stable(after_ms) else "not stable"
    return f"{text}; probes {settled}, within {100 * variation(after_ms):.0f} %."
