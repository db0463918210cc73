"""Whole runs as users start them: the command line, its own processes and the simulated engine, over loopback.

The engine writes down the true times of every request; what a run says of it is held against that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
import pytest
from jsonschema import Draft202012Validator
from processes import LONG, QUIET, Ended, alive, answered, children, ended, load_workers, sidelight, start, until

from sidelight.loadgen.records import read_plan
from sidelight.scraper.engines.recognition import QUANTITIES
from sidelight.sidecar.options import schema
from sidelight.sidecar.run import open_run

DERIVED = (
    "summary.json",
    "server_metrics_export.json",
    "server_metrics_export.csv",
    "requests.parquet",
    "timeslices.parquet",
    "report.html",
    "report.txt",
)
SECRET = "hush-7f3a"
ANSWERED = 25
ENOUGH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The engine's process: its URL, and the file with the truth."""

    url: str
    truth: Path

    def records(self) -> list[dict[str, Any]]:
        """Return what is known by now of every request that ended, whole lines only."""
        whole = self.truth.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def finished(self) -> list[dict[str, Any]]:
        """Return the records of requests that were answered to their end."""
        return [record for record in self.records() if record["finish_reason"] != "abort"]


def running(engine: Simulated, path: Path, *options: str) -> subprocess.Popen[str]:
    """Start a quiet run and return when the engine has answered so many of its requests, preflight included."""
    before = len(engine.finished())
    process = start("run", "--url", engine.url, "--out", path, *QUIET, *LONG, *options, fresh=True)
    until(lambda: len(engine.finished()) >= before + ANSWERED or process.poll() is not None, f"{ANSWERED} answers")
    assert process.poll() is None, process.communicate()
    return process


def bodies(path: Path) -> list[bytes]:
    """Return the request bodies of the measured phase, as they were planned."""
    return [request.body for request in read_plan(path / "raw" / "plan-measure.log")]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulated]:
    """An engine so small that requests wait, for all runs of this file, one after the other."""
    truth = tmp_path_factory.mktemp("engine") / "truth.jsonl"
    with processes.engine("--max-num-seqs", "6", "--truth", truth) as (url, _):
        yield Simulated(url=url, truth=truth)


