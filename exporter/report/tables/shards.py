"""Table of the shards of a watch: what each counted by itself, and all together."""

from __future__ import annotations

from collections.abc import Iterator

from sidelight.correlator.live.reasons import NO_CLIENT, NO_ENGINE
from sidelight.exporter.document import BLANK, Block, Cell, numbers, table, words
from sidelight.exporter.summary.watched import ShardCounts, SinceStart, WatchedTraffic
from sidelight.rundir.printable.numbers import cell


def shards_section(watch: WatchedTraffic) -> Iterator[Block]:
    """Yield a row for each shard, and their sum; nothing of a single watch."""
    if not watch.shards:
        return
    titles = "pages", "spans", "restarts", "broken down", "not", "no engine span", "no client span"
    columns = [*numbers(*titles, show=cell), words("from, UTC"), words("to")]
    days = {at[:10] for shard in watch.shards for at in (shard.begun, shard.ended) if at}
    begin = len("2026-01-01T" if len(days) == 1 else "2026-")
    known = [(len(shard.pages), shard.spans) for shard in watch.shards]
    rows = [
        (shard.shard, *facts, *_counts(shard.since_start), *_times(shard, begin))
        for shard, facts in zip(watch.shards, known, strict=True)
    ]
    whole = "all", *map(sum, zip(*known, strict=True)), *_counts(watch.since_start)
    yield table("Requests of each shard, since its start", columns, [*rows, whole], label_width=7)
    yield BLANK


def _counts(since: SinceStart | None) -> tuple[Cell, ...]:
    if since is None:
        return (None,) * 5
    missing = (since.missing.get(reason, 0) for reason in (NO_ENGINE, NO_CLIENT))
    return since.receiver_restarts, since.by_trace, since.without_breakdown, *missing


def _times(shard: ShardCounts, begin: int) -> tuple[str, str]:
    """Return the start and end times of a shard, cut before `begin`."""
    begun, ended = (at[begin:19].replace("T", " ") for at in (shard.begun, shard.ended or ""))
    return begun, ended or "not ended"
