"""Table of estimated times, one row per request, and the quality of each estimate."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from sidelight.rundir.columns import Floats, Indices, Ints, Texts, same_text

BY_TIME = "by_time"  # of no estimate: times of the engine's, joined by time alone
QUALITIES = ("exact", BY_TIME, "tight", "shared", "mixed_traffic", "prior", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Columns of n requests, in their order; seconds, NaN where unknown.

    queue_s, prefill_s      estimates; _sd_s their standard deviations, 0 where they are the engine's own numbers
    network_s               outside the engine; engine_frontend_s: in it, but neither queue nor prefill. The four add up
                            to the client's wait for its first output. Where nothing tells the two apart (the engine
                            has no TTFT, or there are several engines), network_s is NaN and engine_frontend_s both
    quality                 exact: the only request of its scrape interval, as whole numbers prove
                            tight: one of two or three; shared: one of more
                            mixed_traffic: requests that are not ours ended there too, or whole numbers contradict
                            prior: never observed, `reason` says why; the model's expectation
                            none: no estimate, `reason` says why
    interval                the number of that interval, -1 for none; those of several engines do not mix
    """

    queue_s: Floats
    queue_sd_s: Floats
    prefill_s: Floats
    prefill_sd_s: Floats
    network_s: Floats
    network_sd_s: Floats
    engine_frontend_s: Floats
    engine_frontend_sd_s: Floats
    quality: Texts
    reason: Texts
    interval: Ints

    def __len__(self) -> int:
        return len(self.queue_s)


def nothing(size: int, reason: str) -> Attribution:
    """Return a table without estimates, the same reason for each request."""
    unknown = {column.name: np.full(size, np.nan) for column in fields(Attribution) if column.name.endswith("_s")}
    return Attribution(
        **unknown,
        quality=same_text("none", size),
        reason=same_text(reason, size),
        interval=np.full(size, -1, dtype=np.int64),
    )


def put(table: Attribution, rows: Indices, part: Attribution) -> None:
    """Write the rows of a part into a table; its intervals are numbered on from those of the table."""
    after = int(table.interval.max(initial=-1)) + 1
    for column in fields(Attribution):
        getattr(table, column.name)[rows] = getattr(part, column.name)
    table.interval[rows] = np.where(part.interval >= 0, part.interval + after, -1)
