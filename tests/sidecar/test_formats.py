"""`--formats`: which files a run directory gets, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from golden_files import GOLDEN
from processes import Ended

from sidelight.recorded.directory import MANIFEST, RAW, create, write_json
from sidelight.recorded.events import Event, append_event
from sidelight.scraper.series.log import ScrapeLog
from sidelight.scraper.targets.scrape import Scrape
from sidelight.sidecar.report.derive import derive

S = 10**9
URL = "http://127.0.0.1:9/metrics"
ALWAYS = {"manifest.json", "raw", "summary.json", "requests.parquet", "timeslices.parquet"}

Recorded = Callable[..., Path]
Sidelight = Callable[..., Ended]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """Make the directory of a scrape of two seconds that was asked for these formats (none: before there were any)."""

    def make(formats: list[str] | None) -> Path:
        path = create(tmp_path / "run")
        config = {"slice_duration": 1.0, "metrics": [URL], "url": None} | ({"formats": formats} if formats else {})
        manifest = {"run_id": "r", "tool": {"name": "sidelight", "version": "0"}, "config": config, "started_ns": S}
        targets = [{"configured": "http://dead", "reason": "refused"}, {"configured": URL, "url": URL}]
        ends = {"started_at": "1970-01-01T00:00:01.000Z", "status": "complete", "metrics_targets": targets}
        write_json(path / MANIFEST, manifest | ends)
        for name, at_ns in (("phase_start", S), ("phase_end", 3 * S)):
            append_event(path, Event(at_ns, name, {"phase": "measure"}))
        log = ScrapeLog(path / RAW / "scrapes-0.log")
        for at in range(1, 5):
            page = f"# TYPE a_total counter\na_total {at}\n".encode()
            stamps = {"tick_ns": at * S, "request_ns": at * S - 1, "response_ns": at * S}
            log.append(Scrape(url=URL, **stamps, status=200, content_type="text/plain", body=page, error=""))
        log.close()
        return path

    return make


def written(path: Path) -> set[str]:
    """Return the names in a run directory, but for those that are always there."""
    names = {item.name for item in path.iterdir()}
    assert names >= ALWAYS
    return names - ALWAYS


@pytest.mark.parametrize("formats", [None, ["json", "csv", "text", "html"]], ids=["an old run", "the default"])
def test_default_files(recorded: Recorded, formats: list[str] | None):
    """JSON and CSV of the server's metrics, and the report as text and as a page."""
    path = recorded(formats)
    derive(path)
    assert {"server_metrics_export.json", "server_metrics_export.csv", "report.txt", "report.html"} == written(path)
    exported = json.loads((path / "server_metrics_export.json").read_text())
    assert ["http://dead", URL] == exported["summary"]["endpoints_configured"]
    assert 3.0 == exported["metrics"]["a"]["series"][0]["stats"]["total"]


def test_a_run_keeps_to_what_it_was_asked_for(recorded: Recorded, sidelight: Callable[..., Ended]):
    """A report has the run's formats unless it names others; what was written before stays."""
    path = recorded(["parquet"])
    derive(path)
    assert {"server_metrics_export.parquet"} == written(path)
    ended = sidelight("report", path, "--formats", "jsonl,text")
    assert (0, "") == (ended.code, ended.err)
    names = {"server_metrics_export.parquet", "server_metrics_export.jsonl", "report.txt"}
    assert names == written(path)
    (first, *_) = (json.loads(line) for line in (path / "server_metrics_export.jsonl").read_text().splitlines())
    assert "profiling" == first["benchmark_phase"]


@pytest.mark.parametrize("said", ["--formats=json,cvs", "--formats=cvs"])
def test_a_refusal_as_a_user_sees_it(said: str, sidelight: Callable[..., Ended]):
    """Before the run directory is looked at."""
    ended = sidelight("report", "nowhere", said)
    assert (2, 1) == (ended.code, ended.err.count("\n"))
    assert ended.err.startswith("sidelight: --formats cvs: ")
    assert ended.err.endswith(" [option.value]\n")


def test_a_report_is_printed_though_its_files_cannot_be_written(sidelight: Sidelight, tmp_path: Path):
    """All is known by then. The place is the user's: exit 2."""
    shutil.copytree(GOLDEN / "vllm_plain", tmp_path / "run", ignore=shutil.ignore_patterns("expected"))
    (tmp_path / "run" / "summary.json").mkdir()
    ended = sidelight("report", "run")
    assert (2, 1) == (ended.code, ended.err.count("\n"))
    assert "run/summary.json: " in ended.err
    assert "Where the TTFT went" in ended.out


def test_what_a_server_or_another_program_wrote_moves_no_cursor(sidelight: Sidelight, tmp_path: Path):
    """A model's name with escapes in it is shown by them, on the terminal and in report.txt; so in an error's line."""
    shutil.copytree(GOLDEN / "vllm_plain", tmp_path / "run", ignore=shutil.ignore_patterns("expected"))
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    manifest["config"]["model"] = "m\x1b]0;title\x07\u202e\x9b2J\nfake"
    (tmp_path / "run/manifest.json").write_text(json.dumps(manifest))
    ended = sidelight("report", "run", "--formats", "text")
    for text in (ended.out, (tmp_path / "run/report.txt").read_text()):
        assert "m\\x1b]0;title\\x07\\u202e\\x9b2J\\x0afake" in text
        assert not set(text) & set("\x1b\x07\u202e\x9b")
    (tmp_path / "\x1b[2J").mkdir()
    assert sidelight("report", "\x1b[2J").err.startswith("sidelight: \\x1b[2J: no manifest.json here")