@pytest.fixture(scope="module")
def complete(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """An open loop to its end, with a warm-up."""
    path = tmp_path_factory.mktemp("complete") / "run"
    load = ("--rate", "16", "--requests", "48", "--warmup", "4", "--seed", "1")
    arguments = ("run", "--url", f"{engine.url}/v1", *load, "--out", path, "--listen", "127.0.0.1:0")
    return sidelight(*arguments, path=path, fresh=True)


@pytest.fixture(scope="module")
def interrupted(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that got SIGINT, as from Ctrl-C."""
    path = tmp_path_factory.mktemp("interrupted") / "run"
    with running(engine, path, "--seed", "7") as process:
        until(lambda: processes.finished(path) >= ANSWERED - 1, "the worker, which may be late to read them")
        process.send_signal(signal.SIGINT)
        return ended(process, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A run whose conductor got SIGKILL, and when; up to when it must be recorded whole; `report` is what came of it
    afterwards.
    """

    killed_ns: int
    recorded_until_ns: int
    left: Ended
    report: Ended
    orphans: Sequence[int]


@pytest.fixture(scope="module", params=["the conductor", "every process at once"])
def killed(engine: Simulated, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Killed:
    """A run that was killed in the middle: its conductor alone, or with it all that it had started."""
    path, begun_ns = tmp_path_factory.mktemp("killed") / "run", time.time_ns()
    with running(engine, path, "--seed", "7") as process:
        orphans, (worker,) = list(children(process.pid)), load_workers(process.pid)

        def recorded() -> int:
            until_ns = processes.recorded_until(path, time.time_ns(), is_held_up=processes.is_held_up(worker))
            return sum(begun_ns < record["finished_ns"] < until_ns for record in engine.finished())

        until(lambda: recorded() > ENOUGH, "answers that are a second old")
        killed_ns, was_held_up = time.time_ns(), processes.is_held_up(worker)
        process.kill()
        for orphan in orphans if request.param != "the conductor" else ():
            os.kill(orphan, signal.SIGKILL)
        left = ended(process, path)
    until(lambda: not any(map(alive, orphans)), "the processes that the conductor had started")
    recorded_until_ns = processes.recorded_until(path, killed_ns, is_held_up=was_held_up)
    report = sidelight("report", path, path=path)
    return Killed(killed_ns=killed_ns, recorded_until_ns=recorded_until_ns, left=left, report=report, orphans=orphans)


@pytest.fixture(scope="module")
def bare(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A closed loop of so many requests, without server metrics."""
    path = tmp_path_factory.mktemp("bare") / "run"
    load = ("--concurrency", "4", "--requests", "12", "--warmup", "0", "--metrics", f"{engine.url}/no-metrics-here")
    return sidelight("run", "--url", engine.url, *load, "--out", path, "--listen", "off", path=path)


@pytest.fixture(scope="module")
def configured(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A closed loop for a time, from a configuration file, with a secret on the command line."""
    directory = tmp_path_factory.mktemp("configured")
    path = directory / "run"
    lines = (
        f"url: {engine.url}",
        "concurrency: 3",
        "duration: 1.5",
        "warmup: 2",
        "scrape-interval: 0.1",
        "listen: 'off'",
    )
    (directory / "c.yaml").write_text("\n".join([*lines, f"out: {path}", "seed: 99"]), encoding="utf-8")
    return sidelight("run", "--config", directory / "c.yaml", "--seed", "5", "--api-key", SECRET, path=path)


@pytest.fixture(scope="module")
def worker_killed(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run of which one load worker of two got SIGKILL."""
    path = tmp_path_factory.mktemp("worker") / "run"
    with running(engine, path, "--seed", "8", "--workers", "2") as process:
        until(lambda: answered(path) or process.poll() is not None, "answers to both")
        os.kill(load_workers(process.pid)[1], signal.SIGKILL)
        return ended(process, path)


@pytest.fixture(scope="module")
def scraper_killed(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run to its end whose scraper and receiver of spans got SIGKILL on the way."""
    path = tmp_path_factory.mktemp("scraper") / "run"
    lengths = ("--input-tokens", "32", "--output-tokens", "16")
    load = ("--rate", "20", "--requests", "60", "--warmup", "0", "--seed", "9", "--otlp-listen", "127.0.0.1:0")
    with start(
        "run", "--url", engine.url, *load, *lengths, "--scrape-interval", "0.1", "--out", path, *QUIET
    ) as process:
        until(lambda: answered(path) or process.poll() is not None, "answers")
        for child in processes.child_processes(
            process.pid, "sidelight.scraper.worker", "sidelight.scraper.worker.spans"
        ):
            os.kill(child, signal.SIGKILL)
        return ended(process, path)


@pytest.fixture(scope="module")
def scraped(engine: Simulated, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Server metrics only, until SIGINT, which is how a scrape without a duration is meant to end."""
    path = tmp_path_factory.mktemp("scraped") / "run"
    with start("scrape", "--metrics", f"{engine.url}/metrics", "--out", path, "--scrape-interval", "0.1") as process:
        log = path / "raw" / "scrapes-0.log"
        until(lambda: (log.exists() and log.stat().st_size > 20_000) or process.poll() is not None, "a few scrapes")
        process.send_signal(signal.SIGINT)
        return ended(process, path)


def test_a_run_ends_well_and_leaves_what_the_contract_lists(complete: Ended):
    """Exit 0, every file whole, raw logs beside them, and no process had anything to complain of."""
    assert (0, "complete") == (complete.code, complete.manifest["status"])
    assert {"manifest.json", "raw", *DERIVED} <= {path.name for path in complete.path.iterdir()}
    assert [] == [path.name for path in complete.path.iterdir() if path.name.startswith(".")]
    logs = {path.name: path.stat().st_size for path in (complete.path / "raw").iterdir()}
    assert all(
        logs[name] for name in ("plan-warmup.log", "plan-measure.log", "requests-0.log", "scrapes-0.log", "events.log")
    )
    assert {0} == {size for name, size in logs.items() if name.endswith(".stderr")}
    assert "Where the TTFT went" in complete.out
    assert f"Written to {complete.path}: {', '.join(sorted(['manifest.json', 'raw', *DERIVED]))}\n" in complete.out


def test_queue_and_prefill_agree_with_the_engines_truth(engine: Simulated, complete: Ended):
    """Within 2 % of the true means over the very requests that were measured."""
    breakdown = complete.summary["correlation"]["breakdown"]
    measured = {row["request_id"] for row in complete.requests() if row["phase"] == "measure"}
    truth = [record for record in engine.finished() if record["request_id"] in measured]
    assert 48 == len(measured) == len(truth)
    for part, begin, end in (
        ("queue_ms", "queued_ns", "scheduled_ns"),
        ("prefill_ms", "scheduled_ns", "first_token_ns"),
    ):
        true_ms = sum(record[end] - record[begin] for record in truth) / len(truth) / 1e6
        assert pytest.approx(true_ms, rel=0.02) == breakdown[part]["mean"]
        assert true_ms > 1.0


def test_the_parts_sum_to_the_ttft(complete: Ended):
    """Of each request, of each slice and of the whole run, whose mean is the one that the client's statistics have."""
    summary = complete.summary
    parts = [f"{name}_ms" for name in ("network", "gateway", "queue", "prefill", "other")]
    breakdown = summary["correlation"]["breakdown"]
    assert {"trace": 0.0, "response": 0.0, "histogram": 1.0, "none": 0.0} == summary["correlation"]["coverage"]
    assert summary["client"]["ttft_ms"]["mean"] == breakdown["ttft_ms"]["mean"]
    assert pytest.approx(1.0) == sum(breakdown[name]["share_of_ttft"] or 0.0 for name in parts)
    slices = [piece for piece in summary["correlation"]["timeslices"] if piece["requests"]]
    for row in (*slices, *(row for row in complete.requests() if row["ttft_ms"] is not None)):
        assert pytest.approx(row["ttft_ms"], abs=1e-6) == sum(row[name] or 0.0 for name in parts)


def test_client_and_engine_count_the_same(complete: Ended):
    """Output tokens and finished requests equal the increases of the engine's counters, exactly; so do the inputs."""
    summary = complete.summary
    rows = [row for row in complete.requests() if row["phase"] == "measure"]
    assert {"ok"} == {row["status"] for row in rows}
    increase = {name: summary["server"][name]["stats"]["total"] for name in ("prompt_tokens", "generation_tokens")}
    assert sum(row["output_tokens"] for row in rows) == increase["generation_tokens"]
    assert sum(row["input_tokens"] for row in rows) == increase["prompt_tokens"]
    counts = (summary["client"]["requests"]["ok"], summary["server"]["requests_finished"]["stats"]["total"])
    assert (len(rows), len(rows)) == counts
    assert (len(rows), len(rows)) == tuple(summary["correlation"][f"{side}_requests"] for side in ("client", "server"))


def test_every_quantity_is_there(complete: Ended):
    """The engine shows all that is canonical, and the summary has each with its statistics; it does not speculate."""
    server = complete.summary["server"]
    assert {"draft_tokens", "draft_tokens_accepted"} == set(server["missing"])
    assert all(server[name]["stats"] for name in QUANTITIES if name not in server["missing"])


def test_a_scraper_that_is_killed_is_started_again(scraper_killed: Ended):
    """In logs of its own. Totals are whole, the hole is said, and no log is called damaged."""
    assert (0, "complete") == (scraper_killed.code, scraper_killed.manifest["status"])
    summary = scraper_killed.summary
    logs = {path.name for path in (scraper_killed.path / "raw").iterdir()}
    assert {"scrapes-0.log", "scrapes-1.log", "spans-0.log", "spans-1.log", "hardware.log", "hardware-1.log"} <= logs
    (gap,) = summary["server"]["gaps"]
    assert ("incomplete", True) == (summary["server"]["status"], gap["end_ns"] > gap["start_ns"])
    assert "code -9" in gap["reason"]
    counts = summary["client"]["requests"]["ok"], summary["server"]["requests_finished"]["stats"]["total"]
    assert summary["client"]["requests"]["sent"] == counts[0] == counts[1]
    assert summary["correlation"]["breakdown"]["queue_ms"]["mean"] is not None
    for died in ("the scraper died", "the receiver died"):
        assert 1 == sum(died in text and "was started again" in text for text in summary["warnings"])
    states = {log["log"]: log["state"] for log in summary["integrity"]["logs"]}
    assert states["scrapes-0.log"] in ("unverified", "torn")
    assert "whole" == states["scrapes-1.log"]
    assert "damaged" not in states.values()


def test_a_seed_decides_the_requests_byte_for_byte(interrupted: Ended, killed: Killed, worker_killed: Ended):
    """Runs of one seed planned the same bytes and say so by their digest; another seed planned others."""
    runs = (interrupted, killed.report, worker_killed)
    plans = [bodies(run.path) for run in runs]
    assert plans[0] == plans[1] != plans[2]
    digests = [hashlib.sha256(b"".join(plan)).hexdigest() for plan in plans]
    assert digests == [run.summary["workload"]["requests_sha256"] for run in runs]


@pytest.mark.parametrize("name", ["complete", "interrupted", "bare", "scraped"])
def test_a_report_is_the_same_bytes(name: str, request: pytest.FixtureRequest):
    """Evaluated again from the directory alone, every file is what it was, and the same is printed."""
    run: Ended = request.getfixturevalue(name)
    before = {name: (run.path / name).read_bytes() for name in DERIVED}
    (run.path / "summary.json").unlink()
    again = sidelight("report", run.path)
    assert (0, "", run.out) == (again.code, again.err, again.out)
    assert before == {name: (run.path / name).read_bytes() for name in DERIVED}


@pytest.mark.parametrize("name", ["complete", "interrupted", "bare", "scraped"])
def test_logs_of_a_run_that_ended_are_known_to_be_whole(name: str, request: pytest.FixtureRequest):
    """The manifest states how each of them ended, and as much was read."""
    run: Ended = request.getfixturevalue(name)
    integrity = run.summary["integrity"]
    assert ("whole", []) == (integrity["state"], integrity["disagreements"])
    logs = {path.name for path in (run.path / "raw").glob("*.log")}
    assert logs == set(run.manifest["logs"]) == {log["log"] for log in integrity["logs"]}
    assert {log["log"]: log["frames"] for log in integrity["logs"]} == {
        name: end["frames"] for name, end in run.manifest["logs"].items()
    }


def test_damage_to_a_complete_run_is_said_before_anything_else(complete: Ended, tmp_path: Path):
    """Exit 3; what is left is derived all the same."""
    shutil.copytree(complete.path, tmp_path / "run")
    (tmp_path / "run/raw/requests-0.log").unlink()
    report = sidelight("report", tmp_path / "run", path=tmp_path / "run")
    lost = complete.manifest["logs"]["requests-0.log"]["frames"]
    assert 3 == report.code
    verdict = report.out.replace("\n", " ").partition("Not to be trusted: recorded data are missing or damaged")[2]
    assert f"Why: raw/requests-0.log: {lost} of {lost} records are lost" in verdict
    assert report.err.startswith(f"sidelight: {tmp_path}/run: recorded data are damaged")
    assert "damaged" == report.summary["integrity"]["state"]
    assert report.summary["server"]["requests_running"]["stats"]["count"] > 1


def test_no_damage_to_a_log_is_silent(complete: Ended, tmp_path: Path):
    """Each log cut, emptied, exchanged for another, and with one bit flipped at places all over it."""
    logs = sorted((complete.path / "raw").glob("*.log"))
    silent = []
    shutil.copytree(complete.path, tmp_path / "run")
    raw = tmp_path / "run/raw"
    for log in logs:
        data = log.read_bytes()
        flipped = [place * (len(data) - 1) // 7 for place in range(8)]
        cases = {f"flip {at}": data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] for at in flipped}
        cases |= {f"cut {at}": data[:at] for at in (0, 1, len(data) // 2, len(data) - 33, len(data) - 1)}
        cases["other"] = next(other for other in logs if other != log).read_bytes()
        for name, damaged in cases.items():
            (raw / log.name).write_bytes(damaged)
            integrity = open_run(tmp_path / "run").integrity
            states = {entry.log: entry.state for entry in integrity.logs}
            if states.pop(log.name) != "damaged" or set(states.values()) - {"whole"}:
                silent.append((log.name, name, len(data)))
        (raw / log.name).write_bytes(data)
    assert [] == silent


def test_a_killed_run_loses_at_most_its_last_second(engine: Simulated, killed: Killed):
    """Whatever the engine had answered a second before is in the report as answered, with its tokens; whatever had
    arrived a second before is there at least. A second in which its worker could run: what a busy machine keeps it from
    writing is not lost by the kill.
    """
    assert (0, "") == (killed.report.code, killed.report.err)
    rows = {row["request_id"]: row for row in killed.report.requests()}
    begins_ns = min(row["submit_ns"] for row in rows.values())
    truth = [record for record in engine.records() if begins_ns <= record["arrival_ns"] < killed.killed_ns + 10**9]
    old = [record for record in truth if record["finished_ns"] < killed.recorded_until_ns]
    assert old
    assert {record["request_id"]: ("ok", record["tokens"]) for record in old} == {
        record["request_id"]: (rows[record["request_id"]]["status"], rows[record["request_id"]]["output_tokens"])
        for record in old
    }
    assert {record["request_id"] for record in truth if record["arrival_ns"] < killed.recorded_until_ns} <= set(rows)


def test_a_killed_run_says_that_it_crashed(killed: Killed):
    """No end was written, and the report says so before any number; its processes are gone."""
    assert -signal.SIGKILL == killed.left.code
    assert "status" not in killed.report.manifest
    summary = killed.report.summary
    assert ("crashed", None) == (summary["status"], summary["ended_at"])
    assert "cut short" in summary["warnings"][0]
    assert None is not summary["correlation"]["breakdown"]["queue_ms"]["mean"]
    assert not any(map(alive, killed.orphans))
    check_summary(summary)


def test_ctrl_c_keeps_what_there_is(interrupted: Ended):
    """Exit 130, status interrupted, all files; what was in flight is recorded as cancelled by us."""
    assert (130, "") == (interrupted.code, interrupted.err)
    assert "interrupted" == interrupted.manifest["status"] == interrupted.summary["status"]
    assert set(DERIVED) <= {path.name for path in interrupted.path.iterdir()}
    counts = interrupted.summary["client"]["requests"]
    assert counts["ok"] >= ANSWERED - 1
    assert counts["sent"] == counts["ok"] + counts["cancelled"]
    assert "interrupted" in interrupted.summary["warnings"][0]


def test_without_server_metrics_a_run_goes_on_and_says_so_once(bare: Ended):
    """One line on stderr; the summary says why `server` is empty, and no part of the breakdown is made up."""
    assert (0, "complete") == (bare.code, bare.summary["status"])
    assert 1 == sum("no server metrics" in line for line in bare.err.splitlines())
    assert [] == [warning for warning in bare.summary["warnings"] if "no server metrics" in warning]
    server = bare.summary["server"]
    assert (None, []) == (server["engine"], server["endpoints"])
    assert "/no-metrics-here: HTTP 404" in server["reason"]
    assert set(QUANTITIES) == set(server["missing"])
    breakdown = bare.summary["correlation"]["breakdown"]
    assert {None} == {breakdown[f"{part}_ms"]["mean"] for part in ("queue", "prefill", "other")}
    assert bare.summary["client"]["ttft_ms"]["mean"] == breakdown["ttft_ms"]["mean"] > 0
    report = (bare.path / "report.txt").read_text()
    assert "No breakdown: no metrics page of this server could be read" in report
    assert 1 == report.count("HTTP 404")


def test_a_closed_loop_ends_after_its_requests(bare: Ended):
    """Exactly so many, never more than its slots at once."""
    rows = bare.requests()
    assert ["ok"] * 12 == [row["status"] for row in rows]
    assert 4 == most_at_once(rows)
    assert "closed loop" in bare.summary["self_check"]["schedule_lateness_ms"]["missing"]


def test_a_closed_loop_ends_after_its_duration(configured: Ended):
    """Nothing is submitted later, what is in flight then is answered, and the slots are full all the time."""
    assert (0, "complete") == (configured.code, configured.summary["status"])
    rows = [row for row in configured.requests() if row["phase"] == "measure"]
    began_ns = configured.summary["window"]["start_ns"]
    assert {"ok"} == {row["status"] for row in rows}
    assert all(began_ns <= row["scheduled_ns"] for row in rows)
    # Each but the first three took the place of one that ended in time.
    assert len(rows) - 3 <= sum(row["end_ns"] < began_ns + 1_500_000_000 for row in rows)
    assert 3 == most_at_once(rows)
    assert configured.summary["client"]["requests"]["sent"] == len(rows) < len(bodies(configured.path))
    assert len(rows) == configured.summary["server"]["requests_finished"]["stats"]["total"]


def most_at_once(rows: Sequence[dict[str, Any]]) -> int:
    """Return how many requests were in flight at once, at most."""
    changes = [(row["submit_ns"], 1) for row in rows] + [(row["end_ns"], -1) for row in rows]
    in_flight, most = 0, 0
    for _, change in sorted(changes):
        in_flight += change
        most = max(most, in_flight)
    return most


def test_a_configuration_file_configures_and_no_secret_is_kept(configured: Ended):
    """The command line wins over the file, and the key stands in no file of the run."""
    config = configured.manifest["config"]
    assert (3, None, 1.5, 0.1, 5) == tuple(
        config[name] for name in ("concurrency", "rate", "duration", "scrape_interval", "seed")
    )
    assert "***" == config["api_key"] == configured.manifest["command"][-1]
    leaks = [path for path in configured.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert [] == leaks
    assert SECRET not in configured.out + configured.err


def test_one_dead_worker_of_two_ends_the_run(worker_killed: Ended):
    """Exit 3, one line that names it, and the report of what both had recorded; the manifest has the same reason."""
    assert (3, 1) == (worker_killed.code, worker_killed.err.count("\n"))
    assert "This run was cut short" in worker_killed.out
    manifest = worker_killed.manifest
    assert "crashed" == manifest["status"]
    assert f"sidelight: {manifest['reason']} [process.ended]\n" == worker_killed.err
    assert manifest["reason"].startswith("load worker 1 ended with code -9")
    again = sidelight("report", worker_killed.path)
    assert (0, "") == (again.code, again.err)
    rows = [row for row in worker_killed.requests() if row["status"] == "ok"]
    # They take the requests in turn.
    assert {0, 1} == {int(row["request_id"].rpartition("-")[2]) % 2 for row in rows}
    assert len(rows) == worker_killed.summary["client"]["requests"]["ok"] > 0
    assert manifest["reason"] in worker_killed.summary["warnings"][0]


def test_a_scrape_needs_no_load(scraped: Ended):
    """Ended by Ctrl-C as it is meant to be, it is complete: the engine's quantities, and no client."""
    assert (0, "complete") == (scraped.code, scraped.summary["status"])
    assert 0 == scraped.summary["client"]["requests"]["sent"]
    assert scraped.summary["server"]["requests_running"]["stats"]["count"] > 1


def test_summaries_fit_their_schema(
    complete: Ended, interrupted: Ended, bare: Ended, configured: Ended, worker_killed: Ended, scraped: Ended
):
    """However a run ended, with whatever it could measure."""
    for run in (complete, interrupted, bare, configured, worker_killed, scraped):
        check_summary(run.summary)


def check_summary(summary: dict[str, Any]) -> None:
    """Assert that a summary fits its schema, and that a quantity which is not there has its reason."""
    objections = Draft202012Validator(schema.summary()).iter_errors(summary)
    assert [] == [f"{error.json_path}: {error.message}" for error in objections]
    server = summary["server"]
    assert set(QUANTITIES) == set(server["missing"]) | {name for name in QUANTITIES if name in server}
    assert 1.0 == sum(summary["correlation"]["coverage"].values())
