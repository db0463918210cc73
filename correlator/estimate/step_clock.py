"""What our own streams tell of the engine's steps: when one ended, and what shared it.

A step gives every running request a token, so that the chunks of any stream say when steps ended. A prefill lasts at
least from the end of the step before to the first token; a request that comes while a step runs waits for its end.
"""

from __future__ import annotations

import numpy as np

from rundir.columns import Floats

SHARED_STEP_S = 0.004
STEPS_BACK = 4


def prefill_features(first_s: Floats, wait_s: Floats, chunk_s: Floats, uncached: Floats) -> Floats:
    """Return [n, 5] for requests whose first token came at first_s[n], wait_s[n] after their submission.

    Columns: 1; uncached tokens; those of all first tokens within 4 ms; seconds since the last and since the last but
    one step that chunk_s[m] (ascending, of all streams) shows, at most the wait.
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
