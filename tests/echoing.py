"""A server that repeats in every answer what it was sent (headers, query, body), beside what a terminal and a
spreadsheet would obey; and a collector that keeps what reaches it.
"""

from __future__ import annotations

import gzip
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from processes import Server

MODEL = "m\x1b]0;owned\x07\x1b[2J\u202eevil[bold red]"
VERSION = "1.0\x1b[31m\x9b31m\u2066"
FORMULA = "=cmd|' /C calc'!A0"


@dataclass(slots=True, kw_only=True)
class Echoing:
    """Where it is, what it was sent, and what exporters sent to it."""

    url: str = ""
    sent: list[str] = field(default_factory=list)
    exports: list[bytes] = field(default_factory=list)


def _answering(echo: Echoing) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            sent = self.repeat(b"")
            if self.path.endswith("/models"):
                models = {"data": [{"id": MODEL, "object": "model", "owned_by": sent}]}
                self.say(200, "application/json", json.dumps(models).encode())
            elif self.path.endswith("/version"):
                self.say(200, "application/json", json.dumps({"version": VERSION}).encode())
            elif "/metrics" in self.path:
                self.say(200, "text/plain; version=0.0.4", page(sent).encode())
            else:
                self.say(404, "text/plain", sent.encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.startswith(("/v1/traces", "/v1/metrics")):
                is_packed = self.headers.get("Content-Encoding") == "gzip"
                echo.exports.append(gzip.decompress(body) if is_packed else body)
                self.say(200, "application/x-protobuf", b"")
                return
            sent = self.repeat(body)
            if self.path.startswith("/refusing"):
                self.say(401, "application/json", json.dumps({"error": {"message": f"{sent} {FORMULA}"}}).encode())
            elif self.path.endswith("/completions"):
                delta = {"choices": [{"index": 0, "delta": {"content": sent}, "finish_reason": "length"}]}
                usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 200}}
                events = (json.dumps(delta), json.dumps(usage), "[DONE]")
                self.say(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())
            else:
                self.say(404, "text/plain", sent.encode())

        def repeat(self, body: bytes) -> str:
            sent = f"{self.path} {dict(self.headers)} {body.decode()} {VERSION}"
            echo.sent.append(sent)
            return sent

        def say(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
                self.send_header(name, value)
            self.send_header("X-You-Sent", str(self.headers.get("Authorization")))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


def page(sent: str) -> str:
    """Return a page of an engine whose labels and helps are what it was sent, formulas and controls."""
    quoted = sent.replace("\\", "\\\\").replace('"', '\\"')
    return (
        f"# HELP vllm:num_requests_running {FORMULA} {VERSION}\n# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{model_name="{FORMULA}",seen="{quoted}"}} 0\n'
        f'# TYPE zz counter\nzz_total{{a="@SUM(1)",b="-2+3",c="\x1b[31mx"}} 4\n'
    )


@contextmanager
def echoing(tls: ssl.SSLContext | None = None) -> Iterator[Echoing]:
    """Serve on a free port."""
    echo = Echoing()
    with Server(("127.0.0.1", 0), _answering(echo)) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        echo.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        yield echo
        server.shutdown()
        thread.join()
