"""What a command refuses: one line, the right exit code, and nothing recorded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from certificates import Authority
from processes import QUICK, Ended, Script, serving

from sidelight.sidecar.cli.measuring import free_pair

Sidelight = Callable[..., Ended]


@contextmanager
def answering(status: int, kind: str, body: bytes) -> Iterator[str]:
    """Run a server that answers everything with this, and yield its URL."""

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


@pytest.fixture
def refusal(sidelight: Sidelight) -> Callable[..., str]:
    """Return the one line of a command that was not begun."""

    def run(code: int, *arguments: str) -> str:
        ended = sidelight(*arguments)
        assert (code, "", 1) == (ended.code, ended.out, ended.err.count("\n")), ended.err
        assert ended.err.startswith("sidelight: ")
        assert [] == list(Path().iterdir())
        return ended.err

    return run


@pytest.mark.parametrize(
    ("status", "kind", "body", "code"),
    [
        (200, "text/html", b"<!doctype html><title>Shop</title>", "target.other-api"),
        (404, "text/html", b"<h1>Not found</h1>", "target.other-api"),
        (500, "text/plain", b"Internal Server Error", "target.server-error"),
        (200, "application/json", b'{"hello": "world"}', "target.other-api"),
        (401, "application/json", b'{"error": "no key"}', "target.unauthorized"),
    ],
    ids=["web page", "not found", "failing", "other JSON", "unauthorised"],
)
def test_something_else_at_the_url_is_exit_3(
    refusal: Callable[..., str], status: int, kind: str, body: bytes, code: str
):
    """What it is, and where."""
    with answering(status, kind, body) as url:
        line = refusal(3, "run", "--url", url)
    assert line.endswith(f" [{code}]\n")
    assert url in line


def test_of_several_models_one_has_to_be_named(refusal: Callable[..., str]):
    """The line lists them."""
    models = json.dumps({"data": [{"id": "llama"}, {"id": "qwen", "max_model_len": 4096}]}).encode()
    with answering(200, "application/json", models) as url:
        unnamed = refusal(2, "run", "--url", f"{url}/v1/")
    assert unnamed.endswith("llama, qwen [model.missing]\n")
    assert url in unnamed


@pytest.mark.parametrize("lengths", [("--input-tokens", "4097"), ("--input-tokens", "4000", "--output-tokens", "97")])
def test_lengths_over_the_models_are_exit_2(refusal: Callable[..., str], lengths: tuple[str, ...]):
    """Before any load, which would be another than the header says; the line names options and limit."""
    models = json.dumps({"data": [{"id": "qwen", "max_model_len": 4096}]}).encode()
    with answering(200, "application/json", models) as url:
        line = refusal(2, "run", "--url", url, *lengths)
    assert line.startswith(f"sidelight: {' '.join(lengths)}: qwen takes 4096 tokens ")
    assert line.endswith(" [model.length]\n")


def test_a_directory_in_use_is_exit_2(sidelight: Sidelight, tmp_path: Path):
    """And what is in it stays as it was."""
    (tmp_path / "manifest.json").write_text("{}")
    run = sidelight("run", "--url", "http://192.0.2.1", "--out", tmp_path)
    assert (2, "", 1) == (run.code, run.out, run.err.count("\n"))
    assert run.err.startswith(f"sidelight: --out {tmp_path}: holds another run")
    assert ["{}"] == [path.read_text() for path in tmp_path.iterdir()]


def test_a_host_that_does_not_exist_is_exit_3(refusal: Callable[..., str]):
    line = refusal(3, "run", "--url", "http://no-such-host.invalid:8000", *QUICK)
    assert line.startswith("sidelight: cannot connect to no-such-host.invalid:8000: no such host")
    assert line.endswith(" [target.unreachable]\n")


def test_a_server_that_refuses_one_token_or_speaks_no_tls_is_exit_3(refusal: Callable[..., str]):
    """One that answers the request before the load with 429 is not loaded; for TLS the line asks for what it is."""
    with serving(Script()) as url:
        always = refusal(3, "run", "--url", f"{url}/always/always", *QUICK)
        tls = refusal(3, "run", "--url", f"{url.replace('http', 'https')}/good/tls", *QUICK)
    assert "slow down" in always
    assert always.endswith(" [target.refused]\n")
    assert "TLS failed" in tls
    assert tls.endswith("is it an http:// server? [target.unreachable]\n")


def test_a_server_with_tls_that_is_not_trusted_is_exit_3(refusal: Callable[..., str], authority: Authority):
    """Asked without TLS the line asks for what it is; an unknown certificate has OpenSSL's reason and both cures."""
    with serving(Script(), authority.serving("solo")) as url:
        plain = refusal(3, "run", "--url", f"{url.replace('https', 'http')}/good/plain", *QUICK)
        unknown = refusal(3, "run", "--url", f"{url}/good/unknown", *QUICK)
    assert plain.endswith("is it an https:// server? [target.unreachable]\n")
    for words in ("self-signed certificate", "--ca FILE", "--insecure"):
        assert words in unknown


def test_a_server_that_wants_a_certificate_is_exit_3_without_one(
    refusal: Callable[..., str], sidelight: Sidelight, authority: Authority
):
    """The line names the option. Why the server hung up it says where that could be read before the wire broke.

    Doctor says of a server what a run would meet there, the metrics page included.
    """
    pair = ("--cert", authority.path("unrelated.pem"), "--key", authority.path("unrelated.key"))
    with serving(Script(), authority.serving("solo", ask_client="unrelated.pem")) as url:
        trusting = ("--url", f"{url}/good/nobody", "--ca", authority.path("solo.pem"))
        assert "--cert" in refusal(3, "run", *trusting, *QUICK)
        for named in (True, False):
            done = sidelight("doctor", *trusting, *(pair if named else ()))
            assert (0 if named else 3, "") == (done.code, done.err)
            assert named == ("ok    chat streams" in done.out)
            assert named == ("/metrics: 1 series" in done.out)
            assert named != ("(--cert)" in done.out or "--cert FILE" in done.out)


def test_a_watch_does_not_take_the_records_of_requests(refusal: Callable[..., str]):
    """They would be gone for everybody else."""
    url = "http://127.0.0.1:9/perf_metrics"
    assert f"--metrics {url}: a watch does not read /perf_metrics" in refusal(2, "watch", "--metrics", url)


@pytest.mark.parametrize(
    ("command", "option"), [("run", "--listen"), ("watch", "--listen"), ("watch", "--otlp-listen")]
)
def test_an_address_in_use_is_said_before_anything_is_recorded(refusal: Callable[..., str], command: str, option: str):
    """With the option and the address."""
    options = {"watch": {"--listen": "127.0.0.1:0", "--otlp-listen": "127.0.0.1:0"}}.get(command, {})
    with serving(Script()) as url, socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        asked = ("--url", f"{url}/good/listen", "--quiet") if command == "run" else ()
        used = [word for pair in (options | {option: address}).items() for word in pair]
        assert refusal(2, command, *asked, *used).startswith(f"sidelight: {option} {address}: ")


@pytest.mark.parametrize("taken", [0, 1], ids=["grpc", "http"])
def test_each_address_of_the_receiver_is_looked_at(refusal: Callable[..., str], taken: int):
    """With the option, the address and the cure."""
    address = free_pair()
    port = int(address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port + taken)):
        line = refusal(2, "scrape", "--otlp-listen", address)
    assert line.startswith(f"sidelight: --otlp-listen {address}: cannot listen on 127.0.0.1:{port + taken}: ")
    assert line.endswith(" [listen.in-use]\n")
