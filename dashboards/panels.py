"""Types of dashboards, rows and panels, and their PromQL; `shapes` and `generate` write JSON.

Rules kept throughout: quantiles of a run come from gauges, which are exact (the client's) or have an interval (the
engine's); buckets only serve lines of the last seconds, and `watch`, whose requests are not kept. `> 0` stands on
denominators (no traffic is no data, not NaN), `$__rate_interval` in rates over time, and `$__range` in tiles and
tables, which are of the whole range shown. Means come from sum and count and are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from sidelight.correlator.parts import E2E_PARTS, INNER_PARTS, LABELS, SHARED_PARTS, TTFT_PARTS

# The histograms that bear trace ids.
TRACED = ("sidelight_client_ttft_seconds", "sidelight_ttft_part_seconds")
Kind = Literal["tile", "lines", "stack", "heatmap", "table", "bars"]
Steps = tuple[tuple[float | None, str], ...]

# A series of this name has this colour in every panel: blue is the client's clock, orange the engine's.
COLOURS = {part.label: part.board for part in (*E2E_PARTS, *INNER_PARTS) if part.board} | {
    "client": "blue",
    "client p50": "light-blue",
    "client p90": "blue",
    "client p99": "dark-blue",
    "engine": "orange",
    "engine p50": "light-orange",
    "engine p99": "dark-orange",
    "in flight, client": "blue",
    "running": "orange",
    "waiting": "purple",
    "offered": "#8e8e8e",
    "sent": "light-blue",
    "ended": "blue",
    "met every objective": "green",
}
# And of what labels say, in panels with a series a value.
LABEL_COLOURS = {
    "source": {"trace": "green", "response": "blue", "histogram": "yellow", "none": "red"},
    "quality": {
        "exact": "green",
        "by_time": "blue",
        "tight": "light-green",
        "shared": "yellow",
        "mixed_traffic": "orange",
        "prior": "light-orange",
        "none": "red",
    },
    "status": {"ok": "green", "failed": "red", "refused": "orange", "cancelled": "#8e8e8e"},
    "outcome": {"ok": "green"},
}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    queries      the name of each series, or column, and its PromQL
    description  what to conclude from it
    steps        thresholds as (from, colour), base first
    shows        what a tile writes: the value, the name of its series, or both
    words        texts that stand for a tile's values
    units        of a table's columns that have another one than the panel
    coloured     thresholds of a table's columns; of a tile, colours by patterns of its series' names
    verdicts     the columns of a table that are 1 for yes and 0 for no
    exemplars    whether single requests are marked, with a link to their traces
    link         title and URL that a click on a value offers
    """

    kind: Kind
    title: str
    queries: Mapping[str, str]
    description: str
    unit: str = "s"
    width: int = 12
    height: int = 8
    highest: float | None = None
    steps: Steps = ((None, "text"),)
    shows: Literal["value", "name", "value_and_name"] = "value"
    words: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    coloured: Mapping[str, Steps] = field(default_factory=dict)
    verdicts: tuple[str, ...] = ()
    exemplars: bool = False
    link: tuple[str, str] | None = None
    empty: str = "no data"

    @property
    def instant(self) -> bool:
        """Whether it is asked for once, at the end of the range."""
        return self.kind in {"tile", "table", "bars"}


# Colours of a verdict, by the names of its series.
STATES: Mapping[str, Steps] = {
    "/^healthy/": ((None, "green"),),
    "/^(failing|overloaded|missed)/": ((None, "red"),),
    "/^untrusted/": ((None, "orange"),),
}
tile = partial(Panel, "tile", width=4, height=4)
lines = partial(Panel, "lines")
stack = partial(Panel, "stack")
table = partial(Panel, "table", width=24)
bars = partial(Panel, "bars")


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A titled row of panels with widths that add up to 24 a line.

    It is collapsed where most runs have nothing to show.
    """

    title: str
    panels: tuple[Panel, ...]
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """A user's choice among the values of a label.

    `newest_first` sorts run ids, which begin with their date.
    """

    name: str
    label: str
    query: str
    several: bool = True
    newest_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard; `phases` are the series whose label `phase` is marked over all panels."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    variables: tuple[Variable, ...]
    phases: str


# Each request is in one pool's numbers (`scraper.window.pools`); engines that serve alone have no role.
OF_POOLS = {"prefill": 'role!="decode"', "decode": 'role!="prefill"', "neither": 'role=""'}


@dataclass(frozen=True, slots=True)
class Scope:
    """Labels of a dashboard's series: those of a sidecar, and of the engines it scrapes."""

    client: str

    @property
    def engine(self) -> str:
        return f'{self.client}, endpoint=~"$endpoint"'


def of_pool(labels: str, pool: Literal["prefill", "decode", "neither"]) -> str:
    """Return the labels of a quantity's engines: where two pools share requests, those of the pool that it is of."""
    return f"{labels}, {OF_POOLS[pool]}"


