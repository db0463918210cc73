"""What views and exporters cost a run: lateness of submissions and CPU with all of them on, beside a run with none.

    python benchmarks/views.py --bench DIR [--pairs 5] [--rate 100] [--seconds 20]

DIR holds `mockllm.c`, as for load.py. All on: the live page scraped each second, remote write to a receiver here every
5 s, and behind the load every report format and an OTLP export. None: no live page, JSON alone. The pairs alternate,
since other work on the machine moves both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server

FORMATS = "json,csv,jsonl,parquet,html,text,markdown,junit,openmetrics"


class _Taker(BaseHTTPRequestHandler):
    """A receiver that takes everything and looks at nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Say nothing."""


@contextmanager
def taking() -> Iterator[str]:
    """Give the URL of a receiver."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Taker) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def free_port() -> int:
    with closing(create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])


def run(url: str, receiver: str, out: Path, given: argparse.Namespace, *, views: bool) -> dict[str, float]:
    """Run one load; return the lateness of its submissions, ms."""
    page = free_port()
    load = ["--url", url, "--model", "mock-model", "--rate", str(given.rate), "--duration", str(given.seconds)]
    load += ["--warmup", "2", "--output-tokens", "50", "--input-tokens", "50", "--quiet", "--out", str(out)]
    load += ["--slo", "ttft_p99<500ms,error_rate<1%,goodput>1"]
    extra = ["--listen", "off", "--formats", "json"]
    if views:
        extra = ["--listen", f"127.0.0.1:{page}", "--formats", FORMATS, "--otlp-export", receiver]
        extra += ["--prometheus-write", f"{receiver}/api/v1/write"]
    command = [sys.executable, "-m", "sidelight", "run", *load, *extra]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(1.0)
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics") as reply:
                reply.read()
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    late = summary["self_check"]["schedule_lateness_ms"]
    return {name: late[name] for name in ("p50", "p99", "max")}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bench", type=Path, required=True, help="directory of mockllm.c")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, taking() as receiver:
        mock, port = Path(name) / "mockllm", free_port()
        subprocess.run(
            [shutil.which("gcc") or "cc", "-O2", "-w", "-o", mock, given.bench / "mockllm.c", "-lm"], check=True
        )
        with subprocess.Popen([mock, "--port", str(port), "--ttft-ms", "50", "--itl-ms", "20"]) as server:
            rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
            for pair in range(given.pairs):
                for views in (False, True) if pair % 2 else (True, False):
                    out = Path(name) / f"{pair}-{views}"
                    row = run(f"http://127.0.0.1:{port}", receiver, out, given, views=views)
                    rows[views].append(row)
                    numbers = ", ".join(f"{key} {value:.3g}" for key, value in row.items())
                    print(f"{'all on' if views else 'none  '}: {numbers}", flush=True)
            server.terminate()
    for views, measured in rows.items():
        shown = {key: statistics.median(row[key] for row in measured) for key in ("p50", "p99", "max")}
        print(f"median of {len(measured)}, {'all on' if views else 'none'}: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
