"""The error of a single reported latency, and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from sidelight.loadgen.records import WorkerStat
from sidelight.loadgen.requests.metrics import content_gaps, request_metrics
from sidelight.loadgen.requests.self_check.workers import (
    by_worker,
    counted_between,
    kernel_stamped,
    loop_delays_ms,
    read_counts,
)
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Ints, take
from sidelight.rundir.fields import Missing, doc
from sidelight.rundir.stats import known

# What is left of a stamp's error where it is the kernel's: its move to the run's clock, anew every 50 ms, while the
# wall clock may be slewed by 500 ppm; or, of our own stamp, the call that took it.
STAMP_MS = 0.05
# An error of this size, or of this share of the metric's median, is small enough for any use of the metric.
LIMIT_MS = 1.0
LIMIT_RATIO = 0.02
# An error of this share of the metric's median is no longer small beside it: nothing is decided by the metric.
UNUSABLE_RATIO = 0.1
# A difference of two stamps is off by more than x only when one of them is: at 99 % each may at 99.5 %.
_EACH = 0.995
# A read is counted in the tick behind it, or up to 0.9 s later: recorder.FLUSH_NS, and half as long again.
_LATER_TICKS = 6


class ErrorParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an error."""

    stamp: Annotated[float, doc("Uncertainty of two stamps.", "ms")]
    read: Annotated[float, doc("Reads that were stamped late, or together.", "ms")]
    submit: Annotated[
        float | UnsetType,
        doc("Of TTFT, where the submission is stamped behind the call (not plain TCP): from the dispatch on.", "ms"),
    ] = UNSET


class ErrorBound(msgspec.Struct, frozen=True, kw_only=True):
    """The bound on the error of 99 of 100 values."""

    p99: Annotated[float | None, doc("The bound.", "ms")]
    made_of: Annotated[ErrorParts | None, doc("What the bound is made of.", "ms")]
    median: Annotated[float | None, doc("The metric's median, of the requests that ended ok.", "ms")]
    share_of_median: Annotated[float | None, doc("The bound over the median.", "ratio")]
    limit: Annotated[float | None, doc("1 ms, or 2 % of the median where that is more.", "ms")]
    missing: Missing = UNSET

    @property
    def exceeded(self) -> bool:
        """Return whether the bound is over its limit."""
        return self.p99 is not None and self.limit is not None and self.p99 > self.limit

    @property
    def unusable(self) -> bool:
        """Return whether the bound is too large beside the metric for any decision."""
        return self.exceeded and (self.p99 or 0.0) > UNUSABLE_RATIO * (self.median or 0.0)


class StatedError(msgspec.Struct, frozen=True, kw_only=True):
    """The possible error of a single reported latency."""

    ttft: Annotated[ErrorBound, doc("Of a time to first token.", "ms")]
    itl: Annotated[ErrorBound, doc("Of a gap between chunks.", "ms")]


def stated_error(log: RequestLog, stats: Sequence[WorkerStat]) -> StatedError:
    """Return bounds in ms on the error of TTFT and ITL, and their parts.

    99 of 100 reported values are off by no more than the bound.

    stamp    of two stamps, STAMP_MS each
    read     our own stamps: how late the loop came to its reads, of which its timer is a sample. The kernel's: nothing,
             but for chunks that were read together; see _waited_ms
    submit   TTFT only: over TLS, WebSocket and gRPC the submission is stamped when the library has taken it, and its
             last byte left somewhere between dispatch, or connection, and then. Over plain TCP it is stamped before the
             call, and what comes before that does not belong to a TTFT
    """
    ttft_median, itl_median = _medians(log)
    delays_ms = loop_delays_ms(stats)
    if not len(delays_ms):
        return StatedError(ttft=_unknown(ttft_median), itl=_unknown(itl_median))
    counts, _ = read_counts(stats)
    submit_ms = 0.0
    if sum(counts) and kernel_stamped(stats):
        stretches = content_gaps(log, np.ones(len(log), np.bool_))
        waited = zip(*(_waited_ms(each, gaps_ms, row, stats) for each, gaps_ms, row, _ in stretches), strict=True)
        ttft_ms, itl_ms = (_quantile(np.concatenate(waited_ms), _EACH, method="higher") for waited_ms in waited)
    else:
        ttft_ms = itl_ms = float(np.quantile(delays_ms, _EACH))
        submit_ms = _submit_ms(log)
    stamp_ms = 2 * STAMP_MS
    return StatedError(
        # The two may not add up: a late read makes a TTFT longer, a late stamp of the submission makes it shorter.
        ttft=_bound(
            stamp_ms + max(ttft_ms, submit_ms),
            ErrorParts(stamp=stamp_ms, read=ttft_ms, submit=submit_ms),
            ttft_median,
        ),
        itl=_bound(stamp_ms + itl_ms, ErrorParts(stamp=stamp_ms, read=itl_ms), itl_median),
    )


