"""The page's own script reads what was written: the same numbers and ids as the run's tables have."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_files import GOLDEN

from sidelight.correlator.opening import open_run
from sidelight.sidecar.report.derive import derive_run

NODE = shutil.which("node")
# Node has the browser's own `atob`, `Blob` and `DecompressionStream`; of the document the script needs one element.
PROGRAM = """
const fs = require("fs");
const page = fs.readFileSync(process.argv[2], "utf8");
const data = page.match(/<script type="application\\/json" id="data">(.*?)<\\/script>/s)[1];
globalThis.document = { getElementById: () => ({ textContent: data }) };
const script = fs.readFileSync(process.argv[1], "utf8");
const read = new Function(script + "; return { DATA, openRun, traceId, requestId, valueOf, textOf };")();
read.openRun(read.DATA).then((run) => {
  const { columns } = run;
  const rows = Array.from(columns.sent.values.keys());
  process.stdout.write(JSON.stringify({
    columns: Object.fromEntries(Object.entries(columns).map(([name, { values }]) => [name, Array.from(values)])),
    other: rows.map((row) => read.valueOf(columns, "other", row)),
    trace_id: rows.map((row) => read.traceId(run, row)),
    request_id: rows.map((row) => read.requestId(run, row)),
    status: rows.map((row) => read.textOf(columns, "status", row)),
  }));
});
"""


@pytest.fixture(scope="module", params=["vllm_spans", "two_engines"])
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """Return a run, in the order of its page, and what the script reads of it."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    path = tmp_path_factory.mktemp("run") / request.param
    shutil.copytree(GOLDEN / request.param, path, ignore=shutil.ignore_patterns("expected"))
    run = derive_run(open_run(path), ["html"])
    script = Path(str(resources.files("sidelight.exporter.html") / "assets" / "data.js"))
    command = [NODE, "-e", PROGRAM, str(script), str(path / "report.html")]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return run, json.loads(output)


def test_the_script_reads_the_numbers_of_the_run(scripted: tuple[Any, dict[str, Any]]):
    """Times to a hundredth of a millisecond, counts exactly, what is missing as missing."""
    run, page = scripted
    log, parts = run.run.requests, run.parts
    order = np.argsort(np.where(log.submit_ns >= 0, log.submit_ns, log.dispatch_ns), kind="stable")
    for name, values in {
        "ttft": 1e3 * parts.ttft_s, "queue": 1e3 * parts.queue_s, "network": 1e3 * parts.network_s,
        "sent": (log.submit_ns - run.summary.window.start_ns) / 1e6, "index": log.index.astype(float),
    }.items():  # fmt: skip
        shown = np.array(page["columns"][name], dtype=float)
        np.testing.assert_allclose(shown, values[order], rtol=0, atol=0.0051, err_msg=name)
    covered = parts.covered[order]
    shown = np.array(page["other"], dtype=float)
    np.testing.assert_allclose(shown[covered], 1e3 * parts.other_s[order][covered], rtol=0, atol=0.05)
    assert page["status"] == log.status[order].tolist()


def test_the_script_derives_the_ids_of_requests(scripted: tuple[Any, dict[str, Any]]):
    """Which are not in the page where they follow from the run's own and the request's number."""
    run, page = scripted
    log = run.run.requests
    order = np.argsort(np.where(log.submit_ns >= 0, log.submit_ns, log.dispatch_ns), kind="stable")
    assert page["trace_id"] == log.trace_id[order].tolist()
    assert page["request_id"] == log.request_id[order].tolist()


def test_an_axis_tells_its_places_apart():
    """2.5 s is not 3 s."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    script = (resources.files("sidelight.exporter.html") / "assets" / "plot.js").read_text(encoding="utf-8")
    shown = "; process.stdout.write([[2.5e3, 2.5e3], [1.25e4, 2.5e3], [50, 25], [0.5, 0.25], [2e3, 1e3]]"
    command = [NODE, "-e", f'{script}{shown}.map((tick) => axisMs(...tick)).join("; "))']
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output == "2.5 s; 12.5 s; 50 ms; 0.50 ms; 2 s"


def test_a_value_beside_an_axis_of_seconds_keeps_its_digits():
    """Of 1.6 ms two digits of a second show nothing; nothing is 0 in the axis' own unit."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    script = (resources.files("sidelight.exporter.html") / "assets" / "plot.js").read_text(encoding="utf-8")
    shown = "; process.stdout.write([1.6, 0, 280, 7647.7].map((value) => axisMs(value, 5e3, 100)).join('; '))"
    output = subprocess.run([NODE, "-e", script + shown], check=True, capture_output=True, text=True).stdout
    assert output == "1.60 ms; 0.00 s; 0.28 s; 7.65 s"


