"""What gateways' pages mean: the recorded ones, and the files that say so."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml
from series import counter, gauge, histogram

from sidelight.rundir.stats import Missing
from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.exposition import Page, parse
from sidelight.scraper.gateways.catalogue import (
    QUANTITIES,
    FirstOutput,
    can_state_more,
    canonical,
    detect,
    detect_reply,
    gateway,
    gateway_names,
)

DIRECTORY = Path(str(resources.files("sidelight.scraper.gateways")))
DATA = Path(__file__).parents[1] / "data/gateway_pages.txt.xz"
ASGI = "# TYPE http_server_active_requests gauge\nhttp_server_active_requests 3\n"


@pytest.fixture(scope="module")
def pages() -> Mapping[str, Page]:
    """Recorded pages by their gateway, cut to what its file names."""
    sections = lzma.decompress(DATA.read_bytes()).decode().removeprefix("## ").split("\n## ")
    named = (section.split("\n", 1) for section in sections)
    return {name: parse(f"{text}\n".encode()) for name, text in named}


@pytest.mark.parametrize("name", gateway_names())
def test_every_file_obeys_the_schema(name: str):
    """Each gateway's file is as schema.json has it, and what it matches spans by is a regular part of it."""
    schema = json.loads((DIRECTORY / "schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    table = yaml.safe_load((DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8"))
    assert name == table["gateway"]
    jsonschema.Draft202012Validator(schema).validate(table)
    assert set(gateway(name).quantities) <= set(QUANTITIES)


def test_no_file_is_without_a_gateway():
    assert {f"{name}.yaml" for name in gateway_names()} == {path.name for path in DIRECTORY.glob("*.yaml")}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "litellm",
            {
                "requests": "30",
                "request_time": "30 of 57.92",
                "upstream_time": "30 of 33.98",
                "queue_time": "30 of 10.47",
                "requests_in_flight": "1",
                "retries": "0",
                "upstream_errors": "0",
            },
        ),
        ("sglang_router", {"requests": "17", "requests_in_flight": "0", "retries": "0", "upstream_errors": "1"}),
        ("vllm_router", {"requests": "8", "retries": "0", "upstream_errors": "0"}),
        (
            "dynamo",
            {
                "requests": "27",
                "request_time": "27 of 1.102",
                "upstream_time": "27 of 0.9994",
                "queue_time": "27 of 0.001637",
                "requests_in_flight": "0",
                "retries": "0",
                "upstream_errors": "0",
            },
        ),
        (
            "envoy",
            {
                "requests": "136",
                "request_time": "136 of 1.466e+04",
                "upstream_time": "136 of 1.46e+04",
                "requests_waiting": "0",
                "requests_in_flight": "0",
                "retries": "0",
                "upstream_errors": "0",
            },
        ),
        (
            "production_stack",
            {"requests": "535", "upstream_time": "535 of 144.3", "requests_in_flight": "9", "upstream_errors": "0"},
        ),
        (
            "haproxy",
            {
                "requests": "51",
                "recent_queue_time": "0.038",
                "requests_waiting": "0",
                "requests_in_flight": "0",
                "retries": "0",
                "upstream_errors": "1",
            },
        ),
    ],
)
def test_a_recorded_page(pages: Mapping[str, Page], name: str, expected: dict[str, str]):
    """What it tells; of everything else, why not."""
    page = pages[name]
    recognised = detect(page.series)
    assert recognised is not None
    assert name == recognised.name
    shown, absent = {}, {}
    for quantity, source in canonical(page.series, name).items():
        if isinstance(source, Missing):
            absent[quantity] = source.reason
        elif source.quantity.kind == "histogram":
            count, total = (
                page.values[[getattr(columns, part) for columns in source.histograms]].sum()
                for part in ("count", "sum")
            )
            shown[quantity] = f"{count:.4g} of {total:.4g}"
        else:
            shown[quantity] = f"{page.values[list(source.columns)].sum():.4g}"
    assert expected == shown
    assert all(absent.values())


def test_a_page_may_be_a_gateway_s_and_an_engine_s(pages: Mapping[str, Page]):
    """That of Dynamo's frontend is; LiteLLM's is not an engine's, nor an engine's a gateway's."""
    recognised = engines.detect(pages["dynamo"].series)
    assert recognised is not None
    assert "dynamo" == recognised.name
    assert engines.detect(pages["litellm"].series) is None
    assert detect(parse(b"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 1\n").series) is None


