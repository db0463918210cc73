"""Steady part of a load, and its throughput: without the ramp at its begin, and without the drain.

The draft leaves out the first tenth. Whether that was enough is asked of MSER-5 (White, Cobb and Spratt 2000, "A
comparison of five steady-state truncation heuristics"): of batches of five gaps between completions, it leaves out
those that would make the mean of the others less sure. Of queues that were steady all along it leaves out more than a
tenth in 20 to 45 % of loads of 60 s and 300 completions, and in 0 to 10 % of 300 s.

Rates have an interval by ten batch means (Schmeiser 1982, "Batch size effects in the analysis of simulation output").
On queues of 1, 16 and 64 servers at 50 to 150 % load, 60 and 300 s, it holds the true rate in 90 to 98 %; only within
10 % of the capacity, where a queue that begins empty has not become steady, in 81 to 90 %.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from sidelight.loadgen.requests.metrics import input_tokens
from sidelight.loadgen.requests.rates import SteadyThroughput
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Bools, Floats, Ints
from sidelight.rundir.fields import Ratio, StampNs, doc
from sidelight.rundir.stats import known

LEFT_OUT = 0.1
MSER_BATCH = 5
LEAST_BATCHES = 10  # of five completions each, that MSER-5 can judge
BATCHES, LEAST_EVENTS = 10, 20  # of a rate
_ONE_SIDED_95 = 1.645
_AT_ONCE = 2**20  # stamps in memory


class SteadyWindow(Struct, frozen=True, kw_only=True):
    """The part of a step that is counted: without its first tenth and without the drain."""

    start_ns: Annotated[StampNs, doc("Its begin.", "ns")]
    end_ns: Annotated[StampNs, doc("Its end: the end of the load.", "ns")]
    left_out: Annotated[Ratio, doc("Share of the load before it.", "ratio")]
    enough: Annotated[bool | None, doc("Whether MSER-5 would leave out no more; null: too few requests.")]
    mser5_left_out: Annotated[float | None, doc("Share of the load that MSER-5 would leave out.", "ratio")] = None

    @property
    def duration_s(self) -> float:
        """Return its length in s."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def load_s(self) -> float:
        """Return the length of the whole load in s."""
        return self.duration_s / (1 - self.left_out) if self.left_out < 1 else 0.0


def steady_window(start_ns: int, end_ns: int, ended_ns: npt.ArrayLike) -> SteadyWindow:
    """Return the counted window of a load from `start_ns` to `end_ns`: all but its first tenth.

    ended_ns [n]  when requests ended, in any order; below 0: not known
    """
    load_ns = max(end_ns - start_ns, 0)
    window_ns = start_ns + round(LEFT_OUT * load_ns)
    ended = np.sort(np.asarray(ended_ns, np.int64).ravel())
    ended = ended[(ended >= max(start_ns, 0)) & (ended <= end_ns)]
    if len(ended) < LEAST_BATCHES * MSER_BATCH:
        return SteadyWindow(start_ns=window_ns, end_ns=start_ns + load_ns, left_out=LEFT_OUT, enough=None)
    truncated = mser5(np.diff(ended, prepend=start_ns))
    would_ns = int(ended[truncated - 1]) if truncated else start_ns
    return SteadyWindow(
        start_ns=window_ns,
        end_ns=start_ns + load_ns,
        left_out=LEFT_OUT,
        enough=would_ns <= window_ns,
        mser5_left_out=(would_ns - start_ns) / load_ns,
    )


