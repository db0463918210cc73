"""Loads that are played in virtual time, as the tables of a run have them.

Requests, chunk stamps and scraped pages are read as those of a real run are. Times within the engine (`parts`) are the
truth as spans would state it, or what the correlator makes of the scrapes, or unknown: these cost nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from recordings import log_of

from sidelight.correlator.attribute import attribute
from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.table import Joined, unjoined
from sidelight.loadgen.plan.fitting import clip
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.plan.workloads.request import Shared, WorkloadRequest
from sidelight.loadgen.protocols.request import with_number
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.methodology.study.model import StepData
from sidelight.scraper.exposition import PageReader
from sidelight.scraper.series.log import ScrapeRow
from sidelight.scraper.series.table import EndpointSeries, SeriesTable
from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.engine.tokenizer import encode
from sidelight.simulator.virtual import Played, VirtualExchange

PartsSource = Literal["truth", "scrapes", "none"]
URL = "http://engine.test"
#: What the status of HTTP means in a request log.
_STATUSES = {400: "refused"}


@dataclass(slots=True, kw_only=True)
class VirtualLoad:
    """Requests of a workload for the engine; `planned` are those that were taken, in order."""

    workload: workloads.ReadyWorkload
    max_model_len: int
    body: Mapping[str, Any] = field(default_factory=dict)
    planned: list[WorkloadRequest] = field(default_factory=list)

    def requests(self, count: int | None = None) -> Iterator[EngineRequest]:
        """Give requests as the plan of a run would have them: whole, but for what the model is too short for."""
        while count is None or len(self.planned) < count:
            request = next(self.workload.requests, None)
            if request is None:
                return
            self.planned.append(request)
            yield self._engine_request(request, f"chatcmpl-{len(self.planned)}")

    def _engine_request(self, request: WorkloadRequest, name: str) -> EngineRequest:
        token_ids = _token_ids(request)
        length, max_tokens = clip(len(token_ids), request.max_tokens, self.max_model_len)
        body = with_number({**self.body, **request.body}, len(self.planned))
        known: dict[str, Any] = {key: body[key] for key in ("priority", "cache_salt") if key in body}
        return EngineRequest(request_id=name, prompt_token_ids=token_ids[:length], max_tokens=max_tokens, **known)


def workload_of(options: Mapping[str, Any], *, seed: int) -> workloads.ReadyWorkload:
    """Build the workload that options of `run` state: a name, or a mapping as in a workload file."""
    name = options.get("workload", "synthetic-uniform")
    given = {key: str(options[key]) for key in ("input_tokens", "output_tokens") if options.get(key) is not None}
    return workloads.build(
        name if isinstance(name, str) else json.dumps(name), seed=seed, lengths=workloads.Lengths(**given)
    )


def _token_ids(request: WorkloadRequest) -> tuple[int, ...]:
    if request.messages:
        return tuple(encode("".join(str(message.get("content", "")) for message in request.messages)))
    shared = [_shared_ids(piece) for piece in (request.system, request.prefix) if piece is not None]
    text_ids = request.token_ids if request.text is None else tuple(encode(request.text))
    ids = (*(token_id for piece in shared for token_id in piece), *text_ids)
    # The question behind them has the same words in all requests, and the rest of the length.
    return (*ids, *range(1, 1 + max(0, request.input_tokens - len(ids))))


@lru_cache(maxsize=4096)
def _shared_ids(piece: Shared) -> tuple[int, ...]:
    ids = piece.token_ids or tuple(encode(piece.text))
    return (*ids, *range(1, 1 + piece.tokens - len(ids)))[: piece.tokens]


def step_data(
    played: Played,
    planned: Sequence[WorkloadRequest],
    *,
    closed_loop: bool,
    parts: PartsSource = "truth",
    about: Mapping[str, Any] | None = None,
) -> StepData:
    """Return the tables of a step; `about` has also, as `truth`, the exchanges in the order of the requests."""
    requests = request_log(played.exchanges, planned)
    endpoints = (endpoint_of(played),) if played.pages else ()
    return StepData(
        requests=requests,
        parts=_parts(requests, played.exchanges, endpoints, parts),
        endpoints=endpoints,
        start_ns=played.start_ns,
        end_ns=played.end_ns,
        closed_loop=closed_loop,
        status="complete",
        about={
            "planned": {"count": len(planned), "sha256": _digest(planned)},
            "truth": tuple(played.exchanges),
            "steps": tuple(played.steps),
            **(about or {}),
        },
    )


def _digest(planned: Sequence[WorkloadRequest]) -> str:
    """Return a hash that is equal for equal requests, of the first few."""
    return hashlib.sha256(repr((len(planned), planned[:3])).encode()).hexdigest()


def request_log(exchanges: Sequence[VirtualExchange], planned: Sequence[WorkloadRequest]) -> RequestLog:
    """Return requests as a run's log has them, each token in a chunk of its own."""
    ended = [each.record is not None and not each.error for each in exchanges]
    firsts = [each.token_ns[0] if each.token_ns else -1 for each in exchanges]
    lasts = [each.token_ns[-1] if each.token_ns else -1 for each in exchanges]
    submit_ns = [each.submit_ns for each in exchanges]
    known = dict.fromkeys(("first_read_ns", "first_output_ns", "first_token_ns"), firsts)
    return log_of(
        len(exchanges),
        phase="measure",
        workload_class=[request.workload_class for request in planned[: len(exchanges)]],
        endpoint_url=f"{URL}/v1/chat/completions",
        request_id=[each.request.request_id.partition("-")[2] for each in exchanges],
        **dict.fromkeys(("scheduled_ns", "dispatch_ns", "connected_ns", "submit_ns"), submit_ns),
        **known,
        last_output_ns=lasts,
        last_token_ns=lasts,
        end_ns=[each.end_ns for each in exchanges],
        declared_input_tokens=[len(each.request.prompt_token_ids) for each in exchanges],
        max_tokens=[each.request.max_tokens for each in exchanges],
        input_tokens=[
            len(each.request.prompt_token_ids) if ok else -1 for each, ok in zip(exchanges, ended, strict=True)
        ],
        output_tokens=[len(each.token_ns) if ok else -1 for each, ok in zip(exchanges, ended, strict=True)],
        output_tokens_source=["usage" if ok else "" for ok in ended],
        status=[
            "ok" if ok else _STATUSES.get(each.status, "failed") for each, ok in zip(exchanges, ended, strict=True)
        ],
        http_status=[each.status for each in exchanges],
        error=[each.error for each in exchanges],
        finish_reason=[each.record.finish_reason if each.record else "" for each in exchanges],
        reused=True,
        first_kind=["content" if each.token_ns else "" for each in exchanges],
        chunk_ns=np.concatenate([np.empty(0, np.int64), *(np.array(each.token_ns, np.int64) for each in exchanges)]),
        chunk_start=list(accumulate((len(each.token_ns) for each in exchanges), initial=0)),
    )


