"""The live page: what its script puts together of events is what was handed in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import evaluated

from sidelight.exporter.document import Line, Prose
from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.html.live import LiveColumns, state_event
from sidelight.exporter.html.page import LIVE_SCRIPTS, live_page
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take
from sidelight.scraper.series.log import FailureRecord, ScrapeRow

NODE = shutil.which("node")
ATTACK = "</script><img src=x onerror=alert(1)>"
URL = "http://h/metrics"
ALL = -1e12  # ms: before any request
# Node has the browser's own `atob`, `Blob` and `DecompressionStream`; of the document the script needs one element.
PROGRAM = """
globalThis.document = { getElementById: () => ({ textContent: "{}" }) };
const fs = require("fs");
const [scripts, events] = JSON.parse(fs.readFileSync(0, "utf8"));
const { takeIn, textOf, shapesOf } = new Function(scripts + "; return { takeIn, textOf, shapesOf };")();
(async () => {
  let run = events.shift();
  for (const group of events) run = { ...run, ...await takeIn({ ...run, begin: group.begin }, group.rows) };
  const rows = Array.from(run.columns.sent.values.keys());
  const texts = Object.entries(run.columns).filter(([, column]) => column.texts);
  process.stdout.write(JSON.stringify({
    numbers: Object.fromEntries(Object.entries(run.columns).map(([name, { values }]) => [name, Array.from(values)])),
    texts: Object.fromEntries(texts.map(([name]) => [name, rows.map((row) => textOf(run.columns, name, row))])),
    gauges: run.gauges.map((gauge) => ({ ...gauge, times: Array.from(gauge.times), values: Array.from(gauge.values) })),
    parts: run.parts, marks: run.marks, laidOut: Object.keys(shapesOf(run)),
  }));
})();
"""


def page(at_ns: int) -> ScrapeRow:
    stamps = {"tick_ns": at_ns, "request_ns": at_ns, "response_ns": at_ns}
    return ScrapeRow(url=URL, **stamps, series=(), values=np.empty(0), changed=False)


def failure(at_ns: int, error: str) -> FailureRecord:
    return FailureRecord(url=URL, tick_ns=at_ns, request_ns=at_ns, response_ns=at_ns, status=0, error=error)


def data_of(event: bytes) -> dict[str, Any]:
    """Return the JSON in an event."""
    loaded: dict[str, Any] = json.loads(event.decode().partition("data: ")[2])
    return loaded


def shown(*groups: tuple[list[bytes], float]) -> dict[str, Any]:
    """Return what the script has after groups of events, each put together at once from a moment on."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    folder = resources.files("sidelight.exporter.html") / "assets"
    script = "\n".join((folder / name).read_text(encoding="utf-8") for name in LIVE_SCRIPTS[1:-1])
    facts = LiveColumns("r", 0).facts(0)
    given = [facts, *({"rows": list(map(data_of, rows)), "begin": begin} for rows, begin in groups)]
    command, sent = [NODE, "-e", PROGRAM], json.dumps([script, given])
    output: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True, input=sent).stdout
    )
    return output


@pytest.fixture(scope="module")
def run() -> Evaluated:
    return evaluated("vllm_spans")


