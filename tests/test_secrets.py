"""Planted secrets, and a server that repeats what it is sent: nothing that a run, a watch, an examination or a study
leaves, prints, serves or exports has one of them, nor anything that a terminal obeys.
"""

from __future__ import annotations

import base64
import csv
import json
import re
import signal
import subprocess
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from certificates import Authority
from echoing import Echoing, echoing
from processes import start, until
from sent_spans import body, span

from sidelight.rundir.access import basic
from sidelight.rundir.frames import read_frames

# Each is planted in one place; what a word for it would be, is its name.
SECRETS = {
    name: f"hush{at}{name}x7"
    for at, name in enumerate(
        (
            "apikey", "token", "user", "password", "header", "headerfile", "pageheader", "urluser", "urlpassword",
            "query", "field", "body", "prompt", "path", "collector", "variant", "command", "variable", "page", "listen",
        )
    )
}  # fmt: skip
# As servers get two of them, which stand there in one word.
IN_BASE64 = {
    user: base64.b64encode(f"{SECRETS[user]}:{SECRETS[password]}".encode()).decode()
    for user, password in (("user", "password"), ("urluser", "urlpassword"))
}
UNSEEN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f]")
SHOWN = (".txt", ".html", ".json", ".csv", ".md", ".xml")


@dataclass(slots=True, kw_only=True)
class Left:
    """What commands left: directories, and texts by what printed or served them."""

    paths: list[Path] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    exports: list[bytes] = field(default_factory=list)
    environments: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    def files(self) -> Iterator[Path]:
        return (path for root in self.paths for path in root.rglob("*") if path.is_file())


def started(*arguments: str | Path, fresh: bool = False, **variables: str) -> subprocess.Popen[str]:
    return start(*arguments, fresh=fresh, EXAMPLE_API_TOKEN=SECRETS["variable"], **variables)


def finished(left: Left, name: str, *arguments: str | Path, **variables: str) -> int:
    """Run a command to its end, and keep what it printed."""
    with started(*arguments, **variables) as process:
        out, err = process.communicate()
    left.texts[f"{name}: out"], left.texts[f"{name}: err"] = out, err
    return process.returncode


def certificates_in(directory: Path, authority: Authority) -> Path:
    """Make a directory with certificates and a key."""
    directory.mkdir()
    for name in ("solo.pem", "unrelated.pem", "unrelated.key"):
        (directory / name).write_bytes(Path(authority.path(name)).read_bytes())
    return directory


