"""A watch as it is started, over real sockets: what comes in, its page, its signals, its directory."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from children import Child, awaited
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from packed_columns import read
from processes import child_processes, start
from prometheus_client.parser import text_string_to_metric_families
from sent_spans import MS, NOON, SERVER, body, call, engine, gateway
from served import answer
from server_sent import Sent, listening
from waiting import BOUND_S

from sidelight.rundir.access import Access
from sidelight.scraper.spans.forward import CollectorConnection, Unavailable
from sidelight.sidecar.report.derive import derive
from sidelight.sidecar.run import open_run

TRACE = 'sidelight_requests_total{source="trace"}'
RESTARTS = "sidelight_receiver_restarts_total"


@dataclass(slots=True, kw_only=True)
class Watch:
    """The process, what it said, and where it is."""

    process: Child
    path: Path
    said: list[str] = field(default_factory=list)
    page: str = ""
    ports: tuple[int, int] = (0, 0)

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(self.page.replace("/metrics", path)) as reply:
            return reply.status, await reply.text()

    async def counts(self) -> dict[str, float]:
        """Every sample of the page, by name and labels as they stand there."""
        _, text = await self.get("/metrics")
        assert list(text_string_to_metric_families(text))
        return {
            key: float(value)
            for key, _, value in (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
        }

    async def until(self, fact: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Wait until the page says so."""
        async with asyncio.timeout(BOUND_S):
            while not fact(counts := await self.counts()):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)
        return counts

    async def until_said(self, text: str) -> None:
        """Wait until it has said something."""
        async with asyncio.timeout(BOUND_S):
            while not any(text in line for line in self.said):  # noqa: ASYNC110  as above
                await asyncio.sleep(0.05)

    async def send(self, spans: list[Span], *, over: str = "grpc") -> None:
        """Send an export, again until it is taken."""
        port = self.ports[0] if over == "grpc" else self.ports[1]
        async with asyncio.timeout(BOUND_S), CollectorConnection(f"{over}://127.0.0.1:{port}", Access()) as wire:
            while True:
                try:
                    await wire.send(body(spans))
                except Unavailable:
                    await asyncio.sleep(0.1)
                else:
                    return

    async def end(self) -> str:
        """End it by SIGTERM; return its result."""
        self.process.send_signal(signal.SIGTERM)
        out = await asyncio.wait_for(self.process.stdout.read(), BOUND_S)
        assert 0 == await self.process.wait(), self.said
        return out.decode()

    def receiver(self) -> int:
        return self._child("sidelight.scraper.worker.spans")

    def scraper(self) -> int:
        return self._child("sidelight.scraper.worker")

    def _child(self, module: str) -> int:
        (pid,) = child_processes(self.process.pid, module)
        return pid


@asynccontextmanager
async def watching(path: Path, *options: str, terminal: bool = False) -> AsyncIterator[Watch]:
    """Start a watch that listens on free ports, and speaks JSON or to a terminal."""
    addresses = ("--listen", "127.0.0.1:0", "--otlp-listen", "127.0.0.1:0", "--out", str(path))
    ours, theirs = os.openpty() if terminal else (-1, subprocess.PIPE)
    shown = () if terminal else ("--json",)
    process = await awaited(start("watch", *addresses, *options, *shown, stderr=theirs, TERM="xterm"))
    watch = Watch(process=process, path=path)
    if terminal:
        os.close(theirs)
    reading = asyncio.ensure_future(_read(watch, ours) if terminal else _listen(watch))
    try:
        await watch.until_said("HTTP/protobuf at ")
        stages = " ".join(watch.said)
        watch.page = re.findall(r"http://\S+/metrics", stages)[0]
        grpc_port, http_port = re.findall(r"at 127\.0\.0\.1:(\d+)", stages)[-2:]
        watch.ports = int(grpc_port), int(http_port)
        yield watch
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def _listen(watch: Watch) -> None:
    assert watch.process.stderr is not None
    while line := await watch.process.stderr.readline():
        watch.said.append(str(json.loads(line).get("stage") or json.loads(line).get("text")))


