"""Examine an endpoint before a run: what answers, its metrics and timings, and how to enable what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np
import numpy.typing as npt
from aiohttp import ClientSession
from rich.console import Console
from rich.text import Text

from loadgen.protocols import PROTOCOLS
from rundir.access import Access, masked
from rundir.clock import Clock, anchor
from rundir.stats import Missing
from scraper import engines
from scraper.engines import CanonicalSource, Catalogue
from scraper.exposition import MalformedPage, Page, PageReader
from scraper.perf_metrics import SteadyClock, record_of, timings
from scraper.targets.fetch import Limits, discover, open_session, scrape
from scraper.targets.scrape import Scrape, clock_of
from sidecar.errors import SidelightError, TargetUnreachable
from sidecar.options.load import DoctorOptions
from sidecar.progress import Terminal
from sidecar.run.preflight import preflight
from sidecar.run.prepare import contact_of, pages_access, pages_of, with_pages
from sidecar.run.target import Contact, engine_version, probe

NEEDED = ("queue_time", "prefill_time", "requests_waiting")
SCRAPES = 5
GOOD, BAD, NOTE = ("ok  ", "green"), ("fail", "red"), ("note", "yellow")

Line = tuple[tuple[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Several scrapes of one metrics page, and the pages they returned, equal in number."""

    url: str
    scrapes: tuple[Scrape, ...]
    pages: tuple[Page, ...]


async def examine(options: DoctorOptions) -> int:
    """Print what each URL and its metrics page offer and lack. Returns 0, or 3 where no run would be possible."""
    console = Terminal(highlight=False)
    contact = contact_of(options)
    usable, reachable = True, list(options.url)
    for url in options.url:
        try:
            await _examine_api(console, url, options, contact)
        except SidelightError as error:
            _print(console, BAD, str(error))
            usable = False
            if isinstance(error, TargetUnreachable):
                reachable.remove(url)
    access, limits = pages_access(options), Limits(timeout_s=options.scrape_timeout)
    for page in with_pages(options.metrics, pages_of(reachable, contact)):
        examine_page = _examine_timings if clock_of(page) else _examine_metrics
        await examine_page(console, page, access, limits)
    return 0 if usable else 3


async def _examine_api(console: Console, url: str, options: DoctorOptions, contact: Contact) -> None:
    """Print what serves at a URL, found by the requests a run would send. Raises SidelightError where a run would."""
    protocol = PROTOCOLS[contact.endpoint]
    served = await probe(url, model=options.model, contact=contact)
    limit = "" if served.max_model_len is None else f" (up to {served.max_model_len} tokens)"
    _print(console, GOOD, f"{served.url} serves {served.model}{limit}")
    if version := await engine_version(served.url, contact):
        _print(console, GOOD, f"server version {version}")
    await preflight(served, contact=contact)
    _print(console, GOOD, f"{contact.endpoint} {'streams' if protocol.streams else 'answers, without a stream'}")


async def _examine_metrics(console: Console, target: str, access: Access, limits: Limits) -> None:
    page = await discover(target, engines.metrics_paths(), access=access, limits=limits)
    if isinstance(page, Missing):
        _print(console, BAD, f"no server metrics: {page.reason}")
        for line in advice(page.reason):
            _print(console, NOTE, line)
        return
    clock = anchor()
    samples = await _sample(page, access, limits, clock)
    for mark, text in [(BAD, samples)] if isinstance(samples, str) else describe(samples, clock):
        _print(console, mark, text)


async def _examine_timings(console: Console, url: str, access: Access, limits: Limits) -> None:
    """Read TensorRT-LLM's request records and its clock once, and print what they offer."""
    clock = anchor()
    async with open_session(access) as session:
        replies = [
            await _scrape_once(session, page, access, limits, clock, any_json=page != url)
            for page in (url, clock_of(url))
        ]
    read = timings(map(record_of, replies))
    for reason in (*read.failures, *read.refused):
        _print(console, BAD, f"{masked(url)}: {reason}")
    if not read.failures:
        count = len(read) + sum(read.refused.values())
        _print(console, GOOD, f"{masked(url)}: {count} request records; a record that was read is gone for others")
        if not count:
            timing = engines.catalogue("trtllm").timing
            switch = next(way.enable for way in timing if clock_of(way.name.partition(" ")[0]))
            _print(console, NOTE, f"no request ended since the last reading, or records are off: {switch}")
    (engine_clock,) = read.clocks.values()
    if isinstance(engine_clock, SteadyClock):
        _print(console, GOOD, f"the clock of its timestamps is known to {engine_clock.error_ns / 1e6:.2f} ms")
    elif not read.refused:
        _print(console, BAD, f"its records cannot be joined with requests: {engine_clock.reason}")


