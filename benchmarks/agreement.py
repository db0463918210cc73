"""Two exports of server metrics in AIPerf's format beside each other: where they agree, and every difference.

Used by `replay.py`. Values are equal but for rounding up to a relative difference of 1e-9.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sidelight.scraper.window.window import Window

ROUNDING = 1e-9
LISTED = 8  # differences of one type and field; the rest are counted

Json = dict[str, Any]
Name = tuple[str, str]  # metric, and labels as JSON


class Key(NamedTuple):
    """What one number of an export is; `frame` is the stamps of a timeslice."""

    type: str
    metric: str
    labels: str
    field: str
    frame: str = ""

    @property
    def name(self) -> Name:
        return self.metric, self.labels


Values = dict[Key, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """What AIPerf wrote: its statistics, its scrapes in the order of time, and how many of them it counted.

    `reference` is the number of the scrape that its totals count from, `last` that of its last. `window` is its
    measured phase, from the first to the last scrape of it. `late` are the series that the reference does not show.
    """

    export: Json
    lines: Sequence[Json]
    stamps: Sequence[int]
    url: str
    fetches: int
    reference: int
    last: int
    window: Window
    late: frozenset[Name]

    @property
    def version(self) -> str:
        return str(self.export["aiperf_version"])


def read_logged(directory: Path) -> Logged:
    """Read what AIPerf left in its directory of artifacts."""
    export = json.loads((directory / "server_metrics_export.json").read_text(encoding="utf-8"))
    text = (directory / "server_metrics_export.jsonl").read_bytes().splitlines()
    lines = sorted(map(json.loads, text), key=lambda line: int(line["timestamp_ns"]))
    stamps = [int(line["timestamp_ns"]) for line in lines]
    measured = [number for number, line in enumerate(lines) if line.get("benchmark_phase") == "profiling"]
    shown = {name for name, _ in page(lines[measured[0] - 1]["metrics"])}
    late = {key.name for key in statistics(export) if key.name not in shown and not key.metric.endswith("_info")}
    url = lines[0]["endpoint_url"]
    return Logged(
        export=export,
        lines=lines,
        stamps=stamps,
        url=url,
        fetches=export["summary"]["endpoint_info"][url]["total_fetches"],
        reference=measured[0] - 1,
        last=measured[-1],
        window=Window(start_ns=stamps[measured[0]], end_ns=stamps[measured[-1]]),
        late=frozenset(late),
    )


def statistics(export: Json) -> Values:
    """Return the statistics of every series and the edges of its buckets (`bucket LE`)."""
    return {
        Key(kind, metric, labels, field): float(value)
        for kind, metric, labels, one in _series(export)
        for field, value in (one["stats"] | _edges(one)).items()
    }


def slices(export: Json) -> Values:
    """Return the same of every timeslice."""
    return {
        Key(f"{kind} slice", metric, labels, field, f"{frame['start_ns']}-{frame['end_ns']}"): float(value)
        for kind, metric, labels, one in _series(export)
        for frame in one.get("timeslices") or ()
        for field, value in (frame | _edges(frame)).items()
        if field not in ("start_ns", "end_ns", "is_complete", "buckets")
    }


def page(metrics: Mapping[str, list[Json]]) -> dict[tuple[Name, str], float]:
    """Return the values of one scrape of the JSONL export, called as the increases since nothing would be."""
    found: dict[tuple[Name, str], float] = {}
    for metric, entries in metrics.items():
        for entry in entries:
            name = metric, json.dumps(entry.get("labels") or {}, sort_keys=True)
            shown = {"total": entry["value"]} if "value" in entry else {"count": entry["count"], "sum": entry["sum"]}
            found |= {(name, field): float(value) for field, value in shown.items()}
    return found


def canonical(metrics: Mapping[str, list[Json]]) -> str:
    """Write such a scrape as text that is the same for equal values, without what AIPerf's JSONL leaves out: summaries,
    and what says when something was created or what it is.
    """
    kept = {
        name: sorted(json.dumps(entry, sort_keys=True) for entry in entries if "value" in entry or "buckets" in entry)
        for name, entries in metrics.items()
        if not name.endswith(("_created", "_info"))
    }
    return json.dumps({name: entries for name, entries in kept.items() if entries}, sort_keys=True)


def numbers(metrics: Mapping[str, list[Json]]) -> int:
    """Count the values of such a scrape."""
    return sum(2 + len(entry["buckets"]) if "buckets" in entry else 1 for entry in chain(*metrics.values()))


def totals(values: Values) -> Values:
    """Keep what adds up: totals of counters, counts, sums and buckets of histograms."""
    return {key: value for key, value in values.items() if _field(key) in ("total", "count", "sum", "bucket")}


def compare(ours: Values, theirs: Values, *, late: Collection[Name]) -> None:
    """Print a line for each type and field, then what differs by more than rounding; series in `late` are left out.

    Estimated percentiles are left out too: each tool has an estimator of its own.
    """
    left = {key: value for key, value in theirs.items() if key.name not in late and not _estimate(key)}
    right = {key: value for key, value in ours.items() if key.name not in late and not _estimate(key)}
    print("| type | field | compared | identical | rounding | different | only AIPerf | only Sidelight |")
    print("|---|---|---|---|---|---|---|---|")
    apart: dict[tuple[str, str], list[Key]] = {}
    for kind, field in sorted({(key.type, _field(key)) for key in chain(left, right)}):
        in_left = {key for key in left if (key.type, _field(key)) == (kind, field)}
        in_right = {key for key in right if (key.type, _field(key)) == (kind, field)}
        both = in_left & in_right
        identical = sum(left[key] == right[key] for key in both)
        different = sorted(key for key in both if _relative(left[key], right[key]) > ROUNDING)
        counts = (len(both), identical, len(both) - identical - len(different), len(different))
        print("|", " | ".join(map(str, (kind, field, *counts, len(in_left - both), len(in_right - both)))), "|")
        apart[kind, field] = different + sorted(in_left ^ in_right)
    print()
    for (kind, field), keys in apart.items():
        for key in keys[:LISTED]:
            shown = " ".join(part for part in key if part != "{}")
            print(f"- {shown}: AIPerf {left.get(key)}, Sidelight {right.get(key)}")
        if len(keys) > LISTED:
            print(f"- and {len(keys) - LISTED} more of {kind} {field}")
    if not any(apart.values()):
        print("no difference")
    print()


def compare_late(ours: Values, theirs: Values, last: Mapping[tuple[Name, str], float], late: Collection[Name]) -> None:
    """Print the totals of series that began after the reference, and what the last page says of them."""
    print("| began after the reference | field | AIPerf | Sidelight | last page |")
    print("|---|---|---|---|---|")
    for key, value in sorted(theirs.items()):
        if key.name in late and (key.name, key.field) in last and key.type in ("counter", "histogram"):
            shown = f"{value:g} | {ours[key]:g} | {last[key.name, key.field]:g}"
            print(f"| {key.metric} {key.labels} | {key.field} | {shown} |")
    print()


def compare_estimates(ours: Values, theirs: Values, *, late: Collection[Name]) -> None:
    """Print in one line how far estimated percentiles are from each other."""
    both = [key for key in theirs.keys() & ours.keys() if _estimate(key) and key.name not in late]
    apart = [_relative(theirs[key], ours[key]) for key in both]
    print(
        f"{len(apart)} estimated percentiles: relative difference {median(apart):.1%} median, {max(apart):.1%} largest"
    )


def compare_gauges(ours: Values, beat: Values, theirs: Values, sampled: Mapping[Key, tuple[float, float]]) -> None:
    """Print the statistics that differ, with those of AIPerf's scrapes on its beat, and the range in `sampled`."""
    gauges = {key: value for key, value in theirs.items() if key.type == "gauge"}
    apart = [key for key, value in gauges.items() if _relative(value, ours[key]) > ROUNDING]
    print(f"{len(gauges) - len(apart)} of {len(gauges)} statistics are equal; the others:\n")
    print("| gauge | field | AIPerf | its beat alone | Sidelight | sampled at any phase | outside |")
    print("|---|---|---|---|---|---|---|")
    for key in apart:
        low, high = sampled[key]
        told = {"AIPerf": gauges[key], "its beat": beat[key], "Sidelight": ours[key]}
        slack = ROUNDING * max(abs(low), abs(high))
        outside = [tool for tool, value in told.items() if not low - slack <= value <= high + slack]
        shown = " | ".join(f"{value:.6g}" for value in told.values())
        print(f"| {key.metric} | {key.field} | {shown} | {low:.6g} to {high:.6g} | {', '.join(outside)} |")


def _series(export: Json) -> Iterator[tuple[str, str, str, Json]]:
    for metric, about in export["metrics"].items():
        for one in about["series"]:
            yield about["type"], metric, json.dumps(one.get("labels") or {}, sort_keys=True), one


def _edges(one: Json) -> Json:
    return {f"bucket {float(le)}": count for le, count in (one.get("buckets") or {}).items()}


def _field(key: Key) -> str:
    return key.field.partition(" ")[0]


def _estimate(key: Key) -> bool:
    return key.field.endswith("_estimate")


def _relative(left: float, right: float) -> float:
    return abs(left - right) / max(abs(left), abs(right)) if left != right else 0.0
