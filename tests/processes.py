"""Runs as processes of their own, and servers for them that answer as the first name of the path says."""

from __future__ import annotations

import json
import os
import resource
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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow.parquet as pq
import pytest
from forking import Forked, can_fork, name_of
from waiting import BOUND_S

from sidelight.loadgen.recorder import STAT_NS
from sidelight.loadgen.records import RequestPart, WorkerStat, read_log

MODELS = json.dumps({"data": [{"id": "scripted"}]}).encode()
ANSWER = (
    b'data: {"choices":[{"index":0,"delta":{"content":"w"},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    b"data: [DONE]\n\n"
)
DRIP = b'data: {"choices":[{"index":0,"delta":{"content":"w"},"finish_reason":null}]}\n\n'
METRICS = b"# TYPE up gauge\nup 1\n"
PAGE = b"<!doctype html><title>Bad gateway</title>"
STRANGE = (b"ignore_eos", b"stream_options")
LIMITED = b'{"error":{"message":"slow down"}}'
QUIET = ("--listen", "off", "--quiet")
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
    """A server's memory: how often each run asked for a completion, with which connections and headers, and whether
    all is over.
    """

    asked: Counter[str] = field(default_factory=Counter)
    seen: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def count(self, run: str) -> int:
        """Count a completion and return its number, from 1: the first is the preflight's."""
        with self.lock:
            self.asked[run] += 1
            return self.asked[run]


def scripted(script: Script) -> type[BaseHTTPRequestHandler]:
    """Make what answers by the first name of the path, counted by its second: the run's own.

    A preflight is answered well, but under `always`, and not at all under `mute`; `strict` refuses STRANGE fields.
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
            body = self.rfile.read(int(self.headers["Content-Length"]))
            _, name, run, *rest = self.path.split("/")
            if rest[-1] != "completions":
                self.say(404, "text/plain", b"")
                return
            number = script.count(run)
            script.seen.append((self.client_address[1], dict(self.headers)))
            if name == "strict" and (field := next((field for field in STRANGE if field in body), b"")):
                refusal = b'{"error":{"message":"Unrecognized request argument supplied: %b"}}' % field
                self.say(400, "application/json", refusal)
            elif name == "mute":
                script.over.wait()
            elif number == 1 and name != "always":
                self.say(200, "text/event-stream", ANSWER)
            elif name in {"limited", "always"} and (name == "always" or number % 2):
                self.say(429, "application/json", LIMITED, ("Retry-After", "1"))
            elif name == "page":
                self.say(200, "text/html", PAGE)
            elif name == "endless":
                self.drip()
            elif name == "flood":
                self.drip(pause_s=0.005, filling_bytes=15_000)
            else:
                self.say(200, "text/event-stream", ANSWER)

        def say(self, status: int, kind: str, body: bytes, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for key, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def drip(self, pause_s: float = 0.05, filling_bytes: int = 0) -> None:
            """Answer with a stream that goes on until the client leaves, filled up with what cannot be compressed."""
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.close_connection = True
            try:
                while not script.over.wait(pause_s):
                    self.wfile.write(b": %b\n\n" % os.urandom(filling_bytes).hex().encode() + DRIP)
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
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            script.over.set()
            server.shutdown()
            thread.join()


def until(fact: Callable[[], bool], what: str, *, deadline_s: float = BOUND_S) -> None:
    """Wait for another process."""
    ends_s = time.monotonic() + deadline_s
    while not fact():
        assert time.monotonic() < ends_s, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.02)


class _Bounded(subprocess.Popen[str]):
    """A command that does not outlive the block of a test that fails; its children end with it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.poll() is None:
            self.kill()
        super().__exit__(kind, error, trace)


class Command(_Bounded):
    """A command with an interpreter of its own."""


class ForkedCommand(_Bounded, Forked):
    """A command that finds its imports done."""


