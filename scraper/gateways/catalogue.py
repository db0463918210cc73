"""Catalogue of gateways' pages and spans, one YAML each; recognition of a page's gateway.

A gateway without a file is recognised all the same (`recorded.gateway_spans`): a file adds what no convention says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec

from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource, PageNames
from sidelight.scraper.engines.catalogue import CatalogueQuantity, Names, SpanMatch, names_in, read_yaml
from sidelight.scraper.exposition import Series

Seen = Literal["live", "recorded", "source only", "none"]

_TIME = {"kind": "histogram", "unit": "seconds", "observed": "finish"}
_COUNT = {"kind": "counter", "unit": "requests", "observed": "finish"}
_NUMBER = {"kind": "gauge", "unit": "requests", "observed": "scrape", "across": "sum"}
QUANTITIES: Mapping[str, Mapping[str, Any]] = {
    "requests": {**_COUNT, "meaning": "requests that the gateway answered"},
    "request_time": {**_TIME, "meaning": "how long the gateway had a request"},
    "upstream_time": {**_TIME, "meaning": "how long its call of the next server took"},
    "queue_time": {**_TIME, "meaning": "wait in the gateway before that call"},
    "recent_queue_time": {
        **_NUMBER,
        "unit": "seconds",
        "across": "max",
        "meaning": "the same, a mean over the gateway's last requests",
    },
    "requests_waiting": {**_NUMBER, "meaning": "requests that wait in the gateway"},
    "requests_in_flight": {**_NUMBER, "meaning": "requests that the gateway has"},
    "retries": {**_COUNT, "meaning": "calls of the next server that were made again"},
    "upstream_errors": {**_COUNT, "meaning": "calls of the next server that failed"},
}
UNITS_S = {"seconds": 1.0, "milliseconds": 1e-3}


class FirstOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The attribute of a gateway's own span with the time to its first output.

    It is a number or a text.
    """

    attribute: str
    unit: Literal["seconds", "milliseconds"]

    def seconds(self, stated: str | float | None) -> float | None:
        """Return the stated time in seconds, None if it is missing or not a number."""
        try:
            return None if stated is None else float(stated) * UNITS_S[self.unit]
        except ValueError:
            return None


