"""What a run refuses, as a user sees it: a process that ends at once, with one line and the right exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadgen import workloads


@contextmanager
def answering(status: int, kind: str, body: bytes) -> Iterator[str]:
    """Run a server that answers everything with this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def refused(code: int, *arguments: str | Path) -> str:
    """Return the one line of a run that was not begun."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIDELIGHT_")}
    command = [sys.executable, "-m", "sidecar", "run", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (code, "", 1) == (run.returncode, run.stdout, run.stderr.count("\n")), run.stderr
    assert run.stderr.startswith("sidelight: ")
    return run.stderr


@pytest.mark.parametrize(
    ("status", "kind", "body", "said"),
    [
        (200, "text/html", b"<!doctype html><title>Shop</title>", "this is a web page, not an OpenAI-compatible"),
        (404, "text/html", b"<h1>Not found</h1>", "HTTP 404; this is not an OpenAI-compatible endpoint"),
        (200, "application/json", b'{"hello": "world"}', "not a list of models"),
        (401, "application/json", b'{"error": "no key"}', "SIDELIGHT_API_KEY"),
    ],
    ids=["web page", "not found", "other JSON", "unauthorised"],
)
def test_something_else_at_the_url_is_exit_3(tmp_path: Path, status: int, kind: str, body: bytes, said: str):
    """What it is, in one line, and no run directory."""
    with answering(status, kind, body) as url:
        line = refused(3, "--url", url, "--out", tmp_path / "run")
    assert said in line
    assert url in line
    assert not (tmp_path / "run").exists()


def test_nothing_at_the_url_is_exit_3(tmp_path: Path):
    """A connection refused, in one line, and no run directory."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        host = f"127.0.0.1:{reserved.getsockname()[1]}"
        assert f"cannot connect to {host}: Connection refused" in refused(
            3, "--url", f"http://{host}", "--out", tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


def test_a_model_must_be_one_that_is_served(tmp_path: Path):
    """The line lists those that are; where there are several, one has to be named."""
    models = json.dumps({"data": [{"id": "llama"}, {"id": "qwen", "max_model_len": 4096}]}).encode()
    with answering(200, "application/json", models) as url:
        unknown = refused(2, "--url", url, "--model", "gpt-9", "--out", tmp_path / "run")
        unnamed = refused(2, "--url", f"{url}/v1/", "--out", tmp_path / "run")
    assert unknown == f"sidelight: --model gpt-9: not served; {url}/v1/models serves: llama, qwen\n"
    assert unnamed == f"sidelight: --model is missing; {url}/v1/models serves: llama, qwen\n"
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workload", "synthetic"], ", ".join(workloads.NAMES)),
        (["--rate", "0"], "--rate 0: must be greater than 0"),
        (["--rate", "-3"], "--rate -3: must be greater than 0"),
        (["--rate", "1", "--concurrency", "2"], "exclude each other"),
    ],
    ids=" ".join,
)
def test_a_bad_option_is_exit_2_before_anybody_is_asked(tmp_path: Path, arguments: list[str], said: str):
    """The field and what would be valid; nothing is contacted, nothing recorded."""
    line = refused(2, "--url", "http://192.0.2.1", *arguments, "--out", tmp_path / "run")
    assert said in line
    assert [] == list(tmp_path.iterdir())


def test_a_typo_in_a_file_is_exit_2(tmp_path: Path):
    """With the key, the nearest valid one, and the file."""
    (tmp_path / "c.yaml").write_text("url: http://192.0.2.1\nscrape-intervall: 1\n", encoding="utf-8")
    line = refused(2, "--config", tmp_path / "c.yaml")
    assert (
        f"sidelight: --config {tmp_path}/c.yaml: unknown key 'scrape-intervall'; did you mean 'scrape_interval'?\n"
    ) == line


def test_a_directory_in_use_is_exit_2(tmp_path: Path):
    """And what is in it stays as it was."""
    (tmp_path / "manifest.json").write_text("{}")
    line = refused(2, "--url", "http://192.0.2.1", "--out", tmp_path)
    assert line.startswith(f"sidelight: --out {tmp_path}: holds another run")
    assert ["{}"] == [path.read_text() for path in tmp_path.iterdir()]
