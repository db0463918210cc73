"""Look at an endpoint before a run: what answers, what it can tell of where time goes, and how to switch on what is
missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt
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
from scraper.targets.fetch import Limits, Scrape, clock_of, discover, open_session, scrape
from sidecar.errors import SidelightError, TargetUnreachable
from sidecar.options.load import DoctorOptions
from sidecar.run.prepare import contact_of, pages_access, pages_of
from sidecar.run.target import Contact, engine_version, preflight, probe

NEEDED = ("queue_time", "prefill_time", "requests_waiting")
SCRAPES = 5
GOOD, BAD, NOTE = ("ok  ", "green"), ("lack", "red"), ("note", "yellow")

Line = tuple[tuple[str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The scrapes made of one metrics page and the pages they brought, equal in number."""

    url: str
    scrapes: tuple[Scrape, ...]
    pages: tuple[Page, ...]


async def examine(options: DoctorOptions) -> int:
    """Print what each URL and its metrics page offer and lack. Returns 0, or 3 where no run would be possible."""
    console = Console(highlight=False)
    contact = contact_of(options)
    usable, pages = True, list(options.metrics)
    for url in options.url:
        try:
            await _ask(console, url, options, contact)
        except SidelightError as error:
            _say(console, BAD, str(error))
            usable = False
            if isinstance(error, TargetUnreachable):
                continue
        if all(map(clock_of, options.metrics)):
            pages += pages_of((url,), contact)
    for page in pages:
        see = _see_timings if clock_of(page) else _see
        await see(console, page, pages_access(options), Limits(timeout_s=options.scrape_timeout))
    return 0 if usable else 3


async def _ask(console: Console, url: str, options: DoctorOptions, contact: Contact) -> None:
    """Say what serves at a URL, as a run would ask it. Raises SidelightError where a run would."""
    protocol = PROTOCOLS[contact.endpoint]
    served = await probe(url, model=options.model, contact=contact)
    limit = "" if served.max_model_len is None else f" (up to {served.max_model_len} tokens)"
    _say(console, GOOD, f"{served.url} serves {served.model}{limit}")
    if version := await engine_version(served.url, contact):
        _say(console, GOOD, f"server version {version}")
    await preflight(served, contact=contact)
    _say(console, GOOD, f"{contact.endpoint} {'streams' if protocol.streams else 'answers, without a stream'}")


async def _see(console: Console, target: str, access: Access, limits: Limits) -> None:
    found = await discover(target, access=access, limits=limits)
    if isinstance(found, Missing):
        _say(console, BAD, f"no server metrics: {found.reason}")
        for line in advice(found.reason):
            _say(console, NOTE, line)
        return
    clock = anchor()
    look = await _look(found, access, limits, clock)
    for mark, text in [(BAD, look)] if isinstance(look, str) else describe(look, clock):
        _say(console, mark, text)


async def _see_timings(console: Console, url: str, access: Access, limits: Limits) -> None:
    """Read TensorRT-LLM's records of requests and its clock, once, and say what they tell."""
    clock = anchor()
    async with open_session(access) as session:
        replies = [
            await scrape(
                session,
                page,
                tick_ns=clock.now_ns(),
                clock_offset_ns=clock.offset_ns,
                limits=limits,
                access=access,
                any_json=page != url,
            )
            for page in (url, clock_of(url))
        ]
    read = timings(map(record_of, replies))
    for reason in (*read.failures, *read.refused):
        _say(console, BAD, f"{masked(url)}: {reason}")
    if not read.failures:
        count = len(read) + sum(read.refused.values())
        _say(console, GOOD, f"{masked(url)}: {count} records of requests; no other reader gets them")
        if not count:
            timing = engines.catalogue("trtllm").timing
            switch = next(one.enable for one in timing if clock_of(one.name.partition(" ")[0]))
            _say(console, NOTE, f"none ended since the last reading, or it is off: {switch}")
    (known,) = read.clocks.values()
    if isinstance(known, SteadyClock):
        _say(console, GOOD, f"the clock of its stamps is known to {known.error_ns / 1e6:.2f} ms")
    elif not read.refused:
        _say(console, BAD, f"its records cannot be joined: {known.reason}")


def advice(reason: str) -> Iterator[str]:
    """Say what could bring a metrics page about, judged by why there is none."""
    if "JSON" in reason:
        yield _switch("trtllm")
    elif "HTTP 501" in reason:
        yield _switch("llamacpp")
    elif "HTTP 404" in reason:
        for engine in ("sglang", "trtllm", "llamacpp"):
            yield _switch(engine)
    yield "a run still works; name the page with --metrics URL where it is elsewhere"


