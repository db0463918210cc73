from __future__ import annotations

import dataclasses

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sidelight.rundir.stats import Missing
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions
from sidelight.sidecar.run.preparation.pages import prepare_scrape, scraped_pages, with_pages
from sidelight.sidecar.run.preparation.planning import planned_requests

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"rate": 4.0, "duration": 30.0}, None),
        ({"concurrency": 4, "requests": 7}, 7),
        ({"concurrency": 4, "requests": 7, "duration": 30.0}, 7),
        ({"concurrency": 4, "duration": 30.0}, 240),
        ({"concurrency": 4, "duration": 0.5}, 40),
        ({"concurrency": 1000, "duration": 3600.0}, 20_000),
    ],
)
def test_a_closed_loop_is_prepared_whole_before_the_load(load: dict[str, float], expected: int | None):
    """By its number of requests; else two a second and slot, at least ten a slot, and not without bound."""
    assert expected == planned_requests(dataclasses.replace(RunOptions(url=(URL,)), **load))


async def test_a_named_page_that_does_not_answer_yet_is_asked_all_the_same():
    """Beside one that answers: an engine may be starting. What speaks something else is left out, with a note."""
    pages = {
        "good": web.Response(text="# TYPE x counter\nx_total 1\n"),
        "starting": web.Response(status=503),
        "html": web.Response(text="<!doctype html>", content_type="text/html"),
    }

    async def page(request: web.Request) -> web.Response:
        return pages[request.match_info["name"]]

    app = web.Application()
    app.router.add_get("/{name}/metrics", page)
    async with TestServer(app) as server:
        urls = {name: f"http://127.0.0.1:{server.port}/{name}/metrics" for name in pages}
        scrape = await prepare_scrape(ScrapeOptions(metrics=tuple(urls.values())))
    assert (urls["good"], urls["starting"]) == scrape.targets
    assert [urls["html"] in note for note in scrape.notes] == [True]


@pytest.mark.parametrize(
    ("reason", "switch"),
    [("HTTP 501", "llama.cpp: --metrics"), ("HTTP 404", "docs/reference/engines.md"), ("HTTP 403", "METRICS_TOKEN")],
)
def test_a_missing_page_is_noted_with_what_switches_it_on(reason: str, switch: str):
    """Only llama.cpp answers 501; of the others a page says how."""
    _, (note,) = scraped_pages([(URL, Missing(f"{URL}/metrics: {reason}"))])
    assert switch in note


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ((), (URL,)),
        ((f"{URL}/perf_metrics",), (URL, f"{URL}/perf_metrics")),
        ((f"{URL}/metrics",), (f"{URL}/metrics",)),
        ((f"{URL}/perf_metrics", "http://h/m"), (f"{URL}/perf_metrics", "http://h/m")),
    ],
)
def test_records_of_requests_are_no_page(named: tuple[str, ...], expected: tuple[str, ...]):
    """A `/perf_metrics` that is named leaves the usual page to be found; any other page that is named is instead."""
    assert expected == with_pages(named, (URL,))


async def test_records_of_requests_are_not_read_in_advance():
    """Reading clears them, so only the recorder reads; without a page there is a reason, and they are a target."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        url = f"http://127.0.0.1:{server.port}"
        scrape = await prepare_scrape(ScrapeOptions(url=url, metrics=(f"{url}/perf_metrics",)))
    assert (f"{url}/perf_metrics",) == scrape.targets
    assert "/perf_metrics" not in asked
    assert "HTTP 404" in scrape.about["server_missing"]
    assert [f"{url}/perf_metrics"] == scrape.about["timing_targets"]
    assert [url] == [target["configured"] for target in scrape.about["metrics_targets"]]
