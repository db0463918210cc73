"""What a run does when the load goes wrong: one clear line, the exit code of the contract, and all that was recorded.

Every run is a process of its own. Its target is a server that answers as the first name of the path says, or a
simulated engine that dies.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from processes import (
    LONG,
    QUICK,
    QUIET,
    Case,
    Ended,
    Script,
    agreed_rows,
    engine,
    finished,
    interrupt,
    launched,
    launching,
    refused,
    serving,
    until,
)


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def url(script: Script) -> Iterator[str]:
    """A scripted server for all tests of this file, without TLS."""
    with serving(script) as address:
        yield address


DEADLINES_S = (5, 20, 80, 320)
DEAD_SLO = "ttft_p99<10000s,requests_per_s>0,error_rate<=100%"
CASES = {
    "sigterm": Case(url="http://{}/good/sigterm", options=LONG, deed=partial(interrupt, number=signal.SIGTERM)),
    "sighup": Case(url="http://{}/good/sighup", options=LONG, deed=partial(interrupt, number=signal.SIGHUP)),
    "early": Case(url="http://{}/mute/early", options=(*LONG, "--deadline", "2")),
    "limited": Case(url="http://{}/limited/limited"),
    "page": Case(url="http://{}/page/page"),
    "timeout": Case(url="http://{}/endless/timeout", options=(*QUICK, "--request-timeout", "2")),
    "drain": Case(url="http://{}/endless/drain", options=(*QUICK, "--drain-timeout", "0.5")),
    "many": Case(
        url="http://{}/good/many",
        options=("--concurrency", "10000", "--requests", "10000", "--warmup", "0"),
        limit=1024,
    ),
}


@pytest.fixture(scope="module")
def runs(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """All runs of the table, and one whose engine dies."""
    with engine() as (target, server):

        def die(process: subprocess.Popen[str], path: Path) -> None:
            until(lambda: finished(path) or process.poll() is not None, "an answer")
            server.kill()

        # Far more than can have been answered by then, however late this process sees the first answer.
        options = ("--concurrency", "4", "--requests", "4000", "--warmup", "0", "--slo", DEAD_SLO)
        dead = Case(url=target, options=options, deed=die)
        with launching({"dead": dead, **CASES}, url, tmp_path_factory.mktemp("runs")) as runs:
            yield runs


@pytest.fixture(scope="module")
def overdue(runs: Callable[[str], Ended], url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Ended]:
    """A deadline, and a run that it stopped while replies came; a busy machine gets a later deadline."""
    assert runs  # which go on meanwhile
    for deadline_s in DEADLINES_S:
        path = tmp_path_factory.mktemp("overdue") / "run"
        options = ("--rate", "4", "--duration", str(deadline_s), "--warmup", "0", "--deadline", str(deadline_s))
        case = Case(url=f"http://{{}}/endless/deadline-{deadline_s}", options=options)
        run = launched(case, url.partition("//")[2], path)
        if (path / "requests.parquet").exists() and any(row["first_token_ns"] for row in run.requests()):
            return deadline_s, run
    pytest.fail("no reply began before a deadline")


@pytest.mark.parametrize("name", ["sigterm", "sighup"])
def test_a_signal_ends_the_run_and_keeps_what_there_was(runs: Callable[[str], Ended], name: str):
    """Exit 130, a report that says so, and every answer up to then."""
    run = runs(name)
    assert (130, "interrupted", "interrupted") == (run.code, run.manifest["status"], run.summary["status"])
    # On a busy machine a line that warns of the generator itself comes before.
    assert "interrupted" in next(line for line in run.out.splitlines() if line.startswith("sidelight "))
    assert "" == run.err
    assert agreed_rows(run, failed=0, refused=0)
    assert run.summary["client"]["requests"]["ok"] > 0


def test_a_deadline_stops_the_run(overdue: tuple[int, Ended]):
    """As if the user had stopped it, and it says that it was the deadline; streams are kept as far as they came."""
    deadline_s, run = overdue
    assert (130, "interrupted") == (run.code, run.manifest["status"])
    said = f"he deadline of {deadline_s} s was reached; requests in flight are cancelled"
    assert f"! T{said}" in run.out
    assert f"! t{said}\n" == run.err
    rows = agreed_rows(run, ok=0, failed=0)
    assert {("cancelled", "cancelled: stopped")} == {(row["status"], row["error"]) for row in rows}


def test_a_deadline_holds_for_what_comes_before_the_load(runs: Callable[[str], Ended]):
    """A server that does not answer the request for one token is waited for no longer; nothing is recorded."""
    line = refused(runs("early"), 130)
    assert line.endswith("[interrupted.deadline]\n")


def test_a_refusal_is_data_and_never_tried_again(runs: Callable[[str], Ended], script: Script):
    """HTTP 429 in the error, whatever Retry-After says; each request was sent once."""
    run = runs("limited")
    assert (0, "complete", "") == (run.code, run.manifest["status"], run.err)
    rows = agreed_rows(run, sent=8, ok=4)
    bad = [row for row in rows if row["status"] != "ok"]
    assert {("refused", "http_429: slow down (Retry-After: 1)")} == {(row["status"], row["error"]) for row in bad}
    assert 1 + 8 == script.asked["limited"]


def test_a_page_instead_of_a_stream_is_no_success(runs: Callable[[str], Ended]):
    """A proxy's web page under 200, in every request: exit 3 and one line, and the error says what came."""
    run = runs("page")
    assert (3, 1) == (run.code, run.err.count("\n"))
    assert "none of 8 requests succeeded" in run.err
    rows = agreed_rows(run, sent=8, ok=0, failed=8)
    assert all("text/html" in row["error"] for row in rows), rows[0]["error"]


