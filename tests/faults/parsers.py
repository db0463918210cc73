"""Every parser of what others send or write: what it is fed with, how, and which errors it declares."""

from __future__ import annotations

import base64
import gzip
import json
import lzma
import random
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from faults.cases import REPOSITORY
from golden_files import GOLDEN

from sidelight.correlator.live.requests import SpanRequests
from sidelight.loadgen.http1 import BodyEnd, ProtocolError, dechunk, parse_head
from sidelight.loadgen.plan.prompts import PromptsError
from sidelight.loadgen.plan.traces import TraceError, read_trace
from sidelight.loadgen.plan.workloads import conversation, custom, prompts
from sidelight.loadgen.plan.workloads.fields import WorkloadError
from sidelight.loadgen.protocols import models
from sidelight.loadgen.protocols.reading.failures import UNREADABLE
from sidelight.loadgen.protocols.reading.reply import Reads, Reply
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.methodology.execution.record import StudyRecord, create, open_study
from sidelight.methodology.options import CompareOptions, StudyOptions, SweepOptions
from sidelight.methodology.study.model import Parameters, StudySettings
from sidelight.recorded.directory import read_manifest
from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.system import read_system
from sidelight.rundir.files import read_regular
from sidelight.rundir.framing import Unframer
from sidelight.scraper import perf_metrics
from sidelight.scraper.exposition import MalformedPage, PageReader
from sidelight.scraper.spans.intake.export import ExportRefusal, parsed, unpacked
from sidelight.scraper.spans.log import packed
from sidelight.scraper.spans.requests import engine_spans
from sidelight.sidecar.options import config
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions

CORPUS = REPOSITORY / "tests/data/faults"
DATA = REPOSITORY / "tests/data"
MOST_BYTES = 1 << 20
SECOND_NS = 10**9
OF_FILES = (RunOptions, WatchOptions, StudyOptions, ScrapeOptions, CompareOptions, SweepOptions)
TEXT, OPENMETRICS = "text/plain; version=0.0.4", "application/openmetrics-text; version=1.0.0"
HEADS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 300\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n",
)
NO_BODY = b"HTTP/1.1 204 OK\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parser:
    """`read` takes an input, draws how it comes from a generator, and may write into a directory."""

    corpus: Callable[[], list[bytes]]
    read: Callable[[bytes, random.Random, Path], object]
    declared: tuple[type[Exception], ...] = ()


def files(name: str) -> Callable[[], list[bytes]]:
    """Return what reads the corpus of a name."""
    return lambda: [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]


def chunked(body: bytes, rng: random.Random) -> bytes:
    """Put a body into chunks."""
    ends = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(4)))
    pieces = [body[begin:end] for begin, end in zip([0, *ends], [*ends, len(body)], strict=True) if end > begin]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def page(data: bytes, content_type: str, rng: random.Random) -> None:
    """Read a page first of all, and behind others of its target: with the same result."""
    fresh = _read_page(PageReader(), data, content_type)
    reader = PageReader()
    for before in rng.sample(_pages(), 2):
        _read_page(reader, before, content_type)
    again = _read_page(reader, data, content_type)
    assert fresh == again, "a page is read otherwise behind others"


def _pages() -> list[bytes]:
    return files("pages")()


def _read_page(reader: PageReader, data: bytes, content_type: str) -> tuple[object, ...]:
    try:
        read = reader.read(data, content_type)
    except MalformedPage as error:
        return (str(error),)
    return (read.series, read.values.tobytes())


def reply(data: bytes, rng: random.Random, _: Path) -> None:
    """Read a reply of any protocol, in chunks or not, whole or cut, as it came in several reads: in parts as whole."""
    protocol, head = rng.choice(list(PROTOCOLS.values())), rng.choice(HEADS)
    wire = chunked(data, rng) if b"chunked" in head and rng.random() < 0.9 else data
    ends = sorted({*(rng.randrange(1, len(wire) + 1) for _ in range(3)), len(wire)}) if wire else []
    status = rng.choice((200, 200, 200, 0, 404, 500))
    whole = reads(wire, 0, ends)
    at_once = plain(protocol.read_parts(status, head, [whole]))
    parts = [reads(wire, begin, [end]) for begin, end in pairwise([0, *ends])]
    in_parts = plain(protocol.read_parts(status, head, parts or [whole]))
    # Of a refusal the first part is enough, and what came before broken framing is read only in parts.
    if status == 200 and "protocol: " not in in_parts + at_once:
        assert at_once == in_parts, f"a reply is read otherwise in parts: {in_parts}, not {at_once}"
    protocol.first_token_ns(status, head, whole)


