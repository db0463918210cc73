"""Engines' roles in disaggregated serving, by their pages, and data-parallel ranks of one page.

Pools that share requests are not added up; ranks are, and one of them may wait longer than the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from msgspec import Struct

from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import Count, doc
from sidelight.rundir.stats import Missing, as_many, finite
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.catalogue import catalogue
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.series.resets import restarts_of, rising
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.aggregate import EndpointShare, gauges, histograms
from sidelight.scraper.window.increase import GaugeSamples, HistogramIncrease
from sidelight.scraper.window.window import ScrapeSelection

_Page = tuple[EndpointSeries, Mapping[str, CanonicalSource | Missing]]
Role = Literal["prefill", "decode", ""]
# Each request is in one pool's numbers: what the pools do, and what spans both and is of neither.
OF_PREFILL = ("queue_time", "prefill_time", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")
OF_DECODE = ("decode_time", "inter_token_latency", "tpot_per_request", "generation_tokens", "requests_finished")
OF_NEITHER = ("ttft", "e2e_latency", "inference_time")
BY_POOL = "a prefill and a decode pool share each request, and each counts its own: `endpoints` has both"
_FETCHES = "kv_fetch_in_progress"  # on the page of an engine that may load KV caches, alone
_PARTS = 12  # of the window
_TIMES, _LEAST_MS = 1.5, 5.0


class Rank(Struct, frozen=True, kw_only=True):
    """A data-parallel rank of an engine over the window."""

    rank: Annotated[str, doc("Its label.")]
    requests: Annotated[Count, doc("Requests of which it stated the wait in its queue.", "requests")]
    queue_ms: Annotated[float | None, doc("Their mean wait in its queue.", "ms")]
    running: Annotated[float | None, doc("Requests in its batch, mean.", "requests")]
    waiting: Annotated[float | None, doc("Requests waiting in it, mean.", "requests")]


class SlowRank(Struct, frozen=True, kw_only=True):
    """The rank with a queue longer than the others', all the time."""

    rank: Annotated[str, doc("Its label.")]
    queue_ms: Annotated[float, doc("Mean wait of its requests in its queue.", "ms")]
    others_ms: Annotated[float, doc("Median of the other ranks' means.", "ms")]


def roles_of(endpoints: Sequence[EndpointSeries]) -> list[Role]:
    """Return each page's role, "" of all where no two pools share requests.

    Some engines state it in a label, SGLang's `engine_type`. Of others, only engines that load KV caches show how many
    do. They are a decode pool where others show none and made one token a request, most of their prompts' tokens come
    from elsewhere, and both pools ended as many requests.
    """
    pages: list[_Page] = []
    stated: list[Role] = []
    if len(endpoints) < 2:
        return [""] * len(endpoints)
    for endpoint in endpoints:
        engine = detect(endpoint.series) if len(endpoint.values) else None
        stated.append(_stated(endpoint, catalogue(engine.name).role) if engine else "")
        pages.append((endpoint, canonical(endpoint.series, engine.name) if engine else {}))
    if {"prefill", "decode"} <= set(stated):
        return stated
    decoding = [(endpoint, sources) for endpoint, sources in pages if _FETCHES in sources]
    others = [(endpoint, sources) for endpoint, sources in pages if sources and _FETCHES not in sources]
    ended, ended_too = (_increase(pool, "requests_finished") for pool in (decoding, others))
    loaded, prompts = (_increase(decoding, name) for name in ("prefix_cache_hits_remote", "prompt_tokens"))
    tokens = _increase(others, "generation_tokens")  # an engine that serves alone has more
    is_shared = as_many(ended_too, ended) and as_many(tokens, ended_too)
    if not ended or not is_shared or loaded < prompts / 2:
        return [""] * len(pages)
    return ["decode" if _FETCHES in sources else "prefill" if sources else "" for _, sources in pages]


def _stated(endpoint: EndpointSeries, label: str) -> Role:
    """Return the role that all labels of that name agree on."""
    roles = {value for series in endpoint.series for name, value in series.labels if name == label}
    return "prefill" if roles == {"prefill"} else "decode" if roles == {"decode"} else ""


def is_of(quantity: str, role: Role) -> bool:
    """Return whether a quantity is counted where a page has this role."""
    outside = {"prefill": (*OF_DECODE, *OF_NEITHER), "decode": (*OF_PREFILL, *OF_NEITHER), "": ()}
    return quantity not in outside[role]


