"""Spans of a request through llm-d, as its source has them: endpoint picker, sidecar, prefill pod and decode pod.

Read in the router's repository at 520af478 (before 0.9), at 0.9.0, and in August 2026 (0.10); never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import INTERNAL, SERVER, engine, export, span

from sidelight.scraper.spans.log import ExportRecord

Age = Literal["0.8", "0.9", "0.10"]
PROXY = "llm_d.pd_proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What passes one after the other from the client's submission at 0 on, in ms."""

    to_picker: float = 5.0
    decision: float = 35.0
    to_sidecar: float = 2.0
    before_call: float = 2.0
    to_prefill: float = 1.5
    queue: float = 20.0
    prefill: float = 100.0
    prefill_frontend: float = 6.0
    from_prefill: float = 2.5
    held: float = 80.0
    to_decode: float = 0.5
    decode_queue: float = 40.0
    first_step: float = 15.0
    decode_frontend: float = 5.0
    back: float = 3.0

    @property
    def ttft(self) -> float:
        """All of it."""
        return sum(getattr(self, name) for name in self.__slots__)

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the TTFT that it makes."""
        return {
            "network": self.to_picker + self.to_sidecar + self.to_prefill + self.back,
            "gateway": self.decision + self.before_call,
            "queue": self.queue,
            "prefill": self.prefill,
            "router": self.from_prefill + self.held + self.to_decode,
            "decode_queue": self.decode_queue,
            "first_step": self.first_step,
            "other": self.prefill_frontend + self.decode_frontend,
        }


def llm_d(
    age: Age, truth: Truth, trace: bytes, *, parent: str = "", clocks_ms: Mapping[str, float] | None = None
) -> list[ExportRecord]:
    """Return the exports of one request; `clocks_ms` is by how much a pod's clock is off."""
    off_ms = {"picker": 0.0, "prefill": 0.0, "decode": 0.0} | dict(clocks_ms or {})
    picked = truth.to_picker + truth.decision
    had = picked + truth.to_sidecar
    called = had + truth.before_call
    at_prefill = called + truth.to_prefill
    prefill_ms = truth.queue + truth.prefill + truth.prefill_frontend
    returned = at_prefill + prefill_ms + truth.from_prefill
    called_again = returned + truth.held
    at_decode = called_again + truth.to_decode
    decode_ttft_ms = truth.decode_queue + truth.first_step + truth.decode_frontend
    ended = at_decode + decode_ttft_ms + 300
    api = {f"{PROXY}.connector": "nixlv2", f"{PROXY}.request_id": "uuid"}
    first, second = ("prefill", "decode") if age != "0.8" else (f"{PROXY}.prefill", f"{PROXY}.decode")
    path: dict[str, str | float] = {"url.path": "/v1/completions"}
    picker = {"trace": trace, "clock_ms": off_ms["picker"], "kind": SERVER}
    beside = {"trace": trace, "clock_ms": off_ms["decode"]}
    top = {"start_ms": had, "end_ms": ended + 2, "kind": SERVER}
    whole: list[Span] = [
        span("gateway.request", "epp", parent, truth.to_picker, ended + 4, **picker),
        span("gateway.request_orchestration", "decide", "epp", truth.to_picker + 1, picked, **picker),
    ]
    sidecar = [
        span(f"{PROXY}.POST /v1/completions", "post", "epp", attributes=path, **top, **beside),
        span(
            "forward_request" if age != "0.8" else f"{PROXY}.request",
            "forward",
            "post",
            attributes=api,
            **top,
            **beside,
        ),
        span(first, "p_call", "forward", called, returned, kind=INTERNAL, attributes=api, **beside),
        span(second, "d_call", "p_call", called_again, ended + 1, kind=INTERNAL, attributes=api, **beside),
    ]
    above = ("epp", "epp")
    if age == "0.10":
        above = ("p_http", "d_http")
        full: dict[str, str | float] = {"url.full": "http://pod:8000/v1/completions"}
        sidecar += [
            span("HTTP POST", "p_http", "p_call", called, returned, attributes=full, **beside),
            span("HTTP POST", "d_http", "d_call", called_again, ended + 1, attributes=full, **beside),
        ]
    ids: dict[str, str | float] = {"gen_ai.request.id": f"cmpl-{trace.hex()}-0", "gen_ai.usage.prompt_tokens": 512}
    asked = {**ids, "gen_ai.usage.completion_tokens": 1, "gen_ai.request.max_tokens": 1}
    pods = {
        "prefill": engine(
            "prefill", above[0], queue_ms=truth.queue, prefill_ms=truth.prefill, decode_ms=0, ttft_ms=prefill_ms,
            e2e_ms=prefill_ms, start_ms=at_prefill, end_ms=at_prefill + prefill_ms, trace=trace, stated=asked,
            clock_ms=off_ms["prefill"],
        ),
        "decode": engine(
            "decode", above[1], queue_ms=truth.decode_queue, prefill_ms=truth.first_step, decode_ms=300,
            ttft_ms=decode_ttft_ms, e2e_ms=decode_ttft_ms + 300, start_ms=at_decode, end_ms=ended, trace=trace,
            stated={**ids, "gen_ai.usage.completion_tokens": 16, "gen_ai.request.max_tokens": 16},
            clock_ms=off_ms["decode"],
        ),
    }  # fmt: skip
    return [
        export([pods["prefill"]], instance="p", at_s=1),
        export(whole, service="llm-d-epp", at_s=2),
        export(sidecar, service="llm-d-disagg-sidecar", at_s=2),
        export([pods["decode"]], instance="d", at_s=2),
    ]
