"""The `correlation` object of `summary.json`: where the TTFT went by run, slice, class and URL.

Missing numbers are null beside a `missing` that says why. How sure the requests are of their parts is counted wherever
they are put together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import to_builtins

from correlator.breakdown import E2E_PARTS, INNER_PARTS, SEND, SOURCES, TTFT_PARTS, Part, Parts
from correlator.estimate.percentiles import ServerMeans, ServerPercentiles
from correlator.estimate.table import QUALITIES, Attribution
from correlator.exact.clock_offset import ClockOffset
from correlator.statistics.accuracy import agreement
from rundir.columns import Ints, Texts
from rundir.stats import QUANTILES, Missing, describe, finite

Bools = npt.NDArray[np.bool_]

SPREAD = ("std", "min", "max", *QUANTILES)
JSON_NAMES = {"request_network": "way_in", "response_network": "way_out", "engine_frontend": "admission"}
UNTIMED = "no request with a first token is here"
SEVERAL_CLOCKS = "several engines, each with a clock of its own"
COMPARABLE_RATIO = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known of n measured requests: columns [n] in their order, and what is said of all of them.

    means         what the histograms' sums tell of the run as a whole
    clocks        of the engines, by their names; at least one
    ok            which requests succeeded
    edges_ns      of the slices, ascending; a request belongs to the slice that it was submitted in
    """

    parts: Parts
    attribution: Attribution
    clocks: Mapping[str, ClockOffset]
    means: ServerMeans
    ok: Bools
    submit_ns: Ints
    workload_class: Texts
    endpoint_url: Texts
    edges_ns: Sequence[int]


def correlation(found: Findings) -> dict[str, Any]:
    """Return the `correlation` object but for associations; docs/metrics.md defines its names.

    Where no request has a breakdown of its own, the histograms' means stand in, if the engine finished as many requests
    as succeeded here, within 2 %.
    """
    parts, means = found.parts, found.means
    timed = np.isfinite(parts.ttft_ms)
    ok = int(found.ok.sum())
    comparable = means.missing is None and abs(means.server_requests - ok) <= COMPARABLE_RATIO * ok
    group = _group(found, np.ones(len(parts), dtype=np.bool_))
    missing = None
    if not parts.covered.any():
        missing = _why_none(found, timed, comparable=comparable)
        if missing is None:
            group["breakdown"] |= _of_means(means, _commonest(found.attribution.reason[timed]))
    return {
        **({"missing": missing} if missing else {}),
        **group,
        "not_ok": int((timed & ~found.ok).sum()),
        "none_reasons": _counted(parts.reason[timed & (parts.source == "none")]),
        "estimated_reasons": _counted(parts.reason[timed & (parts.source == "histogram")]),
        "client_requests": means.client_requests,
        "server_requests": means.server_requests,
        "server_over_client": means.ratio,
        "comparable": comparable,
        "classes": _groups(found, found.workload_class),
        "urls": _groups(found, found.endpoint_url),
        "timeslices": list(_slices(found, timed)),
        "clock": _clocks(found.clocks),
        "attribution": _agreement(parts, found.attribution),
    }


def _group(found: Findings, rows: Bools) -> dict[str, Any]:
    timed = rows & np.isfinite(found.parts.ttft_ms)
    return {
        "requests": int(timed.sum()),
        "coverage": _coverage(found.parts, timed),
        "quality": _quality(found.parts, timed),
        "breakdown": _breakdown(found, rows),
    }


def _groups(found: Findings, names: Texts) -> dict[str, Any]:
    several = sorted({str(name) for name in names})
    return {name: _group(found, names == name) for name in several} if len(several) > 1 else {}


def _coverage(parts: Parts, rows: Bools) -> dict[str, float]:
    count = int(rows.sum())
    sources = Counter(parts.source[rows].tolist())
    return {name: sources[name] / count if count else float(name == "none") for name in SOURCES}


def _quality(parts: Parts, rows: Bools) -> dict[str, int]:
    qualities = Counter(parts.quality[rows].tolist())
    return {name: qualities[name] for name in QUALITIES}


