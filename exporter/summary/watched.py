"""Traffic of a watch beside its requests: its start, missing breakdowns with reasons, and totals since its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Struct, UnsetType

from sidelight.correlator.opening import WatchRun
from sidelight.correlator.replay import Replayed
from sidelight.recorded.events import ESTIMATED, WATCHED
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.fields import UNSET, Amount, Count, StampNs, doc
from sidelight.scraper.window.window import Window


class BrokenTraces(Struct, frozen=True, kw_only=True):
    """Requests with client and engine spans in different traces, by place of the break."""

    service: Annotated[str, doc("The service at which traces break; empty where no span says it.")]
    how: Annotated[
        Literal["new_trace", "not_passed_on"],
        doc("Its span begins another trace; or it is the last one in the client's trace, or none is."),
    ]
    requests: Annotated[Count, doc("Requests whose trace breaks there.", "requests")]


class SinceStart(Struct, frozen=True, kw_only=True):
    """Counts from the start to the end, deleted logs included."""

    by_trace: Annotated[Count, doc("Requests broken down by the spans of engines.", "requests")]
    estimated: Annotated[Count, doc("Requests broken down by estimates from scrapes.", "requests")]
    without_breakdown: Annotated[Count, doc("Requests without a breakdown.", "requests")]
    missing: Annotated[dict[str, int], doc("Why a TTFT is not broken down, as on the live page.", "requests")]
    ok: Annotated[Count, doc("Requests whose client's span ended well.", "requests")]
    failed: Annotated[Count, doc("Requests whose client's span ended in an error.", "requests")]
    spans: Annotated[Count, doc("Spans received.", "spans")]
    receiver_restarts: Annotated[Count, doc("Receivers that died and were started again.", "receivers")]


class ShardCounts(Struct, frozen=True, kw_only=True):
    """One of several watches that share the pages and the traces of a fleet."""

    shard: Annotated[str, doc("Which one, as K/N.")]
    run_id: Annotated[str, doc("Its run.")]
    begun: Annotated[str, doc("When it began, in UTC: ISO 8601 to the millisecond.")]
    ended: Annotated[str | None, doc("When it ended; null while it goes on, or after a crash.")]
    pages: Annotated[list[str], doc("The pages that it scraped.")]
    spans: Annotated[Count, doc("Spans that its receivers took in.", "spans")]
    since_start: Annotated[SinceStart | None, doc("All that it counted; null while it goes on, or after a crash.")]


class SaidHeadroom(Struct, frozen=True, kw_only=True):
    """Headroom of a watched engine within `--slo`, as a multiple of its traffic then."""

    at_ns: Annotated[StampNs, doc("When it was said.", "ns")]
    text: Annotated[str, doc("The sentence; without an estimate, why there is none.")]
    estimate: Annotated[Amount | UnsetType, doc("Estimate; absent where unknown.", "ratio")] = UNSET
    low: Annotated[Amount | UnsetType, doc("Lower end of its 90 % interval.", "ratio")] = UNSET
    high: Annotated[Amount | UnsetType, doc("Upper end; absent where it is beyond all tried.", "ratio")] = UNSET


class SaidChange(Struct, frozen=True, kw_only=True):
    """A lasting change of an engine or its traffic, as the watch said it last."""

    process: Annotated[str, doc("The engine's process by its spans; empty of the only engine.")] = ""
    part: Annotated[str, doc("What changed, as in sidelight_drift_ratio; or `restart`.")]
    since_ns: Annotated[StampNs, doc("When it began.", "ns")]
    text: Annotated[str, doc("The sentence.")]
    estimate: Annotated[Amount | UnsetType, doc("Ratio to the baseline; absent of a restart.", "ratio")] = UNSET
    low: Annotated[Amount | UnsetType, doc("Lower end of its 90 % interval.", "ratio")] = UNSET
    high: Annotated[Amount | UnsetType, doc("Upper end of its 90 % interval.", "ratio")] = UNSET


class WatchedTraffic(Struct, frozen=True, kw_only=True):
    """Traffic of a watch. `window` says which time the results cover: what the logs still hold, or less."""

    begun_ns: Annotated[StampNs, doc("When the watch began.", "ns")]
    begun: Annotated[str, doc("The same in UTC: ISO 8601 to the millisecond.")]
    shortened: Annotated[bool, doc("Whether the window begins later, since older logs were deleted or left out.")]
    missing: Annotated[
        dict[str, int],
        doc("Why a TTFT is not broken down, in the window; requests without a client's span too.", "requests"),
    ]
    engine_only_ms: Annotated[
        dict[str, float],
        doc("Mean queue and prefill of requests without a client's span, by their engines' spans.", "ms"),
    ]
    engine_spans: Annotated[Count, doc("Spans of engines' requests in it.", "spans")]
    repeated_spans: Annotated[Count, doc("Spans that came again, and count once.", "spans")]
    evicted_spans: Annotated[Count, doc("Spans that had to make room before their request was whole.", "spans")]
    whole_traces: Annotated[
        Count, doc("Requests with the spans of their client and their engine in one trace.", "requests")
    ]
    broken_traces: Annotated[list[BrokenTraces], doc("Those with them in two, by where their traces break.")]
    left_out_requests: Annotated[Count, doc("Oldest requests that were too many to keep in memory.", "requests")]
    since_start: Annotated[
        SinceStart | None,
        doc("All from start to end, of shards together; null while a watch goes on, or after a crash."),
    ]
    split_traces: Annotated[
        Count | UnsetType, doc("Traces whose spans came to several shards; absent of a single watch.", "traces")
    ] = UNSET
    shards: Annotated[list[ShardCounts] | UnsetType, doc("The watches of a report as one; absent of a single one.")] = (
        UNSET
    )
    headroom: Annotated[
        list[SaidHeadroom] | UnsetType, doc("Headroom each quarter of an hour, in order; absent where none was said.")
    ] = UNSET
    changes: Annotated[list[SaidChange] | UnsetType, doc("Lasting changes; absent where none was said.")] = UNSET


def watched_traffic(run: WatchRun, watched: Replayed, window: Window) -> WatchedTraffic:
    """Return the traffic of a watch beside its requests."""
    begun_ns = next((phase.start_ns for phase in run.phases), window.start_ns)
    broken = [
        {"service": service, "how": how, "requests": requests} for (service, how), requests in watched.broken.items()
    ]
    shards = [_shard(shard) for shard in run.shards]
    estimated = [event for event in run.events if event.name == ESTIMATED]
    changes = {
        (each.get("process"), each["part"], each["since_ns"]): each
        for event in estimated
        for each in event.data["changes"]
    }
    headroom = [{"at_ns": each.at_ns, **each.data["headroom"]} for each in estimated if each.data["headroom"]]
    return WatchedTraffic(
        begun_ns=begun_ns,
        begun=iso_ms(begun_ns),
        shortened=watched.shortened,
        missing=dict(watched.missing),
        engine_only_ms=dict(watched.engine_only_ms),
        engine_spans=watched.engine_spans,
        repeated_spans=watched.repeated,
        evicted_spans=watched.evicted,
        whole_traces=watched.whole,
        broken_traces=msgspec.convert(broken, list[BrokenTraces]),
        left_out_requests=watched.dropped,
        since_start=_together([shard.since_start for shard in shards]) if shards else _since_start(run),
        split_traces=watched.split if shards else UNSET,
        shards=shards or UNSET,
        headroom=msgspec.convert(headroom, list[SaidHeadroom]) or UNSET,
        changes=msgspec.convert(list(changes.values()), list[SaidChange]) or UNSET,
    )


def _since_start(run: WatchRun) -> SinceStart | None:
    counted = next((event.data for event in run.events if event.name == WATCHED), None)
    return msgspec.convert(counted, SinceStart | None)


def _together(counts: Sequence[SinceStart | None]) -> SinceStart | None:
    """Return counts added up; None where one is not known."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    missing = sum((Counter(count.missing) for count in known), Counter[str]())
    names = [name for name in SinceStart.__struct_fields__ if name != "missing"]
    return SinceStart(
        missing=dict(missing.most_common()), **{name: sum(getattr(count, name) for count in known) for name in names}
    )


def _shard(run: WatchRun) -> ShardCounts:
    return ShardCounts(
        shard=run.shard,
        run_id=str(run.manifest["run_id"]),
        begun=iso_ms(int(run.manifest["started_ns"])),
        ended=run.manifest.get("ended_at"),
        pages=[endpoint.url for endpoint in run.endpoints],
        spans=run.span_counts.spans if run.span_counts else 0,
        since_start=_since_start(run),
    )
