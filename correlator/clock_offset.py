"""How far the engine's clock is from ours, by causality: no request arrives before it was sent, no token before it was.

Each joined request bounds the offset from both sides, and the tightest bounds of a run leave half the least way in and
out as error. Nothing is assumed of how a round trip divides into its two ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from correlator.join import SLACK_MS, Joined

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_PAIRS = "no request was joined with stamps of the engine's clock"
NO_BOUNDS = "the requests that were joined bound the offset from one side only"


class Requests(Protocol):
    """The columns of a RequestLog that are read here; int64 ns Unix by our clock, -1 where missing."""

    @property
    def submit_ns(self) -> Ints: ...
    @property
    def first_output_ns(self) -> Ints: ...
    @property
    def end_ns(self) -> Ints: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """What to add to the engine's stamps for ours, and by how much that may be off, ns; None where `reason` says why.

    `pairs` is how many requests bound it.
    """

    offset_ns: int | None
    error_ns: int | None
    pairs: int
    reason: str = ""


def clock_offset(requests: Requests, joined: Joined) -> ClockOffset:
    """Return the middle of the offsets that put no effect before its cause, and half their range as error.

    Sent is not after arrived, the engine's first token not after the client's first output, its end not after ours.

    - no request joined by a span, or none whose reply came: unknown
    - bounds that contradict each other by up to 10 ms, as clocks drift and stamps are late: half of that is the error
    - by more: unknown; the engine's clock was set during the run, or several engines' clocks differ
    """
    stamped = joined.arrival_ns >= 0
    if not stamped.any():
        return ClockOffset(offset_ns=None, error_ns=None, pairs=0, reason=NO_PAIRS)
    least = (requests.submit_ns - joined.arrival_ns)[stamped & (requests.submit_ns >= 0)]
    told = stamped & np.isfinite(joined.ttft_ms) & (requests.first_output_ns >= 0)
    most = np.concatenate(
        [
            (requests.first_output_ns - first_token_ns(joined))[told],
            (requests.end_ns - joined.end_ns)[(joined.end_ns >= 0) & (requests.end_ns >= 0)],
        ]
    )
    if not len(least) or not len(most):
        return ClockOffset(offset_ns=None, error_ns=None, pairs=int(stamped.sum()), reason=NO_BOUNDS)
    low_ns, high_ns = int(least.max()), int(most.min())
    pairs = int(stamped.sum())
    if low_ns - high_ns > SLACK_MS * 1e6:
        reason = (
            f"its stamps contradict each other by {(low_ns - high_ns) / 1e6:.0f} ms: its clock was set during the run, "
            "or several engines' clocks differ"
        )
        return ClockOffset(offset_ns=None, error_ns=None, pairs=pairs, reason=reason)
    return ClockOffset(offset_ns=(low_ns + high_ns) // 2, error_ns=(abs(high_ns - low_ns) + 1) // 2, pairs=pairs)


def first_token_ns(joined: Joined) -> Ints:
    """Return when each request's first token was, int64 [n] ns by the engine's clock, -1 where unknown."""
    told = (joined.arrival_ns >= 0) & np.isfinite(joined.ttft_ms)
    waited_ns = np.rint(np.where(told, joined.ttft_ms, 0.0) * 1e6).astype(np.int64)
    return np.where(told, joined.arrival_ns + waited_ns, -1)
