"""Requests as the estimator sees them: seconds from one origin, and the chunks of all streams as a clock."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from correlator.requests import Requests
from rundir.columns import Bools, Floats, Indices, Ints


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


def read_waits(requests: Requests, rows: Indices, origin_ns: int) -> Waits:
    """Read some requests off their log. A reply refused by a content filter was made by the engine all the same."""
    # The engine observes its first output, whatever that is; the first that is not blank may come later.
    first_ns = np.where(requests.first_output_ns >= 0, requests.first_output_ns, requests.first_token_ns)[rows]
    submit_s, first_s, end_s = (
        np.where(stamps_ns >= 0, (stamps_ns - origin_ns) / 1e9, np.nan)
        for stamps_ns in (requests.submit_ns[rows], first_ns, requests.end_ns[rows])
    )
    made = (requests.status == "ok") | ((requests.status == "refused") & (requests.finish_reason != ""))
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
        ended=np.asarray(made[rows] & np.isfinite(end_s), dtype=np.bool_),
        chunk_s=np.sort((chunk_ns - origin_ns) / 1e9),
        flights_s=np.column_stack((submit_s, np.where(np.isfinite(end_s), end_s, np.inf)))[sent],
    )


_COMMON = ("chunk_s", "flights_s")


def select(waits: Waits, rows: Indices | Bools) -> Waits:
    """Return some of the requests; the chunks and flights of all stay."""
    columns = {one.name: getattr(waits, one.name) for one in fields(Waits)}
    return Waits(**{name: value if name in _COMMON else value[rows] for name, value in columns.items()})
