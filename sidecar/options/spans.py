"""Where spans are received and forwarded, shared by `run`, `scrape` and `watch`; where results are sent, shared by
`run` and `report`; their checks.
"""

# No postponed annotations, as in sidecar.options.fields.
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import Access
from sidelight.rundir.clock import AnchoredClock
from sidelight.scraper.spans.spec import CannotListen, ReceiverSpec, forward_parts, host_and_port, require_free
from sidelight.sidecar.options.access import (
    AccessOptions,
    ListenOptions,
    check_listening,
    guard_of,
    require_headers,
    require_tls,
)
from sidelight.sidecar.options.fields import (
    HEADERS,
    MASKED_URL,
    OUTPUT,
    TLS_FILE,
    http_url,
    listen_address,
    option,
    register_secrets,
    repeatable,
)

SPANS = Group("Spans", sort_key=4.6)  # after the groups of metrics pages

MEMORY_BYTES = 512 * 10**6  # of the receiver of spans, where a watch says no other

OtlpListen = Annotated[
    str | None,
    option(
        SPANS,
        "Receive spans of engines and gateways over OTLP: gRPC on HOST:PORT, HTTP/protobuf on PORT+1; port 0 "
        "picks free ports. Usually 127.0.0.1:4317; docs/reference/engines.md says how engines send them. "
        "Default: off.",
    ),
]
OtlpHeader = Annotated[
    tuple[str, ...],
    repeatable(SPANS, "Additional header for the collectors named here, 'Name: value' or @FILE (repeatable)."),
    HEADERS,
]
OtlpCa = Annotated[
    Path | None,
    option(
        SPANS, "Collectors: trust only certificates signed by this authority (PEM). Default: the system's authorities."
    ),
    TLS_FILE,
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanOptions(ListenOptions, AccessOptions):
    """Options of receiving and forwarding spans, and of access to our ports. The spans are those of engines and
    gateways.
    """

    otlp_listen: OtlpListen = None
    otlp_forward: Annotated[
        str | None,
        option(
            SPANS,
            "Forward received spans to this collector: grpc://HOST:PORT, or http://HOST:PORT (port 4317: gRPC; any "
            "other: HTTP/protobuf); grpcs:// and https:// use TLS.",
        ),
        MASKED_URL,
    ] = None
    otlp_header: OtlpHeader = ()
    otlp_ca: OtlpCa = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RemoteWriteOptions:
    """Destination of the series of a run or a watch."""

    prometheus_write: Annotated[
        str | None,
        option(
            OUTPUT,
            "Send the series of the live page by remote write, e.g. to http://HOST:9090/api/v1/write. They go "
            "every 5 s and at the end, with the run's time stamps.",
        ),
        MASKED_URL,
    ] = None
    prometheus_header: Annotated[
        tuple[str, ...],
        repeatable(OUTPUT, "Additional header for --prometheus-write, 'Name: value' or @FILE (repeatable)."),
        HEADERS,
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExportOptions(RemoteWriteOptions):
    """Destinations of the results of a run."""

    otlp_export: Annotated[
        str | None,
        option(
            SPANS,
            "Send spans of requests, and the run's metrics, to this collector: grpc://HOST:PORT or "
            "http://HOST:PORT. A span of each request, with its phases, after the run; http:// is gRPC at port 4317, "
            "else HTTP/protobuf. See docs/reference/otlp.md.",
        ),
        MASKED_URL,
    ] = None


def check_exports(options: ExportOptions) -> None:
    """Check the destinations of results. Raises ConfigurationError, naming the option and the cure, where one cannot be
    used.
    """
    if options.otlp_export is not None:
        check_collector("--otlp-export", options.otlp_export)
    check_remote_write(options)


def check_remote_write(options: RemoteWriteOptions) -> None:
    """Check the options of remote write. Raises ConfigurationError, naming the option and the cure, where one cannot be
    used.
    """
    if options.prometheus_write is not None:
        example = "http://127.0.0.1:9090/api/v1/write"
        http_url("--prometheus-write", options.prometheus_write, user=True, bare=False, example=example)
    require_headers("--prometheus-header", options.prometheus_header)


def check_spans(options: SpanOptions, *, listen: str | None = None) -> None:
    """Check the options of spans. Raises ConfigurationError, naming the option and the cure, where one cannot be used;
    `listen` is the address of the live page, where one is named.
    """
    register_secrets(options)
    page = {"--listen": listen} if listen is not None and listen_address(listen) is not None else {}
    if options.otlp_listen is None:
        check_listening(options, page)
    else:
        listen_addresses(options.otlp_listen)
        check_listening(options, {**page, "--otlp-listen": options.otlp_listen})
    if options.otlp_forward is not None:
        check_collector("--otlp-forward", options.otlp_forward)
        if options.otlp_listen is None:
            raise ConfigurationError(
                "option.contradictory",
                "--otlp-forward: there are no spans to forward; add --otlp-listen 127.0.0.1:4317",
            )
    require_headers("--otlp-header", options.otlp_header)
    require_tls("--otlp-", ca=options.otlp_ca, cert=None, key=None)


def check_collector(flag: str, url: str) -> None:
    """Check that spans can be sent to the URL of an option. Raises ConfigurationError."""
    try:
        forward_parts(url)
    except ValueError as error:
        raise ConfigurationError("option.value", f"{flag}: {error}; e.g. grpc://127.0.0.1:4317") from error


def require_ports(options: SpanOptions) -> None:
    """Require free addresses for spans, before anything is recorded. Raises ConfigurationError."""
    if options.otlp_listen is None:
        return
    for address in listen_addresses(options.otlp_listen):
        try:
            require_free(address)
        except CannotListen as error:
            raise ConfigurationError(
                "listen.in-use",
                f"--otlp-listen {options.otlp_listen}: {error}; stop what listens there, or choose another HOST:PORT "
                "(its PORT+1 is for HTTP) here and in the engine",
            ) from error


def forward_access(options: SpanOptions) -> Access:
    """Return the access of the collectors, from checked options."""
    headers = require_headers("--otlp-header", options.otlp_header)
    return Access(headers=headers, ca=str(options.otlp_ca) if options.otlp_ca else "")


def write_access(options: RemoteWriteOptions) -> Access:
    """Return the access of the server of --prometheus-write, from checked options."""
    return Access(headers=require_headers("--prometheus-header", options.prometheus_header))


def receiver_spec(options: SpanOptions, clock: AnchoredClock) -> ReceiverSpec | None:
    """Return the specification of the receiver, from checked options; None without one."""
    if options.otlp_listen is None:
        return None
    grpc, http = listen_addresses(options.otlp_listen)
    return ReceiverSpec(
        grpc=grpc,
        http=http,
        clock_offset_ns=clock.offset_ns,
        forward=options.otlp_forward or "",
        access=forward_access(options),
        memory_bytes=MEMORY_BYTES,
        guard=guard_of(options),
    )


def listen_addresses(listen: str) -> tuple[str, str]:
    """Return the addresses for gRPC and for HTTP. Raises ConfigurationError."""
    try:
        _, port = host_and_port(listen)
    except ValueError:
        port = 65536
    if port + 1 > 65535:
        raise ConfigurationError(
            "option.value", f"--otlp-listen {listen}: must be HOST:PORT, e.g. 127.0.0.1:4317, PORT below 65535"
        )
    return listen, f"{listen.rpartition(':')[0]}:{port + 1 if port else 0}"
