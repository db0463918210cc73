"""Client metrics: latencies, tokens and rates, of all requests and by workload class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import UNSET, UnsetType
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from exporter.report.format import Prose, table
from exporter.report.load import rate_lines
from exporter.summary.result import Summary
from loadgen.requests.delivery import Delivery
from loadgen.requests.summary import NONE_HAS_IT, ClassSummary, ClientSummary
from rundir.printable.numbers import cell, ms
from rundir.stats import Statistics

CLIENT_ROWS = (
    ("ttft_ms", "TTFT, ms"),
    ("itl_ms", "gaps between chunks, ms"),
    ("time_between_chunks_ms", "gaps between chunks, ms"),
    ("tpot_ms", "TPOT, ms"),
    ("e2e_ms", "E2E, ms"),
    ("request_output_tps", "tokens/s a request"),
    ("input_tokens", "input tokens"),
    ("output_tokens", "output tokens"),
)
LONGER = 2.0  # times TPOT: gaps that need an explanation
STATISTICS = ("mean", "min", "p50", "p90", "p95", "p99", "p99_9", "max")


def client_section(summary: Summary) -> Iterator[RenderableType]:
    """Yield the tables and the rates; what is missing stands below with its reason, so that it widens no column."""
    client = summary.client
    shown = client_table(client)
    if not shown.row_count:  # the conclusion says why
        return
    yield shown
    missing: dict[str, list[str]] = {}
    for key, label, values in _measured(client):
        if values.mean is None:
            missing.setdefault(_reason(key, values), []).append(label.removesuffix(", ms"))
    for reason, labels in missing.items():
        yield Text(f"{', '.join(labels)}: n/a ({reason})", style="dim")
    yield from _tokens_a_chunk(client)
    yield from map(Prose, rate_lines(summary))
    yield from _first_tokens(client.delivery)
    yield Text("")
    yield from _classes(client.classes)


def _tokens_a_chunk(client: ClientSummary) -> Iterator[Prose]:
    """Yield the reason if gaps are much longer than the time per output token."""
    gap_ms, token_ms = client.time_between_chunks_ms and client.time_between_chunks_ms.p50, client.tpot_ms.p50
    if gap_ms and token_ms and gap_ms >= LONGER * token_ms:
        yield Prose("Chunks hold several tokens, so that gaps between chunks are longer than TPOT.", "dim")


def client_table(client: ClientSummary) -> Table:
    """Return a table of the client's metrics, with a row for each known one."""
    shown = table("Client", *(name.replace("_", ".") for name in STATISTICS))
    for _, label, values in _measured(client):
        if values.mean is not None:
            shown.add_row(label, *(cell(getattr(values, statistic)) for statistic in STATISTICS))
    return shown


def _measured(client: ClientSummary) -> Iterator[tuple[str, str, Statistics]]:
    for key, label in CLIENT_ROWS:
        values: Statistics | UnsetType = getattr(client, key)
        if values is not UNSET:
            yield key, label, values


def _reason(key: str, values: Statistics) -> str:
    """Return the reason for a missing metric; of tokens, that no reply reports them."""
    no_usage = key.endswith("_tokens") and values.missing == NONE_HAS_IT
    return "no usage" if no_usage else values.missing or "not known"


def _first_tokens(delivery: Delivery) -> Iterator[Text]:
    """Yield the kinds of the replies' first tokens, if they were not always text."""
    first = delivery.first_tokens
    if first.reasoning or first.tool:
        counts = ((first.content, "text"), (first.reasoning, "reasoning"), (first.tool, "a tool call"))
        kinds = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        yield Text(f"First tokens: {kinds}", style="dim")


def _classes(classes: Mapping[str, ClassSummary]) -> Iterator[RenderableType]:
    if len(classes) < 2:
        return
    shown = table("Classes", "ok", "TTFT mean", "TTFT p50", "TTFT p99", "TPOT mean", "E2E p50", "E2E p99", "tokens/s")
    for name, group in classes.items():
        ttft, e2e = group.ttft_ms, group.e2e_ms
        times = (ttft.mean, ttft.p50, ttft.p99, group.tpot_ms.mean, e2e.p50, e2e.p99)
        tokens_per_s = cell(group.throughput.output_tokens_per_s)
        shown.add_row(Text(name), f"{group.requests.ok:,}", *(ms(value) for value in times), tokens_per_s)
    yield shown
