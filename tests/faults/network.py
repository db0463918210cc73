"""Hostile replies, pages and exports beside honest ones: each gets its sentence, and the honest ones what is theirs.

All replies come in one run, all pages and exports in one scraper: the hostile ones harm no other.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from faults.cases import Case, Kind, Setting, Try
from faults.hostile import AGAIN, EXPORTS, HANG, PAGES, REPLIES, RESET, STREAM, Attack, Hostile, chunk
from odd_exports import odd_export, over_http
from processes import ANSWER, METRICS, MODELS, QUIET, sidelight
from scraper_process import started

from scraper.series.log import FailureRecord

TIMEOUT_S = 20.0
PAGE_TIMEOUT_S = 15.0
HONEST_EVERY = 5  # requests, of which one is answered well
_CASE = re.compile(rb"case:([a-z0-9.-]+)")
_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")
Answer = Callable[[bytes, bytes], Sequence[bytes]]  # of a path and a body
Said = Mapping[str, set[str]]  # by row: the different sentences
TABLES: Mapping[str, Mapping[str, Hostile | Attack]] = {"reply": REPLIES, "page": PAGES, "export": EXPORTS}
EXPECTED = {f"{side}:{name}": each.said for side, table in TABLES.items() for name, each in table.items()}


def _read(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the path and the body of a request; empty ones where the client left."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return b"", b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    stated = _LENGTH.search(head)
    length = int(stated[1]) if stated else 0
    while len(body) < length and (piece := connection.recv(65536)):
        body += piece
    return head.split(b" ")[1], body


def _write(connection: socket.socket, pieces: Sequence[bytes]) -> None:
    repeats = False
    for piece in pieces:
        if piece == AGAIN:
            repeats = True
        elif piece == RESET:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif piece == HANG:
            connection.recv(1)  # until the client leaves
        else:
            connection.sendall(piece)
            while repeats:
                connection.sendall(piece)
                time.sleep(0.002)  # without end, but not as fast as can be: that would be another test


def _serve(connection: socket.socket, answer: Answer) -> None:
    with connection, suppress(OSError):
        path, body = _read(connection)
        if path:
            _write(connection, answer(path, body))


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Answer one request a connection with what `answer` gives for it, and give the URL."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=_serve, args=(listener.accept()[0], answer), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def _reply(path: bytes, body: bytes) -> Sequence[bytes]:
    """Answer as the prompt says, but what is asked before the load, which is answered well."""
    if path.endswith(b"/models"):
        return (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + MODELS,)
    if path == b"/metrics":
        return (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + METRICS,)
    if not path.endswith(b"/completions"):
        return (b"HTTP/1.1 404 N\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",)
    name = _CASE.search(body)
    hostile = REPLIES.get(name[1].decode()) if name and b'"max_tokens":1}' not in body.replace(b" ", b"") else None
    return hostile.pieces if hostile else (STREAM + chunk(ANSWER) + b"0\r\n\r\n",)


def replies(place: Path) -> Said:
    """Send a request for each reply, honest ones between them, and return what the run says of each."""
    names = ["honest"]
    for number, name in enumerate(REPLIES):
        names += [name] if number % HONEST_EVERY else ["honest", name]
    lines = [json.dumps({"prompt": f"case:{name}", "max_tokens": 7}) for name in names]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    with serving(_reply) as url:
        run = sidelight(
            "run", url, "--prompts", place / "prompts.jsonl", "--concurrency", "12", "--requests", str(len(names)),
            "--warmup", "0", "--request-timeout", f"{TIMEOUT_S:g}", "--workers", "1", "--seed", "1",
            "--out", place / "run", *QUIET, path=place / "run",
        )  # fmt: skip
    if run.code != 0 or "Traceback" in run.err:
        raise AssertionError(f"exit {run.code}: {run.err}")
    shown = (run.path / "report.txt").read_text() + run.out + run.err
    if control := re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown):
        raise AssertionError(f"a control character is shown: {control[0]!r}")
    rows = [row for row in run.requests() if row["phase"] == "measure"]
    if len(rows) != len(names):
        raise AssertionError(f"{len(rows)} of {len(names)} requests are there")
    said: dict[str, set[str]] = {}
    for name, row in zip(names, rows, strict=True):
        said.setdefault(f"reply:{name}", set()).add(f"{row['status']} {row['error'] or ''}".strip())
    return said


async def _scraped(place: Path) -> Said:
    """Scrape every page several times and send every export; return what is said of each, by name."""
    clock_offset_ns = time.time_ns() - time.monotonic_ns()
    anywhere = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "clock_offset_ns": clock_offset_ns}

    def answer(path: bytes, _: bytes) -> Sequence[bytes]:
        return PAGES[path.decode().rpartition("/")[2]].pieces

    with serving(answer) as url:
        urls = {f"{url}/metrics/{name}": name for name in PAGES}
        spec = {"interval_s": 0.5, "timeout_s": PAGE_TIMEOUT_S, "clock_offset_ns": clock_offset_ns, "spans": anywhere}
        spec |= {
            "spans_out": str(place / "spans-0.log"),
            "stderr": str(place / "scraper.stderr"),
            "limit_bytes": 4 << 20,
        }
        async with started(place, targets=list(urls), **spec) as worker:
            ports = await worker.event("listening")
            await worker.event("ready", over=("stale", "fresh"))
            said: dict[str, set[str]] = {}
            for name, attack in EXPORTS.items():
                headers = {key.replace("-", "_"): value for key, value in attack.headers}
                status, text = await over_http(ports["http_port"], attack.body, **headers)
                said[f"export:{name}"] = {f"{status} {text.decode(errors='replace')}".strip()}
                honest, _ = await over_http(ports["http_port"], odd_export(time.time_ns()))
                if honest != 200:
                    raise AssertionError(f"an honest export behind {name}: {honest}")
            worker.send({"cmd": "settle", "seconds": 0})
            await worker.event("settled", over=("stale", "fresh"))
            if await worker.ended():
                raise AssertionError(f"the scraper ended: {(place / 'scraper.stderr').read_text()[-500:]}")
    if "Traceback" in (place / "scraper.stderr").read_text():
        raise AssertionError((place / "scraper.stderr").read_text()[-500:])
    for record in worker.records():
        error = record.error if isinstance(record, FailureRecord) else "a page"
        said.setdefault(f"page:{urls[record.url]}", set()).add(error)
    return said


def fits(said: str, expected: str) -> bool:
    """Tell whether what is said begins as expected, and has the words that are expected behind it (...)."""
    beginning, *words = expected.split("...")
    is_good = expected in ("ok", "a page", "200")
    return said == expected if is_good else said.startswith(beginning) and all(word in said for word in words)


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    @cache
    def scene(is_run: bool) -> Said | str:
        try:
            return replies(setting.place) if is_run else asyncio.run(_scraped(setting.place))
        except AssertionError as error:
            return str(error)

    def attempt(case: Case) -> str:
        said = scene(case.row.startswith("reply:"))
        if isinstance(said, str):
            return said
        texts, expected = said.get(case.row, set()), EXPECTED[case.row]
        if case.row.startswith("page:"):
            # Of many scrapes some may come late on a busy machine, and of a silent page others are left out meanwhile.
            texts = {text for text in texts if text.startswith("timeout") == expected.startswith("timeout")}
        return "" if texts and all(fits(text, expected) for text in texts) else f"expected {expected!r}, and is {texts}"

    yield attempt


NETWORK = Kind(
    name="network",
    rows=dict.fromkeys(EXPECTED, 1),
    opened=opened,
    repeats=False,
)
