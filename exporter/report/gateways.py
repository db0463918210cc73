"""What each gateway between the client and the engine took, and what its spans lack to say all of it, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from exporter.report.format import spoken
from exporter.summary.gateways import GatewaySummary

FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"


def gateway_lines(gateways: Sequence[GatewaySummary]) -> Iterator[str]:
    """Yield the part of each of several gateways, and what to set on those that do not report their first output."""
    if len(gateways) > 1:
        parts = (f"{_name(gateway)} {_part(gateway)}" for gateway in gateways)
        yield f"Gateways, outermost first: {', '.join(parts)}."
    yield from (_without_first_output(gateway) for gateway in gateways if gateway.first_output.get("unknown"))


def _without_first_output(gateway: GatewaySummary) -> str:
    inbound = (
        f"It held requests for {spoken(gateway.request_ms)} before it called the next server, and "
        if gateway.request_ms is not None
        else "Requests spent "
    )
    return (
        f"The spans of gateway {_name(gateway)} do not say when its first output left. {inbound}at most "
        f"{spoken(gateway.at_most_ms)} in it altogether. To see the rest, set {FIRST_CHUNK} (seconds) on its server "
        "span."
    )


def _part(gateway: GatewaySummary) -> str:
    if gateway.part_ms is None:
        return f"at most {spoken(gateway.at_most_ms)}"
    return spoken(gateway.part_ms)


def _name(gateway: GatewaySummary) -> str:
    return gateway.service or "without a service.name"
