"""Choices of routers by their spans: Dynamo's as it sent them, llm-d's as its source has them."""

from __future__ import annotations

import base64
import json
import lzma
from pathlib import Path

from sent_spans import INTERNAL, TRACE, export, span

from sidelight.recorded.gateway_spans import GatewaySpans
from sidelight.scraper.spans.log import packed
from sidelight.scraper.spans.received import attributes_of

PROXY = "llm_d.pd_proxy"
DATA = Path(__file__).parents[1] / "data" / "gateway_spans.jsonl.xz"


def test_dynamos_router_names_its_worker():
    """A recorded trace: the worker's own span has the same number."""
    gateways, workers = GatewaySpans(), set()
    for line in lzma.decompress(DATA.read_bytes()).splitlines():
        row = json.loads(line)
        if row["gateway"] == "dynamo":
            for each in packed(row["received_ns"], row["via"], base64.b64decode(row["export"])).spans():
                gateways.add(each)
                workers.add(attributes_of(each.span).get("instance_id"))
    assert workers - {None} == {choice.endpoint for choice in gateways.choices.values()}


def test_the_first_endpoint_counts_and_the_expected_part_of_a_prompt():
    """Of llm-d: the most of all candidates, and the prefill pod that its sidecar calls; by source, not run."""
    matched = {"llm_d.epp.producer.max_match_blocks": 30.0, "llm_d.epp.producer.total_blocks": 40.0}
    spans = [
        span("produce_precise_prefix_cache", "a", kind=INTERNAL, attributes=matched),
        *(
            span(f"{PROXY}.prefill", name, start_ms=at, kind=INTERNAL, attributes={f"{PROXY}.prefill_target": name})
            for name, at in (("y", 20), ("x", 10))
        ),
    ]
    gateways = GatewaySpans()
    for each in export(spans, service="epp").spans():
        gateways.add(each)
    choice = gateways.choices[TRACE.hex()]
    assert ("x", 0.75) == (choice.endpoint, choice.expected_ratio)


def test_an_impossible_match_is_none():
    wrong = {"llm_d.epp.producer.max_match_blocks": 50.0, "llm_d.epp.producer.total_blocks": 40.0}
    gateways = GatewaySpans()
    for each in export([span("produce_precise_prefix_cache", "a", kind=INTERNAL, attributes=wrong)]).spans():
        gateways.add(each)
    assert {} == gateways.choices