def test_a_peak_within_a_step_is_drawn():
    """And a step of which nothing is known is empty."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    assets = resources.files("sidelight.exporter.html") / "assets"
    script = "".join((assets / name).read_text(encoding="utf-8") for name in ("plot.js", "time.js"))
    gauge = "{ times: Float64Array.of(1, 11, 12, 19), values: Float64Array.of(1, 7, 2, 3) }"
    shown = f"; const held = [{gauge}]; const at = (time) => time < 20 ? combined(held, time, Math.max) : null"
    shown += "; process.stdout.write(JSON.stringify(highest(stepsOf(0, 40, 4), timesOf(held), at)))"
    command = [NODE, "-e", script.replace('"use strict";', "") + shown]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == [1, 7, None, None]


def test_a_request_that_failed_is_in_flight_until_it_ended():
    """And one without an end for as long as the chart goes on."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    assets = resources.files("sidelight.exporter.html") / "assets"
    script = "".join((assets / name).read_text(encoding="utf-8") for name in ("data.js", "plot.js", "time.js"))
    columns = ", ".join(
        f"{name}: {{ values: Float64Array.of({values}) }}"
        for name, values in {"sent": "0, 1, 2", "e2e": "25, NaN, NaN", "ended": "NaN, 12, NaN"}.items()
    )
    shown = f"; const [row] = loadRows({{ columns: {{ {columns} }}, gauges: [] }})"
    shown += "; process.stdout.write(JSON.stringify(row.at(stepsOf(0, 40, 4))))"
    data = "globalThis.DATA = {}; globalThis.document = { getElementById: () => ({ textContent: '{}' }) };"
    command = [NODE, "-e", data + script.replace('"use strict";', "") + shown]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == [3, 3, 2, 1]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("[0, 0.9, 1, 1.2, 4].map((at) => stepAt({ data: [[0, 1, 2, 3]] }, 1, 0, at))", [1, 1, 2, 2, 3]),
        ("roundSteps(-2190, 10790, 14, 0)", {"from": -3000, "to": 11000, "count": 14, "each": 1000}),
        ("roundSteps(100, 1100, 200, 4500)", {"from": 0, "to": 5000, "count": 1, "each": 5000}),
        ("[viewOf(900, 1100, 0, 5000), viewOf(-1000, 1000, 0, 5000)]", [[500, 1500], [0, 2000]]),
        ("[viewOf(4600, 4900, 0, 5000), viewOf(-Infinity, Infinity, 0, 5000)]", [[4000, 5000], None]),
        ("sentIn([2, 3], [1, 2, 3, 4], [3, 2, 1, 0])", [2, 1]),
        ("[titleOf('·· blank output'), titleOf('queue')]", ["no text", ""]),
        (
            "['Blank output, ms', 'or: blank\\u00a0output 3 %', 'valueOf', 'a blank output'].map((of) => titleOf(of))",
            ["no text", "no text", "", ""],
        ),
        ("between(3350, 3600)", "3,350 s to 3,600 s"),
        ("[moment(3480.05, 0.05), moment(3480.1, 0.05)]", ["3,480.05 s", "3,480.10 s"]),
        ("highest(stepsOf(0, 20, 2), [], (at) => (at < 10 ? 3 : 1), (at) => (at < 10 ? 3 : 1))", [3, 1]),
    ],
)
def test_steps_and_ranges_are_those_that_are_labelled(expression: str, value: object):
    """The step under the cursor, of a round length; a zoom of a second at least; what is open as a step begins."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    assets = resources.files("sidelight.exporter.html") / "assets"
    script = "".join((assets / name).read_text(encoding="utf-8") for name in ("plot.js", "time.js", "waterfall.js"))
    data = json.dumps({"titles": {"blank output": "no text"}})
    shown = f"; const DATA = {data}; process.stdout.write(JSON.stringify({expression}))"
    command = [NODE, "-e", script.replace('"use strict";', "") + shown]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == value


def test_a_chart_has_no_heading_without_text():
    """The row of the range under the cursor has none; that of a line says what it means."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    assets = resources.files("sidelight.exporter.html") / "assets"
    script = "".join((assets / name).read_text(encoding="utf-8") for name in ("plot.js", "time.js"))
    program = """
      const DATA = { titles: { running: "at once" } }, rows = [];
      function uPlot({ series }) {
        for (const { label } of series) {
          const parentNode = { append() {}, addEventListener() {} };
          rows.push({ parentNode, firstChild: { label, remove() { this.label = "removed"; } } });
        }
        this.root = { querySelector: () => ({ setAttribute() {} }), querySelectorAll: () => rows };
      }
      uPlot.paths = { bars() {}, stepped() {} };
      timeChart({ clientWidth: 500, firstChild: {} }, 200, [{ name: "ink", label: "running", text: cell }], () => {});
      process.stdout.write(JSON.stringify(rows.map(({ firstChild, title }) => [firstChild.label, title])));
    """
    command = [NODE, "-e", script.replace('"use strict";', "") + program]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(output) == [["removed", None], ["running", "at once"]]


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ("[0.99, 412, 380, 455, 2000]", "p99 412.0, 95 % interval 380.0 to 455.0"),
        ("[0.99, 412, 380, null, 7167]", "p99 412.0, at least 380.0; an interval needs about 7,167"),
        ("[0.5, 9.5]", "p50 9.50"),
    ],
)
def test_a_mark_says_how_sure_it_is(mark: str, text: str):
    """An interval, a bound, or of another selection of requests nothing."""
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    assets = resources.files("sidelight.exporter.html") / "assets"
    script = "".join((assets / name).read_text(encoding="utf-8") for name in ("plot.js", "spread.js"))
    command = [NODE, "-e", script.replace('"use strict";', "") + f"; process.stdout.write(markText({mark}))"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == text
