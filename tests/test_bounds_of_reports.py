"""What a directory of others makes a report do is bounded, however much its records ask for: memory, time, files that
are open, and what is written.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import golden_files
import msgspec
import pyarrow.parquet as pq
import pytest
from faults.cases import cpu_limit
from processes import ended, sidelight, start
from series import END, QUEUE, gauge, histogram, scraped
from test_hostile_directories import ESCAPES, MOST_CPU_S, UNSEEN, ran
from waiting import BOUND_S

from sidelight.exporter.evaluation.measured import LEAST_SLICES, MOST_SLICES
from sidelight.exporter.evaluation.warnings import MOST_NOTES
from sidelight.exporter.summary import correlation
from sidelight.recorded.events import Event
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.log import LayoutRecord, RowRecord, ScrapeLog
from sidelight.sidecar.formats import FORMATS


def refusal(path: Path, least_cpu_s: int, least_bytes: int) -> str:
    """Return the one line of a report that took more than it may."""
    start = "from sidelight.sidecar import __main__; from sidelight.sidecar.report import bounded"
    limits = f"bounded.LEAST_CPU_S, bounded.LEAST_BYTES = {least_cpu_s}, {least_bytes}"
    code = f"{start}; {limits}; __main__.main()"
    command = [sys.executable, "-c", code, "report", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
    assert (2, "", 1) == (done.returncode, done.stdout, done.stderr.count("\n")), done.stderr
    assert "--no-untrusted" in done.stderr
    return done.stderr


def test_a_directory_is_evaluated_in_so_much_memory(tmp_path: Path):
    path = golden_files.copied("two_engines", tmp_path)
    series = zlib.compress(
        msgspec.msgpack.encode([Series(f"s{number}", (), "s", "gauge", "") for number in range(99_999)])
    )
    began_ns = json.loads((path / "manifest.json").read_text())["started_ns"]
    with FrameLog(path / "raw" / "scrapes-1.log") as log:
        log.append(msgspec.msgpack.encode(LayoutRecord(id=0, url="http://x", series=series)))
        for number in range(5000):  # 4 GB
            stamp_ns = began_ns + number * 1_000_000
            row = RowRecord(layout=0, tick_ns=stamp_ns, request_ns=stamp_ns, response_ns=stamp_ns + 1, delta=b"")
            log.append(msgspec.msgpack.encode(row))
    assert "memory" in refusal(path, 600, 2**28)


def test_a_directory_is_evaluated_in_so_much_time(tmp_path: Path):
    """One that would take more is one line; holes in its files give it no more, and nothing unfinished is left."""
    path = golden_files.copied("two_engines", tmp_path)
    texts = [Series(f"vllm:s{number}", (), f"vllm:s{number}", "gauge", "") for number in range(199_000)]
    began_ns = json.loads((path / "manifest.json").read_text())["started_ns"]
    with FrameLog(path / "raw" / "scrapes-1.log") as log:
        layout = zlib.compress(msgspec.msgpack.encode(texts))
        log.append(msgspec.msgpack.encode(LayoutRecord(id=0, url="http://x", series=layout)))
        for at_ns in range(began_ns, began_ns + 20 * 10**9, 10**9):  # several times the bound on a fast machine
            row = RowRecord(layout=0, tick_ns=at_ns, request_ns=at_ns, response_ns=at_ns + 1, delta=b"")
            log.append(msgspec.msgpack.encode(row))
    with (path / "raw" / "hole").open("wb") as file:
        file.truncate(10**12)
    assert re.search("took more than [1-5] s of the processor's time", refusal(path, 1, 2**31))
    assert not list(path.glob(".*"))


@pytest.mark.parametrize("option", [(), ("--untrusted",), ("--no-untrusted",)])
def test_a_report_is_as_without_its_bounds(tmp_path: Path, option: tuple[str, ...]):
    path = golden_files.copied("two_engines", tmp_path)
    reported = sidelight("report", path, *option, path=path, fresh=True)
    assert (0, "") == (reported.code, reported.err)
    assert "Where the TTFT went" in reported.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_that_evaluates(tmp_path: Path, number: signal.Signals):
    """It is sent to the one that waits: another waits for a log to be opened, and is interrupted."""
    path = golden_files.copied("two_engines", tmp_path)
    code = (
        "from sidelight.sidecar import __main__; from sidelight.sidecar.report import derive\n"
        "def derived(*_, **__): print('begun', flush=True); import time; time.sleep(600)\n"
        "derive.derive = derived; __main__.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code, "report", path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "begun\n" == process.stdout.readline()
        process.send_signal(number)
        assert 130 == process.wait(BOUND_S)
        assert "" == process.stdout.read()


def test_a_directory_may_have_more_logs_than_a_process_may_open(tmp_path: Path):
    """Each is open only while it is read."""
    path = golden_files.copied("two_engines", tmp_path)
    for number in range(2, 400):
        FrameLog(path / "raw" / f"hardware-{number}.log").close()
    with start("report", path, limit=200) as process:
        reported = ended(process, path)
    assert 0 == reported.code, reported.err


def test_of_many_damaged_logs_the_first_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = golden_files.copied("two_engines", tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["config"]["url"] = [f"http://engine-{number}:8000" for number in range(1000)]
    manifest["logs"] = {f"requests-{number}.log": None for number in range(5, 5005)}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert 3 == ran("report", path)
    said = " ".join(capsys.readouterr().out.split())
    assert "raw/requests-1007.log: it is damaged (the file is missing); and 4,990 more" in said
    assert "http://engine-9:8000, and 990 more" in said
    assert len(said) < 20_000


def changed(path: Path, **config: object) -> Path:
    """Change what a recorded run was asked for."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["config"] |= config
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_slices_are_only_so_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As its records are worth, of a window of 8 s in slices of 5 us: most would be empty."""
    path = changed(golden_files.copied("vllm_plain", tmp_path), slice_duration=5e-6)
    with cpu_limit(MOST_CPU_S):
        assert 0 == ran("report", path), capsys.readouterr().err
    slices = 1 + max(pq.read_table(path / "timeslices.parquet")["slice"].to_pylist())
    assert LEAST_SLICES < slices < MOST_SLICES / 4


def test_of_many_notes_the_first_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = golden_files.copied("vllm_plain", tmp_path)
    with FrameLog(path / "raw" / "events.log") as log:
        for number in range(20_000):
            log.append(msgspec.msgpack.encode(Event(at_ns=1, name="note", data={"text": f"note {number}"})))
    assert ran("report", path) in (0, 3), capsys.readouterr().err
    said = json.loads((path / "summary.json").read_text())["warnings"]
    assert "raw/events.log has 19,900 more notes" in said
    assert len(said) < 2 * MOST_NOTES


@pytest.mark.parametrize("tags", [[f"k{number}=v" for number in range(100_000)], ['a"} 1\nb{c=d'], ["a=" + "b" * 9999]])
def test_labels_of_others_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], tags: list[str]):
    """Each series has all of them."""
    path = changed(golden_files.copied("vllm_plain", tmp_path), tag=tags)
    assert 2 == ran("report", path, "--formats", "openmetrics")
    said = capsys.readouterr().err
    assert (1, True) == (said.count("\n"), "manifest.json: --tag" in said)


def test_a_table_of_the_server_shows_no_control_of_the_version_that_wrote_it(tmp_path: Path):
    path = golden_files.copied("vllm_plain", tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tool"]["version"] = ESCAPES
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert 0 == ran("report", path, "--formats", "csv")
    assert [] == UNSEEN.findall((path / "server_metrics_export.csv").read_text())


@pytest.mark.parametrize("value", ["1e308", "+Inf", "NaN"])
def test_a_page_of_numbers_that_add_up_to_none_is_reported(tmp_path: Path, value: str):
    """Without a warning of numpy's, and with all else."""
    path = golden_files.copied("vllm_plain", tmp_path)
    began_ns = json.loads((path / "manifest.json").read_text())["started_ns"]
    names = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    page = "".join(gauge(name, value) for name in names)
    page += histogram(QUEUE, value, value, buckets=(("0.1", value), ("1.0", value))) + END
    log = ScrapeLog(path / "raw" / "scrapes-1.log")
    for number in range(24):
        log.append(scraped(began_ns + number * 500_000_000, page, url="http://127.0.0.1:38473/metrics"))
    log.close()
    assert 0 == ran("report", path, "--formats", ",".join(FORMATS))


