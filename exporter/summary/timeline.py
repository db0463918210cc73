"""A run in a few columns: TTFT, waiting and running requests on one axis, as a report draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Struct

from sidelight.correlator.statistics.server_load import EngineSamples, gauge_samples, most_within
from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.fields import doc
from sidelight.rundir.stats import finite
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

COLUMNS = 48

Numbers = list[float | None]


class Timeline(Struct, frozen=True, kw_only=True):
    """Maxima of TTFT and engine load in 48 equal columns of the window; null where a column has none."""

    column_s: Annotated[float, doc("Length of a column.", "s")]
    ttft_ms: Annotated[Numbers, doc("Longest TTFT of the requests submitted in a column.", "ms")]
    requests_waiting: Annotated[Numbers, doc("Most requests that waited, in all engines together.", "requests")]
    requests_running: Annotated[Numbers, doc("Most requests that ran, in all engines together.", "requests")]


def timeline(submit_ns: Ints, ttft_s: Floats, endpoints: Sequence[EndpointSeries], window: Window) -> Timeline:
    """Return the timeline of n requests and the engines over a window. The window has a duration; NaN marks a missing
    TTFT.
    """
    edges_ns = np.linspace(window.start_ns, window.end_ns, COLUMNS + 1).astype(np.int64)
    timed = np.flatnonzero(np.isfinite(ttft_s))
    order = timed[np.argsort(submit_ns[timed], kind="stable")]
    samples = {
        "ttft_ms": EngineSamples(at_ns=submit_ns[order], amount=1e3 * ttft_s[order], over=None, fresh_ns=0.0),
        **{name: gauge_samples(endpoints, name) for name in ("requests_waiting", "requests_running")},
    }
    return Timeline(
        column_s=window.duration_s / COLUMNS,
        **{name: list(map(finite, most_within(seen, edges_ns).tolist())) for name, seen in samples.items()},
    )