def test_a_stream_that_never_ends_is_given_up(runs: Callable[[str], Ended]):
    """After --request-timeout, with the tokens it had brought; none succeeded, so exit 3."""
    run = runs("timeout")
    assert (3, 1) == (run.code, run.err.count("\n"))
    rows = agreed_rows(run, sent=8, failed=8)
    begun = [row for row in rows if row["error"] == "timeout: no complete reply within 2 s"]
    assert begun, rows[0]["error"]
    assert all(row["first_token_ns"] > 0 for row in begun)
    # On a busy machine the server may begin to answer some of them too late.
    assert {"timeout: no response within 2 s"} >= {row["error"] for row in rows if row not in begun}


def test_logs_that_are_large_enough_stop_the_run(
    sidelight: Callable[..., Ended], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As if the user had, and it says why; what was recorded is reported."""
    monkeypatch.setattr("sidelight.sidecar.run.load.MOST_LOG_BYTES", 10**6)
    options = ("--concurrency", "4", "--requests", "4", "--warmup", "0", *QUIET, "--out", tmp_path / "run")
    ended = replace(sidelight("run", f"{url}/flood/full", *options), path=tmp_path / "run")
    assert (130, "interrupted") == (ended.code, ended.manifest["status"])
    assert "The logs of the run have reached 0.001 GB; requests in flight are cancelled" in ended.out
    assert any(row["first_token_ns"] for row in agreed_rows(ended, ok=0))


def test_a_drain_does_not_wait_for_ever(runs: Callable[[str], Ended]):
    """What is in flight so long after the last submission is cancelled; the run came to its end."""
    run = runs("drain")
    assert (3, "complete") == (run.code, run.manifest["status"])
    rows = agreed_rows(run, sent=8, cancelled=8)
    assert {"cancelled: the drain bound was reached"} == {row["error"] for row in rows}


def test_a_server_that_dies_fails_its_requests_and_not_the_run(runs: Callable[[str], Ended]):
    """What had been answered stays; what was in flight, and all that came later, says how it failed."""
    run = runs("dead")
    assert (1, "complete") == (run.code, run.manifest["status"])  # it misses an objective
    rows = agreed_rows(run)
    assert run.summary["client"]["requests"]["ok"] > 0
    errors = {row["error"] for row in rows if row["status"] != "ok"}
    assert any("Connection refused" in error for error in errors), errors
    assert all(error.startswith(("reset: ", "connect: ")) for error in errors), errors


def test_an_objective_of_latency_is_missed_when_the_server_dies(runs: Callable[[str], Ended]):
    """However fast the answers were that came: a request that failed never got its first token."""
    run = runs("dead")
    slo, requests = run.summary["client"]["slo"], run.summary["client"]["requests"]
    latency, rate, errors = slo["objectives"]
    assert (False, None, False, True, True) == (
        slo["met"], latency["value_ms"], latency["met"], rate["met"], errors["met"],
    )  # fmt: skip
    assert (4000, requests["failed"]) == (latency["requests"], latency["failed_requests"])
    assert errors["value"] == requests["failed"] / 4000
    outage = run.summary["client"]["outage"]
    assert requests["failed"] >= sum(outage["errors"].values()) > 3000
    assert run.summary["verdict"]["state"] == "failing"
    assert run.summary["verdict"]["headline"] in " ".join(run.out.split())
    line = f"{requests['failed']} of 4000 requests did not end ok, and their ttft counts as infinite"
    assert f"Objective ttft_p99<10000s: MISSED, {line}" in " ".join(run.out.split())


def test_more_connections_than_open_files_is_exit_2(runs: Callable[[str], Ended]):
    """Said before the run, with the number there is and the cure."""
    line = refused(runs("many"), 2)
    assert line.startswith("sidelight: --concurrency 10000: ")
    assert "its limit is 1024" in line
    assert "ulimit -Hn" in line
