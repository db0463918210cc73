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
from rundir.printable import printable
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
from sidecar.run.preflight import preflight, refusal
from sidecar.run.prepare import contact_of, cure_of_page, pages_access, pages_of, with_pages
from sidecar.run.target import MOST_NAMED, Contact, engine_version, probe, proxy_note, unlisted_note

NEEDED = ("queue_time", "prefill_time", "requests_waiting")
SCRAPES = 5
# fail: no run is possible; warn: one is, with less in its report; skip: not tried. A hint says how to get what is not
# there.
OK, WARN, FAIL, SKIP = ("ok  ", "green"), ("warn", "yellow"), ("fail", "red"), ("skip", "dim")
HINT = ("    ", "dim")
# Engines by the owner that their lists of models state.
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "tensorrt_llm": "trtllm"}

Line = tuple[tuple[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Several scrapes of one metrics page, and the pages they returned, equal in number."""

    url: str
    scrapes: tuple[Scrape, ...]
    pages: tuple[Page, ...]


async def examine(options: DoctorOptions) -> int:
    """Print what each URL and its metrics page offer, and what is missing. Returns 0, or 3 where no run is possible."""
    console = Terminal(highlight=False)
    contact = contact_of(options)
    usable, reachable, engine = True, list(options.url), None
    if note := proxy_note(options.url):
        _print(console, WARN, note)
    for url in options.url:
        try:
            engine = await _examine_api(console, url, options, contact) or engine
        except SidelightError as error:
            _print(console, FAIL, str(error))
            usable = False
            if isinstance(error, TargetUnreachable):
                reachable.remove(url)
    access, limits = pages_access(options), Limits(timeout_s=options.scrape_timeout)
    pages = with_pages(options.metrics, pages_of(reachable, contact))
    if not pages:
        why = "not looked for, since nothing answers"
        if reachable:
            why = f"none beside --endpoint {contact.endpoint}; give their address with --metrics URL"
        _print(console, SKIP, f"server metrics: {why}")
    for page in pages:
        if clock_of(page):
            await _examine_timings(console, page, access, limits)
        else:
            await _examine_metrics(console, page, access, limits, engine)
    return 0 if usable else 3


async def _examine_api(console: Console, url: str, options: DoctorOptions, contact: Contact) -> str | None:
    """Print what serves at a URL, found by the requests a run would send; of several models the first is tried.

    Returns the engine where the list of models tells it. Raises SidelightError where a run would.
    """
    protocol = PROTOCOLS[contact.endpoint]
    served = await probe(url, model=options.model, contact=contact, any_model=True)
    limit = "" if served.max_model_len is None else f" (up to {served.max_model_len} tokens)"
    if served.unlisted is None:
        _print(console, OK, f"{served.url} serves {served.model}{limit}")
    if options.model is None and len(served.listed) > 1:
        names = ", ".join(served.listed[:MOST_NAMED]) + (", ..." if len(served.listed) > MOST_NAMED else "")
        text = f"{len(served.listed)} models are served ({names}), and {served.model} is examined; a run needs --model"
        _print(console, WARN, text)
    if version := await engine_version(served.url, contact):
        _print(console, OK, f"server version {version}")
    for field, said in (await preflight(served, contact=contact, ignore_eos=True)).items():
        _print(console, WARN, refusal(served.url, field, said))
    if note := unlisted_note(served):
        _print(console, WARN, note)
    _print(console, OK, f"{contact.endpoint} {'streams' if protocol.streams else 'answers, without a stream'}")
    return OWNERS.get(served.owner)


async def _examine_metrics(console: Console, target: str, access: Access, limits: Limits, engine: str | None) -> None:
    page = await discover(target, engines.metrics_paths(), access=access, limits=limits)
    if isinstance(page, Missing):
        _print(console, WARN, f"no server metrics: {page.reason}")
        for line in advice(page.reason, engine):
            _print(console, HINT, line)
        return
    clock = anchor()
    samples = await _sample(page, access, limits, clock)
    for mark, text in [(WARN, samples)] if isinstance(samples, str) else describe(samples, clock, engine):
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
        _print(console, WARN, f"{masked(url)}: {reason}")
    if not read.failures:
        count = len(read) + sum(read.refused.values())
        _print(console, OK, f"{masked(url)}: {count} request records; a record that was read is gone for others")
        if not count:
            timing = engines.catalogue("trtllm").timing
            switch = next(way.enable for way in timing if clock_of(way.name.partition(" ")[0]))
            _print(console, HINT, f"no request ended since the last reading, or records are off: {switch}")
    (engine_clock,) = read.clocks.values()
    if isinstance(engine_clock, SteadyClock):
        _print(console, OK, f"the clock of its timestamps is known to {engine_clock.error_ns / 1e6:.2f} ms")
    elif not read.refused:
        _print(console, WARN, f"its records cannot be joined with requests: {engine_clock.reason}")


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


def advice(reason: str, engine: str | None) -> Iterator[str]:
    """Give what could make a metrics page available, by why there is none, and by the engine where it is known."""
    # Only these two answer so.
    engine = engine or ("trtllm" if "JSON" in reason else "llamacpp" if "HTTP 501" in reason else None)
    if engine is not None:
        yield _switch(engine)
    elif "HTTP 404" in reason:
        yield "docs/reference/engines.md says how each engine is made to show its metrics"
    yield f"a run still works, without the engine's side; {cure_of_page(reason)}"


def describe(samples: Samples, clock: Clock, engine_by_owner: str | None = None) -> Iterator[Line]:
    """Describe a page: its format and cost, the engine, and which quantities it shows and which not."""
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
    detected = engines.detect(page.series)
    if detected is None:
        yield WARN, f"no known engine exposes these series; known: {', '.join(engines.engine_names())}"
        if engine_by_owner is not None:
            yield HINT, _switch(engine_by_owner)
        return
    engine = engines.catalogue(detected.name)
    version = f" {detected.version}" if detected.version else ""
    yield OK, f"engine {detected.name} ({engine.title}{version}, by {detected.detected_by})"
    yield WARN if len(samples.pages) == 1 else OK, _changes(samples, engine)
    yield from _quantities(page, engine)
    for timing in engine.timing:
        yield HINT, f"times of requests from {timing.name}: {timing.gives}; {timing.enable}"


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
            yield WARN if name in NEEDED else HINT, f"{name:{width}}  {source.reason}"
        else:
            moment = f"at {source.quantity.observed.replace('_', ' ')}"
            yield OK, f"{name:{width}}  {values[name]:{value_width}}  {moment:16}  {source.metric}"


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
    console.print(Text.assemble(mark, "  ", printable(text)), soft_wrap=True)
