"""What a second signal does, and what becomes of a run whose terminal is gone."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from processes import LONG, Case, Ended, Script, answered, interrupt, launching, refused, serving, start, until
from waiting import BOUND_S

from sidelight.sidecar.report.derive import derive

NOT_WAITED_FOR = "sidelight: interrupted; `sidelight report RUN` evaluates what a run had recorded\n"


def twice(process: subprocess.Popen[str], path: Path, *, second: signal.Signals) -> None:
    """Interrupt a run, and again when its load has stopped but its end is not recorded yet."""
    interrupt(process, path)
    until(lambda: b"phase_end" in (path / "raw" / "events.log").read_bytes(), "the end of the load")
    process.send_signal(second)


def too_early(process: subprocess.Popen[str], _path: Path, *, script: Script) -> None:
    """Interrupt a run that waits for its one token."""
    until(lambda: script.asked["too-early"] > 0, "a request")
    process.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """Runs against one scripted server."""
    script = Script()
    cases = {
        number.name: Case(url=f"http://{{}}/endless/{number.name}", options=LONG, deed=partial(twice, second=number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    } | {"too-early": Case(url="http://{}/mute/too-early", options=LONG, deed=partial(too_early, script=script))}
    with serving(script) as url, launching(cases, url, tmp_path_factory.mktemp("runs")) as launched:
        yield launched


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_second_signal_is_not_kept_waiting(runs: Callable[[str], Ended], name: str):
    """One line and exit 130 without a report; the manifest is closed, and the report can be had of what is there."""
    run = runs(name)
    assert (130, "", NOT_WAITED_FOR, "interrupted") == (run.code, run.out, run.err, run.manifest["status"])
    assert not (run.path / "summary.json").exists()
    derive(run.path, ["parquet"])
    rows = run.requests()
    assert {("cancelled", "cancelled: stopped")} == {(row["status"], row["error"]) for row in rows}
    assert any(row["first_token_ns"] for row in rows)


def test_a_signal_before_the_load_ends_it_at_once(runs: Callable[[str], Ended]):
    """Exit 130 and one line; nothing is recorded."""
    assert refused(runs("too-early"), 130).endswith("[interrupted.user]\n")


# Runs the command line, and sends itself a signal when a module is looked for.
SIGNALLED = """
import os, sys
module, number, *arguments = sys.argv[1:]
class Signalling:
    def find_spec(name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Signalling)
sys.argv[1:] = arguments
from sidelight.sidecar.__main__ import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("module", ["cyclopts", "sidelight.sidecar.run.session"])
def test_a_signal_while_modules_are_imported_is_one_line(module: str, number: signal.Signals):
    """Those that every command needs, and those of one command: exit 130 and no traceback."""
    command = [sys.executable, "-c", SIGNALLED, module, str(int(number)), "run", "--url", "http://127.0.0.1:9"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (130, "", 1) == (ended.returncode, ended.stdout, ended.stderr.count("\n"))
    assert ended.stderr.startswith("sidelight: interrupted")


def test_an_examination_that_is_interrupted_points_to_no_run():
    """`doctor` records nothing that could be evaluated."""
    command = [
        sys.executable,
        "-c",
        SIGNALLED,
        "sidelight.sidecar.doctor",
        str(int(signal.SIGINT)),
        "doctor",
        "127.0.0.1:9",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (130, "sidelight: interrupted\n") == (ended.returncode, ended.stderr)


@pytest.mark.parametrize("options", [(), ("--quiet",)], ids=["panel", "quiet"])
def test_a_terminal_that_is_gone_ends_the_run_and_keeps_its_results(tmp_path: Path, options: tuple[str, ...]):
    """As Ctrl-C does, though nothing can be said any more."""
    path = tmp_path / "run"
    command = [sys.executable, "-m", "sidelight", "run", "--listen", "off", "--out", str(path), *LONG, *options]
    with serving(Script()) as url:
        child, terminal = pty.fork()
        if child == 0:
            os.execv(sys.executable, [*command, "--url", f"{url}/good/terminal"])  # noqa: S606  no shell is wanted
        ends_s = time.monotonic() + BOUND_S
        while not answered(path) and time.monotonic() < ends_s:
            if select.select([terminal], [], [], 0.05)[0]:
                os.read(terminal, 65_536)
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    run = Ended(code=os.waitstatus_to_exitcode(status), out="", err="", path=path)
    assert (130, "interrupted", "interrupted") == (run.code, run.manifest["status"], run.summary["status"])
    assert run.summary["client"]["requests"]["ok"] > 0


@pytest.mark.parametrize(
    ("closed", "options", "code"),
    [
        (("stdout",), ("--quiet",), 0),
        (("stdout", "stderr"), ("--json", "--slo", "ttft_p50<0.001ms"), 1),
        (("stderr",), (), 0),
    ],
)
def test_a_run_outlives_the_reader_of_its_output(
    closed: tuple[str, ...], options: tuple[str, ...], code: int, tmp_path: Path
):
    """As in `sidelight run | head`: it is complete, and its exit code is the one that it has for another reader."""
    load = ("--rate", "40", "--requests", "4", "--warmup", "0", "--listen", "off")
    with (
        serving(Script()) as url,
        start("run", "--url", f"{url}/good/gone", "--out", tmp_path / "run", *load, *options, fresh=True) as process,
    ):
        streams = {"stdout": process.stdout, "stderr": process.stderr}
        for name in closed:
            streams[name].close()
        output = "".join(stream.read() for name, stream in streams.items() if name not in closed)
        assert code == process.wait(BOUND_S), output
    assert "Traceback" not in output
    assert "complete" == json.loads((tmp_path / "run" / "summary.json").read_text())["status"]


def test_a_watch_outlives_the_reader_of_its_output(tmp_path: Path):
    """Its report is written all the same."""
    path = tmp_path / "watch"
    addresses = ("--listen", "127.0.0.1:0", "--otlp-listen", "127.0.0.1:0")
    with start("watch", "--out", path, *addresses, fresh=True) as process:
        process.stdout.close()
        while "HTTP/protobuf at" not in (line := process.stderr.readline()):
            assert line
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert 0 == process.wait(BOUND_S), said
    assert "complete" == json.loads((path / "summary.json").read_text())["status"]
