"""Recorded and simulated runs with the truth about each request, for `attribution.py`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scraper.endpoint import Scrape
from scraper.log import rows
from scraper.series import EndpointSeries, build

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The columns of a request log that the estimator reads."""

    submit_ns: Ints
    first_output_ns: Ints
    first_token_ns: Ints
    end_ns: Ints
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    status: Texts
    finish_reason: Texts
    endpoint_url: Texts
    chunk_ns: Ints
    chunk_start: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run and its truth in s [n], NaN where there is none (an aborted request)."""

    name: str
    requests: Requests
    scrapes: tuple[EndpointSeries, ...]
    queue_s: Floats
    prefill_s: Floats


def recorded(folder: Path, name: str) -> Case:
    """Read a recording of a real engine; its spans are the truth."""
    meta = json.loads((folder / "load_meta.json").read_text(encoding="utf-8"))
    anchor = meta["anchor_start"]
    offset_ns = anchor["unix_ns"] - anchor["mono_ns"]
    lines = list(_lines(folder / "requests.jsonl.gz"))
    spans = {
        line["trace_id"]: line["attributes"]
        for line in _lines(folder / "spans.jsonl.gz")
        if line["name"] == "llm_request"
    }
    truth = [spans.get(line["trace_id"], {}) for line in lines]
    return Case(
        name=name,
        requests=_recorded_requests(lines, offset_ns),
        scrapes=build(rows(_recorded_scrapes(folder / "scrapes.jsonl.gz", offset_ns))),
        queue_s=np.array([one.get("gen_ai.latency.time_in_queue", np.nan) for one in truth]),
        prefill_s=np.array([one.get("gen_ai.latency.time_in_model_prefill", np.nan) for one in truth]),
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _recorded_requests(lines: list[dict[str, Any]], offset_ns: int) -> Requests:
    chunks = [[event[0] + offset_ns for event in line["events"] if event[3]] for line in lines]
    usages = [line.get("usage") or {} for line in lines]

    def stamps(name: str) -> Ints:
        return np.array([-1 if line.get(name) is None else line[name] + offset_ns for line in lines], dtype=np.int64)

    def tokens(name: str) -> Ints:
        return np.array([usage.get(name, -1) for usage in usages], dtype=np.int64)

    ok = [line["status"] == 200 and line["error"] is None and bool(line["finish_reason"]) for line in lines]
    return Requests(
        submit_ns=stamps("submit_ns"),
        first_output_ns=stamps("first_token_ns"),
        first_token_ns=stamps("first_token_ns"),
        end_ns=stamps("done_ns"),
        input_tokens=tokens("prompt_tokens"),
        output_tokens=tokens("completion_tokens"),
        cached_tokens=np.full(len(lines), -1, dtype=np.int64),
        status=np.array(["ok" if one else "failed" for one in ok], dtype=np.object_),
        finish_reason=np.array([line["finish_reason"] or "" for line in lines], dtype=np.object_),
        endpoint_url=np.full(len(lines), "http://engine.test/v1", dtype=np.object_),
        chunk_ns=np.array([one for chunk in chunks for one in chunk], dtype=np.int64),
        chunk_start=np.concatenate([[0], np.cumsum([len(chunk) for chunk in chunks])]).astype(np.int64),
    )


def _recorded_scrapes(path: Path, offset_ns: int) -> Iterator[Scrape]:
    for line in _lines(path):
        if "k" not in line:
            continue
        yield Scrape(
            url="http://engine.test/metrics",
            tick_ns=line["due_ns"] + offset_ns,
            request_ns=line["t0_ns"] + offset_ns,
            response_ns=(line.get("t1_ns") or line["t0_ns"]) + offset_ns,
            status=line.get("status") or 0,
            content_type=line.get("ctype") or "",
            body=(line.get("body") or "").encode(),
            error=line.get("error") or "",
        )


def thinned(case: Case, every: int) -> Case:
    """Keep every so manieth scrape."""
    return replace(case, scrapes=tuple(kept(one, slice(None, None, every)) for one in case.scrapes))


def kept(endpoint: EndpointSeries, chosen: slice | Ints) -> EndpointSeries:
    """Keep some of an endpoint's scrapes."""
    names = ("tick_ns", "request_ns", "response_ns", "at_ns", "values", "changed")
    return replace(endpoint, **{name: getattr(endpoint, name)[chosen] for name in names})


def withheld(case: Case, share: float, seed: int) -> Case:
    """Leave out the client's records of a share of the requests: to the estimator they are strangers'."""
    seen = np.random.default_rng(np.random.SeedSequence(seed)).random(len(case.queue_s)) >= share
    return replace(
        case, requests=chosen(case.requests, seen), queue_s=case.queue_s[seen], prefill_s=case.prefill_s[seen]
    )


def chosen(requests: Requests, seen: npt.NDArray[np.bool_]) -> Requests:
    """Return some of the requests, their chunks with them."""
    sizes = np.diff(requests.chunk_start)
    columns = {
        one.name: getattr(requests, one.name)[seen]
        for one in fields(Requests)
        if one.name not in {"chunk_ns", "chunk_start"}
    }
    return Requests(
        **columns,
        chunk_ns=requests.chunk_ns[np.repeat(seen, sizes)],
        chunk_start=np.concatenate([[0], np.cumsum(sizes[seen])]).astype(np.int64),
    )