def test_copies_of_engines_gauges_make_no_engine(pages: Mapping[str, Page]):
    """A router's page is not vLLM's; on an engine's own page its own series alone count."""
    assert engines.detect(pages["production_stack"].series) is None
    page = parse(b'vllm:num_requests_running{server="a"} 3\nvllm:num_requests_running{engine="0"} 2\n')
    assert engines.detect(page.series) is not None
    source = engines.canonical(page.series, "vllm")["requests_running"]
    assert not isinstance(source, Missing)
    assert [2.0] == page.values[list(source.columns)].tolist()


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (
            counter("llm_d_epp_request_total", 5)
            + counter("inference_objective_request_total", 5)
            + gauge("llm_d_epp_request_running", 2)
            + gauge("llm_d_epp_flow_control_queue_size", 3),
            "llm_d_epp",
            {"requests": 5.0, "requests_in_flight": 2.0, "requests_waiting": 3.0},
        ),
        (
            counter("inference_objective_request_total", 5) + gauge("inference_objective_running_requests", 2),
            "llm_d_epp",
            {"requests": 5.0, "requests_in_flight": 2.0, "upstream_errors": 0.0},
        ),
        (
            histogram("gen_ai_server_request_duration_seconds", 4, 2, labels='gen_ai_operation_name="chat"'),
            "envoy_ai_gateway",
            {"requests": 4.0, "request_time": 4.0, "upstream_errors": 0.0},
        ),
        (
            counter("agentgateway_requests_total", 4) + histogram("agentgateway_request_processing_seconds", 4, 1),
            "agentgateway",
            {"requests": 4.0, "queue_time": 4.0, "retries": 0.0},
        ),
        (
            counter("llm_model_requests_total", 4) + histogram("llm_model_routing_latency_seconds", 4, 1),
            "semantic_router",
            {"requests": 4.0, "queue_time": 4.0},
        ),
    ],
    ids=["llm-d", "old names", "Envoy AI Gateway", "agentgateway", "semantic-router"],
)
def test_a_page_as_the_source_has_it(text: str, name: str, expected: dict[str, float]):
    """Of names that stand twice, old and new, one counts."""
    page = parse(text.encode())
    recognised = detect(page.series)
    assert recognised is not None
    assert name == recognised.name
    assert engines.detect(page.series) is None
    shown = {
        quantity: float(page.values[[*source.columns, *(columns.count for columns in source.histograms)]].sum())
        for quantity, source in canonical(page.series, name).items()
        if not isinstance(source, Missing)
    }
    assert expected.items() <= shown.items()


def test_an_idle_page_is_recognised():
    """Before its first request vllm-router shows its workers alone."""
    recognised = detect(parse(b"# TYPE vllm_router_active_workers gauge\nvllm_router_active_workers 1\n").series)
    assert recognised is not None
    assert "vllm_router" == recognised.name


def test_names_of_any_instrumented_server_tell_nothing_of_an_engine_s_page():
    """They may be the engine's own."""
    series = parse(ASGI.encode()).series
    recognised = detect(series)
    assert recognised is not None
    assert "fastapi" == recognised.name
    assert detect(series, beside_engine=True) is None


@pytest.mark.parametrize(
    ("stated", "seconds"), [("65.10", 0.0651), (65.1, 0.0651), ("soon", None), (None, None)], ids=str
)
def test_a_first_output_may_be_a_text(stated: str | float | None, seconds: float | None):
    """As `tracing` of Rust writes numbers; what is none is not used."""
    first = FirstOutput(attribute="ttft_ms", unit="milliseconds")
    assert seconds == pytest.approx(first.seconds(stated)) if seconds else first.seconds(stated) is None


@pytest.mark.parametrize("name", gateway_names())
def test_what_is_shown_of_a_gateway_fits_its_example(name: str):
    """The block of settings listens where the example calls, and sends its spans to the port that is received at."""
    known = gateway(name)
    text = known.configuration.text
    if known.seen.settings != "source only":
        for url in filter(None, (known.example.url, known.example.page if known.seen.page == "recorded" else "")):
            port = re.findall(r":(\d+)", url)[0]
            # FastAPI's is the user's own server.
            assert name == "fastapi" or port in text, url
    assert known.spans is None or "4317" in text


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"server": "nginx/1.22.1"}, "nginx"),
        ({"server": "envoy", "x-envoy-upstream-service-time": "3"}, "envoy"),
        ({"server": "istio-envoy"}, "istio"),
        ({"server": "uvicorn", "x-litellm-version": "1.106.2"}, "litellm"),
        ({"server": "Python/3.11 aiohttp/3.14.5"}, None),
        ({}, None),
    ],
)
def test_the_gateway_of_a_reply(headers: Mapping[str, str], name: str | None):
    """By a header that it sets itself; an engine's own headers say nothing of what passed them on."""
    recognised = detect_reply(headers)
    assert name == (recognised.name if recognised else None)


def test_only_a_gateway_of_ones_own_can_be_made_to_state_more():
    """An attribute can be set in code that one wrote, with a framework or without, not in Envoy."""
    assert [True, True, True, False, False] == [
        can_state_more(name) for name in (None, "", "fastapi", "envoy", "sglang_router")
    ]