def _breakdown(found: Findings, rows: Bools) -> dict[str, Any]:
    parts = found.parts
    timed, covered = rows & np.isfinite(parts.ttft_ms), rows & parts.covered
    ended = rows & (parts.source != "none") & np.isfinite(parts.e2e_ms)
    why = "no request has a breakdown of its own" if timed.any() else UNTIMED
    e2e = {json_name(part): _part(found, part, ended, "e2e", why) for part in E2E_PARTS}
    return {
        "ttft_ms": {
            **to_builtins(describe(parts.ttft_ms[covered if covered.any() else timed], why)),
            "source": "client",
        },
        **{json_name(part): _part(found, part, covered, "ttft", why) for part in (*TTFT_PARTS, *INNER_PARTS, SEND)},
        "merged": _counted(parts.merged[covered & (parts.merged != "")]),
        "e2e": {"e2e_ms": {**to_builtins(describe(parts.e2e_ms[ended], why)), "source": "client"}, **e2e},
    }


def json_name(part: Part) -> str:
    """Return what a part is called in the summary."""
    return f"{JSON_NAMES.get(part.name, part.name)}_ms"


def _part(found: Findings, part: Part, rows: Bools, whole: str, why: str) -> dict[str, Any]:
    """Describe one part over the requests that know it; its share is of the whole, TTFT or E2E, of all `rows`."""
    values = part.of(found.parts)
    known = rows & np.isfinite(values)
    total_ms = float(getattr(found.parts, f"{whole}_ms")[rows].sum())
    sources = sorted(set(found.parts.source[known].tolist()))
    source = ("client" if part.by_client else sources[0] if len(sources) == 1 else "mixed") if sources else None
    return {
        **to_builtins(describe(values[known], _why_unknown(found, part) if rows.any() else why)),
        f"share_of_{whole}": float(values[known].sum()) / total_ms if sources and total_ms > 0 else None,
        "source": source,
        "error_ms": _error_ms(found, part, known) if sources else None,
    }


def _error_ms(found: Findings, part: Part, rows: Bools) -> float:
    """Return the root mean square of the requests' standard errors."""
    if part.within == "network":
        return float(np.sqrt((found.parts.network_split_error_ms[rows] ** 2).mean()))
    if not part.error:
        return 0.0
    estimated = rows & (found.parts.source == "histogram")
    errors_ms = 1e3 * getattr(found.attribution, f"{part.error}_sd_s")[estimated]
    return float(np.sqrt((errors_ms**2).sum() / rows.sum()))


def _why_unknown(found: Findings, part: Part) -> str:
    """Say why none of the requests that have a breakdown knows a part."""
    if part.name == "gateway":
        return "no span of a gateway tells its first output; it is in network_ms"
    if part.within == "network":
        reasons = dict.fromkeys(one.reason for one in found.clocks.values() if one.reason)
        return ": ".join(("in network_ms", *(["; ".join(reasons)] if reasons else [])))
    return "not told apart: in other_ms"


def _of_means(means: ServerMeans, why: str) -> dict[str, Any]:
    """Return what the histograms' sums tell of the breakdown, in place of what each request tells."""
    blank = dict.fromkeys(SPREAD)
    ttft_ms, queue_ms, prefill_ms = (1e3 * (mean_s or 0.0) for mean_s in (means.ttft_s, means.queue_s, means.prefill_s))
    means_ms = {"queue_ms": queue_ms, "prefill_ms": prefill_ms, "other_ms": ttft_ms - queue_ms - prefill_ms}
    shown = {}
    for name, mean_ms in means_ms.items():
        shown[name] = {
            "count": means.server_requests,
            "mean": mean_ms,
            **blank,
            "share_of_ttft": mean_ms / ttft_ms if ttft_ms else None,
            "source": "histogram",
            "error_ms": None,
            "missing": f"only the mean is known: {why}",
        }
    return {**shown, "means_only": why}


def _why_none(found: Findings, timed: Bools, *, comparable: bool) -> str | None:
    """Say why there is no breakdown, not even of means; None where there is one of means."""
    if comparable and found.means.client_requests:
        return None
    if not timed.any():
        return found.means.missing or UNTIMED
    if not (timed & found.ok).any():
        return (
            f"none of the {timed.sum()} requests that had a first token succeeded, and engines tell only of requests "
            "that they finished"
        )
    if found.means.missing:
        return found.means.missing
    return (
        f"{_commonest(found.attribution.reason[timed])}; and the engine finished {found.means.server_requests} "
        f"requests where {found.ok.sum()} of yours succeeded, so that its means are not theirs"
    )