def describe(look: Look, clock: Clock) -> Iterator[Line]:
    """Describe a page: how it is exposed and how fast, which engine's it is, what it tells and what it does not."""
    durations_ms = [(one.response_ns - one.request_ns) / 1e6 for one in look.scrapes]
    page, body = look.pages[-1], look.scrapes[-1].body
    cost_ms = median(durations_ms)
    kind = _format(look.scrapes[-1].content_type)
    yield GOOD, f"{masked(look.url)}: {len(page.series)} series in {len(body) / 1024:.1f} KiB of {kind}"
    several = f" (median of {len(durations_ms)}; {max(durations_ms):.1f} at most)" if len(durations_ms) > 1 else ""
    yield GOOD, f"a scrape takes {cost_ms:.1f} ms{several}"
    yield (
        NOTE,
        f"the moment of a page is known to {cost_ms / 2:.1f} ms, the clock's anchor to {clock.error_ns / 1e3:.1f} us",
    )
    engine = engines.detect(page.series)
    if engine is None:
        yield BAD, f"no engine is recognised among its series; known: {', '.join(engines.ENGINES)}"
        yield NOTE, _switch("vllm")
        return
    known = engines.catalogue(engine.name)
    version = f" {engine.version}" if engine.version else ""
    yield GOOD, f"engine {engine.name} ({known.title}{version}, by {engine.detected_by})"
    yield NOTE, _updates(look, known)
    yield from _quantities(page, known)
    for timing in known.timing:
        yield NOTE, f"times of requests from {timing.name}: {timing.gives}; {timing.enable}"


async def _look(url: str, access: Access, limits: Limits, clock: Clock) -> Look | str:
    """Scrape a page several times, one after another; return what was wrong with the first one that failed.

    A page that each reading empties is read once.
    """
    reader = PageReader()
    scrapes: list[Scrape] = []
    pages: list[Page] = []
    async with open_session(access) as session:
        for _ in range(SCRAPES):
            taken = await scrape(
                session,
                url,
                tick_ns=clock.now_ns(),
                clock_offset_ns=clock.offset_ns,
                limits=limits,
                access=access,
            )
            if taken.error:
                return f"{masked(url)}: {taken.error}"
            try:
                pages.append(reader.read(taken.body, taken.content_type))
            except MalformedPage as bad:
                return f"{masked(url)}: malformed page: {bad}"
            scrapes.append(taken)
            if taken.body.lstrip()[:1] == b"[":
                break
    return Look(url=url, scrapes=tuple(scrapes), pages=tuple(pages))


def _updates(look: Look, known: Catalogue) -> str:
    """Say what moved from scrape to scrape; an engine without load moves nothing of its own."""
    if len(look.pages) == 1:
        return "each reading empties this page: it was read once, and no other reader gets what it held"
    moved: set[str] = set()
    for before, after in zip(look.pages, look.pages[1:], strict=False):
        earlier = dict(zip(_keys(before), before.values.tolist(), strict=True))
        for key, value in zip(_keys(after), after.values.tolist(), strict=True):
            if earlier.get(key) != value and not (math.isnan(value) and key in earlier):
                moved.add(key[0])
    own = sorted(name for name in moved if known.normalised(name).startswith(known.prefix))
    if not moved:
        return f"{SCRAPES} scrapes in a row brought the same page: nothing moves while the engine is idle"
    if not own:
        return f"from scrape to scrape nothing of the engine's own moved: it is idle (of other names {len(moved)} did)"
    return f"from scrape to scrape moved: {', '.join(own[:4])}{f' and {len(own) - 4} more' if len(own) > 4 else ''}"


def _keys(page: Page) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(one.name, one.labels) for one in page.series]


def _quantities(page: Page, known: Catalogue) -> Iterator[Line]:
    """One line a canonical quantity: what it is now, when it is observed, and where it stands; or why it is lacking."""
    found = engines.canonical(page.series, known.name)
    wide = max(len(name) for name in found)
    shown = {name: _now(source, page.values) for name, source in found.items() if isinstance(source, CanonicalSource)}
    value_wide = max((len(text) for text in shown.values()), default=0)
    for name, source in found.items():
        if isinstance(source, Missing):
            lacking = BAD if name in NEEDED else NOTE
            yield lacking, f"{name:{wide}}  {source.reason}"
        else:
            moment = f"at {source.quantity.observed.replace('_', ' ')}"
            yield GOOD, f"{name:{wide}}  {shown[name]:{value_wide}}  {moment:16}  {source.metric}"


def _now(source: CanonicalSource, values: npt.NDArray[np.float64]) -> str:
    """Return the present value of a quantity in a few characters, with the number of its label sets beyond one."""
    sets = len(source.histograms) or len(source.columns)
    several = f" ({sets} label sets)" if sets > 1 else ""
    unit = source.quantity.unit
    if source.quantity.kind == "histogram":
        count = _total(values, (one.count for one in source.histograms))
        total = _total(values, (one.sum for one in source.histograms))
        total -= _total(values, (one.less for one in source.histograms if one.less >= 0))
        mean = f", mean {total / count:.4g} {unit}" if count > 0 and math.isfinite(total) else ""
        return f"{count:.10g} seen{mean}{several}"
    if not source.columns and not source.histograms:
        return f"0 {unit} (not shown before the first)"
    columns = values[list(source.columns)]
    if source.over:
        base = _total(values, source.over)
        return f"{float(columns.sum()) / base:.4g} {unit}{several}" if base > 0 else f"no base{several}"
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
    return f"{names.get(kind.strip().lower(), kind.strip() or 'no stated type')} {version}".strip()


def _switch(engine: str) -> str:
    known = engines.catalogue(engine)
    return f"{known.title}: {known.enable}"


def _say(console: Console, mark: tuple[str, str], text: str) -> None:
    console.print(Text.assemble(mark, "  ", text), soft_wrap=True)