class GatewaySpanRules(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions for a gateway's own spans and for its calls of the next server.

    Its own are those `serving` the request. They are for gateways that kinds and attributes do not show by convention.
    `any_service`: those of a sidecar, which bears the service name of the client or the engine that it stands beside.
    `late_events`: the event of a first token is stamped as the stream ends, so that it tells nothing.
    `decision` are spans that end as it lets the request go on. `pair`: of two calls of a request, the first is of a
    prefill engine, the second of a decode engine.
    """

    serving: tuple[SpanMatch, ...] = msgspec.field(name="own")
    call: tuple[SpanMatch, ...] = ()
    decision: tuple[SpanMatch, ...] = ()
    first_output: FirstOutput | None = None
    any_service: bool = False
    late_events: bool = False
    pair: bool = False
    meaning: str


class ChoiceRules(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes of a router's span with its choice, and with the cached part it expects.

    `endpoint` is the chosen one; the first span of a request counts. `matched` of `whole` is what a cache holds.
    """

    span: str
    endpoint: str = ""
    matched: str = ""
    whole: str = ""


class NotTtft(msgspec.Struct, frozen=True, kw_only=True):
    """A time that looks like one to the first token, and is another: a metric, or an attribute of a span."""

    name: str
    why: str


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for a gateway's spans, trace context and page, and `where` they go."""

    where: str
    language: str
    text: str


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """URLs of a gateway so configured and its page, with options of `doctor` and `run`.

    `page_options` are those for the page alone. `page` is empty where reading it disturbs requests.
    """

    url: str
    page: str = ""
    options: str
    page_options: str = ""


class Switches(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that supply something missing.

    "" where there is none, or where no gateway's is special.

    trace         the trace header does not reach the engine
    spans         no span of its own comes
    first_output  its spans do not say when its first output left
    delivery      it holds back the beginning of replies
    """

    trace: str = ""
    spans: str = ""
    first_output: str = ""
    delivery: str = ""


class SeenBy(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence for a file's statements: a live gateway, a recording, or source and documentation alone."""

    page: Seen
    spans: Seen
    settings: Seen


class RecentMean(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `recent_queue_time`: an exponential mean over `requests` requests.

    It is rounded up to a multiple of `step_s`.
    """

    requests: int
    step_s: float


class GatewayEntry(Names, frozen=True, kw_only=True):
    """The catalogue entry of one gateway.

    - `order`: a page or a span is tried for gateways of a lower one first.
    - `signs` are names by which its page is recognised too, such as those of an idle one.
    - `rounded`: by how much of itself a time of its page may be rounded, up or down.
    - `generic`: its names are those of any service that is instrumented so: on an engine's page they are the engine's.
    - `traceparent` and `request_id` are what becomes of the headers.
    - `reply_headers`: how a header of its replies begins, as `server: nginx`.
    """

    name: str = msgspec.field(name="gateway")
    title: str
    order: int = 10
    generic: bool = False
    signs: tuple[str, ...] = ()
    rounded: float = 0.0
    recent: RecentMean | None = None
    seen: SeenBy
    versions: str
    pages: tuple[str, ...] = ()
    enable: str
    traceparent: str
    request_id: str
    configuration: Configuration
    example: Example
    traps: tuple[str, ...]
    reply_headers: tuple[str, ...] = ()
    switches: Switches = Switches()
    not_ttft: tuple[NotTtft, ...] = ()
    absent: str = "its page does not tell"
    spans: GatewaySpanRules | None = None
    spans_note: str = ""
    choices: tuple[ChoiceRules, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """The gateway of a page or a reply, and the metric or header identifying it."""

    name: str
    detected_by: str


@cache
def gateway_names() -> tuple[str, ...]:
    """Return the gateways by their `order`."""
    return tuple(sorted(names_in("sidelight.scraper.gateways"), key=lambda name: (gateway(name).order, name)))


@cache
def gateway(name: str) -> GatewayEntry:
    """Return the catalogue entry of a gateway, from its YAML."""
    return read_yaml("sidelight.scraper.gateways", name, GatewayEntry, QUANTITIES)


@cache
def choice_rules() -> Mapping[str, ChoiceRules]:
    """Return the attributes of routers' choices, by the names of spans."""
    return {rules.span: rules for name in gateway_names() for rules in gateway(name).choices}


def can_state_more(name: str | None) -> bool:
    """Return whether a gateway's operators can make its spans state more.

    They can with a gateway of their own, with or without a framework (no name, or a generic one), not with a program of
    others.
    """
    return not name or gateway(name).generic


def detect(series: Iterable[Series], *, beside_engine: bool = False) -> Recognised | None:
    """Return the gateway of a page by a metric of its own, else None.

    With `beside_engine` the page is an engine's as well, and generic gateways are passed over.
    """
    shown = dict.fromkeys(name for labelled in series for name in (labelled.family, labelled.name))
    for name in gateway_names():
        known = gateway(name)
        if known.generic and beside_engine:
            continue
        for metric in shown:
            normalised = known.normalised(metric)
            if normalised.startswith(known.prefix) and normalised in _own_names(name):
                return Recognised(name=name, detected_by=f"metric {metric}")
    return None


def detect_reply(headers: Mapping[str, str]) -> Recognised | None:
    """Return the gateway of a reply by its headers, else None. Names of headers are in lower case."""
    for name in gateway_names():
        for sign in gateway(name).reply_headers:
            header, _, begin = sign.partition(":")
            if header in headers and headers[header].lower().startswith(begin.strip()):
                return Recognised(name=name, detected_by=f"header {sign}")
    return None


def canonical(series: tuple[Series, ...], name: str) -> dict[str, CanonicalSource | Missing]:
    """Return the source of each of `QUANTITIES`, or why it is missing.

    A source is the columns of a gateway's page (or matrix) that provide it.
    """
    known = gateway(name)
    page = PageNames(series, known)
    return {quantity: _source(known.quantities[quantity], page) for quantity in QUANTITIES}


def _source(quantity: CatalogueQuantity, page: PageNames) -> CanonicalSource | Missing:
    if (source := page.source(quantity)) is not None:
        return source
    if not quantity.metrics:
        return Missing(quantity.absent)
    return Missing(f"the page does not show {' or '.join(entry.text() for entry in quantity.metrics)}")


@cache
def _own_names(name: str) -> frozenset[str]:
    known = gateway(name)
    entries = (entry for quantity in known.quantities.values() for entry in quantity.metrics)
    names = {metric for entry in entries for metric in entry.names}
    return frozenset(names | {time.name for time in known.not_ttft} | set(known.signs))
