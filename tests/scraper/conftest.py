"""Recordings, and a real HTTP server that replays pages."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import pytest
from aiohttp import web
from served import Handler, Serve

from sidelight.scraper.targets.scrape import Scrape

REPOSITORY = Path(__file__).parents[2]
URL = "http://engine.test/metrics"


@pytest.fixture(scope="session")
def vllm_scrapes() -> list[Scrape]:
    """Twenty scrapes of a real vLLM under load, the first and the last of their recording included."""
    with lzma.open(REPOSITORY / "tests/data/vllm_scrapes.jsonl.xz", "rt") as file:
        next(file)
        return [_record(json.loads(line)) for line in file]


@pytest.fixture(scope="session")
def recording(shared: Path) -> Callable[[str], list[Scrape]]:
    """Load a whole recording by its name."""
    return lambda name: list(_recorded(shared / "fixtures/vllm/recorded" / name / "scrapes.jsonl.gz"))


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start HTTP servers on free ports of the loopback: paths and handlers in, base URL out."""
    runners: list[web.AppRunner] = []

    async def start(handlers: dict[str, Handler]) -> str:
        app = web.Application()
        for path, handler in handlers.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def _recorded(path: Path) -> Iterable[Scrape]:
    with gzip.open(path, "rt") as file:
        anchor = json.loads(next(file))["anchor"]
        offset_ns = anchor["unix_ns"] - anchor["mono_ns"]
        for line in file:
            row = json.loads(line)
            yield _record(
                {
                    "due_ns": row["due_ns"] + offset_ns,
                    "request_ns": row["t0_ns"] + offset_ns,
                    "response_ns": row.get("t1_ns", row["t0_ns"]) + offset_ns,
                    "content_type": row.get("ctype", ""),
                    "page": row.get("body", ""),
                    "error": row.get("error", ""),
                }
            )


def _record(row: dict[str, str]) -> Scrape:
    return Scrape(
        url=URL,
        tick_ns=int(row["due_ns"]),
        request_ns=int(row["request_ns"]),
        response_ns=int(row["response_ns"]),
        status=200 if row["page"] else 0,
        content_type=row["content_type"],
        body=row["page"].encode(),
        error=row.get("error", ""),
    )
