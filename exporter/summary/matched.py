"""What came of an engine's records without ids, as an object of `summary.json`."""

from __future__ import annotations

from typing import Any

import numpy as np

from correlator.exact.matching import Matched
from rundir.stats import Missing
from scraper.perf_metrics import SteadyClock


def matched_object(found: Matched | None) -> dict[str, Any] | None:
    """Return the `perf_metrics` object of `correlation`, of all requests of a run; null where nobody read any."""
    if found is None:
        return None
    timings, ours = found.timings, int((found.row >= 0).sum())
    clocks = timings.clocks.values()
    errors_ns = [one.error_ns for one in clocks if isinstance(one, SteadyClock)]
    return {
        "records": len(timings),
        "matched": ours,
        "strangers": len(timings) - ours,
        "ambiguous_requests": int(found.ambiguous.sum()),
        "unmatched_requests": int(np.sum((found.reason != "") & ~found.ambiguous)),
        "refused": dict(timings.refused),
        "failed_readings": dict(timings.failures),
        "clock_error_ms": max(errors_ns) / 1e6 if errors_ns else None,
        "clock_missing": "; ".join(dict.fromkeys(one.reason for one in clocks if isinstance(one, Missing))) or None,
    }
