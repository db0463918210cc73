"""What moves with the TTFT and what is to blame for it: as JSON for `summary.json`, and in words for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from correlator.statistics.association import LAGS_S, Association
from correlator.statistics.bootstrap import FEW_BLOCKS
from correlator.statistics.tail import PARTS, Blame, Threshold
from rundir.stats import Missing

NAMES = {"network": "the network", "gateway": "the gateway", "queue": "queueing", "prefill": "prefill"}
INTERVALS = ("ci95", "ci95_lag0", "ci95_partial")
REST = "the engine outside queue and prefill"
# Below that, the 99th percentile of a run is its slowest request.
LEAST_FOR_P99 = 100
FEW_REQUESTS = 10  # a statement that rests on fewer says on how many
HARDLY_RATIO = 1.25
WORTH_NAMING = 0.05


def association_objects(found: Sequence[Association]) -> list[dict[str, Any]]:
    """Return the `association` list of a summary: numbers that are not known are null, `missing` says why."""
    objects = []
    for one in found:
        shown = asdict(one) | {"given": list(one.given)}
        shown |= {name: list(interval) for name in INTERVALS if (interval := shown[name])}
        if not one.missing:
            del shown["missing"]
        objects.append(shown)
    return objects


def blame_object(found: Blame | Missing) -> dict[str, Any]:
    """Return the `blame` object of a summary with its sentence; where there is no blame, only that and `missing`."""
    if isinstance(found, Missing):
        return {"missing": found.reason, "sentence": sentence(found)}
    return {
        "requests": found.requests,
        "with_ttft": found.with_ttft,
        "blocks": found.blocks,
        "variance_share": dict(found.variance_share),
        "ci95": {name: None if interval is None else list(interval) for name, interval in found.ci95.items()},
        "mean_share": dict(found.mean_share),
        "merged": dict(found.merged),
        "quality": dict(found.quality),
        "mean_ms": found.mean_ms,
        "std_ms": found.std_ms,
        "p50_ms": found.p50_ms,
        "tail": {name: asdict(tail) for name, tail in found.tails.items()},
        "threshold": _threshold_object(found.threshold),
        "sentence": sentence(found),
    }


def sentence(found: Blame | Missing) -> str:
    """Say in one sentence what the slow requests' TTFT is; what is estimated, merged or not known is called so.

    Slow are those at and above p99, of fewer than 100 requests p95. Where that is within 1.25 times the median, the
    sentence is of the mean.
    """
    if isinstance(found, Missing):
        return f"What makes slow requests slow is not known: {found.reason}."
    label = "p99" if found.with_ttft >= LEAST_FOR_P99 else "p95"
    tail = found.tails[label]
    rest = _rest(found.merged, found.requests)
    if 0 < tail.from_ms <= HARDLY_RATIO * found.p50_ms:
        ratio = f"{label} is {tail.from_ms / found.p50_ms:.2f} times p50"
        name, share = _ranked(found.mean_share)[0]
        estimated = found.requests - found.quality.get("exact", 0)
        trust = _trust(found.requests, found.with_ttft, estimated, found.quality.get("prior", 0), None)
        return f"TTFT hardly varies ({ratio}); {NAMES.get(name, rest)} is {_percent(share)} of it{trust}."
    if 2 * tail.explained < tail.requests:
        return (
            f"What the {label} TTFT is made of is not known: {tail.explained} of the {tail.requests} requests there "
            "tell their parts."
        )
    error = tail.error_ms / tail.mean_ms if tail.error_ms is not None and tail.mean_ms else None
    trust = _trust(tail.explained, tail.requests, tail.estimated, tail.expected, error)
    (name, share), *others = _ranked(tail.share)
    if share > 0.5:
        start = _start(found.threshold) if name == "queue" else ""
        return f"{label} TTFT is {NAMES.get(name, rest)}: {_percent(share)} of it{start}{trust}."
    largest = [f"{NAMES.get(part, rest)} is {_percent(ratio)}" for part, ratio in [(name, share), *others[:1]]]
    return f"No part is most of the {label} TTFT: {', '.join(largest)}{trust}."


def blame_rows(correlation: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line of what the TTFT varies by, from a summary's `correlation`; none where that is not known.

    The interval of a share between 0 and 1 is shown cut at them; the summary has it whole.
    """
    found = correlation.get("blame", {"missing": ""})
    if "missing" in found:
        return
    (name, share), *others = _ranked(found["variance_share"])
    rest = _rest(found["merged"], found["requests"])
    words = [f"{NAMES.get(name, rest)} makes {_percent(share)} of its variance"]
    interval = found["ci95"][name]
    if interval is not None:
        low, high = (min(max(end, 0.0), 1.0) if 0 <= share <= 1 else end for end in interval)
        words[0] += f" (95 % interval {100 * low:.0f} to {100 * high:.0f} %{_guess(found['blocks'])})"
    words += [f"{NAMES.get(other, rest)} {_percent(part)}" for other, part in others if part >= WORTH_NAMING]
    yield f"How the TTFT varies: {', '.join(words)}."