def reads(wire: bytes, begin: int, ends: list[int]) -> Reads:
    """Return what came of a reply from a position on, in reads that end there, each a nanosecond a byte later."""
    stops = np.array(ends, np.int64)
    return Reads(stamps_ns=10**18 + stops, ends=stops - begin, body=wire[begin : ends[-1] if ends else begin])


def plain(reply: Reply) -> str:
    """Return a reply as text: times that are missing are NaN, which equals nothing."""
    return repr([np.asarray(getattr(reply, name)).tolist() for name in Reply.__struct_fields__])


def framing(data: bytes, rng: random.Random, _: Path) -> None:
    """Take a body apart, and find its end, which is the same in whatever pieces it comes."""
    head, separator, body = data.partition(b"\r\n\r\n")
    read = parse_head(head + separator)
    assert _end_of(BodyEnd(read), [body]) == _end_of(BodyEnd(read), _pieces(body, rng) or [b""]), (
        "pieces move the end of a body"
    )
    dechunk(body)


def _pieces(data: bytes, rng: random.Random) -> list[bytes]:
    sizes = [rng.randrange(1, 60) for _ in range(len(data))]
    pieces, at = [], 0
    for size in sizes:
        if at >= len(data):
            break
        pieces.append(data[at : at + size])
        at += size
    return pieces


def _end_of(end: BodyEnd, pieces: list[bytes]) -> int | str:
    before = 0
    for piece in pieces:
        try:
            at = end.feed(piece, 0)
        except ProtocolError:
            return "refused"
        if at >= 0:
            return before + at
        before += len(piece)
    return -1


def export(data: bytes, _: random.Random, __: Path) -> None:
    """Take in an export as a receiver does, and let `watch` and `report` read its spans."""
    parsed(data)
    record = packed(1_700_000_000 * SECOND_NS, "grpc", data)
    engine_spans([record])
    requests = SpanRequests(nullcontext)
    requests.spans.take(record)
    requests.ended(1_700_000_100 * SECOND_NS, all_of_it=True)


def exports() -> list[bytes]:
    """Return exports of gateways and engines that were recorded."""
    lines = lzma.decompress((DATA / "gateway_spans.jsonl.xz").read_bytes()).splitlines()
    lines += lzma.decompress((DATA / "router_spans.jsonl.xz").read_bytes()).splitlines()
    return [base64.b64decode(record["export"]) for line in lines if "export" in (record := json.loads(line))][:24]


def file_of(*suffixes: str, read: Callable[[Path], object]) -> Callable[[bytes, random.Random, Path], None]:
    """Return what writes an input into a new file, of one of these names, and reads it."""

    def read_file(data: bytes, rng: random.Random, place: Path) -> None:
        suffix = rng.choice(suffixes)
        path = place / f"{rng.getrandbits(64):x}{suffix}"  # some readers remember what a file held
        path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
        try:
            read(path)
        finally:
            path.unlink()

    return read_file


def timings(data: bytes, _: random.Random, __: Path) -> None:
    record = perf_metrics.ReplyRecord(
        url="http://x/perf_metrics", request_ns=1, response_ns=2, status=200, error="", packed=zlib.compress(data)
    )
    perf_metrics.timings([record, record])
    perf_metrics.clock_reading(record)


def manifest(data: bytes, _: random.Random, place: Path) -> None:
    (place / "manifest.json").write_bytes(data)
    read_manifest(place)


def study(data: bytes, _: random.Random, place: Path) -> None:
    (place / "study.json").write_bytes(data)
    open_study(place)


