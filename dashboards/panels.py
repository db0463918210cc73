"""What a panel and a row are, and the PromQL they are made of; `rows` holds them, `generate` writes JSON.

Rules kept throughout: `sum by (le)` before a quantile, `max` for usage, `> 0` on denominators (no traffic is no data,
not NaN), `$__rate_interval` for rates over time, and `$__range` for tiles that answer for the whole range shown.
Means come from sum and count and are exact; quantiles are interpolated inside a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

SIDECAR = 'instance=~"$instance"'
ENGINE = 'instance=~"$instance", endpoint=~"$endpoint"'

# A series of this name has this colour in every panel: blue is the client's clock, orange the engine's.
COLOURS = {
    "client p50": "light-blue",
    "client p99": "dark-blue",
    "client mean": "blue",
    "client": "blue",
    "engine p99": "dark-orange",
    "engine mean": "orange",
    "engine": "orange",
    "queue": "purple",
    "prefill": "yellow",
    "network": "blue",
    "gateway": "light-blue",
    "engine_frontend": "orange",
    "scheduler_intake": "dark-orange",
    "decode": "green",
    "other": "#8e8e8e",
    "waiting": "purple",
    "running": "orange",
    "in flight, client": "blue",
}

# What people read for a series where its label's value would mislead: proxies without spans are in that part too.
DISPLAYED = {"network": "outside the engine, no known gateway"}

Kind = Literal["tile", "lines", "stack", "heatmap"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    queries      the name of each series and its PromQL
    description  what to conclude from it
    steps        thresholds as (from, colour), base first
    instant      asks only for the end of the range
    """

    kind: Kind
    title: str
    queries: Mapping[str, str]
    description: str
    unit: str = "s"
    width: int = 12
    height: int = 8
    highest: float | None = None
    steps: tuple[tuple[float | None, str], ...] = ((None, "text"),)
    instant: bool = False
    shows_name: bool = False
    empty: str = "no data"


tile = partial(Panel, "tile", width=4, height=4)
lines = partial(Panel, "lines")
stack = partial(Panel, "stack")


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels; widths add up to 24 a line."""

    title: str
    panels: tuple[Panel, ...]


def quantile(q: float, metric: str, labels: str, window: str = "$__rate_interval") -> str:
    """Return the PromQL of a quantile over all label sets."""
    return f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{labels}}}[{window}])))"


def exact_quantile(q: float, of: str, labels: str) -> str:
    """Return the PromQL of the client's exact quantile, the last in the range; of a watch, that of its buckets."""
    exact = f'max (last_over_time(sidelight_client_quantile_seconds{{{labels}, of="{of}", quantile="{q}"}}[$__range]))'
    return f"{exact} or {quantile(q, f'sidelight_client_{of}_seconds', labels, '$__range')}"


def seen(info: str, labels: str, by: str) -> str:
    """Return the PromQL of what an info metric stated anywhere in the range shown."""
    return f"group by ({by}) (last_over_time({info}{{{labels}}}[$__range]))"


def mean(metric: str, labels: str) -> str:
    """Return the PromQL of an exact mean; nothing where nothing was observed."""
    return f"{total(f'{metric}_sum', labels)} / ({total(f'{metric}_count', labels)} > 0)"


def total(counter: str, labels: str, by: str = "") -> str:
    """Return the PromQL of a rate per second, added up over what `by` does not name."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{labels}}}[$__rate_interval]))"


def increase(counter: str, labels: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Return the PromQL of what a counter gained, added up over what `by` does not name."""
    return f"sum{f' by ({by})' if by else ''} (increase({counter}{{{labels}}}[{window}]))"


def share(counter: str, of: str, pending: str = "") -> str:
    """Return the PromQL of the share that series with further labels have of a counter, over the range shown, and of
    what the gauge `pending` says is still to be counted.
    """
    part = increase(counter, f"{SIDECAR}, {of}", window="$__range")
    whole = increase(counter, SIDECAR, window="$__range")
    if pending:
        whole = f"({whole} + (max ({pending}{{{SIDECAR}}}) or vector(0)))"
    return f"({part} or vector(0)) / ({whole} > 0)"


def quantiles(metric: str, labels: str, side: str, qs: tuple[float, ...] = (0.5, 0.99)) -> dict[str, str]:
    """Return the PromQL of each quantile, named after the side and the percentile ("client p99")."""
    return {f"{side} p{q * 100:g}".strip(): quantile(q, metric, labels) for q in qs}


def heatmap(title: str, metric: str, labels: str, description: str) -> Panel:
    """Return a panel of how a histogram's observations are spread over time."""
    return Panel("heatmap", title, {"{{le}}": increase(f"{metric}_bucket", labels, by="le")}, description)