async def _scrape_once(
    session: ClientSession, url: str, access: Access, limits: Limits, clock: Clock, *, any_json: bool = False
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


def advice(reason: str) -> Iterator[str]:
    """Give what could make a metrics page available, judged by why there is none."""
    if "JSON" in reason:
        yield _switch("trtllm")
    elif "HTTP 501" in reason:
        yield _switch("llamacpp")
    elif "HTTP 404" in reason:
        for engine in ("sglang", "trtllm", "llamacpp"):
            yield _switch(engine)
    yield "a run still works; if the page is elsewhere, give its address with --metrics URL"


def describe(samples: Samples, clock: Clock) -> Iterator[Line]:
    """Describe a page: its format and cost, the engine, and which quantities it shows and which not."""
    durations_ms = [(taken.response_ns - taken.request_ns) / 1e6 for taken in samples.scrapes]
    page, body = samples.pages[-1], samples.scrapes[-1].body
    cost_ms = median(durations_ms)
    kind = _format(samples.scrapes[-1].content_type)
    yield GOOD, f"{masked(samples.url)}: {len(page.series)} series in {len(body) / 1024:.1f} KiB of {kind}"
    several = f" (median of {len(durations_ms)}; maximum {max(durations_ms):.1f} ms)" if len(durations_ms) > 1 else ""
    yield GOOD, f"a scrape takes {cost_ms:.1f} ms{several}"
    yield (
        NOTE,
        f"the time of a page is known to {cost_ms / 2:.1f} ms, our clock's anchor to {clock.error_ns / 1e3:.1f} us",
    )
    detected = engines.detect(page.series)
    if detected is None:
        yield BAD, f"no known engine exposes these series; known: {', '.join(engines.engine_names())}"
        yield NOTE, _switch("vllm")
        return
    engine = engines.catalogue(detected.name)
    version = f" {detected.version}" if detected.version else ""
    yield GOOD, f"engine {detected.name} ({engine.title}{version}, by {detected.detected_by})"
    yield NOTE, _changes(samples, engine)
    yield from _quantities(page, engine)
    for timing in engine.timing:
        yield NOTE, f"times of requests from {timing.name}: {timing.gives}; {timing.enable}"


async def _sample(url: str, access: Access, limits: Limits, clock: Clock) -> Samples | str:
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
    return Samples(url=url, scrapes=tuple(scrapes), pages=tuple(pages))


def _changes(samples: Samples, engine: Catalogue) -> str:
    """Say which metrics changed from scrape to scrape; those of an engine without load do not."""
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
        return f"{SCRAPES} scrapes in a row returned the same page: no value changes while the engine is idle"
    if not names:
        return (
            f"no metric of the engine changed between scrapes: it is idle (other metrics that changed: {len(changed)})"
        )
    return f"changed between scrapes: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"


def _keys(page: Page) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(series.name, series.labels) for series in page.series]


def _quantities(page: Page, engine: Catalogue) -> Iterator[Line]:
    """Give a line for each canonical quantity: its value, when it is observed and its metric; or why it is missing."""
    sources = engines.canonical(page.series, engine.name)
    width = max(map(len, sources))
    values = {name: _value(source, page.values) for name, source in sources.items() if not isinstance(source, Missing)}
    value_width = max(map(len, values.values()), default=0)
    for name, source in sources.items():
        if isinstance(source, Missing):
            yield BAD if name in NEEDED else NOTE, f"{name:{width}}  {source.reason}"
        else:
            moment = f"at {source.quantity.observed.replace('_', ' ')}"
            yield GOOD, f"{name:{width}}  {values[name]:{value_width}}  {moment:16}  {source.metric}"


def _value(source: CanonicalSource, values: npt.NDArray[np.float64]) -> str:
    """Return the present value of a quantity in a few characters, with the number of its label sets beyond one."""
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


def _switch(engine: str) -> str:
    catalogue = engines.catalogue(engine)
    return f"{catalogue.title}: {catalogue.enable}"


def _print(console: Console, mark: tuple[str, str], text: str) -> None:
    console.print(Text.assemble(mark, "  ", text), soft_wrap=True)