def test_a_histogram_may_have_more_buckets_than_can_be_fitted(tmp_path: Path):
    """Its sum and count stay; a table of each bucket by each other would take 3 GB."""
    path = golden_files.copied("vllm_plain", tmp_path)
    began_ns = json.loads((path / "manifest.json").read_text())["started_ns"]
    log = ScrapeLog(path / "raw" / "scrapes-1.log")
    for number in range(24):
        buckets = [(str(bound), number * bound) for bound in range(20_000)]
        page = histogram(QUEUE, number * 20_000, number * 1e4, buckets=buckets) + END
        log.append(scraped(began_ns + number * 500_000_000, page, url="http://127.0.0.1:38473/metrics"))
    log.close()
    with cpu_limit(MOST_CPU_S):
        assert 0 == ran("report", path)


def test_of_many_classes_those_with_the_most_requests_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = golden_files.copied("vllm_plain", tmp_path)
    ran("report", path)
    classes = json.loads((path / "summary.json").read_text())["correlation"]["classes"]
    monkeypatch.setattr(correlation, "MOST_GROUPS", 1)
    ran("report", path)
    largest = max(classes, key=lambda name: classes[name]["requests"])
    assert {largest: classes[largest]} == json.loads((path / "summary.json").read_text())["correlation"]["classes"]
