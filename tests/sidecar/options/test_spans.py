"""The options of spans: what they make of an address, and how they say what is wrong."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import Access
from sidelight.rundir.clock import anchor
from sidelight.sidecar.cli.measuring import free_pair
from sidelight.sidecar.options.config import as_recorded
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.spans import SpanOptions, forward_access, receiver_spec, require_ports
from sidelight.sidecar.options.watch import ScrapeOptions, check_scrape

LISTEN = "127.0.0.1:4317"


@pytest.mark.parametrize(
    ("listen", "http"),
    [
        (LISTEN, "127.0.0.1:4318"),
        ("0.0.0.0:65534", "0.0.0.0:65535"),
        ("[::1]:4317", "[::1]:4318"),
        ("localhost:0", "localhost:0"),
    ],
)
def test_http_is_at_the_next_port(listen: str, http: str):
    """gRPC where it was said, HTTP/protobuf beside it, as 4317 and 4318 are; any two ports for port 0."""
    spec = receiver_spec(SpanOptions(otlp_listen=listen), anchor())
    assert spec is not None
    assert (listen, http) == (spec.grpc, spec.http)
    assert receiver_spec(SpanOptions(), anchor()) is None


def test_the_next_collector_gets_headers_and_is_trusted_by_its_authority():
    """Neither stands in the manifest with its value, nor does a password in the URL."""
    options = RunOptions(
        otlp_listen=LISTEN,
        otlp_forward="https://ann:hush-pw@collector",
        otlp_export="http://ann:hush-pw@other:4318",
        otlp_header=("Authorization: hush-token",),
        otlp_ca=Path("ca.pem"),
    )
    access = Access(headers={"Authorization": "hush-token"}, ca="ca.pem")
    spec = receiver_spec(options, anchor())
    assert spec is not None
    assert (access, "https://ann:hush-pw@collector") == (spec.access, spec.forward)
    assert access == forward_access(options)
    recorded = as_recorded(options)
    assert "hush" not in json.dumps(recorded)
    assert ("https://***@collector", "http://***@other:4318", ["Authorization: ***"]) == tuple(
        recorded[name] for name in ("otlp_forward", "otlp_export", "otlp_header")
    )


def test_a_scrape_needs_no_pages_where_it_has_spans():
    assert LISTEN == check_scrape(ScrapeOptions(otlp_listen=LISTEN)).otlp_listen


def test_free_ports_are_left_free():
    """Both can be had after the question; nothing is asked where nothing listens."""
    require_ports(SpanOptions())
    require_ports(SpanOptions(otlp_listen="127.0.0.1:0"))
    port = int(free_pair().rpartition(":")[2]) + 1
    with socket.create_server(("127.0.0.1", port)):
        for listen in (f"127.0.0.1:{port}", f"127.0.0.1:{port - 1}"):
            with pytest.raises(
                ConfigurationError, match=f"--otlp-listen {listen}: cannot listen on 127.0.0.1:{port}: "
            ):
                require_ports(SpanOptions(otlp_listen=listen))
