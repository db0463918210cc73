"""What the client saw: latencies, tokens and rates, of all requests and by workload class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import UNSET, UnsetType
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from exporter.report.format import cell, ms, table
from loadgen.requests.delivery import Delivery
from loadgen.requests.summary import ClassSummary, ClientSummary
from rundir.stats import Statistics

CLIENT_ROWS = (
    ("ttft_ms", "TTFT, ms"),
    ("itl_ms", "ITL, ms"),
    ("time_between_chunks_ms", "between chunks, ms"),
    ("tpot_ms", "TPOT, ms"),
    ("e2e_ms", "E2E, ms"),
    ("request_output_tps", "tokens/s a request"),
    ("input_tokens", "input tokens"),
    ("output_tokens", "output tokens"),
)
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def client_section(client: ClientSummary) -> Iterator[RenderableType]:
    """Yield the tables and the rates."""
    yield _client(client)
    yield _throughput(client)
    yield _first_tokens(client.delivery)
    yield from _classes(client.classes)


def _client(client: ClientSummary) -> Table:
    shown = table("Client", *STATISTICS)
    for key, label in CLIENT_ROWS:
        values: Statistics | UnsetType = getattr(client, key)
        if values is UNSET:
            continue
        if values.mean is None:
            shown.add_row(label, Text(values.missing or "missing", style="dim"))
        else:
            shown.add_row(label, *(cell(getattr(values, statistic)) for statistic in STATISTICS))
    return shown


def _throughput(client: ClientSummary) -> Text:
    rates = (
        ("requests_per_s", "requests/s"),
        ("input_tokens_per_s", "input tokens/s"),
        ("output_tokens_per_s", "output tokens/s"),
        *((("goodput_requests_per_s", "good requests/s"),) if client.slo else ()),
    )
    return Text("throughput: " + ", ".join(f"{cell(getattr(client.throughput, key))} {label}" for key, label in rates))


def _first_tokens(delivery: Delivery) -> Text:
    """Return what replies began with, and the rule that makes it a first token."""
    counts = msgspec.structs.asdict(delivery.first_tokens)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "none"
    return Text(f"first tokens: {kinds}; {delivery.content_rule}", style="dim")


def _classes(classes: Mapping[str, ClassSummary]) -> Iterator[RenderableType]:
    if len(classes) < 2:
        return
    shown = table("Classes", "ok", "TTFT mean", "p50", "p99", "TPOT mean", "E2E p50", "p99", "tokens/s")
    for name, group in classes.items():
        ttft, e2e = group.ttft_ms, group.e2e_ms
        times = (ttft.mean, ttft.p50, ttft.p99, group.tpot_ms.mean, e2e.p50, e2e.p99)
        tokens_per_s = cell(group.throughput.output_tokens_per_s)
        shown.add_row(name, f"{group.requests.ok:,}", *(ms(value) for value in times), tokens_per_s)
    yield shown