async def _read(watch: Watch, terminal: int) -> None:
    """Read what is written to a terminal, to its end."""
    reader = asyncio.StreamReader()
    with os.fdopen(terminal, "rb", buffering=0) as stream, suppress(OSError):  # a terminal ends with an error
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), stream)
        while line := await reader.readline():
            watch.said.append(line.decode())


def now_ms() -> float:
    """Return the time of day as `sent_spans` counts it."""
    return (time.time_ns() - NOON) / MS


def request(number: int, clock_ms: float | None = None) -> list[Span]:
    """Spans of a request, ms: 40 network, 60 gateway, 50 in the engine's front end, 50 queue, 100 prefill."""
    trace, clock_ms = number.to_bytes(16), now_ms() if clock_ms is None else clock_ms
    return [
        call(first_ms=300, trace=trace, clock_ms=clock_ms),
        gateway("gate", "client", first_ms=260, trace=trace, clock_ms=clock_ms + 5000),
        engine(parent="gate", trace=trace, clock_ms=clock_ms - 300_000),
    ]


async def test_a_full_disk_does_not_end_a_watch(tmp_path: Path):
    """What cannot be written is counted, spans are refused so that they come again, and /readyz says why; all goes on
    when there is room.
    """

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 1\n")

    app = web.Application()
    app.router.add_get("/metrics", page)
    async with (
        TestServer(app) as server,
        watching(
            tmp_path / "watch", "--metrics", str(server.make_url("/metrics")), "--scrape-interval", "0.05"
        ) as watch,
    ):
        await watch.until(lambda page: any(name.startswith("sidelight_scrapes_total") for name in page))
        limit, processes = resource.RLIMIT_FSIZE, (watch.receiver(), watch.scraper())
        _, most = resource.prlimit(watch.receiver(), limit)
        for process in processes:
            resource.prlimit(process, limit, (1, most))
        await watch.until(lambda page: page["sidelight_scrapes_unwritten_total"] > 0)
        assert (503, "its logs cannot be written: File too large\n") == await watch.get("/readyz")
        async with CollectorConnection(f"grpc://127.0.0.1:{watch.ports[0]}", Access()) as wire:
            with pytest.raises(Unavailable):
                await wire.send(body(request(1)))
        for process in processes:
            resource.prlimit(process, limit, (most, most))
        await watch.until_said("logs are written again")
        assert (200, "ready\n") == await watch.get("/readyz")
        await watch.send(request(1))
        turned_away = 'sidelight_receiver_refused_total{kind="turned_away"}'
        counts = await watch.until(lambda page: page[TRACE] == 1 and page[turned_away] >= 1)
        assert 0 == counts[RESTARTS]
        await watch.end()
    run = open_run(tmp_path / "watch")
    assert ("whole", 1) == (run.integrity.state, len(run.requests))


