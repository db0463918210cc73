"""Roles of engines in disaggregated serving, by their pages: pools that share requests are not added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.series.resets import restarts_of, rising
from sidelight.scraper.series.table import EndpointSeries

_Page = tuple[EndpointSeries, Mapping[str, CanonicalSource | Missing]]
Role = Literal["prefill", "decode", ""]
# Each request is in one pool's numbers: what the pools do, and what spans both and is of neither.
OF_PREFILL = ("queue_time", "prefill_time", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")
OF_DECODE = ("decode_time", "inter_token_latency", "tpot_per_request", "generation_tokens", "requests_finished")
OF_NEITHER = ("ttft", "e2e_latency", "inference_time")
BY_POOL = "a prefill and a decode pool share each request, and each counts its own: `endpoints` has both"
_FETCHES = "kv_fetch_in_progress"  # on the page of an engine that may load KV caches, alone
_ALIKE = 0.02


def roles_of(endpoints: Sequence[EndpointSeries]) -> list[Role]:
    """Return each page's role, "" of all where no two pools share requests.

    Only engines that load KV caches show how many do. They are a decode pool where others show none and made one token
    a request, most of their prompts' tokens come from elsewhere, and both pools ended as many requests.
    """
    pages: list[_Page] = []
    for endpoint in endpoints:
        engine = detect(endpoint.series) if len(endpoint.values) else None
        pages.append((endpoint, canonical(endpoint.series, engine.name) if engine else {}))
    decoding = [(endpoint, sources) for endpoint, sources in pages if _FETCHES in sources]
    others = [(endpoint, sources) for endpoint, sources in pages if sources and _FETCHES not in sources]
    ended, ended_too = (_increase(pool, "requests_finished") for pool in (decoding, others))
    loaded, prompts = (_increase(decoding, name) for name in ("prefix_cache_hits_remote", "prompt_tokens"))
    tokens = _increase(others, "generation_tokens")  # an engine that serves alone has more
    apart = max(abs(ended - ended_too), abs(ended_too - tokens))
    if not ended or apart > max(1.0, _ALIKE * ended) or loaded < prompts / 2:
        return [""] * len(pages)
    return ["decode" if _FETCHES in sources else "prefill" if sources else "" for _, sources in pages]


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
