"""Examine a metrics page: its engine, what it shows, what a scrape costs, and how to enable what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np
import numpy.typing as npt
from aiohttp import ClientSession
from rich.console import Console

from sidelight.rundir.access import Access, masked
from sidelight.rundir.clock import AnchoredClock, anchor
from sidelight.rundir.printable.text import first_of
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.catalogue import Catalogue
from sidelight.scraper.engines.recognition import RecognisedEngine
from sidelight.scraper.exposition import MalformedPage, Page, PageReader
from sidelight.scraper.gateways import catalogue as gateways
from sidelight.scraper.gateways.catalogue import Recognised
from sidelight.scraper.perf_metrics import SteadyClock, record_of, timings
from sidelight.scraper.targets.fetch import FetchLimits, discover, open_session, scrape
from sidelight.scraper.targets.scrape import Scrape, clock_of
from sidelight.sidecar.doctor.lines import HINT, OK, WARN, Line, print_line
from sidelight.sidecar.run.preparation.pages import cure_of_page, switch_of_page

NEEDED = ("queue_time", "prefill_time", "requests_waiting")
SCRAPES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Names of a page's engine and gateway in the catalogues; None where missing. `version` is the engine's."""

    engine: str | None = None
    version: str = ""
    gateway: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSamples:
    """Several scrapes of one metrics page, and the pages they returned, equal in number."""

    url: str
    scrapes: tuple[Scrape, ...]
    pages: tuple[Page, ...]


async def examine_metrics(
    console: Console, target: str, access: Access, limits: FetchLimits, known: Servers
) -> Servers:
    """Print the examination of the page at or beside a URL, and return its servers. What is known without it stays."""
    page = await discover(target, engines.metrics_paths(), access=access, limits=limits)
    if isinstance(page, Missing):
        print_line(console, WARN, f"no server metrics: {page.reason}")
        for line in advice(page.reason, known.engine):
            print_line(console, HINT, line)
        return known
    clock = anchor()
    samples = await _sample(page, access, limits, clock)
    if isinstance(samples, str):
        print_line(console, WARN, samples)
        return known
    for mark, text in describe(samples, clock, known):
        print_line(console, mark, text)
    detected, gateway = _detected(samples.pages[-1])
    version = known.version
    if detected:
        version = engines.catalogue(detected.name).version_of(version, samples.scrapes[-1].content_type)
    return replace(
        known,
        engine=detected.name if detected else known.engine,
        version=version,
        gateway=gateway.name if gateway else known.gateway,
    )


async def examine_timings(console: Console, url: str, access: Access, limits: FetchLimits) -> None:
    """Read TensorRT-LLM's request records and its clock once, and print a summary of them."""
    clock = anchor()
    async with open_session(access) as session:
        replies = [
            await _scrape_once(session, page, access, limits, clock, any_json=page != url)
            for page in (url, clock_of(url))
        ]
    read = timings(map(record_of, replies))
    for reason in (*read.failures, *read.refused):
        print_line(console, WARN, f"{masked(url)}: {reason}")
    if not read.failures:
        count = len(read) + sum(read.refused.values())
        print_line(console, OK, f"{masked(url)}: {count} request records; a record that was read is gone for others")
        if not count:
            timing = engines.catalogue("trtllm").timing
            enable = next(way.enable for way in timing if clock_of(way.name.partition(" ")[0]))
            print_line(console, HINT, f"no request ended since the last reading, or records are off: {enable}")
    (engine_clock,) = read.clocks.values()
    if isinstance(engine_clock, SteadyClock):
        print_line(console, OK, f"the clock of its timestamps is known to {engine_clock.error_ns / 1e6:.2f} ms")
    elif not read.refused:
        print_line(console, WARN, f"its records cannot be joined with requests: {engine_clock.reason}")


async def _scrape_once(
    session: ClientSession,
    url: str,
    access: Access,
    limits: FetchLimits,
    clock: AnchoredClock,
    *,
    any_json: bool = False,
) -> Scrape:
    return await scrape(
        session,
        url,
        tick_ns=clock.now_ns(),
        clock_offset_ns=clock.offset_ns,
        limits=limits,
        access=access,
        any_json=any_json,
    )