async def test_what_a_scraper_could_not_write_before_its_death_is_said(tmp_path: Path):
    """How many, and that those of its last second are not among them; the report says it, too."""
    app = web.Application()
    app.router.add_get("/metrics", answer("up 1\n"))
    async with (
        TestServer(app) as server,
        watching(
            tmp_path / "watch", "--metrics", str(server.make_url("/metrics")), "--scrape-interval", "0.05"
        ) as watch,
    ):
        await watch.until_said("scraping http")
        resource.prlimit(watch.scraper(), resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        counts = await watch.until(lambda page: page["sidelight_scrapes_unwritten_total"] > 0)
        os.kill(watch.scraper(), signal.SIGKILL)
        await watch.until_said("the scraper ended with code -9")
        await watch.until_said("the scraper runs again")
        await watch.end()
    stated = re.search(r"; (\d+) scrapes? lost since the start, and those of its last second", "".join(watch.said))
    assert stated is not None, watch.said
    assert int(stated[1]) >= counts["sidelight_scrapes_unwritten_total"]
    assert any(stated[0] in note for note in open_run(tmp_path / "watch").notes)


async def test_requests_are_broken_down_as_their_spans_come(tmp_path: Path):
    """Over both wires, to the parts that were sent; at its end what is pending is counted, and the logs can be read."""
    async with watching(tmp_path / "watch") as watch:
        assert (200, "ok\n") == await watch.get("/healthz")
        assert (200, "ready\n") == await watch.get("/readyz")
        for number in range(1, 11):
            await watch.send(request(number)[:2], over="grpc")
            await watch.send(request(number)[2:], over="http")
        counts = await watch.until(lambda page: page[TRACE] == 10)
        async with asyncio.timeout(BOUND_S), listening(watch.page.replace("/metrics", "/live")) as events:
            shown = [await anext(events)]
            await watch.send([call(trace=b"nobody but this.", clock_ms=now_ms())])
            result = await watch.end()
            shown += [event async for event in events]
    assert_shown(shown)
    sums = {
        part: counts[f'sidelight_ttft_part_seconds_sum{{part="{part}",source="trace"}}']
        for part in ("network", "gateway", "queue", "prefill", "other")
    }
    expected = {"network": 0.4, "gateway": 0.6, "queue": 0.5, "prefill": 1.0, "other": 0.5}
    assert expected == pytest.approx(sums)
    assert 0.5 == pytest.approx(counts['sidelight_inner_part_seconds_sum{part="engine_frontend",source="trace"}'])
    assert 30 == counts["sidelight_receiver_spans_total"]
    assert "11 requests" in result
    counted = "(10 broken down by trace, 1 without a breakdown); 31 spans in 21 exports"
    assert f"{counted}, 0 refused; receiver restarted 0 times" in result
    run = open_run(tmp_path / "watch")
    assert ("complete", 11, 0) == (run.status, len(run.requests), run.receiver_deaths)
    assert_reported(tmp_path / "watch", result)


async def test_a_watch_is_judged_by_its_objectives(tmp_path: Path):
    """Its metrics, its log and its report say what is missed, and what no span states; it ends as a service does."""
    file = tmp_path / "watch.yaml"
    file.write_text("slo: ttft_p99<250ms,tpot_p99<1s\n")
    async with watching(tmp_path / "watch", "--config", str(file)) as watch:
        for number in range(1, 21):
            await watch.send(request(number))
        met = "sidelight_slo_met{objective="
        counts = await watch.until(lambda page: page.get(f'{met}"ttft_p99"}}') == 0)
        await watch.until(lambda page: page.get('sidelight_verdict{cause="prefill",state="missed"}') == 1)
        await watch.until_said("Objective missed in the last minute: ttft_p99<250ms (300 ms).")
        result = await watch.end()
    assert 0.3 == pytest.approx(counts['sidelight_slo_value{objective="ttft_p99"}'], abs=1e-3)
    assert f'{met}"tpot_p99"}}' not in counts
    assert "Objective missed: ttft_p99<250ms." in result


def assert_shown(events: list[Sent]) -> None:
    """A browser that came after ten requests got them with their parts, and what came until the end of the watch."""
    rows = [read(table) for event in events if event.name == "rows" for table in event.data["tables"]]
    queue_ms = [queue for table in rows for queue in table.get("queue", ())]
    assert [50.0] * 10 == pytest.approx([queue for queue in queue_ms if not math.isnan(queue)])
    assert 11 == sum(len(table["sent"]) for table in rows)
    assert "The watch has ended" in events[-1].data["note"]


def assert_reported(path: Path, result: str) -> None:
    """At its end a watch prints and writes a report by its clients' spans, and `report` derives the same again."""
    (ttft,) = re.findall(r"^ TTFT, ms +(\S+)", result, re.MULTILINE)
    assert 300 == pytest.approx(float(ttft), abs=0.1)
    assert "11 requests, all ok, by their outermost spans" in result
    assert "Without a breakdown of the TTFT: 1 (no engine's span came for it" in result
    before = {name: (path / name).read_bytes() for name in ("summary.json", "report.txt", "requests.parquet")}
    summary = derive(path).summary
    assert before == {name: (path / name).read_bytes() for name in before}
    means_ms = {part: getattr(summary.correlation.breakdown, f"{part}_ms").mean for part in ("gateway", "queue")}
    assert {"gateway": 60, "queue": 50} == pytest.approx(means_ms)
    assert summary.watch
    assert summary.watch.since_start is not None
    assert {"no_engine_span": 1} == summary.watch.missing == summary.watch.since_start.missing
    assert (11, 31, False) == (
        summary.watch.since_start.ok,
        summary.watch.since_start.spans,
        summary.watch.shortened,
    )
    rows = pq.read_table(path / "requests.parquet").to_pylist()
    assert {(number.to_bytes(16)).hex() for number in range(1, 11)} < {row["trace_id"] for row in rows}
    assert {(None, None, "ok")} == {(row["request_id"], row["tpot_ms"], row["status"]) for row in rows}


async def test_a_gateway_that_does_not_say_its_first_output_is_named(tmp_path: Path):
    """Once, with the attribute to set; its requests are counted as such, and shown on the terminal."""
    async with watching(tmp_path / "watch", terminal=True) as watch:
        for number in (1, 2):
            sent = request(number)
            sent[1].kind = SERVER  # of a gateway that the catalogue lacks
            del sent[1].attributes[:]
            await watch.send(sent)
        counts = await watch.until(lambda page: page[TRACE] == 2)
        await watch.until_said("the spans of gateway")
        await watch.until_said("prefill")
        await watch.until_said("Where the TTFT went: 2 requests")  # the panel is drawn once a second
        result = await watch.end()
    assert 2 == counts['sidelight_gateway_requests_total{first_output="unknown"}']
    (line,) = (text for text in watch.said if "the spans of gateway" in text)
    assert "do not say when its first output left" in line
    assert "set gen_ai.response.time_to_first_chunk (seconds) on its server span" in line
    assert any("Where the TTFT went: 2 requests" in text for text in watch.said)
    assert "2 requests, all ok, by their outermost spans" in result
    assert "\x1b[?25h" in "".join(watch.said), "the cursor is shown again"


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to find the receiver")
async def test_a_receiver_that_is_killed_is_counted_and_started_again(tmp_path: Path):
    """At the same ports; spans that are sent again come, those of a request that it had half of too."""
    async with watching(tmp_path / "watch") as watch:
        await watch.send(request(1)[:1])
        await watch.until(lambda page: page["sidelight_receiver_spans_total"] == 1)
        os.kill(watch.receiver(), signal.SIGKILL)
        await watch.until_said("restarted (restart 1)")
        await watch.send(request(1)[1:])
        await watch.send(request(2))
        counts = await watch.until(lambda page: page[TRACE] == 2)
        assert (200, "ready\n") == await watch.get("/readyz")
        result = await watch.end()
    assert (1, 6) == (counts[RESTARTS], counts["sidelight_receiver_spans_total"])
    assert "receiver restarted 1 time" in result
    run = open_run(tmp_path / "watch")
    assert (1, ["receiver_died"]) == (run.receiver_deaths, [event.name for event in run.events if "died" in event.name])
    assert any("code -9" in text for text in run.notes)
    # The oldest logs are deleted as time goes on: what is kept is a run all the same.
    min((tmp_path / "watch/raw").glob("spans-*.log")).unlink()
    watched = derive(tmp_path / "watch").summary.watch
    assert watched
    assert watched.shortened


async def test_a_scraper_that_is_killed_keeps_no_span_away(tmp_path: Path):
    """It is counted, said and started again by itself: the receiver lives on, and the report has when it was down."""
    async with watching(tmp_path / "watch") as watch:
        receiver = watch.receiver()
        await watch.until_said("scraping no page")
        os.kill(watch.scraper(), signal.SIGKILL)
        await watch.until_said("the scraper ended with code -9")
        await watch.send(request(1))
        await watch.until_said("the scraper runs again after")
        counts = await watch.until(lambda page: page[TRACE] == 1)
        assert (200, "ready\n", receiver) == (*await watch.get("/readyz"), watch.receiver())
        await watch.end()
    assert (0, 1) == (counts[RESTARTS], counts["sidelight_scraper_restarts_total"])
    assert any("nothing was scraped for" in text for text in derive(tmp_path / "watch").summary.warnings)


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc to find the receiver")
async def test_what_did_not_reach_a_collector_is_counted(tmp_path: Path):
    """It is away: what waited as the receiver was killed is unknown, what waits at the end is dropped."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        async with watching(
            tmp_path / "watch", "--otlp-forward", f"http://127.0.0.1:{reserved.getsockname()[1]}"
        ) as watch:
            for number in range(1, 4):
                await watch.send(request(number))
            await watch.until(lambda page: page[TRACE] == 3)
            os.kill(watch.receiver(), signal.SIGKILL)
            await watch.until_said("the receiver runs again after")
            for number in range(4, 8):
                await watch.send(request(number))
            waiting = 'sidelight_receiver_forward_queue{what="exports"}'
            counts = await watch.until(lambda page: page.get(waiting) == 4)
            await watch.end()
    assert 3 == counts["sidelight_receiver_forward_unknown_total"]
    summary = json.loads((tmp_path / "watch/summary.json").read_text())
    spans = summary["correlation"]["spans"]
    names = ("exports", "forwarded", "forward_dropped", "forward_unknown")
    assert [7, 0, 4, 3] == [spans[name] for name in names]
    assert any("of 7 exports of spans 4 were not passed on" in text for text in summary["warnings"])


@asynccontextmanager
async def engine_pages(asked: Counter[str]) -> AsyncIterator[str]:
    """Serve the page of an engine with seven running requests at any path, and count each path's requests."""

    async def page(request: web.Request) -> web.Response:
        asked[request.path] += 1
        return web.Response(text="# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 7\n")

    app = web.Application()
    app.router.add_get("/{name}", page)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


async def test_a_reload_changes_what_is_scraped(tmp_path: Path):
    """And refuses the rest by name; a file that is broken changes nothing, and is said to be."""
    asked: Counter[str] = Counter()
    file = tmp_path / "watch.yaml"
    async with engine_pages(asked) as url:
        file.write_text(f"metrics: {url}/old\nscrape_interval: 0.1\n")
        async with watching(tmp_path / "watch", "--config", str(file)) as watch:
            old, new = (f'sidelight_engine_requests_running{{endpoint="{url}/{name}"}}' for name in ("old", "new"))
            await watch.until(lambda counts: counts.get(old) == 7)
            file.write_text("metrics: [\n")
            watch.process.send_signal(signal.SIGHUP)
            await watch.until_said("not reloaded, the configuration is unchanged: --config")
            file.write_text(f"metrics: {url}/new\nscrape_interval: 0.05\nscrape_timeout: 3\nkeep: 10m\n")
            watch.process.send_signal(signal.SIGHUP)
            await watch.until(lambda counts: counts.get(new) == 7 and old not in counts)
            await watch.until_said("scrape_timeout cannot change while the watch runs")
            before = asked["/old"]
            more = asked["/new"] + 3
            async with asyncio.timeout(BOUND_S):
                while asked["/new"] < more:  # noqa: ASYNC110  as above
                    await asyncio.sleep(0.02)
            assert before == asked["/old"]
            await watch.end()


async def test_a_reload_reads_the_file_of_targets_again(tmp_path: Path):
    """Its pages come beside those of the command line; a file that is broken changes nothing."""
    file = tmp_path / "targets.json"
    async with engine_pages(Counter()) as url:
        host = url.removeprefix("http://")

        def lists(*names: str) -> None:
            groups = [{"targets": [host], "labels": {"__metrics_path__": f"/{name}"}} for name in names]
            file.write_text(json.dumps(groups))

        def running(name: str) -> str:
            return f'sidelight_engine_requests_running{{endpoint="http://{host}/{name}"}}'

        lists("old")
        options = (f"http://{host}/named", "--metrics-from", str(file), "--scrape-interval", "0.1")
        async with watching(tmp_path / "watch", *options) as watch:
            await watch.until(lambda counts: counts.get(running("old")) == counts.get(running("named")) == 7)
            file.write_text("[")
            watch.process.send_signal(signal.SIGHUP)
            await watch.until_said("not reloaded, the configuration is unchanged: --metrics-from")
            lists("new")
            watch.process.send_signal(signal.SIGHUP)
            await watch.until(lambda counts: counts.get(running("new")) == 7 and running("old") not in counts)
            await watch.until(lambda counts: counts.get(running("named")) == 7)
            await watch.end()
    report = (tmp_path / "watch/report.txt").read_text()
    assert f"http://{host}/named, http://{host}/old, http://{host}/new" in " ".join(report.split())
