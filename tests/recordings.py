"""Recordings of real engines as the logs of a run have them: requests, the engine's spans, and its scraped pages."""

from __future__ import annotations

import base64
import gzip
import json
import lzma
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from series import endpoint_of_columns

from sidelight.correlator.exact.join import join
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.spans.log import packed
from sidelight.scraper.spans.requests import EngineSpans, engine_spans
from sidelight.scraper.targets.scrape import Scrape

REPOSITORY = Path(__file__).parents[1]
SHARED = Path(os.environ.get("SIDELIGHT_SHARED", REPOSITORY.parent / "shared"))
URL = "http://engine.test"
TYPES = {column.name: str(column.type) for column in fields(RequestLog)}
FLAGS = "Bools"
MISSING: Mapping[str, Any] = {"Ints": -1, "Texts": "", "Floats": np.nan, FLAGS: False}
DTYPES: Mapping[str, Any] = {"Ints": np.int64, "Texts": np.object_, "Floats": np.float64, FLAGS: np.bool_}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded run. The workload class of a request is the phase that it was sent in."""

    requests: RequestLog
    spans: EngineSpans
    endpoints: tuple[EndpointSeries, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests, scrapes, and the truth in s [n], NaN where no span tells it."""

    name: str = ""
    requests: RequestLog
    scrapes: tuple[EndpointSeries, ...]
    queue_s: Floats
    prefill_s: Floats

    def every(self, nth: int) -> Case:
        """Keep every nth scrape."""
        return replace(self, scrapes=tuple(scrapes_of(series, slice(None, None, nth)) for series in self.scrapes))

    def withheld(self, share: float, seed: int) -> Case:
        """Leave out the client's records of a share of the requests: to the estimator they are other traffic."""
        seen = np.random.default_rng(np.random.SeedSequence(seed)).random(len(self.queue_s)) >= share
        requests = take(self.requests, seen)
        return replace(self, requests=requests, queue_s=self.queue_s[seen], prefill_s=self.prefill_s[seen])


def recording(name: str, engine: str = "vllm", *, scraped: bool = True) -> Recording:
    """Read a recording of those in `shared`, with its scrapes or without; where there is none, the test is skipped."""
    return read(present(name, engine), scraped=scraped)


def whole_case(name: str) -> Case:
    """Read a recording of those in `shared` with its truth; where there is none, the test is skipped."""
    return case_of(present(name))


def present(name: str, engine: str = "vllm") -> Path:
    """Return where a recording is; where there is none, the test is skipped."""
    path = SHARED / f"fixtures/{engine}/recorded" / name
    if not path.exists():
        pytest.skip(f"no recording at {path}")
    return path


def read(path: Path, *, scraped: bool = True) -> Recording:
    """Read a recording, with its scrapes or without."""
    anchor = json.loads((path / "load_meta.json").read_text(encoding="utf-8"))["anchor_start"]
    case = recorded(lines(path / "requests.jsonl.gz"), lines(path / "otlp_exports.jsonl.gz"), anchor)
    if not scraped:
        return case
    return replace(case, endpoints=build(rows(pages(path / "scrapes.jsonl.gz", anchor["unix_ns"] - anchor["mono_ns"]))))


def edges() -> Recording:
    """Read the recording `edges`, a small phase for each odd case, without its scrapes."""
    with lzma.open(REPOSITORY / "tests/data/vllm_edges_spans.jsonl.xz", "rt") as file:
        meta, *entries = [json.loads(line) for line in file]
    requests = [entry["request"] for entry in entries if "request" in entry]
    return recorded(
        requests, [entry["export"] for entry in entries if "export" in entry], meta["load_meta"]["anchor_start"]
    )


def recorded(
    requests: Iterable[dict[str, Any]], exports: Iterable[Mapping[str, Any]], anchor: Mapping[str, int]
) -> Recording:
    """Put what was noted of requests, and the spans that came, into columns."""
    offset_ns = anchor["unix_ns"] - anchor["mono_ns"]
    return Recording(
        requests=request_log([request(sent, offset_ns) for sent in requests]),
        spans=engine_spans(
            packed(export["recv_unix_ns"], "grpc", base64.b64decode(export["body_b64"])) for export in exports
        ),
        endpoints=(),
    )


def case_of(path: Path, name: str = "") -> Case:
    """Read a recording whose truth is in its spans."""
    case = read(path)
    joined = join(case.requests, case.spans)
    exact = np.isin(joined.source, ("trace", "request id"))
    queue_s, prefill_s = (np.where(exact, time_s, np.nan) for time_s in (joined.queue_s, joined.prefill_s))
    return Case(name=name, requests=case.requests, scrapes=case.endpoints, queue_s=queue_s, prefill_s=prefill_s)


