"""Replay a recording to AIPerf and to Sidelight at once, and compare what each derives from it.

    python benchmarks/replay.py --aiperf AIPERF [--recording FILE.jsonl.gz] [--tokenizer DIR] [--speed 2] [--keep DIR]

A server on loopback shows the recorded pages by elapsed time, and answers one chat completion that lasts as long as
the replay: that is AIPerf's load, and the request for it starts the replay. `sidelight scrape` reads the same page
meanwhile, at the same interval. The page stands still for a while at both ends. Each reply ends in a comment with a
number of its own, so that AIPerf takes none for a duplicate and logs them all.

Two comparisons are made. *Same scrapes*: the pages and stamps that AIPerf logged, through our derivation. AIPerf's
statistics go from the scrape before its first of the measured phase, which is the reference, and its timeslices (and
`rate_*`, made of them) from that first one, so both windows are derived. *As run*: each tool's own scrapes; the range
in which sampling alone may move a gauge's statistics is had from the recording, read at 200 phases of the interval.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import agreement
import numpy as np
from agreement import Key, Values, canonical, numbers, page, read_logged, slices, statistics, totals
from aiohttp import web
from msgspec import to_builtins
from numpy.typing import NDArray

from sidelight.exporter.server_metrics import jsonl
from sidelight.exporter.server_metrics.json import document
from sidelight.exporter.server_metrics.source import MetricsSource
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.targets.scrape import Scrape
from sidelight.scraper.window.statistics import gauge_stats
from sidelight.scraper.window.window import Window
from sidelight.sidecar.run import open_run

SHARED = Path(os.environ.get("SIDELIGHT_SHARED", Path(__file__).parents[2] / "shared"))
STILL_S = 1.5  # at both ends, beside what the recording itself has
INTERVAL_S = 0.333  # AIPerf's own default
SLICE_S = 2.0
PHASES = 200  # of a scraper's clock against the replay

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One recorded page, and the seconds after the first at which it was complete."""

    at_s: float
    content_type: str
    body: bytes