def sent_ms(log: RequestLog, start_ns: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return (log.submit_ns - start_ns) / 1e6


def test_requests_come_with_their_parts_however_they_are_handed_in(run: Evaluated):
    """Ended in any order and in several events, some with parts later and some with none."""
    log, parts, start_ns = run.run.requests, run.parts, run.summary.window.start_ns
    columns, rows = LiveColumns("r", start_ns), np.random.default_rng(1).permutation(len(log))
    events = []
    for some in np.array_split(rows, 4):
        columns.ended(take(log, some))
        events.append(columns.rows())
    known = rows[: len(rows) // 2]
    columns.counted(log.index[known], take(parts, known))
    events.append(columns.rows())
    after = shown((events[:2], ALL), (events[2:], ALL))
    order = np.argsort(log.submit_ns, kind="stable")
    np.testing.assert_allclose(after["numbers"]["sent"], sent_ms(log, start_ns)[order], atol=0.0051)
    assert after["numbers"]["index"] == log.index[order].tolist()
    assert after["texts"]["status"] == log.status[order].tolist()
    is_known = np.isin(order, known) & parts.covered[order]
    assert after["numbers"]["covered"] == is_known.astype(int).tolist()
    queue_ms = np.array(after["numbers"]["queue"], dtype=float)
    np.testing.assert_allclose(queue_ms[is_known], 1e3 * parts.queue_s[order][is_known], atol=0.0051)
    assert np.isnan(queue_ms[~np.isin(order, known)]).all()


def test_what_is_older_than_is_shown_is_left_out(run: Evaluated):
    """Of requests, gauges and marks; parts of a request that has gone are nothing."""
    log, parts, start_ns = run.run.requests, run.parts, run.summary.window.start_ns
    columns = LiveColumns("r", start_ns)
    columns.ended(log)
    for second in range(10):
        columns.scraped(page(start_ns + second * 10**9), {"requests_waiting": second, "prompt_tokens": 7})
        columns.scraped(failure(start_ns + second * 10**9, "refused"), {})
    whole = columns.rows()
    columns.counted(log.index, parts)
    begin = float(np.median(sent_ms(log, start_ns)))
    after = shown(([whole], ALL), ([columns.rows()], begin))
    assert after["numbers"]["sent"] == pytest.approx(
        [at for at in sorted(sent_ms(log, start_ns)) if at >= begin], abs=0.01
    )
    assert all(mark["at"] >= begin for mark in after["marks"])
    assert ["time", "requests", "spread"] == after["laidOut"]
    (gauge,) = after["gauges"]
    assert gauge["times"][0] <= begin < gauge["times"][1]
    assert (gauge["name"], gauge["label"], gauge["address"]) == ("requests_waiting", "waiting", URL)


def test_engines_are_shown_before_the_first_request():
    """Without a chart of requests; and nothing is, where there is nothing."""
    columns = LiveColumns("w", 0, is_by_clock=True)
    columns.scraped(page(10**9), {"requests_waiting": 3.0})
    assert ["time"] == shown(([columns.rows()], ALL))["laidOut"]
    assert shown(([], ALL))["laidOut"] == []


def test_requests_of_others_are_known_by_their_ids(run: Evaluated):
    """Those of a watch have no index of ours: none takes the place of another."""
    log, parts = run.run.requests, run.parts
    columns = LiveColumns("w", run.summary.window.start_ns, is_by_clock=True)
    log.index[:] = 0
    columns.known(log, parts)
    after = shown(([columns.rows()], ALL))
    assert sorted(after["texts"]["trace_id"]) == sorted(log.trace_id.tolist())


def test_what_servers_said_stays_text():
    """In the lines above the charts, and in the columns of requests."""
    columns = LiveColumns(ATTACK, 0)
    columns.scraped(failure(10**9, ATTACK), {})
    assert ATTACK == data_of(columns.rows())["marks"][0]["text"].removeprefix(f"{URL}: ")
    state = data_of(state_event(ATTACK, [Line(((ATTACK, ""), (ATTACK, "strong")))], columns.facts(0), kept_s=900))
    assert "<img" not in state["html"]
    assert 2 == state["html"].count("&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;")
    assert ATTACK == state["title"]


def test_what_is_left_out_is_said():
    """Where more requests ended than are kept for a browser."""
    state = data_of(state_event("t", [Prose("line")], {}, kept_s=123.0))
    assert "Only the last 2 min 3 s are shown" in state["html"].replace("\N{NO-BREAK SPACE}", " ")


def test_the_live_page_connects_to_nothing_but_its_own_server():
    """It allows its own script and styles, by their hashes."""
    text = live_page()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    style, _, script = re.findall(r"<(?:style|script[^>]*)>(.*?)</(?:style|script)>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(piece.encode()).digest()).decode() for piece in (style, script)]
    assert f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}';" in policy
    assert policy.endswith("connect-src 'self'")
    assert not re.findall(r"<[^>]+ (?:src|href|on\w+)=", text.replace(script, ""))
    assert Path("live") == Path(re.findall(r'new EventSource\("(\w+)"\)', text)[0])


def test_an_objective_that_is_met_has_no_colour_of_a_part():
    """Nor that of a warning, as prefill's is; the prefill of the legend keeps it."""
    lines = [Line((("met", "met strong"), ("▓", "prefill")))]
    assert (
        '<p class="row"><span class="met strong">met</span><span class="prefill">▓</span></p>'
        in data_of(state_event("t", lines, {"run": "r"}, kept_s=900))["html"]
    )


def test_a_page_without_charts_says_when_they_come():
    """In the warm-up there are none."""
    assert "Charts come once" in data_of(state_event("t", [Prose("line")], {}, kept_s=900))["html"]
    facts = LiveColumns("r", 0).facts(0)
    assert "Charts come once" not in data_of(state_event("t", [Prose("line")], facts, kept_s=900))["html"]