def overload() -> Case:
    """Read the overload phase of the recording `main`: 161 requests, 190 scrapes at 0.2 s."""
    with np.load(REPOSITORY / "tests/data/vllm_overload.npz") as file:
        data = {name: file[name] for name in file.files}
    start_ns = int(data["start_ns"])
    stamps = {name: data[f"{name}_ns"] + start_ns for name in ("submit", "first_output", "end")}
    request_ns, response_ns = data["scrape_request_ns"] + start_ns, data["scrape_response_ns"] + start_ns
    series = [
        Series(name=name, labels=tuple((key, value) for key, value in labels), family=family, type=kind, help="")
        for name, labels, family, kind in json.loads(str(data["series"]))
    ]
    endpoint = endpoint_of_columns(
        series, data["scrape_values"], request_ns=request_ns, response_ns=response_ns, url=f"{URL}/metrics"
    )
    requests = log_of(
        len(stamps["submit"]),
        submit_ns=stamps["submit"],
        first_output_ns=stamps["first_output"],
        first_token_ns=stamps["first_output"],
        end_ns=stamps["end"],
        input_tokens=data["input_tokens"],
        output_tokens=data["output_tokens"],
        status="ok",
        finish_reason="length",
        endpoint_url=URL,
        chunk_ns=np.cumsum(data["chunk_ns"]) + start_ns,
        chunk_start=data["chunk_start"],
    )
    return Case(requests=requests, scrapes=(endpoint,), queue_s=data["queue_s"], prefill_s=data["prefill_s"])


def scrapes_of(endpoint: EndpointSeries, chosen: slice | npt.NDArray[np.int64]) -> EndpointSeries:
    """Keep some of an endpoint's scrapes."""
    names = ("tick_ns", "request_ns", "response_ns", "at_ns", "values", "changed")
    return replace(endpoint, **{name: getattr(endpoint, name)[chosen] for name in names})


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def pages(path: Path, offset_ns: int) -> Iterator[Scrape]:
    """Read the pages; the first line is an anchor."""
    for line in lines(path):
        if "k" in line:
            yield Scrape(
                url=f"{URL}/metrics",
                tick_ns=line["due_ns"] + offset_ns,
                request_ns=line["t0_ns"] + offset_ns,
                response_ns=line["t1_ns"] + offset_ns,
                status=line["status"],
                content_type=line["ctype"],
                body=line["body"].encode(),
                error="",
            )


def request(record: Mapping[str, Any], offset_ns: int) -> dict[str, Any]:
    """Put what was noted of a request into the columns of a log; what was not is left out, as in `edges` all chunks."""
    metrics = {key: value for key, value in (record.get("server_metrics") or {}).items() if value is not None}
    events = record.get("events", ())
    chunks = [event[0] + offset_ns for event in events if event[3]]
    first_ns = record["first_token_ns"] if record.get("stream") else None
    stamps = {
        "dispatch_ns": record["submit_ns"],
        "submit_ns": record["submit_ns"],
        "first_output_ns": first_ns,
        "first_token_ns": first_ns,
        "last_token_ns": events[-1][0] if record.get("stream") and chunks else None,
        "end_ns": record["done_ns"],
    }
    usage = record.get("usage") or {}
    return {
        "phase": "measure",
        "workload_class": record["phase"],
        "endpoint_url": URL,
        "trace_id": record["trace_id"],
        "request_id": record["request_id"] or "",
        "response_id": record["response_id"] or "",
        "status": status(record),
        "http_status": record["status"] or 0,
        **{name: stamp + offset_ns for name, stamp in stamps.items() if stamp is not None},
        "input_tokens": usage.get("prompt_tokens", -1),
        "output_tokens": usage.get("completion_tokens", -1),
        "finish_reason": record["finish_reason"] or "",
        "timings_source": "vllm" if metrics else "",
        "server_queue_ms": metrics.get("queue_time_ms", np.nan),
        "server_prefill_ms": metrics.get("time_to_first_token_ms", np.nan),
        "server_decode_ms": metrics.get("generation_time_ms", np.nan),
        "chunks": chunks,
    }


def status(record: Mapping[str, Any]) -> str:
    """The status that a request log gives such a reply."""
    if record["error"] == "client_cancelled":
        return "cancelled"
    if (record["status"] or 0) >= 400:
        return "refused" if record["status"] < 500 else "failed"
    return "ok" if record["finish_reason"] else "failed"


def request_log(rows: Sequence[Mapping[str, Any]]) -> RequestLog:
    """Make a log of requests by what is known of each; `chunks` are the stamps of its chunks."""
    names = {name for row in rows for name in row} - {"chunks"}
    chunks = [np.array(row.get("chunks", ()), dtype=np.int64) for row in rows]
    return log_of(
        len(rows),
        **{name: [row.get(name, MISSING[TYPES[name]]) for row in rows] for name in names},
        chunk_ns=np.concatenate([np.empty(0, np.int64), *chunks]),
        chunk_start=np.concatenate([[0], np.cumsum([len(stamps) for stamps in chunks])]),
    )


def log_of(size: int, **values: Any) -> RequestLog:
    """Make a log of some columns, or of what is the same in each row; all others are missing."""
    chunks = {
        "held_ns": np.zeros(size),
        "chunk_ns": np.empty(0),
        "chunk_start": np.zeros(size + 1),
        "chunk_choice": np.empty(0),
        "choice_start": np.zeros(size + 1),
        "index": np.arange(size),
    }
    values = {**chunks, "chunk_chars": np.ones(len(values.get("chunk_ns", ()))), **values}
    columns = {}
    for name, kind in TYPES.items():
        value = values.get(name, MISSING[kind])
        columns[name] = np.full(size, value, DTYPES[kind]) if np.ndim(value) == 0 else np.asarray(value, DTYPES[kind])
    return RequestLog(**columns)