def endpoint_of(played: Played) -> EndpointSeries:
    """Return the scrapes of a step, its pages read as the scraper reads them."""
    table, reader = SeriesTable(f"{URL}/metrics"), PageReader()
    for page in played.pages:
        read = reader.read(page.body, page.content_type)
        table.append(
            ScrapeRow(
                url=f"{URL}/metrics",
                tick_ns=page.request_ns,
                request_ns=page.request_ns,
                response_ns=page.response_ns,
                series=read.series,
                values=read.values,
                changed=True,
            )
        )
    return table.view()


def _parts(
    requests: RequestLog, exchanges: Sequence[VirtualExchange], endpoints: Sequence[EndpointSeries], source: PartsSource
) -> Parts:
    size = len(requests)
    attribution = attribute(requests, endpoints) if source == "scrapes" else nothing(size, "not estimated")
    return break_down(requests, _joined(exchanges) if source == "truth" else unjoined(size), attribution)


def _joined(exchanges: Sequence[VirtualExchange]) -> Joined:
    """Return the engine's true times, as its spans state them."""
    records = [each.record for each in exchanges]
    times = {
        f"{name}_s": np.array([np.nan if record is None else getattr(record, f"{name}_s") for record in records])
        for name in ("queue", "prefill", "decode", "ttft", "e2e")
    }
    sources = np.array(["none" if record is None else "trace" for record in records], dtype=np.object_)
    arrival_ns = np.array([-1 if record is None else record.arrival_ns for record in records], dtype=np.int64)
    return replace(unjoined(len(records)), source=sources, **times, arrival_ns=arrival_ns)
