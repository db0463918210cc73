"""Requests as the estimator sees them: seconds from one origin, and the chunks of all streams as a clock of its steps.

A step gives every running request a token, so that the chunks of any stream say when steps ended. A prefill lasts at
least from the end of the step before to the first token; a request that comes while a step runs waits for its end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from sidelight.correlator.requests import RequestColumns, first_output_ns
from sidelight.rundir.columns import Bools, Floats, Indices, Ints

SHARED_STEP_S = 0.004
STEPS_BACK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Columns of n requests; seconds from one origin, tokens -1 where unknown.

    `prompt_tokens` are as the server counted them, `declared_tokens` as we meant them: without a chat template, say.
    `first_s` is the first output of any kind and `wait_s` the time to it from submission, NaN where there was none;
    `ended`: the engine ended it, so that its histograms of the end hold it. `chunk_s` are the chunks of all streams,
    ascending, `flights_s`[k, 2] submission and end of every request: also of those that are not in the columns.
    """

    submit_s: Floats
    first_s: Floats
    wait_s: Floats
    end_s: Floats
    declared_tokens: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    ended: Bools
    chunk_s: Floats
    flights_s: Floats


def read_waits(requests: RequestColumns, rows: Indices, origin_ns: int) -> Waits:
    """Read some requests off their log. A reply refused by a content filter was made by the engine all the same."""
    # The engine observes its first output, whatever that is; the first that is not blank may come later.
    first_ns = first_output_ns(requests)[rows]
    submit_s, first_s, end_s = (
        np.where(stamps_ns >= 0, (stamps_ns - origin_ns) / 1e9, np.nan)
        for stamps_ns in (requests.submit_ns[rows], first_ns, requests.end_ns[rows])
    )
    ended = (requests.status == "ok") | ((requests.status == "refused") & (requests.finish_reason != ""))
    chunks = [requests.chunk_ns[requests.chunk_start[row] : requests.chunk_start[row + 1]] for row in rows.tolist()]
    chunk_ns = np.concatenate([first_ns[first_ns >= 0], *chunks])
    sent = np.isfinite(submit_s)
    return Waits(
        submit_s=submit_s,
        first_s=first_s,
        wait_s=np.maximum(first_s - submit_s, 0.0),
        end_s=end_s,
        declared_tokens=requests.declared_input_tokens[rows],
        prompt_tokens=requests.input_tokens[rows],
        output_tokens=requests.output_tokens[rows],
        cached_tokens=requests.cached_tokens[rows],
        ended=np.asarray(ended[rows] & np.isfinite(end_s), dtype=np.bool_),
        chunk_s=np.sort((chunk_ns - origin_ns) / 1e9),
        flights_s=np.column_stack((submit_s, np.where(np.isfinite(end_s), end_s, np.inf)))[sent],
    )


_COMMON = ("chunk_s", "flights_s")


def select(waits: Waits, rows: Indices | Bools) -> Waits:
    """Return some of the requests; the chunks and flights of all stay."""
    columns = {column.name: getattr(waits, column.name) for column in fields(Waits)}
    return Waits(**{name: value if name in _COMMON else value[rows] for name, value in columns.items()})


def prefill_features(first_s: Floats, wait_s: Floats, chunk_s: Floats, uncached: Floats) -> Floats:
    """Return the prefill features [n, 5] of requests.

    Their first tokens came at first_s[n], wait_s[n] after their submission. Columns: 1; uncached tokens; those of all
    first tokens within 4 ms; seconds since the last and since the last but one step that chunk_s[m] (ascending, of all
    streams) shows, at most the wait.
    """
    order = np.argsort(first_s, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(uncached[order])])
    low = np.searchsorted(first_s[order], first_s - SHARED_STEP_S, side="left")
    high = np.searchsorted(first_s[order], first_s + SHARED_STEP_S, side="right")
    last_s = _last_before(chunk_s, first_s - SHARED_STEP_S)
    one_more_s = _last_before(chunk_s, last_s - SHARED_STEP_S)
    return np.column_stack(
        (
            np.ones(len(first_s)),
            uncached,
            before[high] - before[low],
            np.minimum(first_s - last_s, wait_s),
            np.minimum(first_s - one_more_s, wait_s),
        )
    )


def nearest_step(first_s: Floats, wait_s: Floats, chunk_s: Floats, expected_s: Floats) -> Floats:
    """Return [n] the seconds since one of the last steps, or since submission: those nearest to what is expected."""
    best_s = wait_s
    at_s = first_s
    for _ in range(STEPS_BACK):
        at_s = _last_before(chunk_s, at_s - SHARED_STEP_S)
        gap_s = np.minimum(first_s - at_s, wait_s)
        best_s = np.where(np.abs(gap_s - expected_s) < np.abs(best_s - expected_s), gap_s, best_s)
    return best_s


def rest_features(
    submit_s: Floats, first_s: Floats, chunk_s: Floats, flights_s: Floats, tokens: Floats, delay_s: float
) -> Floats:
    """Return [n, 3]: 1; prompt tokens; seconds from submission to the end of the step that was running `delay_s` later.

    That end is the next chunk of any stream; there is no such step where none of flights_s[m, 2] (submission and end of
    each of our requests) was under way, or where the next chunk is of the step that gave the first token itself.
    """
    begun = np.searchsorted(np.sort(flights_s[:, 0]), submit_s, side="left")
    ended = np.searchsorted(np.sort(flights_s[:, 1]), submit_s, side="left")
    place = np.searchsorted(chunk_s, submit_s + delay_s, side="right")
    next_s = np.append(chunk_s, np.inf)[place]
    waited = (begun > ended) & (next_s < first_s - SHARED_STEP_S)
    return np.column_stack((np.ones(len(submit_s)), tokens, np.where(waited, next_s - submit_s, 0.0)))


def _last_before(chunk_s: Floats, at_s: Floats) -> Floats:
    if not len(chunk_s):
        return np.full(len(at_s), -np.inf)
    place = np.searchsorted(chunk_s, at_s, side="left") - 1
    return np.where(place >= 0, chunk_s[np.maximum(place, 0)], -np.inf)