def start(
    *arguments: str | Path,
    limit: int | None = None,
    fresh: bool = False,
    stderr: int = subprocess.PIPE,
    **variables: str,
) -> subprocess.Popen[str]:
    """Start a command; `limit` is the hard limit of its open files, `variables` are added to its environment.

    `fresh`: with an interpreter of its own, as users start it.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIDELIGHT_")} | variables

    def lower() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    kind = ForkedCommand if not fresh and limit is None and can_fork(environment) else Command
    return kind(
        [sys.executable, "-m", "sidelight", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        preexec_fn=None if limit is None else lower,  # no thread of ours holds a lock in the child
    )


def ended(process: subprocess.Popen[str], path: Path, *, bound_s: float = BOUND_S) -> Ended:
    """Wait for a command."""
    out, err = process.communicate(timeout=bound_s)
    return Ended(code=process.returncode, out=out, err=err, path=path)


def sidelight(*arguments: str | Path, path: Path = Path(), bound_s: float = BOUND_S, fresh: bool = False) -> Ended:
    """Run a command to its end."""
    with start(*arguments, fresh=fresh) as process:
        return ended(process, path, bound_s=bound_s)


@contextmanager
def engine(*options: str | Path, fresh: bool = False) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a fast simulated engine, and yield its URL and process; `fresh` as for `start`."""
    command = [
        sys.executable,
        "-m",
        "sidelight.simulator",
        "--speed-profile",
        "fast",
        "--exit-on-eof",
        *map(str, options),
    ]
    with (Command if fresh or not can_fork(os.environ) else ForkedCommand)(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process
        assert process.stdin is not None
        process.stdin.close()


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


def finished(path: Path) -> int:
    """Return how many requests a run has recorded to their end."""
    logs = (path / "raw").glob("requests-*.log")
    return sum(isinstance(part, RequestPart) and part.last for log in logs for part in read_log(log))


def children(parent: int) -> dict[int, str]:
    """Return the processes that a process started, in order, each with its command line."""
    listing = Path(f"/proc/{parent}/task/{parent}/children")
    if not listing.exists():
        pytest.skip("needs /proc to find the processes of a run")
    return {int(pid): Path(f"/proc/{pid}/cmdline").read_text() for pid in listing.read_text().split()}


def child_processes(parent: int, *modules: str) -> list[int]:
    """Return the processes that a process started to run one of these modules, in order."""
    names = {*modules, *map(name_of, modules)}
    return [
        child
        for child, command in children(parent).items()
        if not names.isdisjoint((*command.split("\0"), Path(f"/proc/{child}/comm").read_text().rstrip("\n")))
    ]


def load_workers(parent: int) -> list[int]:
    """Return the load workers that a run started, in order."""
    return child_processes(parent, "sidelight.loadgen.worker")


def state(process: int) -> str:
    """Return the state of a process in the system's letters: R runs or waits for a processor, S sleeps."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def alive(process: int) -> bool:
    """Tell whether a process still runs; one that waits to be reaped does not."""
    return state(process) not in ("", "Z")


def is_held_up(process: int) -> bool:
    """Tell whether a process wants to go on: it runs, waits for a processor, or for the disk."""
    return state(process) in ("R", "D")


def recorded_until(path: Path, now_ns: int, *, is_held_up: bool) -> int:
    """Return up to when a run must be recorded whole: a second before now, without the time in which its worker, which
    notes several times a second that it runs, had no processor. Whether that is so now is to be stated: that it does
    not write proves nothing.
    """
    stats = (record for record in read_log(path / "raw" / "requests-0.log") if isinstance(record, WorkerStat))
    stamps_ns = [*(stat.at_ns for stat in stats), *([now_ns] if is_held_up else [])]
    until_ns = now_ns - 10**9
    for before_ns, after_ns in reversed(list(pairwise(stamps_ns))):
        if after_ns > until_ns and after_ns - before_ns > 2 * STAT_NS:
            until_ns -= after_ns - before_ns
    return until_ns


def interrupt(process: subprocess.Popen[str], path: Path, number: signal.Signals = signal.SIGINT) -> None:
    until(lambda: answered(path) or process.poll() is not None, "answers")
    process.send_signal(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run: where it goes ({} is the server's host and port), its options, the hard limit of its open files, and what
    is done to it while it goes on.
    """

    url: str
    options: tuple[str, ...] = QUICK
    limit: int | None = None
    deed: Callable[[subprocess.Popen[str], Path], None] | None = None


def launched(case: Case, netloc: str, path: Path) -> Ended:
    """Run a case to its end."""
    url = case.url.format(netloc)
    with start("run", "--url", url, "--out", path, *QUIET, *case.options, limit=case.limit) as process:
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


def agreed_rows(run: Ended, **counts: int) -> list[dict[str, Any]]:
    """Return a run's requests when the files agree on how many of each status there are."""
    rows = [row for row in run.requests() if row["phase"] == "measure"]
    totals = run.summary["client"]["requests"]
    assert {"sent": len(rows), **Counter(row["status"] for row in rows)} == {
        name: count for name, count in totals.items() if count
    }
    assert counts == {name: totals[name] for name in counts}
    return rows