def mser5(values: npt.ArrayLike) -> int:
    """Return the number of first values [n] to leave out: a multiple of 5.

    They make the mean of the others less sure. 0 below two batches. All but a few is an answer too: no part of the
    series is steady.
    """
    series = np.asarray(values, np.float64).ravel()
    count = len(series) // MSER_BATCH
    if count < 2:
        return 0
    means = series[: count * MSER_BATCH].reshape(count, MSER_BATCH).mean(axis=1)
    means = means - means.mean()
    left = np.arange(count, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    error = np.maximum(squares - sums**2 / left, 0.0) / left**2
    # The last batches agree by chance, as one alone always does.
    considered = error[: max(1, count - MSER_BATCH + 1)]
    return MSER_BATCH * int(np.argmin(considered))


def rate(
    at_ns: npt.ArrayLike, weights: npt.ArrayLike, window: SteadyWindow
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the rate per second in the window, and its 95 % interval.

    The interval is by batch means.

    at_ns [n], weights [n] or 1  when something came, and how much: completions, or tokens

    - A window without length has no rate. Nothing that came in it is a rate of 0 without an interval.
    - Fewer than 20 events have no interval.
    """
    if window.duration_s <= 0:
        return None, None
    sums, events = _batches(at_ns, weights, window)
    per_s = float(sums.sum()) / window.duration_s
    if events < LEAST_EVENTS:
        return per_s, None
    from scipy.special import stdtrit  # noqa: PLC0415  150 ms, and a run without requests needs none of SciPy

    # The rate is the mean of the batches' rates, each of a tenth of the window.
    spread = float(sums.std(ddof=1)) * BATCHES / window.duration_s
    half = float(stdtrit(BATCHES - 1, 0.975)) * spread / math.sqrt(BATCHES)
    return per_s, (max(0.0, per_s - half), per_s + half)


def is_steady(at_ns: npt.ArrayLike, weights: npt.ArrayLike, window: SteadyWindow) -> bool | None:
    """Return whether the batches of `rate` vary by chance alone.

    It is judged by von Neumann's ratio at 5 %; None where it has none. Of a throughput that rises, falls or moves in
    waves, neighbouring batches resemble each other.
    """
    if window.duration_s <= 0:
        return None
    sums, events = _batches(at_ns, weights, window)
    if events < LEAST_EVENTS:
        return None
    ratio = von_neumann_ratio(sums)
    return ratio is None or ratio >= 2 - 2 * _ONE_SIDED_95 * math.sqrt((BATCHES - 2) / (BATCHES**2 - 1))


def von_neumann_ratio(values: npt.ArrayLike) -> float | None:
    """Return the mean square of successive differences over the variance: about 2 of independent values [n].

    Less where neighbours resemble each other; None of fewer than two values, and of values that are all equal.
    """
    series: Floats = np.asarray(values, np.float64).ravel()
    spread = float(series.var()) if len(series) > 1 else 0.0
    return float((np.diff(series) ** 2).sum()) / (len(series) * spread) if spread > 0 else None


def _batches(at_ns: npt.ArrayLike, weights: npt.ArrayLike, window: SteadyWindow) -> tuple[Floats, int]:
    """Return the amount in each tenth of a window, and its total number of events."""
    stamps_ns = np.asarray(at_ns, np.int64).ravel()
    amounts = np.broadcast_to(np.asarray(weights, np.float64), stamps_ns.shape)
    sums, events = np.zeros(BATCHES), 0
    for part in (slice(begin, begin + _AT_ONCE) for begin in range(0, len(stamps_ns), _AT_ONCE)):
        inside = (stamps_ns[part] > window.start_ns) & (stamps_ns[part] <= window.end_ns)
        share = (stamps_ns[part][inside] - window.start_ns) / (window.end_ns - window.start_ns)
        batch = np.minimum((share * BATCHES).astype(np.int64), BATCHES - 1)
        sums += np.bincount(batch, amounts[part][inside], BATCHES)
        events += int(inside.sum())
    return sums, events


def in_flight(begun_ns: npt.ArrayLike, ended_ns: npt.ArrayLike, window: SteadyWindow) -> float | None:
    """Return the mean number of requests in flight in the window; a negative end is none on record."""
    begun, ended = np.asarray(begun_ns, np.int64).ravel(), np.asarray(ended_ns, np.int64).ravel()
    if window.duration_s <= 0:
        return None
    until = np.minimum(np.where(ended < 0, window.end_ns, ended), window.end_ns)
    overlap = np.maximum(until - np.maximum(begun, window.start_ns), 0)[begun >= 0]
    return float(overlap.sum()) / (window.end_ns - window.start_ns)


def little_residual(begun_ns: npt.ArrayLike, ended_ns: npt.ArrayLike, window: SteadyWindow) -> float | None:
    """Return requests in flight over their rate times their time in flight, less 1: near 0 in a steady state.

    Rate and time are of the requests that ended in the window; None without any, or where they took no time.
    """
    begun, ended = np.asarray(begun_ns, np.int64).ravel(), np.asarray(ended_ns, np.int64).ravel()
    number = in_flight(begun, ended, window)
    inside = (begun >= 0) & (ended > window.start_ns) & (ended <= window.end_ns)
    taken_ns = float((ended - begun)[inside].sum())
    if number is None or taken_ns <= 0:
        return None
    return number * (window.end_ns - window.start_ns) / taken_ns - 1


def scaled_sum(amounts: Floats, window: SteadyWindow) -> float | None:
    """Return a sum over the window, a second; unknown amounts count as the mean of those known."""
    values = known(amounts)
    return float(values.mean()) * len(amounts) / window.duration_s if len(values) else None


def token_arrivals(log: RequestLog) -> tuple[Ints, Floats]:
    """Return the arrival times and numbers of output tokens: each reply's evenly over its chunks.

    Of a reply that did not end its tokens are unknown: each chunk counts for as many as a chunk of the others has.
    """
    chunks = np.diff(log.chunk_start)
    counted = (log.output_tokens >= 0) & (chunks > 0)
    usual = float(log.output_tokens[counted].sum() / chunks[counted].sum()) if counted.any() else 1.0
    per_chunk = np.where(counted, log.output_tokens / np.maximum(chunks, 1), usual)
    in_one_piece = (chunks == 0) & (log.output_tokens > 0) & (log.end_ns >= 0)
    stamps_ns = np.concatenate([log.chunk_ns, log.end_ns[in_one_piece]])
    return stamps_ns, np.concatenate([np.repeat(per_chunk, chunks), log.output_tokens[in_one_piece]])


def within(stamps_ns: npt.ArrayLike, window: SteadyWindow) -> Bools:
    """Return a mask of the stamps [n] that lie in the window."""
    stamps = np.asarray(stamps_ns, np.int64)
    inside: Bools = (stamps >= window.start_ns) & (stamps <= window.end_ns)
    return inside


def steady_throughput(log: RequestLog, start_ns: int) -> SteadyThroughput | None:
    """Return the steady throughput of a load, None for fewer than two requests. The load began at `start_ns`."""
    if (log.dispatch_ns >= 0).sum() < 2:
        return None
    window = steady_window(start_ns, int(log.dispatch_ns.max()), log.end_ns[log.end_ns >= 0])
    requests_per_s, requests_ci95 = rate(log.end_ns[(log.status == "ok") & (log.end_ns >= 0)], 1, window)
    arrived_ns, tokens = token_arrivals(log)
    is_known = not (log.output_tokens_source == "contradicted").any()
    tokens_per_s, tokens_ci95 = rate(arrived_ns, tokens, window) if is_known else (None, None)
    return SteadyThroughput(
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        duration_s=window.duration_s,
        requests_per_s=requests_per_s,
        requests_per_s_ci95=requests_ci95,
        output_tokens_per_s=tokens_per_s,
        output_tokens_per_s_ci95=tokens_ci95,
        input_tokens_per_s=scaled_sum(input_tokens(log)[within(log.first_token_ns, window)], window),
        steady=is_steady(arrived_ns, tokens, window),
        mser5_left_out=window.mser5_left_out,
    )