def _bound(p99_ms: float, parts: ErrorParts, median_ms: float | None) -> ErrorBound:
    return ErrorBound(
        p99=p99_ms,
        made_of=parts,
        median=median_ms,
        share_of_median=p99_ms / median_ms if median_ms else None,
        limit=_limit_ms(median_ms),
    )


def _unknown(median_ms: float | None) -> ErrorBound:
    return ErrorBound(
        p99=None,
        made_of=None,
        median=median_ms,
        share_of_median=None,
        limit=_limit_ms(median_ms),
        missing="no worker reported",
    )


def _limit_ms(median_ms: float | None) -> float | None:
    return None if median_ms is None else max(LIMIT_MS, LIMIT_RATIO * median_ms)


def _medians(log: RequestLog) -> tuple[float | None, float | None]:
    """Return the median TTFT and gap, ms."""
    metrics = request_metrics(take(log, log.status == "ok"), as_read=True)
    return _median(metrics.ttft_ms), _median(metrics.itl_ms)


def _median(values: Floats) -> float | None:
    flat = known(values)
    return float(np.median(flat)) if len(flat) else None


def _waited_ms(log: RequestLog, gaps_ms: Floats, of_gap: Ints, stats: Sequence[WorkerStat]) -> tuple[Floats, Floats]:
    """Return each TTFT's and each gap's possible error from joint reads, ms.

    Chunks that came apart may have been read together.

    The kernel gives a read the stamp of the last bytes in it. Those before them came after the stamp before, so neither
    the time that led to such a read nor the gaps of 0 in it are off by more than the time that led to it; nor by more
    than the worker's loop was seen not to look around that time.
    """
    ttft_ms = request_metrics(log).ttft_ms
    rows = np.flatnonzero(~np.isnan(ttft_ms))
    # Each request's TTFT, and the gaps behind it.
    times_ms = np.concatenate([ttft_ms[rows], gaps_ms])
    of_row = np.concatenate([rows, of_gap])
    order = np.argsort(of_row, kind="stable")
    ordered_ms, of_row = times_ms[order], of_row[order]
    zero = ordered_ms == 0
    led_to = np.append(zero[1:] & (of_row[1:] == of_row[:-1]), np.zeros(min(len(zero), 1), bool))
    together = np.flatnonzero(zero | led_to)
    leading = np.maximum.accumulate(np.where(zero, 0, np.arange(len(zero))))[together]
    # When each ended: the first token, and from there on gap by gap.
    since_submit_ms = np.cumsum(ordered_ms)
    before_row_ms = (since_submit_ms - ordered_ms)[np.searchsorted(of_row, of_row[together])]
    ended_ns = log.submit_ns[of_row[together]] + np.rint(1e6 * (since_submit_ms[together] - before_row_ms))
    away_ms = _away_ms(ended_ns.astype(np.int64), log.worker[of_row[together]], stats)
    waited_ms = np.zeros_like(times_ms)
    waited_ms[order[together]] = np.minimum(ordered_ms[leading], away_ms)
    return waited_ms[: len(rows)], waited_ms[len(rows) :]


def _away_ms(read_ns: Ints, worker: Ints, stats: Sequence[WorkerStat]) -> Floats:
    """Return the longest absence of each read's worker loop around the read, ms.

    Seen by its timer and by other reads, in the tick that covers the read and the next ones; of a worker without a
    tick, by all.
    """
    seen_ms: dict[int, tuple[Ints, Floats]] = {}
    for number, ticks in by_worker(stats).items():
        before = [() if len(ticks) == 1 else ticks[0].read_late_counts, *(tick.read_late_counts for tick in ticks)]
        late_ns = [
            max(tick.loop_delay_ns, counted_between(counted, tick)[1])
            for counted, tick in zip(before, ticks, strict=False)
        ]
        padded = np.append(late_ns, np.zeros(_LATER_TICKS))
        longest = np.lib.stride_tricks.sliding_window_view(padded, _LATER_TICKS + 1).max(axis=1)
        seen_ms[number] = np.array([tick.at_ns for tick in ticks]), longest / 1e6
    away_ms = np.full(len(read_ns), max(float(longest.max()) for _, longest in seen_ms.values()))
    for number, (at_ns, longest) in seen_ms.items():
        of_worker = worker == number
        tick = np.minimum(np.searchsorted(at_ns, read_ns[of_worker]), len(at_ns) - 1)
        away_ms[of_worker] = longest[tick]
    return away_ms


def _submit_ms(log: RequestLog) -> float:
    """Return the 0.995 quantile of the possible lateness of submission stamps. 0 where nothing was submitted."""
    began_ns = np.maximum(log.dispatch_ns, log.connected_ns)
    took_ms = (log.submit_ns - began_ns)[(log.submit_ns >= 0) & (began_ns >= 0)] / 1e6
    return _quantile(took_ms, _EACH)


def _quantile(values: Floats, q: float, *, method: Literal["linear", "higher"] = "linear") -> float:
    """Return a quantile, 0 without values."""
    return float(np.quantile(values, q, method=method)) if len(values) else 0.0