def studies() -> list[bytes]:
    """Return study.json as it is written."""
    from tempfile import TemporaryDirectory  # noqa: PLC0415  of this alone

    asked = StudySettings(test="ttft", scale="short", parameters=Parameters(load=0.7, requests=100), seed=1)
    about = {"tool": {"name": "sidelight"}, "command": ["sidelight"], "options": {"url": ["http://x"]}}
    record = StudyRecord(study_id="s", started_at="2026-11-22T12:00:00.000Z", asked=asked, seen={}, host={}, **about)  # type: ignore[arg-type]
    with TemporaryDirectory() as scratch:
        return [read_regular(create(Path(scratch) / "study", record).path / "study.json")]


def frames(data: bytes, rng: random.Random, _: Path) -> None:
    """Read a log in pieces: the same as at once."""
    whole, pieces = Unframer(), Unframer()
    at_once = whole.feed(data) + whole.finish()
    piecewise = [payload for piece in _pieces(data, rng) for payload in pieces.feed(piece)] + pieces.finish()
    assert (at_once, whole.extent) == (piecewise, pieces.extent), "a log is read otherwise in pieces"


def listings(data: bytes, _: random.Random, __: Path) -> None:
    models.owner_of(data)
    for listing in (models.OPENAI, models.OLLAMA, models.TGI):
        try:
            listing.read(data)
        except UNREADABLE:
            continue


def wire_bodies() -> list[bytes]:
    """Return heads with bodies in chunks and without."""
    bodies = files("replies")()
    return (
        [HEADS[0] + chunked(body, random.Random(1)) for body in bodies]
        + [HEADS[1] + body for body in bodies[:2]]
        + [NO_BODY]
    )


def manifests() -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.glob("*/manifest.json"))]


def logs() -> list[bytes]:
    from sidelight.rundir.framing import Framer  # noqa: PLC0415  of this alone

    framer = Framer()
    today = b"".join(map(framer.frame, (b"a", b"bb" * 50, b"c" * 500))) + framer.end()
    return [today, (GOLDEN / "torn/raw/events.log").read_bytes(), (GOLDEN / "torn/raw/hardware.log").read_bytes()]


PARSERS: dict[str, Parser] = {
    "exposition": Parser(corpus=files("pages"), read=lambda data, rng, _: page(data, TEXT, rng)),
    "openmetrics": Parser(corpus=files("pages"), read=lambda data, rng, _: page(data, OPENMETRICS, rng)),
    "trtllm-json": Parser(corpus=files("json_pages"), read=lambda data, rng, _: page(data, "application/json", rng)),
    "perf-metrics": Parser(corpus=files("perf_metrics"), read=timings),
    "reply": Parser(corpus=files("replies"), read=reply),
    "framing": Parser(corpus=wire_bodies, read=framing, declared=(ProtocolError,)),
    "models": Parser(corpus=files("models"), read=listings),
    "otlp": Parser(corpus=exports, read=export, declared=(ExportRefusal,)),
    "gzip": Parser(
        corpus=lambda: [gzip.compress(body, mtime=0) for body in exports()],
        read=lambda data, _, __: unpacked(data, MOST_BYTES), declared=(ExportRefusal,),
    ),
    "trace": Parser(
        corpus=files("traces"), read=file_of(".csv", ".jsonl", ".csv.gz", read=read_trace), declared=(TraceError,)
    ),
    "prompts": Parser(
        corpus=files("prompts"), read=file_of(".jsonl", ".json", ".txt", read=prompts.read),
        declared=(PromptsError, WorkloadError),
    ),
    "sharegpt": Parser(
        corpus=files("conversations"), read=file_of(".json", read=conversation.read), declared=(WorkloadError,)
    ),
    "workload": Parser(corpus=files("workloads"), read=file_of(".yaml", read=custom.read), declared=(WorkloadError,)),
    "config": Parser(
        corpus=files("configs"), declared=(ConfigurationError,),
        read=lambda data, rng, place: file_of(
            ".yaml", read=lambda path: config.load_yaml(path, rng.choice(OF_FILES))
        )(data, rng, place),
    ),
    "system": Parser(
        corpus=lambda: [(REPOSITORY / "examples/sut.yaml").read_bytes()],
        read=file_of(".yaml", read=read_system), declared=(WorkloadError,),
    ),
    "manifest": Parser(corpus=manifests, read=manifest, declared=(ConfigurationError,)),
    "study": Parser(corpus=studies, read=study, declared=(ConfigurationError,)),
    "frames": Parser(corpus=logs, read=frames),
}  # fmt: skip
