"""Hostile replies, pages and exports beside honest ones: each gets its sentence, and the honest ones what is theirs.

All replies come in one run, all pages and exports in one scraper: the hostile ones harm no other. So it is over TLS,
and where all come at once beside a hundred honest streams, of which the run must be right as in a quiet one.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from subprocess import SubprocessError

import certificates
from certificates import Authority
from faults.cases import Case, Kind, Setting, Try
from faults.honest import TOKENS, Honest, answering
from faults.hostile import EXPORTS, LAST, OVER_TLS, PAGES, REPLIES, STREAM, Attack, Hostile, chunk
from faults.servers import Asked, serving
from odd_exports import odd_export, over_http
from processes import ANSWER, METRICS, MODELS, QUIET, Ended, sidelight
from scraper_process import receiving, started

from sidelight.scraper.series.log import FailureRecord

PAGE_TIMEOUT_S = 15.0
HONEST_EVERY = 5  # requests, of which one is answered well
ROUNDS, CONCURRENCY = 2, 150  # of a crowd, two thirds of which are honest streams
_CASE = re.compile(rb"case:([a-z0-9.-]+)")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
Said = Mapping[str, set[str]]  # by row: the different sentences
TABLES: Mapping[str, Mapping[str, Hostile | Attack]] = {"reply": REPLIES, "page": PAGES, "export": EXPORTS}
EXPECTED = {f"{side}:{name}": each.said for side, table in TABLES.items() for name, each in table.items()}
# Of what is tried over TLS, what the quick part tries, too: nothing that waits for a time-out.
QUICK_OVER_TLS = frozenset((
    "reply:honest", "reply:length-long", "reply:chunk-size-none", "reply:closed", "reply:reset", "reply:reset-body",
    "page:honest", "page:length-long", "page:gzip-cut", "page:closed", "page:reset",
    "export:nothing", "export:random", "export:gzip-bomb",
))  # fmt: skip
# How it comes: alone, over TLS, or all at once beside honest streams, of which as many run once alone.
ROWS: Mapping[str, int] = {
    **dict.fromkeys(EXPECTED, 1),
    **{f"tls:{row}": int(row in QUICK_OVER_TLS) for row in EXPECTED},
    "quiet:honest": 0,
    "crowd:honest": 0,
    **{f"crowd:{row}": 0 for row in EXPECTED},
}


def hostile_reply(asked: Asked) -> Sequence[bytes]:
    """Answer as the prompt says, but what is asked before the load, which is answered well."""
    if asked.path.endswith("/models"):
        return (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + MODELS,)
    if asked.path == "/metrics":
        return (b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + METRICS,)
    if not asked.path.endswith("/completions"):
        return (b"HTTP/1.1 404 N\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",)
    name, is_asked_before = _CASE.search(asked.body), b'"max_tokens":1}' in asked.body.replace(b" ", b"")
    hostile = REPLIES.get(name[1].decode()) if name and not is_asked_before else None
    return hostile.pieces if hostile else (STREAM + chunk(ANSWER) + LAST,)


def loaded(place: Path, urls: Sequence[str], names: Sequence[str], *more: str) -> tuple[Ended, Said]:
    """Send a request for each name, and return the run and what it says of each."""
    lines = [json.dumps({"prompt": f"case:{name}", "max_tokens": TOKENS}) for name in names]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    run = sidelight(
        "run", *(f"--url={url}" for url in urls), "--prompts", place / "prompts.jsonl", "--requests", str(len(names)),
        "--warmup", "0", "--workers", "1", "--seed", "1", "--out", place / "run", *QUIET, *more, path=place / "run",
    )  # fmt: skip
    if run.code != 0 or "Traceback" in run.err:
        raise AssertionError(f"exit {run.code}: {run.err}")
    if control := _CONTROL.search((run.path / "report.txt").read_text() + run.out + run.err):
        raise AssertionError(f"a control character is shown: {control[0]!r}")
    rows = [row for row in run.requests() if row["phase"] == "measure"]
    if len(rows) != len(names):
        raise AssertionError(f"{len(rows)} of {len(names)} requests are there")
    said: dict[str, set[str]] = {}
    for name, row in zip(names, rows, strict=True):
        said.setdefault(f"reply:{name}", set()).add(f"{row['status']} {row['error'] or ''}".strip())
    return run, said


def replies(place: Path, rows: Container[str], authority: Authority | None = None) -> Said:
    """Send a request for each reply, honest ones between them."""
    sent = ["honest"]
    for number, name in enumerate(name for name in REPLIES if f"reply:{name}" in rows):
        sent += [name] if number % HONEST_EVERY else ["honest", name]
    with serving(hostile_reply, tls=authority and authority.serving()) as url:
        trust = ("--ca", authority.path("ca.pem")) if authority else ()
        return loaded(place, [url], sent, "--concurrency", "12", "--request-timeout", "20", *trust)[1]


async def scraped(place: Path, rows: Container[str], authority: Authority | None, is_over: Callable[[], bool]) -> Said:
    """Scrape every page several times and send every export, again until it is over; return what is said of each."""
    access, guard, tls = {}, {}, None
    if authority is not None:
        access = {"ca": authority.path("ca.pem")}
        tls = ssl.create_default_context(cafile=authority.path("ca.pem"))
        guard = {"cert": authority.path("server.pem"), "key": authority.path("server.key")}

    def answer(asked: Asked) -> Sequence[bytes]:
        return PAGES[asked.path.rpartition("/")[2]].pieces

    with serving(answer, tls=authority and authority.serving()) as url:
        urls = {f"{url}/metrics/{name}": name for name in PAGES if f"page:{name}" in rows}
        spec = {"interval_s": 0.5, "timeout_s": PAGE_TIMEOUT_S, "clock_offset_ns": time.time_ns() - time.monotonic_ns()}
        spec |= {"access": access, "stderr": str(place / "scraper.stderr"), "limit_bytes": 4 << 20}
        async with (
            started(place, targets=list(urls), **spec) as worker,
            receiving(place, receiver={"guard": guard}) as receiver,
        ):
            ports = await receiver.event("listening")
            await worker.event("ready", over=("stale", "fresh"))
            said = await attacked(ports["http_port"], rows, tls)
            while not is_over():
                for row, sentences in (await attacked(ports["http_port"], rows, tls)).items():
                    said[row] |= sentences
            worker.send({"cmd": "settle", "seconds": 0})
            await worker.event("settled", over=("stale", "fresh"))
            ends = {"scraper": await worker.ended(), "receiver": await receiver.ended()}
    for who, code in ends.items():
        errors = (place / f"{who}.stderr").read_text()
        if code or "Traceback" in errors:
            raise AssertionError(f"the {who} ended with {code}: {errors[-500:]}")
    for record in worker.records():
        error = record.error if isinstance(record, FailureRecord) else "a page"
        said.setdefault(f"page:{urls[record.url]}", set()).add(error)
    return said


async def attacked(port: int, rows: Container[str], tls: ssl.SSLContext | None) -> dict[str, set[str]]:
    """Send every export, an honest one behind each, and return what is said of them."""
    said: dict[str, set[str]] = {}
    for name, attack in EXPORTS.items():
        if f"export:{name}" in rows:
            headers = {key.replace("-", "_"): value for key, value in attack.headers}
            status, text = await over_http(port, attack.body, tls=tls, **headers)
            said[f"export:{name}"] = {f"{status} {text.decode(errors='replace')}".strip()}
            honest, _ = await over_http(port, odd_export(time.time_ns()), tls=tls)
            if honest != 200:
                raise AssertionError(f"an honest export behind {name}: {honest}")
    return said


def streamed(place: Path, honest: Honest, names: Sequence[str]) -> Said:
    """Send a request for each of these replies and two honest streams for each, all at once."""
    with serving(hostile_reply) as url:
        sent = [each for name in names for each in (name, "honest", "honest")]
        load = ("--concurrency", str(CONCURRENCY), "--request-timeout", "60")
        run, said = loaded(place, [url, *honest.urls], sent, *load)
    stated_ms = run.summary["self_check"]["error_ms"]["ttft"]["p99"]
    rows = [row for number, row in enumerate(run.requests()) if number % 3]
    return {**said, "honest": {honest.wrong(rows, stated_ms)}}


def crowded(place: Path) -> Said:
    """Let all that is hostile come at once beside honest streams."""
    over = threading.Event()
    with answering(place) as honest, ThreadPoolExecutor(1) as pool:
        pages = pool.submit(lambda: asyncio.run(scraped(place, EXPECTED, None, over.is_set)))
        try:
            said = streamed(place, honest, list(REPLIES) * ROUNDS)
        finally:
            over.set()
        return {**pages.result(), **said}


def quiet(place: Path) -> Said:
    """Send honest streams alone, as many as in a crowd."""
    with answering(place) as honest:
        return streamed(place, honest, ["honest"] * len(REPLIES) * ROUNDS)


def fits(said: str, expected: str) -> bool:
    """Tell whether what is said begins as expected, and has the words that are expected behind it (...)."""
    beginning, *words = expected.split("...")
    is_good = expected in ("ok", "a page", "200", "")
    return said == expected if is_good else said.startswith(beginning) and all(word in said for word in words)


def staged(place: Path, how: str, side: str, rows: Container[str]) -> Said:
    """Return what is said of these rows where they come so."""
    if how in ("quiet", "crowd"):
        return quiet(place) if how == "quiet" else crowded(place)
    authority = certificates.established(place) if how == "tls" else None
    if side == "reply":
        return replies(place, rows, authority)
    return asyncio.run(scraped(place, rows, authority, lambda: True))


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    @cache
    def scene(how: str, side: str, *, is_cut: bool) -> Said | str:
        place = setting.place / f"{how}-{side}"
        place.mkdir()
        try:
            return staged(place, how, side, QUICK_OVER_TLS if is_cut else EXPECTED)
        except (AssertionError, SubprocessError) as error:
            return str(error)

    def attempt(case: Case) -> str:
        how, row = case.row.split(":", 1) if case.row not in EXPECTED else ("", case.row)
        side = "reply" if row.startswith("reply:") and how in ("", "tls") else "other"
        said = scene(how, side, is_cut=how == "tls" and not setting.seconds and row in QUICK_OVER_TLS)
        if isinstance(said, str):
            return said
        expected = OVER_TLS.get(row, EXPECTED[row]) if how == "tls" else EXPECTED.get(row, "")
        texts = said.get(row, set())
        if row.startswith("page:"):
            # Of many scrapes some may come late on a busy machine, and of a silent page others are left out meanwhile.
            texts = {text for text in texts if text.startswith("timeout") == expected.startswith("timeout")}
        return "" if texts and all(fits(text, expected) for text in texts) else f"expected {expected!r}, and is {texts}"

    yield attempt


NETWORK = Kind(name="network", rows=ROWS, opened=opened, sizes=dict.fromkeys(ROWS, 1))