class Replay:
    """Shows the pages at their time once the first chat completion has been asked for."""

    def __init__(self, pages: Sequence[Page], speed: float) -> None:
        self.begun_ns = 0
        self.served = 0
        self.scraped = asyncio.Event()
        self.seconds = pages[-1].at_s / speed + 2 * STILL_S
        self._pages, self._speed = pages, speed
        self._at_s = np.array([page.at_s for page in pages])

    def shown(self, at_ns: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return which page stands at each stamp (int64 ns Unix)."""
        elapsed_s = ((at_ns - self.begun_ns) / 1e9 - STILL_S) * self._speed
        return np.maximum(np.searchsorted(self._at_s, elapsed_s, side="right") - 1, 0)

    async def metrics(self, _: web.Request) -> web.Response:
        """Answer a scrape."""
        number = int(self.shown(np.array([time.time_ns()]))[0]) if self.begun_ns else 0
        self.served += 1
        self.scraped.set()
        page = self._pages[number]
        body = page.body + b"# reply %d\n" % self.served
        return web.Response(body=body, headers={"Content-Type": page.content_type})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat completion with a stream as long as the replay."""
        await request.read()
        self.begun_ns = self.begun_ns or time.time_ns()
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        tokens = math.ceil(self.seconds)
        for _ in range(tokens):
            await self._event(reply, choices=[{"index": 0, "delta": {"content": " a"}}])
            await asyncio.sleep(self.seconds / tokens)
        await self._event(reply, choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
        usage = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": tokens + 8}
        await self._event(reply, choices=[], usage=usage)
        await reply.write(b"data: [DONE]\n\n")
        return reply

    @staticmethod
    async def _event(reply: web.StreamResponse, **body: Any) -> None:
        chunk = {"id": "replay", "object": "chat.completion.chunk", "created": 0, "model": "replayed"} | body
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def main() -> None:
    """Replay, compare, print Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--aiperf", required=True, help="AIPerf's command, in an environment of its own")
    parser.add_argument(
        "--recording", type=Path, default=SHARED / "fixtures/vllm/recorded/main/scrapes.jsonl.gz", help="JSON lines"
    )
    parser.add_argument("--tokenizer", type=Path, default=SHARED / "bench/tokenizer", help="directory, for AIPerf")
    parser.add_argument("--speed", type=float, default=2.0)
    parser.add_argument("--keep", type=Path, help="directory for what both tools write; none: nothing is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sidelight-replay-") as scratch:
        out = options.keep or Path(scratch)
        pages = _pages(options.recording)
        replay = Replay(pages, options.speed)
        asyncio.run(_both(options, replay, out))
        _report(out, pages, replay)


def _pages(recording: Path) -> list[Page]:
    with gzip.open(recording, "rt", encoding="utf-8") as file:
        next(file)
        lines = [line for line in map(json.loads, file) if line.get("body")]
    begun_ns = lines[0]["t1_ns"]
    return [
        Page(at_s=(line["t1_ns"] - begun_ns) / 1e9, content_type=line["ctype"], body=line["body"].encode())
        for line in lines
    ]


async def _both(options: argparse.Namespace, replay: Replay, out: Path) -> None:
    """Let both tools scrape one replay; what they write is in `out`/aiperf and `out`/sidelight."""
    app = web.Application()
    app.router.add_get("/metrics", replay.metrics)
    app.router.add_post("/v1/chat/completions", replay.chat)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        sidelight = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sidelight", "scrape", "--url", url, "--metrics", f"{url}/metrics",
            "--scrape-interval", str(INTERVAL_S), "--out", str(out / "sidelight"), "--quiet",
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await asyncio.wait_for(replay.scraped.wait(), 30)
        aiperf = await asyncio.create_subprocess_exec(
            options.aiperf, "profile", "-m", "replayed", "-u", url, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(options.tokenizer), "--concurrency", "1", "--request-count", "1", "--isl", "8",
            "--osl", "8", "--use-server-token-count", "--no-gpu-telemetry", "--server-metrics-formats", "json", "jsonl",
            "--slice-duration", str(SLICE_S), "--artifact-dir", str(out / "aiperf"), "--ui", "none",
            stdout=asyncio.subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
            | {"AIPERF_SERVER_METRICS_COLLECTION_INTERVAL": str(INTERVAL_S)},
        )  # fmt: skip
        try:
            failed = await asyncio.wait_for(aiperf.wait(), replay.seconds + 120)
        finally:
            if aiperf.returncode is None:
                aiperf.kill()
            sidelight.send_signal(signal.SIGINT)
            await sidelight.wait()
        if failed or sidelight.returncode:
            raise SystemExit(
                f"AIPerf ended with {failed}, sidelight with {sidelight.returncode}; --keep shows what they wrote"
            )
    finally:
        await runner.cleanup()


def _report(out: Path, pages: Sequence[Page], replay: Replay) -> None:
    logged = read_logged(out / "aiperf")
    print(f"AIPerf {logged.version}: {logged.fetches} scrapes, {len(logged.lines)} of them in its log")
    measured = logged.last - logged.reference
    print(f"measured phase: {measured} scrapes in {logged.window.duration_s:.3f} s")
    window, stamps, late = logged.window, logged.stamps, logged.late
    theirs = statistics(logged.export)
    last = page(logged.lines[logged.last]["metrics"])

    print("\n## Same scrapes\n")
    matched = _matched(logged.lines, pages, logged.url)
    same = _scraped(matched, stamps, logged.url)
    whole = document(_source(same, Window(start_ns=stamps[logged.reference] + 1, end_ns=window.end_ns)))
    sliced = document(_source(same, window))
    derived = _apart(statistics(whole), rates=False) | _apart(statistics(sliced), rates=True)
    agreement.compare(derived | slices(sliced), theirs | slices(logged.export), late=late)
    agreement.compare_late(derived, theirs, last, late)
    agreement.compare_estimates(derived, theirs, late=late)

    print("\n## As run: totals that each tool wrote\n")
    ours = statistics(json.loads((out / "sidelight/server_metrics_export.json").read_text(encoding="utf-8")))
    agreement.compare(totals(ours), totals(theirs), late=late)
    agreement.compare_late(ours, theirs, last, late)

    print("\n## As run: gauges within AIPerf's measured phase\n")
    own = next(endpoint for endpoint in open_run(out / "sidelight").endpoints if endpoint.url == logged.url)
    inside = int(((own.at_ns >= window.start_ns) & (own.at_ns <= window.end_ns)).sum())
    beat = np.flatnonzero(np.diff(stamps, prepend=0) > INTERVAL_S / 2 * 1e9).tolist()
    regular = _scraped([matched[number] for number in beat], [stamps[number] for number in beat], logged.url)
    print(f"Sidelight has {inside} scrapes there; {len(stamps) - len(beat)} of AIPerf's are off its beat\n")
    agreement.compare_gauges(
        statistics(document(_source(own, window))),
        statistics(document(_source(regular, window))),
        theirs,
        _sampled(pages, replay, window),
    )


def _apart(values: Values, *, rates: bool) -> Values:
    """Keep the statistics of rates over slices, or all others."""
    return {key: value for key, value in values.items() if key.field.startswith("rate_") == rates}


def _source(endpoint: EndpointSeries, window: Window) -> MetricsSource:
    return MetricsSource(
        endpoints=(endpoint,),
        window=window,
        slice_ns=int(SLICE_S * 1e9),
        benchmark_id=None,
        input_config={},
        tool_version="",
    )


def _scraped(pages: Sequence[Page], stamps: Sequence[int], url: str) -> EndpointSeries:
    """Return pages as if they had been scraped at the stamps, each in no time."""
    scrapes = (
        Scrape(
            url=url, tick_ns=at_ns, request_ns=at_ns, response_ns=at_ns, status=200, content_type=page.content_type,
            body=page.body, error="",
        )
        for page, at_ns in zip(pages, stamps, strict=True)
    )  # fmt: skip
    return build(rows(scrapes))[0]


def _matched(logged: Sequence[Json], pages: Sequence[Page], url: str) -> list[Page]:
    """Return for each line of AIPerf's log the recorded page that it equals: all names, labels and values of our own
    JSONL of that page.
    """
    said: dict[str, Page] = {}
    for one in pages:
        line = BytesIO()
        jsonl.write(_source(_scraped([one], [1], url), Window(start_ns=0, end_ns=2)), line)
        said.setdefault(canonical(json.loads(line.getvalue())["metrics"]), one)
    found = [said.get(canonical(line["metrics"])) for line in logged]
    matched = [one for one in found if one]
    values = sum(numbers(line["metrics"]) for line in logged)
    print(f"{len(matched)} of {len(logged)} logged scrapes equal a recorded page, {values} values\n")
    if len(matched) < len(logged):
        raise SystemExit("the parsers disagree")
    return matched


def _sampled(pages: Sequence[Page], replay: Replay, window: Window) -> dict[Key, tuple[float, float]]:
    """Return the least and largest of each gauge's statistics over the phases in which a scraper's beat may stand."""
    recorded = _scraped(pages, range(len(pages)), "")
    step_ns = int(INTERVAL_S * 1e9)
    beats = [
        np.arange(window.start_ns + step_ns * phase // PHASES, window.end_ns, step_ns, dtype=np.int64)
        for phase in range(PHASES)
    ]
    found: dict[Key, tuple[float, float]] = {}
    for column, one in enumerate(recorded.series):
        if one.type != "gauge":
            continue
        labels = json.dumps(dict(one.labels), sort_keys=True)
        described = [to_builtins(gauge_stats(recorded.values[replay.shown(beat), column])[0]) for beat in beats]
        for field in described[0]:
            values = [stats[field] for stats in described]
            key = Key(one.type, one.name, labels, "avg" if field == "mean" else field)
            found[key] = (min(values), max(values))
    return found


if __name__ == "__main__":
    main()