def run(left: Left, echo: Echoing, authority: Authority, directory: Path) -> None:
    """A run over TLS with all that its options can hold, exported to a collector."""
    hidden = certificates_in(directory / SECRETS["path"], authority)
    (directory / "key").write_text(SECRETS["apikey"] + "\n")
    (directory / "headers").write_text(f"X-Secret: {SECRETS['headerfile']}\n")
    lines = ({"prompt": "a", "max_tokens": 2, "headers": {"X-Tenant-Key": SECRETS["prompt"]}}, {"prompt": "b"})
    (directory / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = echo.url.replace("//", f"//{SECRETS['urluser']}:{SECRETS['urlpassword']}@") + "/metrics"
    path = directory / "run"
    code = finished(
        left, "run", "run", echo.url, "--requests", "12", "--rate", "20", "--warmup", "2",
        "--prompts", directory / "prompts.jsonl", "--api-key", f"@{directory / 'key'}",
        "--header", f"X-Tok: {SECRETS['header']}", "--header", f"@{directory / 'headers'}",
        "--extra-body", json.dumps({"api_token": SECRETS["body"], "max_queue": {"auth": [SECRETS["body"]]}}),
        "--metrics", f"{page}?token={SECRETS['query']}&target=1&shard={SECRETS['field']}",
        "--metrics-header", f"X-Page: {SECRETS['pageheader']}",
        "--ca", hidden / "solo.pem", "--cert", hidden / "unrelated.pem", "--key", hidden / "unrelated.key",
        "--metrics-ca", hidden / "solo.pem", "--otlp-ca", hidden / "solo.pem",
        "--otlp-export", f"{echo.url}/?key={SECRETS['query']}", "--otlp-header", f"X-Otlp: {SECRETS['collector']}",
        "--formats", "json,csv,jsonl,parquet,text,html,markdown,junit,openmetrics", "--listen", "127.0.0.1:0",
        "--out", path, "--verbose", "--json",
    )  # fmt: skip
    assert 0 == code, left.texts["run: err"]
    left.paths.append(path)
    assert 0 == finished(left, "report", "report", path)


def refused(left: Left, echo: Echoing, directory: Path) -> None:
    """An examination, and a run that ends in a traceback: the server's refusal repeats what it was sent."""
    common = ("--api-key", SECRETS["apikey"], "--header", f"X-Tok: {SECRETS['header']}", "--verbose")
    extra = ("--extra-body", json.dumps({"api_token": SECRETS["body"]}))
    page = f"{echo.url}/metrics?api_key={SECRETS['query']}"
    finished(
        left, "doctor", "doctor", echo.url, *common, *extra, "--metrics", page, SIDELIGHT_METRICS_TOKEN=SECRETS["token"]
    )
    finished(left, "refusing doctor", "doctor", f"{echo.url}/refusing", *common, *extra)
    out = ("--out", directory / "refused")
    assert 3 == finished(left, "refused", "run", f"{echo.url}/refusing", *common, *extra, *out, "--requests", "2")
    assert "Traceback" in left.texts["refused: err"]


def watch(left: Left, echo: Echoing, authority: Authority, directory: Path) -> None:
    """A watch of a page and of a span that repeats a key, which is forwarded; it asks for a token itself."""
    path, hidden = directory / "watch", certificates_in(directory / f"watch-{SECRETS['path']}", authority)
    with started(
        "watch", f"{echo.url}/metrics?token={SECRETS['page']}", "--scrape-interval", "0.1", "--listen", "127.0.0.1:0",
        "--otlp-listen", "127.0.0.1:0", "--out", path, "--json", "--verbose",
        "--metrics-header", f"X-Page: {SECRETS['pageheader']}", "--metrics-ca", hidden / "solo.pem",
        "--metrics-cert", hidden / "unrelated.pem", "--metrics-key", hidden / "unrelated.key",
        "--otlp-forward", f"{echo.url}/?key={SECRETS['query']}", "--otlp-header", f"X-Otlp: {SECRETS['collector']}",
        SIDELIGHT_METRICS_USER=f"{SECRETS['user']}:{SECRETS['password']}", SIDELIGHT_LISTEN_TOKEN=SECRETS["listen"],
        fresh=True,  # the system shows the environment with which a process was started, and not that of a fork
    ) as process:  # fmt: skip
        assert process.stderr is not None
        said: list[str] = []
        while not any("spans: gRPC" in line for line in said):
            said.append(process.stderr.readline())
            assert said[-1], said
        served = re.findall(r"http://[^\s,]+/metrics", "".join(said))[0]  # then the one that is scraped
        port = re.findall(r"HTTP/protobuf at 127\.0\.0\.1:(\d+)", "".join(said))[-1]
        attributes = {"http.request.header.authorization": basic(f"{SECRETS['user']}:{SECRETS['password']}")}
        spans = body([span("chat model", "client", attributes=attributes)])
        fetched(f"http://127.0.0.1:{port}/v1/traces", spans)
        until(lambda: "sidelight_engine_" in fetched(served) or process.poll() is not None, "a page with the engine")
        until(lambda: bool(echo.exports) or process.poll() is not None, "the export at the next collector")
        left.environments += environments_of_children(process.pid)
        left.texts |= {f"watch {at}": fetched(served.replace("/metrics", at)) for at in ("/metrics", "/", "/readyz")}
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    left.texts |= {"watch: out": out, "watch: err": "".join(said) + err}
    left.paths.append(path)


def study(left: Left, echo: Echoing, directory: Path) -> None:
    """Two configurations in turn, one set up by a command that prints what it was given."""
    declared = {
        "a": {
            "url": echo.url,
            "header": [f"X-Variant-Key: {SECRETS['variant']}"],
            "extra-body": {"metadata": {"password": SECRETS["body"]}},
            "before": f"echo HF_TOKEN={SECRETS['command']} and $SIDELIGHT_API_KEY; echo $EXAMPLE_API_TOKEN",
        },
        "b": f"{echo.url}",
    }
    (directory / "c.yaml").write_text(json.dumps({"variant": declared}))
    path = directory / "study"
    finished(
        left, "study", "compare", "--config", directory / "c.yaml", "--scale", "short", "--rate", "10", "--pairs", "1",
        "--duration", "1s", "--input-tokens", "4", "--output-tokens", "4", "--out", path, "--verbose", "--json",
        SIDELIGHT_API_KEY=SECRETS["apikey"],
    )  # fmt: skip
    assert (path / "report.txt").exists(), left.texts["study: err"]
    left.paths.append(path)


def environments_of_children(process: int) -> list[str]:
    listing = Path(f"/proc/{process}/task/{process}/children")
    return (
        [Path(f"/proc/{child}/environ").read_text() for child in listing.read_text().split()]
        if listing.exists()
        else []
    )


def fetched(url: str, spans: bytes | None = None) -> str:
    """Get a page of a watch, or send it spans."""
    headers = {"Authorization": f"Bearer {SECRETS['listen']}", "Content-Type": "application/x-protobuf"}
    with urllib.request.urlopen(urllib.request.Request(url, spans, headers)) as reply:  # noqa: S310  on loopback
        text: str = reply.read().decode()
        return text


@pytest.fixture(scope="module")
def left(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """What all of them leave; they go on side by side, since each mostly waits."""
    directory = tmp_path_factory.mktemp("left")
    left = Left()
    with echoing(authority.serving("solo")) as secured, echoing() as echo, ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(run, left, secured, authority, directory),
            pool.submit(refused, left, echo, directory),
            pool.submit(watch, left, echo, authority, directory),
            pool.submit(study, left, echo, directory),
        ]
        for job in jobs:
            job.result()
        assert secured.exports
        assert echo.exports
        left.exports, left.sent = secured.exports + echo.exports, secured.sent + echo.sent
    return left


def contents(path: Path) -> bytes:
    """Return what is in a file, also what is compressed in it."""
    raw = path.read_bytes()
    if path.suffix == ".parquet":
        return repr((pq.read_schema(path), pq.read_table(path).to_pylist())).encode()
    if path.suffix == ".log":
        with suppress(ValueError, msgspec.DecodeError):
            return raw + b"".join(inflated(msgspec.msgpack.decode(payload)) for payload in read_frames(path))
    return raw


def inflated(value: Any) -> bytes:
    """Return all bytes of a record, one after the other."""
    if isinstance(value, list | tuple):
        return b" ".join(map(inflated, value))
    if isinstance(value, dict):
        return inflated([*value, *value.values()])
    if isinstance(value, bytes):
        for bits in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
            with suppress(zlib.error):
                return zlib.decompress(value, bits)
        return value
    return str(value).encode(errors="replace")


def leaks(data: bytes) -> list[str]:
    plain = [name for name, secret in SECRETS.items() if secret.encode() in data]
    return plain + [f"{name} in base64" for name, secret in IN_BASE64.items() if secret.encode() in data]


def test_each_secret_was_sent_where_it_belongs(left: Left):
    """What is missing below was there: the servers had them, but for the two of variables and files' places."""
    sent = "".join(left.sent)
    unsent = {name for name, secret in SECRETS.items() if secret not in sent}
    assert {
        "path", "variable", "command", "user", "password", "urluser", "urlpassword", "collector", "listen",
    } >= unsent  # fmt: skip
    assert basic(f"{SECRETS['user']}:{SECRETS['password']}") in sent
    assert basic(f"{SECRETS['urluser']}:{SECRETS['urlpassword']}") in sent


def test_no_file_has_a_secret(left: Left):
    """Not in raw logs, tables, pages and reports; compressed or not."""
    assert {} == {str(path): leaks(contents(path)) for path in left.files() if leaks(contents(path))}
    names = [name for path in left.files() for name in leaks(str(path.name).encode())]
    assert [] == names


def test_nothing_that_is_printed_served_or_exported_has_a_secret(left: Left):
    """Tracebacks, progress as JSON, the page for Prometheus and the one for browsers, a collector's exports."""
    assert {} == {name: leaks(text.encode()) for name, text in left.texts.items() if leaks(text.encode())}
    assert [] == [name for export in left.exports for name in leaks(export)]


def test_children_inherit_no_secret(left: Left):
    """Neither ours nor others that a variable's name says to be secret."""
    assert [] == [name for environment in left.environments for name in leaks(environment.encode())]


def test_nothing_that_a_person_sees_moves_a_cursor(left: Left):
    """What servers call themselves is escaped on terminals, in reports, pages and tables."""
    texts = left.texts | {str(path): path.read_text() for path in left.files() if path.suffix in SHOWN}
    assert {} == {name: UNSEEN.findall(text)[:5] for name, text in texts.items() if UNSEEN.search(text)}


def test_no_cell_of_a_table_is_a_formula(left: Left):
    """A number may have a sign; a text that begins like a formula has an apostrophe before it."""
    cells = [
        cell
        for path in left.files()
        if path.suffix == ".csv"
        for row in csv.reader(path.read_text().splitlines())
        for cell in row
        if cell.startswith(("=", "+", "-", "@"))
    ]
    assert [] == [cell for cell in cells if not re.fullmatch(r"[+-][\d.einf]+(=.*)?", cell, re.IGNORECASE)]
