"""Traces that real gateways sent, one each: the part of the TTFT that is theirs, in a watch and in a run alike.

Recorded in front of a simulated vLLM, with the client's own span beside them.
"""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.spans import span_times
from sidelight.correlator.exact.table import put, unjoined
from sidelight.correlator.live.breakdown import break_down_ended
from sidelight.correlator.live.window import TraceWindow
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.recorded.client_spans import client_span, request_log
from sidelight.recorded.gateway_spans import GatewaySpans
from sidelight.scraper.spans.log import ExportRecord, packed
from sidelight.scraper.spans.received import ReceivedSpan
from sidelight.scraper.spans.requests import engine_spans

DATA = Path(__file__).parents[2] / "data" / "gateway_spans.jsonl.xz"
CLIENT = "users-app"


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, list[ExportRecord]]:
    """The exports of each gateway's trace, in the order in which they came."""
    exports: dict[str, list[ExportRecord]] = {}
    for line in lzma.decompress(DATA.read_bytes()).splitlines():
        row = json.loads(line)
        record = packed(row["received_ns"], row["via"], base64.b64decode(row["export"]))
        exports.setdefault(row["gateway"], []).append(record)
    return exports


def watched(exports: list[ExportRecord]) -> Parts:
    """Break the trace down as a watch does, to which the client's own span is sent."""
    window = TraceWindow()
    for export in exports:
        window.take(export)
    return break_down_ended(window.finished(exports[-1].received_ns, all_of_it=True)).parts


def run(exports: list[ExportRecord]) -> Parts:
    """Break the trace down as a run does, whose requests are its own: the client's span stands for one of them."""
    received = [span for export in exports for span in export.spans()]
    (client,) = [client_span(span) for span in received if span.service == CLIENT]
    gateways, rest = GatewaySpans(), [span for span in received if span.service != CLIENT]
    for span in rest:
        gateways.add(span)
    spans, joined = engine_spans(exports), unjoined(1)
    times = span_times(spans, range(len(spans)))
    assert times is not None
    put(joined, 0, "trace", times)
    (passed,) = gateways.by_trace().values()
    return break_down(request_log([client], [b"t" * 16]), joined, nothing(1, ""), gateways=[passed])


@pytest.mark.parametrize("of", [watched, run])
@pytest.mark.parametrize(
    ("gateway", "part_ms", "request_ms", "at_most_ms", "first_output"),
    [
        ("litellm-v2", 95.5, 65.3, 138.2, "inner_call"),
        ("fastapi", 108.8, 101.4, np.nan, "body"),
        ("envoy", 0.2, 0.2, 166.6, ""),
        ("litellm-v1", 570.7, 570.7, 1325.1, ""),
    ],
)
def test_a_real_gateway_s_part(
    recorded: Mapping[str, list[ExportRecord]],
    of: object,
    gateway: str,
    part_ms: float,
    request_ms: float,
    at_most_ms: float,
    first_output: str,
):
    """By its own attribute, its inner call or its first body-send span; else by its way in, and a bound.

    The first version of LiteLLM's spans has a call of kind INTERNAL, which the catalogue names.
    """
    parts = of(recorded[gateway])  # type: ignore[operator]
    columns_s = (parts.gateway_s, parts.gateway_request_s, parts.gateway_at_most_s)
    found_ms = [1e3 * float(column[0]) for column in columns_s]
    assert [part_ms, request_ms, at_most_ms] == pytest.approx(found_ms, abs=0.1, nan_ok=True)
    assert [first_output] == [part.first_by for part in parts.gateways[0]]
    whole_s = np.nansum([parts.seconds(part)[0] for part in TTFT_PARTS])
    assert float(parts.ttft_s[0]) == pytest.approx(float(whole_s))


def test_a_gateway_of_the_catalogue_may_be_of_another_kind(recorded: Mapping[str, list[ExportRecord]]):
    """Dynamo's frontend, whose span is INTERNAL and states its first output as a text in ms; no engine's span came."""
    gateways = GatewaySpans()
    received: list[ReceivedSpan] = [span for export in recorded["dynamo"] for span in export.spans()]
    for span in received:
        gateways.add(span)
    ((frontend,),) = gateways.by_trace().values()
    assert ("dynamo-frontend", "dynamo", "attribute") == (frontend.service, frontend.name, frontend.first_by)
    assert 0.0651 == pytest.approx(frontend.first_s)


def test_a_router_s_own_span_is_known_by_the_catalogue(recorded: Mapping[str, list[ExportRecord]]):
    """sglang-router's is INTERNAL and begins the trace; its attribute `latency` ends at the response's headers."""
    gateways = GatewaySpans()
    for record in recorded["sglang-router"]:
        for received in record.spans():
            gateways.add(received)
    ((router,),) = gateways.by_trace().values()
    assert ("smg", "sglang_router", "") == (router.service, router.name, router.first_by)
    assert 0.2496 == pytest.approx(router.whole_s, abs=1e-4)
    assert np.isnan(router.first_s)