def quantile(q: float, metric: str, labels: str, window: str = "$__rate_interval") -> str:
    """Return the PromQL of a quantile of the requests of a window, from buckets."""
    return f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{{labels}}}[{window}])))"


def quantiles(metric: str, labels: str, side: str, qs: tuple[float, ...] = (0.5, 0.9, 0.99)) -> dict[str, str]:
    """Return the PromQL of each quantile, named after the side and the percentile ("client p99")."""
    return {f"{side} p{q * 100:g}".strip(): quantile(q, metric, labels) for q in qs}


def last(series: str, labels: str, by: str = "", fold: str = "max") -> str:
    """Return the PromQL of the last value in the range shown. It also finds a run that ended long before the range's
    end.
    """
    return f"{fold}{f' by ({by})' if by else ''} (last_over_time({series}{{{labels}}}[$__range]))"


def verdict_of(latest: str) -> dict[str, str]:
    """Return the PromQL of a verdict in words: its state, and its cause where there is one."""
    named = f"group by (state, cause) ({latest})"
    for part in SHARED_PARTS:
        named = f'label_replace ({named}, "cause", "{part.label}", "cause", "{part.name}")'
    joined = f'label_join ({named}, "verdict", ": ", "state", "cause")'
    caused = f'label_replace ({joined}, "verdict", "$1", "verdict", "(.*): none")'
    return {"{{verdict}}": f'label_replace ({caused}, "verdict", "not judged$1", "verdict", "not_judged(.*)")'}


def advice_of(latest: str) -> dict[str, str]:
    """Return the PromQL of a table with a row for each sentence of a verdict."""
    titles = {"headline": "State", "why": "Why", "do": "Do this"}
    rows = (
        f'label_replace (label_replace (group by ({name}) ({latest}), "sentence", "$1", "{name}", "(.*)"), '
        f'"verdict", "{title}", "", "")'
        for name, title in titles.items()
    )
    return {"About": " or ".join(f"group by (verdict, sentence) ({row})" for row in rows)}


def engines(labels: str) -> dict[str, str]:
    """Return the PromQL of the engines of the range, with their known versions."""
    known = last("sidelight_engine_info", labels, "engine, version", "group")
    return {"{{named}}": f'label_join({known}, "named", " ", "engine", "version")'}


def client_quantile(of: str, q: float, labels: str, by: str = "") -> str:
    """Return the PromQL of a quantile of a run, exact, as its report has it."""
    return last("sidelight_client_quantile_seconds", f'{labels}, of="{of}", quantile="{q}"', by)


def engine_quantile(of: str, q: float, labels: str, bound: str = "estimate") -> str:
    """Return the PromQL of a quantile by the engine's page so far; of several engines, the highest."""
    of_quantile = f'{labels}, of="{of}", quantile="{q}", bound="{bound}"'
    return f"max (sidelight_engine_quantile_seconds{{{of_quantile}}})"


def mean(metric: str, labels: str) -> str:
    """Return the PromQL of an exact mean; nothing where nothing was observed."""
    return f"{total(f'{metric}_sum', labels)} / ({total(f'{metric}_count', labels)} > 0)"


def total(counter: str, labels: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Return the PromQL of a rate per second, summed over labels not in `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate({counter}{{{labels}}}[{window}]))"


def increase(counter: str, labels: str, by: str = "", window: str = "$__rate_interval") -> str:
    """Return the PromQL of a counter's increase, summed over labels not in `by`."""
    return f"sum{f' by ({by})' if by else ''} (increase({counter}{{{labels}}}[{window}]))"


def share(part: str, whole: str) -> str:
    """Return the PromQL of a share: zero without a part, nothing without a whole."""
    return f"({part} or vector(0)) / ({whole} > 0)"


def heatmap(title: str, metric: str, labels: str, description: str, width: int = 12) -> Panel:
    """Return a panel of how a histogram's observations are spread over time; of those with exemplars, single requests
    are marked.
    """
    is_traced = metric in TRACED
    buckets = {"{{le}}": increase(f"{metric}_bucket", labels, by="le")}
    return Panel("heatmap", title, buckets, description, width=width, exemplars=is_traced)


def of_parts(metric: str, labels: str, parts: tuple[str, ...], window: str = "$__rate_interval") -> dict[str, str]:
    """Return the PromQL of each part's mean over requests with a breakdown, by display name.

    Every such request has an observation of the part `other`, of others only where they are known.
    """
    counted = total(f"{metric}_count", f'{labels}, part="other"', window=window)
    sums = {part: total(f"{metric}_sum", f'{labels}, part="{part}"', window=window) for part in parts}
    return {LABELS[part]: f"{sums[part]} / ({counted} > 0)" for part in parts}


TTFT_NAMES = tuple(part.name for part in TTFT_PARTS)
E2E_NAMES = tuple(part.name for part in E2E_PARTS)
