"""Look at an endpoint before a run: what answers, what it can tell of where time goes, and how to switch on what is
missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from rich.console import Console
from rich.text import Text

from scraper import engines
from scraper.endpoint import Limits, discover, open_session, scrape
from scraper.missing import Missing
from scraper.series import EndpointSeries, build
from sidecar.clock import anchor
from sidecar.errors import SidelightError, TargetUnreachable
from sidecar.target import Served, auth_headers, engine_version, preflight, probe

NEEDED = ("queue_time", "prefill_time", "requests_waiting")
SCRAPES = 5
GOOD, BAD, NOTE = ("ok  ", "green"), ("lack", "red"), ("note", "yellow")


async def examine(url: str, *, model: str | None, api_key: str | None, metrics: tuple[str, ...]) -> int:
    """Print what an endpoint offers and lacks. Returns 0, or 3 where no run would be possible."""
    console = Console(highlight=False)
    headers = auth_headers(api_key)
    usable = True
    try:
        served = await probe(url, model=model, api_key=api_key)
        _say(console, GOOD, f"{served.url} serves {served.model}{_limit(served)}")
        version = await engine_version(served.url, headers)
        if version:
            _say(console, GOOD, f"server version {version}")
        await preflight(served, endpoint="chat", headers=headers)
        _say(console, GOOD, "chat completions stream")
    except SidelightError as error:
        _say(console, BAD, str(error))
        usable = False
        if isinstance(error, TargetUnreachable) and not metrics:
            return error.exit_code
    for target in metrics or (url,):
        found = await discover(target, headers=headers)
        if isinstance(found, Missing):
            _say(console, BAD, f"no server metrics: {found.reason}")
            _say(
                console,
                NOTE,
                "a run still works; name the page with --metrics URL. vLLM: do not use --disable-log-stats",
            )
        else:
            await _page(console, found, headers)
    return 0 if usable else 3


async def _page(console: Console, url: str, headers: dict[str, str]) -> None:
    clock = anchor()
    async with open_session(headers) as session:
        records = [
            await scrape(session, url, due_ns=time.time_ns(), clock_offset_ns=clock.offset_ns, limits=Limits())
            for _ in range(SCRAPES)
        ]
    endpoint = build(records)[0]
    if not len(endpoint.at_ns):
        _say(console, BAD, f"{url}: {endpoint.failures[0][1]}")
        return
    cost_ms = median((record.response_ns - record.request_ns) / 1e6 for record in records)
    _say(console, GOOD, f"{url}: {len(endpoint.series)} series, a scrape takes {cost_ms:.1f} ms (median of {SCRAPES})")
    _say(
        console,
        NOTE,
        f"a scrape's own time is known to {cost_ms / 2:.1f} ms; the clock's anchor to {clock.error_ns / 1e3:.1f} us",
    )
    for mark, text in _quantities(endpoint):
        _say(console, mark, text)


def _quantities(endpoint: EndpointSeries) -> Iterator[tuple[tuple[str, str], str]]:
    engine = engines.detect(endpoint.series)
    if engine is None:
        yield BAD, f"no engine is recognised among its series; known: {', '.join(engines.ENGINES)}"
        return
    yield GOOD, f"engine {engine.name} (by {engine.detected_by})"
    for name, source in engines.canonical(endpoint.series, engine.name).items():
        if not isinstance(source, Missing):
            yield GOOD, f"{name}: {source.metric} ({source.quantity.kind}, observed at {source.quantity.observed})"
        else:
            yield (BAD if name in NEEDED else NOTE), f"{name}: {source.reason}"
    yield NOTE, "where the TTFT went: from histogram sums, as means; request by request it needs the engine's spans"


def _say(console: Console, mark: tuple[str, str], text: str) -> None:
    console.print(Text.assemble(mark, "  ", text), soft_wrap=True)


def _limit(served: Served) -> str:
    return "" if served.max_model_len is None else f" (up to {served.max_model_len} tokens)"
