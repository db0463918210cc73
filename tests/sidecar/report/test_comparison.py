"""`sidelight report A B`: one page of several runs, whose directories stay as they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from codes import raises
from golden_files import GOLDEN
from html_page import ATTACK, Page
from packed_columns import read
from processes import Ended

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.printable.numbers import cell, ms
from sidelight.sidecar.report.comparison import compare, write_change
from sidelight.sidecar.report.derive import evaluated

NODE = shutil.which("node")
PROGRAM = """
const fs = require("fs");
const [scripts, page] = [process.argv[1].split(","), fs.readFileSync(process.argv[2], "utf8")];
const data = page.match(/<script type="application\\/json" id="data">(.*?)<\\/script>/s)[1];
globalThis.document = { getElementById: () => ({ textContent: data }) };
const source = scripts.map((path) => fs.readFileSync(path, "utf8").replace('"use strict";', "")).join("\\n");
const { DATA, openRun, meansOf, stepsOf } = new Function(source + "; return { DATA, openRun, meansOf, stepsOf };")();
Promise.all(DATA.runs.map(openRun)).then((runs) => {
  const means = runs.map((run) => meansOf(run, stepsOf(0, run.duration, 1)).ttft[0]);
  process.stdout.write(JSON.stringify(means));
});
"""


def copied(name: str, to: Path, **manifest: Any) -> Path:
    """Copy a recorded run; `manifest` replaces what its configuration says."""
    shutil.copytree(GOLDEN / name, to, ignore=shutil.ignore_patterns("expected"))
    if manifest:
        whole = json.loads((to / "manifest.json").read_text(encoding="utf-8"))
        whole["config"] |= manifest
        (to / "manifest.json").write_text(json.dumps(whole), encoding="utf-8")
    return to


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one engine, one of them with spans."""
    return copied("vllm_plain", tmp_path / "before"), copied("vllm_spans", tmp_path / "after")


def files_of(path: Path) -> dict[str, bytes]:
    """The files of a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_two_runs_give_one_page_and_stay_as_they_are(
    runs: tuple[Path, Path], sidelight: Callable[..., Ended], tmp_path: Path
):
    """By the command; what the page answers is printed."""
    before = [files_of(run) for run in runs]
    ended = sidelight("report", *runs, "--output", tmp_path / "page.html")
    assert ended.code == 0, ended.err
    assert before == [files_of(run) for run in runs]
    assert all(line == line.rstrip() for line in ended.out.splitlines())
    said = " ".join(ended.out.split())
    assert "All runs sent the same requests." in said
    assert said.startswith("Not decided: p50 of the TTFT, 330 ms and 323 ms, may each be off: together by 35.1 ms.")
    assert "Do this: Measure again; " in said
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert any(text.startswith("All runs sent the same requests.") for text in page.contents["p"])


def test_runs_are_called_by_their_names(runs: tuple[Path, Path], sidelight: Callable[..., Ended], tmp_path: Path):
    """In the text, the page and its charts; a run without a name keeps its letter."""
    ended = sidelight("report", f"old={runs[0]}", runs[1], "--output", tmp_path / "page.html")
    assert ended.code == 0, ended.err
    assert ["old", "B"] in [line.split() for line in ended.out.splitlines()]
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert any(text.startswith("old: ") for text in Page(text).contents["p"])
    assert ["old", "B"] == re.findall(r'"label":"(old|A|B)"', text)


def test_a_page_that_cannot_be_written_is_bad_usage(
    runs: tuple[Path, Path], sidelight: Callable[..., Ended], tmp_path: Path
):
    """The option, the path and the cure, as of --out."""
    place = tmp_path / "absent" / "page.html"
    ended = sidelight("report", *runs, "--output", place)
    assert 2 == ended.code
    assert f"sidelight: --output {place}: No such file or directory; give a place" in ended.err


def test_the_table_of_times_has_the_runs_own_numbers(runs: tuple[Path, Path], tmp_path: Path):
    """As their summaries have them."""
    compare(runs, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    rows = {row[0]: row[1:] for row in page.rows}
    first, second = (evaluated(run).summary for run in runs)
    for label, values in {
        "TTFT, mean": [summary.client.ttft_ms.mean for summary in (first, second)],
        "TTFT, p99": [summary.client.ttft_ms.p99 for summary in (first, second)],
        "queue, p50": [summary.correlation.breakdown.queue_ms.p50 for summary in (first, second)],
        "E2E, p90": [summary.client.e2e_ms.p90 for summary in (first, second)],
    }.items():
        assert rows[label] == [ms(value) for value in values]
    assert rows["directory"] == ["before", "after"]
    assert rows["requests running, at most"] == [
        cell(summary.server.requests_running.stats.max) for summary in (first, second)
    ]
    assert rows["otlp listen"] == ["-", "127.0.0.1:4317"]
    assert "seed" not in rows


def test_every_request_of_each_run_is_in_the_page(runs: tuple[Path, Path], tmp_path: Path):
    """And the page's script reads them: means of TTFT over the whole run, as the summaries have them."""
    compare(runs, tmp_path / "page.html")
    data = json.loads(Page((tmp_path / "page.html").read_text(encoding="utf-8")).contents["script"][0])
    assert [run["label"] for run in data["runs"]] == ["A", "B"]
    derived = [evaluated(run) for run in runs]
    assert [len(read(run["requests"])["sent"]) for run in data["runs"]] == [len(run.run.requests) for run in derived]
    if NODE is None:
        pytest.skip("node is not installed (Debian package nodejs)")
    assets = resources.files("sidelight.exporter.html") / "assets"
    scripts = ",".join(str(assets / name) for name in ("data.js", "plot.js", "time.js"))
    command = [NODE, "-e", PROGRAM, scripts, str(tmp_path / "page.html")]
    means = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert means == pytest.approx([run.summary.client.ttft_ms.mean for run in derived], abs=0.01)


