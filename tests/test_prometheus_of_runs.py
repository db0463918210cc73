"""Real runs and a watch, as users start them, in a real Prometheus that is asked what Grafana would ask it.

One Prometheus scrapes a run with spans, one without, one that misses its objectives and one with long replies;
promtool has filled in the pages of a recorded run. A watch under traffic has a Prometheus of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import promql
import pytest
from golden_files import GOLDEN
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from processes import engine
from sent_spans import CLIENT
from test_watch import TRACE, watching
from waiting import BOUND_S

from sidelight.correlator.opening import open_run
from sidelight.correlator.parts import SHARED_PARTS
from sidelight.sidecar.cli.measuring import free_pair
from sidelight.sidecar.formats import OPENMETRICS
from sidelight.sidecar.report.derive import derive_run

PROMTOOL = shutil.which("promtool")
# A run that waits for its last scrape on a busy machine too.
PATIENT = (
    "from sidelight.sidecar.cli import app as cli; from sidelight.sidecar.live import final; "
    "final.INTERVALS = final.LONGEST_S; cli.main()"
)
# What is started, and its exit code.
STARTED = {
    "spans": (0, ("--rate", "6", "--duration", "9", "--warmup", "2")),
    "estimates": (0, ("--rate", "8", "--duration", "9", "--warmup", "2")),
    "objectives": (1, ("--rate", "20", "--duration", "7", "--slo", "ttft_p99<1ms,error_rate<50%")),
    "long": (0, ("--rate", "1.5", "--duration", "8", "--warmup", "0", "--output-tokens", "1500")),
}
RECORDED = "vllm_spans"
WATCHED = 40  # requests
Shown = dict[tuple[str, str], list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has ended: its summary, and what the dashboard of it shows over a range that ends after all runs."""

    summary: dict[str, Any]
    shown: Shown

    def tile(self, title: str, name: str) -> float:
        (value,) = self.shown[title, name]
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of all of them; `checked` is what promtool said of a page while it went on, `demonstrated` what a
    demo printed.
    """

    runs: dict[str, Run]
    compared: Shown
    watched: Shown
    checked: str
    demonstrated: str


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """All of it, side by side."""
    if promql.PROMETHEUS is None or PROMTOOL is None:
        pytest.skip("prometheus and promtool are not installed (Debian package prometheus)")
    return asyncio.run(_seen(tmp_path_factory.mktemp("seen")))


async def _seen(folder: Path) -> Seen:
    pages = {name: free_pair() for name in STARTED}
    recorded_s = await _filled_in(folder)
    (folder / "watch").mkdir()
    began_s = time.time()
    async with promql.prometheus(scraping=list(pages.values()), directory=folder) as base_url:
        async with asyncio.TaskGroup() as group:
            watched = group.create_task(_watched(folder / "watch"))
            checked = group.create_task(_checked(f"http://{pages['spans']}/metrics"))
            demo = ("demo", "--duration", "3", "--listen", "off", "--out", str(folder / "demo"), "--quiet")
            demonstrated = group.create_task(_output(sys.executable, "-m", "sidelight", *demo))
            for name, page in pages.items():
                group.create_task(_run(name, folder / name, page))
        ended_s = time.time()
        summaries = {name: json.loads((folder / name / "summary.json").read_text()) for name in (*STARTED, RECORDED)}
        for name in STARTED:  # what was scraped last may not have been stored yet
            last_page = f'sidelight_run_info{{run_id="{summaries[name]["run_id"]}", phase="done"}}'
            await _scraped(base_url, f"last_over_time({last_page}[1h])", 1)
        runs = {}
        for name, summary in summaries.items():
            start_s, end_s = (recorded_s - 5, recorded_s + 60) if name == RECORDED else (began_s, ended_s)
            run = {"run": summary["run_id"], "start_s": start_s, "end_s": end_s}
            shown = await promql.answers(base_url, promql.board("run"), **run)
            runs[name] = Run(summary=summary, shown=shown)
        base = summaries[RECORDED]["run_id"]
        compared = await promql.answers(
            base_url, promql.board("compare"), start_s=recorded_s, end_s=ended_s, run=".*", base=base
        )
    return Seen(
        runs=runs,
        compared=compared,
        watched=watched.result(),
        checked=checked.result(),
        demonstrated=demonstrated.result(),
    )


async def _filled_in(folder: Path) -> float:
    """Give Prometheus' directory what a recorded run's page showed; return when that run began."""
    path = folder / RECORDED
    shutil.copytree(GOLDEN / RECORDED, path, ignore=shutil.ignore_patterns("expected"))
    derived = derive_run(open_run(path), ["json", "openmetrics"])
    blocks = (path / OPENMETRICS, folder / "tsdb")
    await _output(str(PROMTOOL), "tsdb", "create-blocks-from", "openmetrics", *map(str, blocks))
    return derived.summary.window.start_ns / 1e9


async def _output(*command: str, given: bytes = b"", code: int = 0) -> str:
    """Run a command to its end and return what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(2 * BOUND_S):
        written, _ = await process.communicate(given)
    assert code == process.returncode, written.decode()
    return written.decode()


