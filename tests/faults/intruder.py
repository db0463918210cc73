"""An intruder beside honest traffic in a watch, for as long as is wanted: nothing that is his changes what is theirs.

He has a page among those that are scraped, sends exports, and answers the requests of loads whose spans come to the
same watch. The honest requests are broken down as in a quiet watch that is sent them at the same time, and the page
says what was refused of his, by kind, exactly. Only of the long part of the suite.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from faults.cases import Case, Kind, Setting, Try
from faults.hostile import EXPORTS, PAGES, REPLIES, whole
from faults.network import hostile_reply
from faults.servers import Asked, serving
from odd_exports import over_http
from processes import METRICS, QUIET, sidelight
from test_watch import TRACE, Watch, request, watching  # that of the tests of `watch`

LEAST_S = 30.0
EVERY_S = 0.2  # between honest requests, and between his exports
ROUNDED_MS = 0.01
EMPTY_SPANS = 20_000  # in the one export that is taken, and breaks OTLP's rules
REFUSED = {400: "malformed", 415: "malformed", 413: "too_large", 503: "turned_away"}
PARTS = ("network_ms", "gateway_ms", "queue_ms", "prefill_ms", "other_ms")
Rows = Mapping[str, Mapping[str, Any]]  # of requests.parquet, by trace


@dataclass(slots=True, kw_only=True)
class Intruder:
    """What he does until it is over, and how he is answered."""

    place: Path
    url: str
    over: threading.Event = field(default_factory=threading.Event)
    refused: Counter[str] = field(default_factory=Counter)
    loads: int = 0

    async def act(self, watch: Watch) -> None:
        """Send exports, and let loads be sent to his server."""
        await asyncio.gather(self._export(watch.ports[1]), asyncio.to_thread(self._answer, watch.ports[1]))

    async def _export(self, port: int) -> None:
        for name in itertools.cycle(EXPORTS):
            if self.over.is_set():
                return
            headers = {key.replace("-", "_"): value for key, value in EXPORTS[name].headers}
            status, _ = await over_http(port, EXPORTS[name].body, **headers)
            if status in REFUSED:
                self.refused[REFUSED[status]] += 1
            elif name == "spans-20000":
                self.refused["bad_spans"] += EMPTY_SPANS
            await asyncio.sleep(EVERY_S)

    async def check(self, watch: Watch, page_url: str) -> None:
        """Require that the watch's page has what was refused, by kind, and that his page failed. Raises
        AssertionError.
        """

        def shown(page: Mapping[str, float]) -> Mapping[str, float]:
            return {kind: page[f'sidelight_receiver_refused_total{{kind="{kind}"}}'] for kind in self.refused}

        page = await watch.until(lambda page: sum(shown(page).values()) >= self.refused.total())
        if shown(page) != self.refused:
            raise AssertionError(f"the page says {shown(page)}, the answers were {self.refused}")
        failed = page[f'sidelight_scrapes_total{{endpoint="{page_url}",outcome="failed"}}']
        if not (failed and self.loads and {"malformed", "too_large", "bad_spans"} <= self.refused.keys()):
            raise AssertionError(f"not tried: {failed:g} failed scrapes, {self.loads} loads, {self.refused}")

    def _answer(self, port: int) -> None:
        prompts = self.place / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps({"prompt": f"case:{name}", "max_tokens": 7}) for name in REPLIES))
        load = ("--prompts", prompts, "--requests", str(len(REPLIES)), "--concurrency", "12", "--warmup", "0")
        export = ("--request-timeout", "5", "--otlp-export", f"http://127.0.0.1:{port}", *QUIET)
        while not self.over.is_set():
            shutil.rmtree(self.place / "load", ignore_errors=True)
            run = sidelight("run", f"{self.url}/v1", *load, *export, "--out", self.place / "load")
            if run.code or "Traceback" in run.err:
                raise AssertionError(f"a load ended with {run.code}: {run.err}")
            self.loads += 1


def _answer() -> Callable[[Asked], Sequence[bytes]]:
    """Return what answers a scrape with a page after the other, a good one first, and a request as its prompt says."""
    pages = itertools.chain([(whole(METRICS, kind=b"text/plain"),)], *([page.pieces] for page in PAGES.values()))
    turns, lock = itertools.cycle(list(pages)), threading.Lock()

    def answer(asked: Asked) -> Sequence[bytes]:
        if asked.path == "/intruder/metrics":
            with lock:
                return next(turns)
        return hostile_reply(asked)

    return answer


async def _watched(path: Path, pages: Sequence[str], seconds: float, intruder: Intruder | None) -> Rows:
    """Send honest requests to a watch for so long; return its rows of them. Raises AssertionError where a count is
    wrong.
    """
    options = [part for page in pages for part in ("--metrics", page)]
    async with watching(path, *options, "--scrape-interval", "0.5") as watch:
        acting = asyncio.create_task(intruder.act(watch) if intruder else asyncio.sleep(0))
        ends_s, count = time.monotonic() + seconds, 0
        try:
            while time.monotonic() < ends_s:
                count += 1
                await watch.send(request(count), over="http" if count % 2 else "grpc")
                await asyncio.sleep(EVERY_S)
        finally:
            if intruder:
                intruder.over.set()  # whose loads, in a thread, would go on for ever
        await acting
        page = await watch.until(lambda page: page[TRACE] >= count)
        if intruder:
            await intruder.check(watch, pages[-1])
        await watch.end()
    if "Traceback" in "".join(watch.said):
        raise AssertionError("\n".join(watch.said[-5:]))
    if page[TRACE] != count:
        raise AssertionError(f"{count} honest requests were sent, {page[TRACE]:g} counted")
    # Of all, as a watch itself reports the last 4 MB of spans: of an hour these are some 20 million empty ones of his,
    # which take longer than the bound on a directory of others.
    report = await asyncio.to_thread(sidelight, "report", path, "--no-untrusted", bound_s=3600.0)
    if report.code:
        raise AssertionError(f"the report ends with {report.code}: {report.err}")
    rows = {row["trace_id"]: row for row in pq.read_table(path / "requests.parquet").to_pylist()}
    return {trace: rows[trace] for trace in (number.to_bytes(16).hex() for number in range(1, count + 1))}


async def _both(place: Path, pages: Sequence[str], seconds: float, intruder: Intruder) -> tuple[Rows, Rows]:
    """Send the same honest requests to a quiet watch, and to one with an intruder beside it."""
    return await asyncio.gather(
        _watched(place / "quiet", pages[:1], seconds, None), _watched(place / "beside", pages, seconds, intruder)
    )


def _different(quiet: Rows, beside: Rows) -> str:
    """Say which request, of those that were sent in both, is broken down otherwise than its stated error allows."""
    for trace in quiet.keys() & beside.keys():
        error_ms = ROUNDED_MS + sum(rows[trace]["breakdown_error_ms"] or 0.0 for rows in (quiet, beside))
        for part in PARTS:
            before, after = quiet[trace][part], beside[trace][part]
            if before is None or after is None or abs(before - after) > error_ms:
                return f"{part} of {trace} is {after}, and {before} in the quiet run; stated error {error_ms:.3f} ms"
    return ""


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    def attempt(_: Case) -> str:
        place = setting.place
        honest = (whole(METRICS, kind=b"text/plain"),)
        with serving(lambda _: honest) as url, serving(_answer()) as his_url:
            pages = (f"{url}/metrics", f"{his_url}/intruder/metrics")
            intruder = Intruder(place=place, url=his_url)
            return _different(*asyncio.run(_both(place, pages, max(LEAST_S, setting.seconds), intruder)))

    yield attempt


INTRUDER = Kind(name="intruder", rows={"watch": 0}, opened=opened, sizes={"watch": 1})