def advice(reason: str, engine: str | None) -> Iterator[str]:
    """Yield cures for a missing metrics page, by reason, and by engine if known."""
    if switch := switch_of_page(reason, engine):
        yield switch
    yield f"a run still works, without the engine's side; {cure_of_page(reason)}"


def describe(samples: PageSamples, clock: AnchoredClock, servers: Servers = Servers()) -> Iterator[Line]:
    """Describe a page: its format and cost, the engine, shown and missing quantities."""
    durations_ms = [(taken.response_ns - taken.request_ns) / 1e6 for taken in samples.scrapes]
    page, body = samples.pages[-1], samples.scrapes[-1].body
    cost_ms = median(durations_ms)
    kind = _format(samples.scrapes[-1].content_type)
    yield OK, f"{masked(samples.url)}: {len(page.series)} series in {len(body) / 1024:.1f} KiB of {kind}"
    several = f" (median of {len(durations_ms)}; maximum {max(durations_ms):.1f} ms)" if len(durations_ms) > 1 else ""
    yield OK, f"a scrape takes {cost_ms:.1f} ms{several}"
    yield (
        OK,
        f"the time of a page is known to {cost_ms / 2:.1f} ms, our clock's anchor to {clock.error_ns / 1e3:.1f} us",
    )
    detected, gateway = _detected(page)
    if gateway is not None:
        yield from _gateway(page, gateway)
    if detected is None:
        if gateway is not None:
            return
        known = ", ".join(dict.fromkeys((*engines.engine_names(), *gateways.gateway_names())))
        yield WARN, f"no known engine or gateway exposes these series; known: {known}"
        if servers.engine is not None:
            yield HINT, switch_of_page("", servers.engine)
        return
    engine = engines.catalogue(detected.name)
    version = f" {detected.version}" if detected.version else ""
    yield OK, f"engine {detected.name} ({engine.title}{version}, by {detected.detected_by})"
    yield WARN if len(samples.pages) == 1 else OK, _changes(samples, engine)
    yield from _quantities(page, engine)
    served = engine.version_of(servers.version, samples.scrapes[-1].content_type)
    if served != servers.version:
        yield OK, f"{served}: its page is OpenMetrics, though plain text was preferred"
    for timing in engine.ways(served):
        yield HINT, f"times of requests from {timing.name}: {timing.gives}; {timing.enable}"
    if engine.probe_path:
        yield HINT, f"for health probes use {engine.probe_path}: those of its usual path are served like requests"


def _detected(page: Page) -> tuple[RecognisedEngine | None, Recognised | None]:
    """Return the engine and the gateway that a page is of."""
    engine = engines.detect(page.series)
    return engine, gateways.detect(page.series, beside_engine=engine is not None)


async def _sample(url: str, access: Access, limits: FetchLimits, clock: AnchoredClock) -> PageSamples | str:
    """Scrape a page several times, one after another; return what was wrong with the first scrape that failed.

    A page whose records are gone once read is scraped once.
    """
    reader = PageReader()
    scrapes: list[Scrape] = []
    pages: list[Page] = []
    async with open_session(access) as session:
        for _ in range(SCRAPES):
            taken = await _scrape_once(session, url, access, limits, clock)
            if taken.error:
                return f"{masked(url)}: {taken.error}"
            try:
                pages.append(reader.read(taken.body, taken.content_type))
            except MalformedPage as error:
                return f"{masked(url)}: malformed page: {error}"
            scrapes.append(taken)
            if taken.body.lstrip()[:1] == b"[":
                break
    return PageSamples(url=url, scrapes=tuple(scrapes), pages=tuple(pages))