def association_rows(correlation: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of associations, from a summary's `correlation`: one for each that is told apart from chance, one for
    those of a measure that are not, and one for each reason why others are not known.
    """
    others: dict[tuple[str, str], list[str]] = {}
    for found in correlation.get("association", ()):
        if found["rho"] is None:
            others.setdefault((found["client"], f"not known, {found['missing']}"), []).append(found["server"])
        elif _by_chance(found):
            guess = _guess(found["blocks"])
            rho = found["rho_lag0"]
            shown = found["server"] if rho is None else f"{found['server']} ({rho:.2f})"
            others.setdefault((found["client"], f"not told apart from chance{guess}"), []).append(shown)
        else:
            yield _line(found)
    for (client, why), servers in others.items():
        yield f"{client} and {', '.join(servers)}: {why}"


def _by_chance(found: Mapping[str, Any]) -> bool:
    ci95 = found["ci95_lag0"]
    return ci95 is None or ci95[0] <= 0 <= ci95[1]


def _line(found: Mapping[str, Any]) -> str:
    low, high = found["ci95_lag0"]
    interval = f"95 % interval {low:.2f} to {high:.2f}{_guess(found['blocks'])}"
    words = [f"rank correlation {found['rho_lag0']:.2f} at submission ({interval})"]
    if found["partial_rho"] is not None:
        words.append(f"{found['partial_rho']:.2f} given the rest ({', '.join(found['given'])})")
    if found["lag_s"]:
        when = f"{abs(found['lag_s']):g} s {'after' if found['lag_s'] > 0 else 'before'} submission"
        words.append(f"{found['rho']:.2f} {when} (the best of {len(LAGS_S)} lags, so optimistic)")
    return f"{found['client']} and {found['server']}: {'; '.join(words)}"


def _guess(blocks: int) -> str:
    return "" if blocks >= FEW_BLOCKS else f"; the interval is a guess, from {blocks} blocks"


def _threshold_object(found: Threshold | Missing) -> dict[str, Any]:
    if isinstance(found, Missing):
        return {"waiting": None, "requests": 0, "fewest": None, "missing": found.reason}
    return asdict(found)


def _ranked(shares: Mapping[str, float | None]) -> list[tuple[str, float]]:
    known = [(name, share) for name in PARTS if (share := shares[name]) is not None]
    return sorted(known, key=lambda pair: -pair[1])


def _rest(merged: Mapping[str, int], requests: int) -> str:
    """Name `other`: what stands merged in it, where it does so for more than a tenth of the requests."""
    if 10 * sum(merged.values()) <= requests:
        return REST
    return f"what is not told apart ({'; '.join(merged)})"


def _percent(ratio: float) -> str:
    """Return whole percent; what is not all is never called 100 %."""
    return "over 99 %" if 0.995 <= ratio < 1 - 1e-9 else f"{100 * ratio:z.0f} %"


def _start(threshold: Threshold | Missing) -> str:
    """Say from which length of the queue on queueing dominates, nothing where that is not known or never."""
    if isinstance(threshold, Missing) or threshold.waiting is None:
        return ""
    if threshold.waiting <= threshold.fewest:
        return f", at every length of the queue seen (waiting >= {threshold.fewest:g})"
    return f", starting when waiting > {threshold.waiting - 1:g}"


def _trust(explained: int, requests: int, estimated: int, expected: int, error_ratio: float | None) -> str:
    """Say how many of the requests are spoken of, how many of these are estimated, and how well."""
    words = []
    if explained < requests:
        words.append(f"of {explained} of {requests} requests")
    elif requests < FEW_REQUESTS:
        words.append(f"the slowest {requests} requests" if requests > 1 else "the slowest request")
    if estimated:
        words.append("estimated" if estimated == explained else f"estimated for {estimated} of {explained} requests")
    if expected:
        words.append(f"{expected} of them never observed")
    if estimated and error_ratio is not None:
        words.append(f"standard error at most {100 * error_ratio:.1f} %")
    return f" ({', '.join(words)})" if words else ""
