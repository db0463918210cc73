"""What a run does when the load goes wrong: one clear line, the exit code of the contract, and all that was recorded.

Every run is a process of its own. Its target is a server that says what it is told by the first name of the path, or a
simulated engine that dies.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

BOUND_S = 60.0
MODELS = json.dumps({"data": [{"id": "scripted"}]}).encode()
ANSWER = (
    b'data: {"choices":[{"index":0,"delta":{"content":"w"},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)
DRIP = b'data: {"choices":[{"index":0,"delta":{"content":"w"},"finish_reason":null}]}\n\n'
METRICS = b"# TYPE up gauge\nup 1\n"
PAGE = b"<!doctype html><title>Bad gateway</title>"
LIMITED = b'{"error":{"message":"slow down"}}'
QUICK = ("--rate", "40", "--requests", "8", "--warmup", "0")
LONG = ("--rate", "20", "--duration", "25", "--warmup", "0")  # runs that are ended before they end


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended, and its run directory."""

    code: int
    out: str
    err: str
    path: Path

    @property
    def summary(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return loaded

    @property
    def manifest(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "manifest.json").read_text())
        return loaded

    def requests(self) -> list[dict[str, Any]]:
        """Return the rows of requests.parquet."""
        rows: list[dict[str, Any]] = pq.read_table(self.path / "requests.parquet").to_pylist()
        return rows


@dataclass(slots=True)
class Script:
    """A server's memory: how often each run asked for a completion, and whether all is over."""

    asked: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def count(self, run: str) -> int:
        """Count a completion and return its number, from 1: the first is the preflight's."""
        with self.lock:
            self.asked[run] += 1
            return self.asked[run]


def scripted(script: Script) -> type[BaseHTTPRequestHandler]:
    """Make what answers by the first name of the path, counted by its second: the run's own.

    A preflight is answered well, but under `always`.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path.endswith("/models"):
                self.say(200, "application/json", MODELS)
            elif self.path == "/metrics":
                self.say(200, "text/plain; version=0.0.4", METRICS)
            else:
                self.say(404, "text/plain", b"")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            _, name, run, *rest = self.path.split("/")
            if rest[-1] != "completions":
                self.say(404, "text/plain", b"")
                return
            number = script.count(run)
            if number == 1 and name != "always":
                self.say(200, "text/event-stream", ANSWER)
            elif name in {"limited", "always"} and (name == "always" or number % 2):
                self.say(429, "application/json", LIMITED, ("Retry-After", "1"))
            elif name == "page":
                self.say(200, "text/html", PAGE)
            elif name == "endless":
                self.drip()
            else:
                self.say(200, "text/event-stream", ANSWER)

        def say(self, status: int, kind: str, body: bytes, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for key, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def drip(self) -> None:
            """Answer with a stream that goes on until the client leaves."""
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.close_connection = True
            try:
                while not script.over.wait(0.05):
                    self.wfile.write(DRIP)
            except OSError:
                pass  # the client left

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


class Server(ThreadingHTTPServer):
    """A server whose clients may leave when they like."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that speaks something else, or leaves, is what is tested."""


