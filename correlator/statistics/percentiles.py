"""How sure the percentiles of a run are: those of the client's times, and of the parts of the TTFT."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.correlator.statistics.intervals import QuantileInterval, quantiles
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, take
from sidelight.rundir.fields import doc


class PercentileIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """The 95 % intervals of some percentiles."""

    p50: Annotated[QuantileInterval, doc("Of the median.", "ms")]
    p90: Annotated[QuantileInterval, doc("Of the 90th percentile.", "ms")]
    p95: Annotated[QuantileInterval, doc("Of the 95th percentile.", "ms")]
    p99: Annotated[QuantileInterval, doc("Of the 99th percentile.", "ms")]


NAMES = ("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms", *(f"{part.name}_ms" for part in TTFT_PARTS))
QUANTILES = {name: int(name[1:]) / 100 for name in PercentileIntervals.__struct_fields__}


def percentile_intervals(measured: RequestLog, parts: Parts) -> dict[str, PercentileIntervals]:
    """Return the intervals of the percentiles of `times_in_order`, by metric."""
    return {
        name: PercentileIntervals(**dict(zip(QUANTILES, quantiles(values, list(QUANTILES.values())), strict=True)))
        for name, values in times_in_order(measured, parts).items()
    }


def times_in_order(measured: RequestLog, parts: Parts) -> dict[str, Floats]:
    """Return times by metric, ms, of those that any request has: of requests that ended ok, and the parts of those that
    have a breakdown, in the order in which they were sent; gaps between chunks in that in which they ended.
    """
    ok = measured.status == "ok"
    metrics, of_ok = request_metrics(take(measured, ok)), np.argsort(measured.submit_ns[ok], kind="stable")
    times_ms = {name: getattr(metrics, name)[of_ok] for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    times_ms["itl_ms"] = metrics.itl_ms[np.argsort(metrics.itl_end_ns, kind="stable")]
    covered = parts.covered
    of_covered = np.argsort(measured.submit_ns[covered], kind="stable")
    times_ms |= {f"{part.name}_ms": 1e3 * parts.seconds(part)[covered][of_covered] for part in TTFT_PARTS}
    known = ((name, values, np.isfinite(values)) for name, values in times_ms.items())
    return {name: values if finite.all() else values[finite] for name, values, finite in known if finite.any()}