def _commonest(reasons: Texts) -> str:
    return str(Counter(reasons.tolist()).most_common(1)[0][0])


def _counted(words: Texts) -> dict[str, int]:
    """Count, most frequent first."""
    return dict(sorted(Counter(words.tolist()).items(), key=lambda pair: (-pair[1], pair[0])))


def _slices(found: Findings, timed: Bools) -> Iterator[dict[str, Any]]:
    """Give each slice the means of the requests submitted in it; the last has those of its end as well."""
    edges = found.edges_ns
    for number, (start_ns, end_ns) in enumerate(pairwise(edges)):
        last = number == len(edges) - 2
        inside = (found.submit_ns >= start_ns) & ((found.submit_ns <= end_ns) if last else (found.submit_ns < end_ns))
        yield {"start_ns": start_ns, "end_ns": end_ns, **_slice(found.parts, timed & inside)}


def _slice(parts: Parts, rows: Bools) -> dict[str, Any]:
    covered = rows & parts.covered
    told = int(covered.sum())
    means: dict[str, float | None] = {}
    for part in TTFT_PARTS:
        values = part.of(parts)[covered]
        means[json_name(part)] = float(np.nansum(values)) / told if np.isfinite(values).any() else None
    shown = covered if told else rows
    reason = UNTIMED if not rows.any() else None if told else _commonest(parts.reason[rows])
    return {
        "requests": int(rows.sum()),
        "covered": told,
        "ttft_ms": float(parts.ttft_ms[shown].mean()) if shown.any() else None,
        **means,
        "error_ms": float(np.sqrt((parts.error_ms[covered] ** 2).mean())) if told else None,
        "coverage": _coverage(parts, rows),
        "quality": _quality(parts, rows),
        **({"missing": reason} if reason else {}),
    }


def _clocks(clocks: Mapping[str, ClockOffset]) -> dict[str, Any]:
    """Return the offset of the only engine; of several each one's own, and of all together the largest error."""
    engines = {name: _clock(one) for name, one in sorted(clocks.items())}
    if len(engines) == 1:
        return {**next(iter(engines.values())), "engines": {}}
    errors_ms = [one["error_ms"] for one in engines.values() if one["error_ms"] is not None]
    return {
        "offset_ms": None,
        "error_ms": max(errors_ms, default=None),
        "pairs": sum(one["pairs"] for one in engines.values()),
        "left_out": sum(one["left_out"] for one in engines.values()),
        "reason": SEVERAL_CLOCKS,
        "engines": engines,
    }


def _clock(offset: ClockOffset) -> dict[str, Any]:
    return {
        "offset_ms": None if offset.offset_ns is None else offset.offset_ns / 1e6,
        "error_ms": None if offset.error_ns is None else offset.error_ns / 1e6,
        "pairs": offset.pairs,
        "left_out": offset.left_out,
        "reason": offset.reason or None,
    }


def _agreement(parts: Parts, attribution: Attribution) -> Mapping[str, Any]:
    found = agreement(parts, attribution)
    if isinstance(found, Missing):
        return {"missing": found.reason}
    return {name: asdict(error) for name, error in found.items()}


def server_percentiles_object(found: Mapping[str, ServerPercentiles | Missing]) -> dict[str, Any]:
    """Return percentiles of the server's times, by part, ms, each with its 90 % interval and what it was read from."""
    return {name: _percentiles(one) for name, one in found.items()}


def _percentiles(found: ServerPercentiles | Missing) -> dict[str, Any]:
    if isinstance(found, Missing):
        return {"missing": found.reason}
    values, lows, highs = ((1e3 * column).tolist() for column in (found.values_s, found.low_s, found.high_s))
    return {
        **dict(zip(QUANTILES, map(finite, values), strict=True)),
        "intervals": {
            name: {"low": finite(low), "high": finite(high)}
            for name, low, high in zip(QUANTILES, lows, highs, strict=True)
        },
        "source": found.source,
        "covered_ratio": found.covered_ratio,
    }