@contextmanager
def serving(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run a scripted server and yield its URL."""
    with Server(("127.0.0.1", 0), scripted(script)) as server:
        if tls is not None:
            # Without the handshake in accept, which would hold up all others.
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        script.over.set()
        server.shutdown()
        thread.join()


def until(fact: Callable[[], bool], what: str, *, deadline_s: float = 30.0) -> None:
    """Wait for another process."""
    ends_s = time.monotonic() + deadline_s
    while not fact():
        assert time.monotonic() < ends_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.02)


def start(url: str, path: Path, *options: str | Path, limit: int | None = None) -> subprocess.Popen[str]:
    """Start a quiet run; `limit` is the hard limit of its open files."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIDELIGHT_")}
    command = [sys.executable, "-m", "sidecar", "run", "--url", url, "--out", path, "--listen", "off", "--quiet"]

    def lower() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    return subprocess.Popen(
        [*map(str, command), *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=None if limit is None else lower,  # noqa: PLW1509  no thread of ours holds a lock in the child
    )


def ended(process: subprocess.Popen[str], path: Path) -> Ended:
    """Wait for a command."""
    out, err = process.communicate(timeout=BOUND_S)
    return Ended(code=process.returncode, out=out, err=err, path=path)


def refused(run: Ended, code: int) -> str:
    """Return the one line of a run that was not begun, which leaves nothing behind."""
    assert (code, "", 1) == (run.code, run.out, run.err.count("\n")), run.err
    assert run.err.startswith("sidelight: ")
    assert not run.path.exists()
    return run.err


def answered(path: Path) -> bool:
    """Tell whether each load worker of a run has recorded something of its load."""
    sizes = [log.stat().st_size for log in (path / "raw").glob("requests-*.log")]
    return bool(sizes) and min(sizes) > 3_000


def load_workers(parent: int) -> list[int]:
    """Return the load workers that a run started, in order."""
    listing = Path(f"/proc/{parent}/task/{parent}/children")
    if not listing.exists():
        pytest.skip("needs /proc to find the processes of a run")
    started = [int(child) for child in listing.read_text().split()]
    return [child for child in started if b"loadgen.worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


@contextmanager
def engine() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a simulated engine that may be killed, and yield its URL and process."""
    command = [sys.executable, "-m", "simulator", "--speed-profile", "fast", "--exit-on-eof"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def url(script: Script) -> Iterator[str]:
    """A scripted server for all tests of this file, without TLS."""
    with serving(script) as found:
        yield found


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A scripted server with a certificate that no system knows, and the authority that vouches for it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with serving(Script(), context) as found:
        yield found, cert


def interrupt(process: subprocess.Popen[str], path: Path, number: signal.Signals = signal.SIGINT) -> None:
    until(lambda: answered(path) or process.poll() is not None, "answers")
    process.send_signal(number)


def kill_a_worker(process: subprocess.Popen[str], path: Path) -> None:
    until(lambda: answered(path) or process.poll() is not None, "answers")
    os.kill(load_workers(process.pid)[1], signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: where it goes ({} is the server's host and port), its options, the hard limit of its open files, and what
    is done to it while it goes on.
    """

    url: str
    options: tuple[str, ...] = QUICK
    limit: int | None = None
    deed: Callable[[subprocess.Popen[str], Path], None] | None = None


CASES = {
    "ctrl-c": Case(url="http://{}/good/ctrl-c", options=LONG, deed=interrupt),
    "sigterm": Case(url="http://{}/good/sigterm", options=LONG, deed=partial(interrupt, number=signal.SIGTERM)),
    "deadline": Case(url="http://{}/endless/deadline", options=(*LONG, "--deadline", "2")),
    "limited": Case(url="http://{}/limited/limited"),
    "page": Case(url="http://{}/page/page"),
    "timeout": Case(url="http://{}/endless/timeout", options=(*QUICK, "--request-timeout", "0.5")),
    "drain": Case(url="http://{}/endless/drain", options=(*QUICK, "--drain-timeout", "0.5")),
    "worker": Case(url="http://{}/good/worker", options=(*LONG, "--workers", "2"), deed=kill_a_worker),
    "name": Case(url="http://no-such-host.invalid:8000"),
    "always": Case(url="http://{}/always/always"),
    "tls": Case(url="https://{}/good/tls"),
    "many": Case(
        url="http://{}/good/many",
        options=("--concurrency", "10000", "--requests", "10000", "--warmup", "0"),
        limit=1024,
    ),
}


def launched(case: Case, netloc: str, path: Path) -> Ended:
    """Run a case to its end."""
    with start(case.url.format(netloc), path, *case.options, limit=case.limit) as process:
        if case.deed is not None:
            case.deed(process, path)
        return ended(process, path)


@contextmanager
def launching(cases: Mapping[str, Case], url: str, directory: Path) -> Iterator[Callable[[str], Ended]]:
    """Start all of these runs, a few at a time, since each of them mostly waits; a test takes its own by name."""
    netloc = url.partition("//")[2]
    with ThreadPoolExecutor(4) as pool:
        started: dict[str, Future[Ended]] = {
            name: pool.submit(launched, case, netloc, directory / name) for name, case in cases.items()
        }
        yield lambda name: started[name].result()


@pytest.fixture(scope="module")
def runs(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """All runs of the table, and one whose engine dies."""
    with engine() as (target, server):

        def die(process: subprocess.Popen[str], path: Path) -> None:
            until(lambda: answered(path) or process.poll() is not None, "answers")
            server.kill()

        dead = Case(url=target, options=("--rate", "25", "--duration", "2", "--warmup", "0"), deed=die)
        with launching({"dead": dead, **CASES}, url, tmp_path_factory.mktemp("runs")) as found:
            yield found


@pytest.fixture(scope="module")
def secured(secure: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """Runs against the server with TLS."""
    address, ca = secure
    cases = {
        "plain": Case(url="http://{}/good/plain"),
        "unknown": Case(url="https://{}/good/unknown"),
        "ca": Case(url="https://{}/good/ca", options=(*QUICK, "--ca", str(ca))),
        "insecure": Case(url="https://{}/good/insecure", options=(*QUICK, "--insecure")),
    }
    with launching(cases, address, tmp_path_factory.mktemp("secured")) as found:
        yield found


def kept(run: Ended, **counts: int) -> list[dict[str, Any]]:
    """Return a run's requests when the files agree on how many of each status there are."""
    rows = [row for row in run.requests() if row["phase"] == "measure"]
    told = run.summary["client"]["requests"]
    assert {"sent": len(rows), **Counter(row["status"] for row in rows)} == {
        name: count for name, count in told.items() if count
    }
    assert counts == {name: told[name] for name in counts}
    return rows


@pytest.mark.parametrize("name", ["ctrl-c", "sigterm"])
def test_a_signal_ends_the_run_and_keeps_what_there_was(runs: Callable[[str], Ended], name: str):
    """Exit 130, a report that says so, and every answer up to then."""
    run = runs(name)
    assert (130, "interrupted", "interrupted") == (run.code, run.manifest["status"], run.summary["status"])
    # On a busy machine a line that warns of the generator itself comes before.
    assert "interrupted" in next(line for line in run.out.splitlines() if line.startswith("sidelight "))
    assert "" == run.err
    assert kept(run, failed=0, refused=0)
    assert run.summary["client"]["requests"]["ok"] > 0


def test_a_deadline_stops_the_run(runs: Callable[[str], Ended]):
    """As if the user had stopped it, and it says that it was the deadline; streams are kept as far as they came."""
    run = runs("deadline")
    assert (130, "interrupted") == (run.code, run.manifest["status"])
    assert "! the deadline of 2 s was reached; what was in flight then is cancelled" in run.out
    assert "! the deadline of 2 s was reached; what was in flight then is cancelled\n" == run.err
    rows = kept(run, ok=0, failed=0)
    assert {("cancelled", "cancelled: stopped")} == {(row["status"], row["error"]) for row in rows}
    assert any(row["first_token_ns"] for row in rows)


def test_a_refusal_is_data_and_never_tried_again(runs: Callable[[str], Ended], script: Script):
    """HTTP 429 in the error, whatever Retry-After says; each request was sent once."""
    run = runs("limited")
    assert (0, "complete", "") == (run.code, run.manifest["status"], run.err)
    rows = kept(run, sent=8, ok=4)
    bad = [row for row in rows if row["status"] != "ok"]
    assert {("refused", "http_429: slow down (Retry-After: 1)")} == {(row["status"], row["error"]) for row in bad}
    assert 1 + 8 == script.asked["limited"]


def test_a_page_instead_of_a_stream_is_no_success(runs: Callable[[str], Ended]):
    """A proxy's web page under 200, in every request: exit 3 and one line, and the error says what came."""
    run = runs("page")
    assert (3, 1) == (run.code, run.err.count("\n"))
    assert "none of 8 requests succeeded" in run.err
    rows = kept(run, sent=8, ok=0, failed=8)
    assert all("text/html" in row["error"] for row in rows), rows[0]["error"]


def test_a_stream_that_never_ends_is_given_up(runs: Callable[[str], Ended]):
    """After --request-timeout, with the tokens it had brought; none succeeded, so exit 3."""
    run = runs("timeout")
    assert (3, 1) == (run.code, run.err.count("\n"))
    rows = kept(run, sent=8, failed=8)
    assert all(row["error"].startswith("timeout") for row in rows), rows[0]["error"]
    assert all(row["first_token_ns"] > 0 for row in rows)


def test_a_drain_does_not_wait_for_ever(runs: Callable[[str], Ended]):
    """What is in flight so long after the last submission is cancelled; the run came to its end."""
    run = runs("drain")
    assert (3, "complete") == (run.code, run.manifest["status"])
    rows = kept(run, sent=8, cancelled=8)
    assert {"cancelled: the drain bound was reached"} == {row["error"] for row in rows}


def test_one_dead_worker_of_two_ends_the_run(runs: Callable[[str], Ended]):
    """Exit 3 and one line that names it; what both had recorded is kept."""
    run = runs("worker")
    assert (3, 1, "crashed") == (run.code, run.err.count("\n"), run.manifest["status"])
    assert run.err.startswith("sidelight: load worker 1 ended with code -9")
    rows = [row for row in run.requests() if row["status"] == "ok"]
    # They take the requests in turn.
    assert {0, 1} == {int(row["request_id"].rpartition("-")[2]) % 2 for row in rows}
    assert len(rows) == run.summary["client"]["requests"]["ok"] > 0


def test_a_server_that_dies_fails_its_requests_and_not_the_run(runs: Callable[[str], Ended]):
    """What had been answered stays; what was in flight, and all that came later, says how it failed."""
    run = runs("dead")
    assert (0, "complete") == (run.code, run.manifest["status"])
    rows = kept(run)
    assert run.summary["client"]["requests"]["ok"] > 0
    errors = {row["error"] for row in rows if row["status"] != "ok"}
    assert any("Connection refused" in error for error in errors), errors
    assert all(error.startswith(("reset: ", "connect: ")) for error in errors), errors


def test_a_name_that_is_none_is_exit_3(runs: Callable[[str], Ended]):
    """Before anything is recorded."""
    line = refused(runs("name"), 3)
    assert line.startswith("sidelight: cannot connect to no-such-host.invalid:8000: no such host")


def test_refused_from_the_first_request_on_is_exit_3(runs: Callable[[str], Ended]):
    """A server that answers a request for one token with 429 is not loaded at all."""
    assert "HTTP 429 to a request for one token: slow down" in refused(runs("always"), 3)


def test_tls_to_a_server_without_it_is_exit_3(runs: Callable[[str], Ended]):
    """The line asks for what it is."""
    line = refused(runs("tls"), 3)
    assert "TLS failed" in line
    assert line.endswith("is it an http:// server?\n")


def test_more_connections_than_open_files_is_exit_2(runs: Callable[[str], Ended]):
    """Told before the run, with the number there is and the cure."""
    line = refused(runs("many"), 2)
    assert line.startswith("sidelight: --concurrency 10000: ")
    assert "its limit is 1024" in line
    assert "ulimit -Hn" in line


def test_no_tls_to_a_server_with_it_is_exit_3(secured: Callable[[str], Ended]):
    """The line asks for what it is."""
    assert refused(secured("plain"), 3).endswith("is it an https:// server?\n")


def test_an_unknown_certificate_is_exit_3(secured: Callable[[str], Ended]):
    """With OpenSSL's reason and both cures."""
    line = refused(secured("unknown"), 3)
    assert "self-signed certificate" in line
    assert "--ca FILE" in line
    assert "--insecure" in line


@pytest.mark.parametrize("name", ["ca", "insecure"])
def test_a_certificate_is_good_by_its_authority_or_by_decree(secured: Callable[[str], Ended], name: str):
    """For the questions before the load, for the load, and for the metrics page at the same host."""
    run = secured(name)
    assert (0, "") == (run.code, run.err)
    kept(run, sent=8, ok=8)
    assert run.manifest["metrics_targets"][0]["url"].startswith("https://")