def _increase(pool: Sequence[_Page], name: str) -> float:
    """Return the increase of a counter over all scrapes of some pages, 0 without it."""
    total = 0.0
    for endpoint, sources in pool:
        source = sources.get(name)
        if isinstance(source, CanonicalSource):
            risen = (rising(endpoint, column, restarts_of(endpoint)).values for column in source.columns)
            total += sum(float(np.nan_to_num(values[-1] - values[0])) for values in risen)
    return total


def ranks_of(
    endpoint: EndpointSeries,
    selection: ScrapeSelection,
    sources: Mapping[str, CanonicalSource | Missing],
    labels: Collection[tuple[str, str]],
) -> tuple[list[Rank], SlowRank | None]:
    """Return the ranks of a page by their labels, and the slow one; none below two that state their waits.

    A rank is slow where its mean wait is 1.5 times the median of the others' or more, in each twelfth of the window.
    Queues last, so that of eight equal ranks one waits 1.5 times as long in most runs; all the time in few.
    """

    def share(name: str, rank: tuple[str, str]) -> EndpointShare | None:
        source = sources.get(name)
        if not isinstance(source, CanonicalSource):
            return None
        columns = tuple(c for c in source.columns if rank in endpoint.series[c].labels)
        groups = tuple(group for group in source.histograms if rank in group.labels)
        part = replace(source, columns=columns, histograms=groups)
        return EndpointShare(endpoint=endpoint, selection=selection, source=part) if columns or groups else None

    def mean(name: str, rank: tuple[str, str]) -> float | None:
        part = share(name, rank)
        samples = Missing("") if part is None else gauges([part])
        return float(samples.values.mean()) if isinstance(samples, GaugeSamples) else None

    waits: dict[tuple[str, str], HistogramIncrease] = {}
    for rank in sorted(labels, key=lambda label: (len(label[1]), label)):
        part = share("queue_time", rank)
        wait = Missing("") if part is None else histograms([part])
        if isinstance(wait, HistogramIncrease) and np.isfinite(wait.count):
            waits[rank] = wait
    if len(waits) < 2:
        return [], None
    rows = [
        Rank(
            rank=rank[1],
            requests=round(wait.count),
            queue_ms=finite(1e3 * wait.sum / wait.count) if wait.count else None,
            running=mean("requests_running", rank),
            waiting=mean("requests_waiting", rank),
        )
        for rank, wait in waits.items()
    ]
    return rows, _slow(rows, np.array([_by_part(wait) for wait in waits.values()]))


def _by_part(wait: HistogramIncrease) -> Floats:
    """Return the mean wait in each part of the window, s (float64[PARTS]); NaN without an observation."""
    pairs = np.column_stack([wait.slice_sums, wait.slice_counts])
    pairs[~np.isfinite(pairs).all(axis=1)] = 0.0
    sums, counts = np.array([part.sum(axis=0) for part in np.array_split(pairs, _PARTS)]).T
    means_s: Floats = np.divide(sums, counts, out=np.full(_PARTS, np.nan), where=counts > 0)
    return means_s


def _slow(rows: Sequence[Rank], by_part: Floats) -> SlowRank | None:
    """Return the rank with the longest mean wait, unless others wait as long at times.

    `by_part` are the mean waits of each rank in each part (float64[R, PARTS]).
    """
    means_ms = np.array([np.nan if row.queue_ms is None else row.queue_ms for row in rows])
    if np.isfinite(means_ms).sum() < 2:
        return None
    worst = int(np.nanargmax(means_ms))
    others = np.delete(by_part, worst, axis=0)
    known = np.isfinite(by_part[worst]) & np.isfinite(others).any(axis=0)
    queue_ms, others_ms = float(means_ms[worst]), float(np.nanmedian(np.delete(means_ms, worst)))
    if known.sum() < _PARTS - 1 or queue_ms < max(_TIMES * others_ms, others_ms + _LEAST_MS):
        return None
    others_s = np.nanmedian(others[:, known], axis=0)
    is_longer = by_part[worst, known] >= np.maximum(_TIMES * others_s, others_s + _LEAST_MS / 1e3)
    return SlowRank(rank=rows[worst].rank, queue_ms=queue_ms, others_ms=others_ms) if is_longer.all() else None