async def _run(name: str, path: Path, page: str) -> None:
    """Start a run as users do, with an engine of its own."""
    code, options = STARTED[name]
    addresses, traced = ["--listen", page, "--out", str(path)], []
    if name in {"spans", "long"}:
        collector = free_pair()
        addresses, traced = [*addresses, "--otlp-listen", collector], ["--otlp-endpoint", f"http://{collector}"]
    with engine("--speed-profile", "demo" if name == "estimates" else "fast", *traced) as (url, _):
        command = (sys.executable, "-c", PATIENT, "run", "--url", url, "--quiet", *options, *addresses)
        await _output(*command, code=code)


async def _checked(url: str) -> str:
    """Return what promtool says of a page once it counts an answered request."""
    async with asyncio.timeout(BOUND_S), aiohttp.ClientSession() as session:
        page = ""
        while not re.search(r"^sidelight_client_ttft_seconds_count\S* [1-9]", page, re.MULTILINE):
            await asyncio.sleep(0.1)
            try:
                async with session.get(url) as response:
                    page = await response.text()
            except aiohttp.ClientConnectionError:
                continue
    return await _output(str(PROMTOOL), "check", "metrics", given=page.encode())


async def _watched(folder: Path) -> Shown:
    """Return what the dashboard shows of a watch beside an engine that others ask, in two waves."""
    port = free_pair().rpartition(":")[2]
    began_s = time.time()
    async with AsyncExitStack() as stack:
        watch = await stack.enter_async_context(watching(folder / "run", f"http://127.0.0.1:{port}/metrics"))
        spans = f"http://127.0.0.1:{watch.ports[0]}"
        url, _ = stack.enter_context(engine("--port", port, "--otlp-endpoint", spans, "--max-num-seqs", "8"))
        page = watch.page.removeprefix("http://").removesuffix("/metrics")
        base_url = await stack.enter_async_context(promql.prometheus(scraping=[page], directory=folder))
        await _scraped(base_url, "count(sidelight_engine_requests_finished_total)", 1)  # before the first request
        for wave in range(2):
            await watch.send([span async for span in _asked(url, WATCHED // 2)])
            counted = (wave + 1) * WATCHED // 2
            await watch.until(lambda counts, at_least=counted: counts.get(TRACE, 0) >= at_least)
            await _scraped(base_url, 'sidelight_requests_total{source="trace"}', counted)
        await _scraped(base_url, "sidelight_engine_requests_finished_total", WATCHED)
        return await promql.answers(base_url, promql.board("watch"), start_s=began_s, end_s=time.time())


async def _asked(url: str, count: int) -> Any:
    """Yield the client's span of each request of a wave, as they end."""
    async with aiohttp.ClientSession() as session:
        for asking in asyncio.as_completed([_request(session, url) for _ in range(count)]):
            yield await asking


async def _request(session: aiohttp.ClientSession, url: str) -> Span:
    span = Span(trace_id=secrets.token_bytes(16), span_id=secrets.token_bytes(8), name="chat", kind=CLIENT)
    span.start_time_unix_nano = time.time_ns()
    asked = {
        "model": "sim-llama",
        "stream": True,
        "max_tokens": 30,
        "messages": [{"role": "user", "content": "w " * 99}],
    }
    headers = {"traceparent": f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"}
    first_ns = 0
    async with session.post(f"{url}/v1/chat/completions", json=asked, headers=headers) as response:
        async for line in response.content:
            if b'"content":"' in line and not first_ns:
                first_ns = time.time_ns()
    span.end_time_unix_nano = time.time_ns()
    span.attributes.add(key="gen_ai.operation.name").value.string_value = "chat"
    seconds = (first_ns - span.start_time_unix_nano) / 1e9
    span.attributes.add(key="gen_ai.response.time_to_first_chunk").value.double_value = seconds
    return span


async def _scraped(base_url: str, expr: str, at_least: float) -> None:
    """Wait until Prometheus has as much."""
    async with asyncio.timeout(BOUND_S), aiohttp.ClientSession() as session:
        while True:
            async with session.post(f"{base_url}/api/v1/query", data={"query": expr}) as response:
                result = (await response.json())["data"]["result"]
            if result and float(result[0]["value"][1]) >= at_least:
                return
            await asyncio.sleep(0.2)


def without_data(shown: Shown) -> set[str]:
    """Return the titles of panels, or their series, that show nothing; all of a panel's series: its title."""
    empty = {key for key, values in shown.items() if not values}
    titles = {title for title, _ in empty if all(not values for (other, _), values in shown.items() if other == title)}
    return titles | {f"{title} / {name}" for title, name in empty if title not in titles}


# What shows nothing, and why that is right.
NOTHING = {
    "there is no gateway": {
        "Time in the gateway", "Requests in the gateway", "p99 of each part / gateway", "Mean TTFT by part / gateway",
        "TTFT by part / gateway", "Mean end-to-end time by part / gateway", "Change of each part's mean / gateway",
    },
    "one engine does all of a request": {
        f"{panel} / {part.label}"
        for part in SHARED_PARTS
        for panel in (
            "p99 of each part", "Mean TTFT by part", "TTFT by part", "Mean end-to-end time by part",
            "Change of each part's mean",
        )
    },
    "only SGLang tells it": {"p99 of each part / scheduler intake"},
    "no --slo": {"Objectives", "Limits and values"},
    "a single class": {"Classes"},
    "not in what promtool fills in": {"CPU of our processes"},
    "some seconds do not tell how far the clocks differ": {"p99 of each part / API server"},
    "no client's span states tokens": {"Output tokens / s: client and engine / client"},
    "it has no --slo, whose headroom is estimated each minute": {
        "Requests / s: clients and engines / meets --slo up to ({{bound}})"
    },
    "traces are whole, nothing is passed on": {
        "Requests / s whose client and engine are in two traces / {{service}} {{how}}",
        "Queue and prefill without a client's span",
    },
}  # fmt: skip
IN_NO_RUN = set[str]().union(
    *(NOTHING[why] for why in ("there is no gateway", "one engine does all of a request", "only SGLang tells it"))
)


def unexpected(shown: Shown, *reasons: str) -> set[str]:
    """Return what shows nothing without a reason."""
    expected = IN_NO_RUN.union(*(NOTHING[reason] for reason in reasons))
    return without_data(shown) - expected


@pytest.mark.parametrize("name", [*STARTED, RECORDED])
def test_every_panel_of_a_run_shows_something(name: str, seen: Seen) -> None:
    """By spans and by estimates, of replies that outlast the load, and filled in; and named panels do not."""
    reasons = [] if name == "objectives" else ["no --slo"]
    if name == RECORDED:
        reasons.append("not in what promtool fills in")
    else:
        reasons.append("a single class")
    shown = seen.runs[name].shown
    assert unexpected(shown, *reasons) == set()
    empty = without_data(shown)
    assert {title for reason in reasons for title in NOTHING[reason]} <= empty


@pytest.mark.parametrize("name", [*STARTED, RECORDED])
def test_tiles_show_the_reports_numbers(name: str, seen: Seen) -> None:
    """After the run, in a range that does not end with it: percentiles and rates to 1e-9, shares to the digit shown."""
    run = seen.runs[name]
    client, parts = run.summary["client"], run.summary["correlation"]["breakdown"]
    near = lambda value: pytest.approx(value, rel=1e-9)  # noqa: E731
    assert run.tile("TTFT", "p50") == near(client["ttft_ms"]["p50"] / 1e3)
    assert run.tile("TTFT", "p99") == near(client["ttft_ms"]["p99"] / 1e3)
    assert run.tile("Requests / s", "offered") == near(client["rates"]["offered_requests_per_s"])
    figures = {figure["name"]: figure["value"] for figure in run.summary["verdict"]["figures"]}
    assert run.tile("Requests / s", "served") == near(figures["served"])
    assert run.tile("Failed or refused", "share") == 0.0
    assert run.tile("TTFT by part", "queue") == pytest.approx(parts["queue_ms"]["mean"] / 1e3, rel=1e-3)
    assert run.tile("Broken down", "share") == near(1 - run.summary["correlation"]["coverage"]["none"])


def test_objectives_are_shown_as_judged(seen: Seen) -> None:
    """One is met, the other missed; bounds and values are in base units."""
    shown, slo = seen.runs["objectives"].shown, seen.runs["objectives"].summary["client"]["slo"]
    late, errors = slo["objectives"]
    assert sorted(shown["Objectives", "{{objective}}"]) == [0.0, 1.0]
    assert sorted(shown["Limits and values", "Limit"]) == [0.001, 0.5]
    assert sorted(shown["Limits and values", "Value"]) == [errors["value"], pytest.approx(late["value"] / 1e3)]


def test_runs_are_compared_side_by_side(seen: Seen) -> None:
    """All five have a line, the filled-in one too, and one is the base of the changes."""
    assert unexpected(seen.compared) <= {"Change of latencies and rates / Goodput / s", "Runs / Load sustained"}
    p99_s = [run.summary["client"]["ttft_ms"]["p99"] / 1e3 for run in seen.runs.values()]
    assert sorted(seen.compared["Runs", "TTFT p99"]) == pytest.approx(sorted(p99_s))
    base_s = seen.runs[RECORDED].summary["client"]["ttft_ms"]["p99"] / 1e3
    changes = sorted(seen.compared["Change of latencies and rates", "TTFT p99"])
    assert changes == pytest.approx(sorted(value / base_s - 1 for value in p99_s))
    assert len(seen.compared["Runs", "About"]) == len(seen.runs)
    assert sorted(seen.compared["Runs", "Objectives met"]) == [0.0]


def test_every_panel_of_a_watch_shows_something(seen: Seen) -> None:
    """Of an engine under others' traffic, whose clients send spans."""
    reasons = (
        "no client's span states tokens", "traces are whole, nothing is passed on",
        "some seconds do not tell how far the clocks differ",
        "it has no --slo, whose headroom is estimated each minute",
    )  # fmt: skip
    assert unexpected(seen.watched, *reasons) == set()


def test_promtool_accepts_the_page_of_a_run(seen: Seen) -> None:
    """Prometheus' own linter has nothing to say while it goes on."""
    assert seen.checked == ""


def test_a_demo_shows_where_the_ttft_went(seen: Seen) -> None:
    """Without arguments but where to write it: a report on the terminal, and the files it names."""
    assert "Where the TTFT went" in seen.demonstrated
    assert "engine spans" in seen.demonstrated
    assert all(name in seen.demonstrated for name in ("summary.json", "report.txt", "requests.parquet"))