def test_what_servers_and_directories_are_called_stays_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A model and a directory that would be elements: the page has none of them. A terminal's marks are no marks."""
    name = ATTACK.replace("/", "\N{FRACTION SLASH}")
    paths = (copied("vllm_plain", tmp_path / name, model=ATTACK), copied("vllm_spans", tmp_path / "[b]"))
    compare(paths, tmp_path / "page.html")
    assert "[b]" in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"img"} & {tag for tag, _ in page.elements}
    assert text.count("</script") == 2
    assert [ATTACK, "tiny-llama"] in [row[1:] for row in page.rows if row[0] == "model"]


def test_what_cannot_be_compared_is_refused(runs: tuple[Path, Path], sidelight: Callable[..., Ended], tmp_path: Path):
    """One run twice, more than a page shows, something else than a page, no run at all."""
    page = tmp_path / "page.html"
    with raises("compare.same-run"):
        compare([*runs, runs[0]], page)
    with raises("compare.names"):
        compare([Path(f"old={run}") for run in runs], page)
    with raises("report.too-many"):
        compare([tmp_path / str(at) for at in range(7)], page)
    with raises("run.none"):
        compare([runs[0], tmp_path / "missing"], page)
    assert not page.exists()
    ended = sidelight("report", *runs, "--json")
    assert (ended.code, "of several runs" in ended.err) == (2, True)


def test_a_comment_has_the_times_of_a_base_beside_its_own(
    runs: tuple[Path, Path], sidelight: Callable[..., Ended], tmp_path: Path
):
    """Between the conclusion and the run's own tables. Neither the run itself nor an empty folder can be a base."""
    base, run = runs
    before = files_of(base)
    ended = sidelight("report", run, "--base", base)
    assert (ended.code, before) == (0, files_of(base)), ended.err
    comment = (run / "report.md").read_text(encoding="utf-8")
    base_id = evaluated(base).summary.run_id
    order = [
        f"**Beside run {base_id}**",
        "All runs sent the same",
    ]
    places = [
        comment.index(text) for text in (*order, "| TTFT, p99 |", "**What differs in the", "**Where the TTFT went")
    ]
    assert places == sorted(places)
    assert "- ! In the base: Gaps between chunks may be wrong by up to 19.4 ms" in comment
    for wrong, reason in ((run, "is named twice"), (tmp_path, "no manifest.json here")):
        with pytest.raises(ConfigurationError, match=reason):
            write_change(evaluated(run), wrong)