def _changes(samples: PageSamples, engine: Catalogue) -> str:
    """Return a line on the metrics that changed from scrape to scrape; those of an engine without load do not."""
    if len(samples.pages) == 1:
        return "each reading empties this page: it was read once, and other readers do not get what it held"
    changed: set[str] = set()
    for before, after in pairwise(samples.pages):
        earlier = dict(zip(_keys(before), before.values.tolist(), strict=True))
        for key, value in zip(_keys(after), after.values.tolist(), strict=True):
            if earlier.get(key) != value and not (math.isnan(value) and key in earlier):
                changed.add(key[0])
    names = sorted(name for name in changed if engine.normalised(name).startswith(engine.prefix))
    if not changed:
        return f"{SCRAPES} scrapes in a row returned the same page: no value changed between them"
    if not names:
        return (
            f"no metric of the engine changed between scrapes: it is idle (other metrics that changed: {len(changed)})"
        )
    return f"changed between scrapes: {first_of(names, 4)}"


def _keys(page: Page) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(series.name, series.labels) for series in page.series]


def _gateway(page: Page, recognised: Recognised) -> Iterator[Line]:
    """Yield lines on a gateway's page: its values, and times that are not a TTFT."""
    known = gateways.gateway(recognised.name)
    yield OK, f"gateway {known.name} ({known.title}, by {recognised.detected_by})"
    shown = {
        name: source
        for name, source in gateways.canonical(page.series, known.name).items()
        if not isinstance(source, Missing)
    }
    width = max(map(len, shown), default=0)
    for name, source in shown.items():
        yield OK, f"{name:{width}}  {_value(source, page.values)}  {source.metric}"
    names = {name for series in page.series for name in (series.name, series.family)}
    for time in known.not_ttft:
        if time.name in names:
            yield HINT, f"{time.name} is not a TTFT: {time.why}"
    yield HINT, f"traceparent: {known.traceparent}; docs/reference/gateways.md has its settings"


def _quantities(page: Page, engine: Catalogue) -> Iterator[Line]:
    """Yield a line for each canonical quantity: its value and metric, or its absence. It states when the quantity is
    observed, or why it is missing.
    """
    sources = engines.canonical(page.series, engine.name)
    width = max(map(len, sources))
    values = {name: _value(source, page.values) for name, source in sources.items() if not isinstance(source, Missing)}
    value_width = max(map(len, values.values()), default=0)
    for name, source in sources.items():
        if isinstance(source, Missing):
            yield WARN if name in NEEDED else HINT, f"{name:{width}}  {source.reason}"
        else:
            moment = f"at {source.quantity.observed.replace('_', ' ')}"
            yield OK, f"{name:{width}}  {values[name]:{value_width}}  {moment:16}  {source.metric}"


def _value(source: CanonicalSource, values: npt.NDArray[np.float64]) -> str:
    """Return a quantity's present value in a few characters. It has the number of its label sets beyond one."""
    sets = len(source.histograms) or len(source.columns)
    several = f" ({sets} label sets)" if sets > 1 else ""
    unit = source.quantity.unit
    if source.quantity.kind == "histogram":
        count = _total(values, (histogram.count for histogram in source.histograms))
        total = _total(values, (histogram.sum for histogram in source.histograms))
        total -= _total(values, (histogram.less for histogram in source.histograms if histogram.less >= 0))
        mean = f", mean {total / count:.4g} {unit}" if count > 0 and math.isfinite(total) else ""
        return f"{count:.10g} observed{mean}{several}"
    if not source.columns and not source.histograms:
        return f"0 {unit} (not exposed before the first)"
    columns = values[list(source.columns)]
    if source.over:
        base = _total(values, source.over)
        return f"{float(columns.sum()) / base:.4g} {unit}{several}" if base > 0 else f"nothing to divide by{several}"
    value = float(columns.max() if source.quantity.across == "max" else columns.sum())
    return f"{value:.10g} {unit}{several}"


def _total(values: npt.NDArray[np.float64], columns: Iterable[int]) -> float:
    """Add values up; NaN where one of the columns is not on the page."""
    return sum((float(values[column]) if column >= 0 else math.nan) for column in columns)


def _format(content_type: str) -> str:
    kind, _, parameters = content_type.partition(";")
    version = next(
        (part.partition("=")[2] for part in parameters.split(";") if part.strip().startswith("version=")), ""
    )
    names = {
        "application/openmetrics-text": "OpenMetrics",
        "text/plain": "text",
    }
    return f"{names.get(kind.strip().lower(), kind.strip() or 'no content type')} {version}".strip()
