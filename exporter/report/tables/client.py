"""Client metrics: latencies, tokens and rates, of all requests and by workload class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msgspec import UNSET, UnsetType

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import BLANK, Block, Prose, Table, numbers, table
from sidelight.exporter.report.load import rate_lines
from sidelight.exporter.summary.breakdown import Breakdown, json_name, label_of
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.delivery import Delivery
from sidelight.loadgen.requests.self_check.nodes import NodeSummary
from sidelight.loadgen.requests.summary import NONE_HAS_IT, ClassSummary, ClientSummary
from sidelight.rundir.printable.numbers import cell, count_of, percent
from sidelight.rundir.stats import Statistics

CLIENT_ROWS = (
    ("ttft_ms", "TTFT, ms"),
    ("first_visible_token_ms", "first visible token, ms"),
    ("itl_ms", "gaps between chunks, ms"),
    ("time_between_chunks_ms", "gaps between chunks, ms"),
    ("tpot_ms", "TPOT, ms"),
    ("e2e_ms", "E2E, ms"),
    ("request_output_tps", "tokens/s a request"),
    ("input_tokens", "input tokens"),
    ("output_tokens", "output tokens"),
    ("reasoning_tokens", "reasoning tokens"),
)
LONGER = 2.0  # times TPOT: gaps that need an explanation
STATISTICS = ("mean", "min", "p50", "p90", "p95", "p99", "p99_9", "max")


def client_section(summary: Summary) -> Iterator[Block]:
    """Yield the tables and the rates; what is missing stands below with its reason, so that it widens no column."""
    client = summary.client
    shown = client_table(client)
    if not shown.rows:  # the conclusion says why
        return
    yield shown
    missing: dict[str, list[str]] = {}
    for key, label, values in _measured(client):
        if values.mean is None:
            missing.setdefault(_reason(key, values), []).append(label.removesuffix(", ms"))
    for reason, labels in missing.items():
        yield Prose(f"{', '.join(labels)}: n/a ({reason})", "note")
    if client.requests.left:
        yield Prose(f"The times of {count_of(client.requests.left, 'client')} that left are not among these.", "note")
    yield from _tokens_a_chunk(client)
    yield from map(Prose, chain(_speculation(client), rate_lines(summary)))
    yield from _first_tokens(client.delivery)
    yield BLANK
    yield from _classes("Classes", client.classes)
    yield from _classes("Models", client.models or {})
    yield from _nodes(client.by_node or ())


def _tokens_a_chunk(client: ClientSummary) -> Iterator[Prose]:
    """Yield the reason if gaps are much longer than the time per output token."""
    gap_ms, token_ms = client.time_between_chunks_ms and client.time_between_chunks_ms.p50, client.tpot_ms.p50
    if gap_ms and token_ms and gap_ms >= LONGER * token_ms:
        yield Prose("Chunks hold several tokens, so that gaps between chunks are longer than TPOT.", "note")


def _speculation(client: ClientSummary) -> Iterator[str]:
    """Yield the acceptance of speculative decoding by the replies, and how it differs between requests."""
    if stated := client.speculation:
        step, accepted = stated.tokens_a_step, stated.draft_tokens_accepted
        spread = ", ".join(f"{name} {getattr(step, name):.2f}" for name in ("p10", "p50", "p90"))
        yield (
            f"Speculative decoding, by {stated.requests:,} replies: {1 + accepted / stated.drafts:.2f} tokens a "
            f"step (of a request {spread}), {percent(accepted / stated.draft_tokens)} of "
            f"{stated.draft_tokens:,} draft tokens accepted"
        )


def client_table(client: ClientSummary) -> Table:
    """Return a table of the client's metrics, with a row for each known one."""
    rows = (
        (label, *(getattr(values, statistic) for statistic in STATISTICS))
        for _, label, values in _measured(client)
        if values.mean is not None
    )
    return table("Client", numbers(*(name.replace("_", ".") for name in STATISTICS), show=cell), rows)


def time_labels(breakdown: Breakdown) -> dict[str, str]:
    """Return the labels of the client's times and the parts of the TTFT, without units."""
    labels = {name: label.removesuffix(", ms") for name, label in CLIENT_ROWS}
    return labels | {json_name(part): label_of(part, breakdown) for part in TTFT_PARTS}


def _measured(client: ClientSummary) -> Iterator[tuple[str, str, Statistics]]:
    for key, label in CLIENT_ROWS:
        values: Statistics | UnsetType = getattr(client, key)
        if values is not UNSET:
            yield key, label, values


def _reason(key: str, values: Statistics) -> str:
    """Return the reason for a missing metric; of tokens, that no reply reports them."""
    no_usage = key.endswith("_tokens") and values.missing == NONE_HAS_IT
    return "no usage" if no_usage else values.missing or "not known"


def _first_tokens(delivery: Delivery) -> Iterator[Prose]:
    """Yield the kinds of the replies' first tokens, if they were not always text."""
    first = delivery.first_tokens
    if first.reasoning or first.tool:
        counts = ((first.content, "text"), (first.reasoning, "reasoning"), (first.tool, "a tool call"))
        kinds = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        yield Prose(f"First tokens: {kinds}", "note")


def _classes(title: str, classes: Mapping[str, ClassSummary]) -> Iterator[Block]:
    if len(classes) < 2:
        return
    rows = []
    for name, group in classes.items():
        ttft, e2e = group.ttft_ms, group.e2e_ms
        times = (ttft.mean, ttft.p50, ttft.p99, group.tpot_ms.mean, e2e.p50, e2e.p99)
        rows.append((name, group.requests.ok, *times, group.throughput.output_tokens_per_s))
    columns = numbers("TTFT mean", "TTFT p50", "TTFT p99", "TPOT mean", "E2E p50", "E2E p99")
    yield table(title, (*numbers("ok", show=cell), *columns, *numbers("tokens/s", show=cell)), rows)


def _nodes(nodes: Sequence[NodeSummary]) -> Iterator[Block]:
    """Yield a row for each node: its requests, its TTFT, how late its first one left, when it had its order."""
    if len(nodes) < 2:
        return
    rows = []
    for node in nodes:
        busy = None if node.machine is None else node.machine.busy_ratio
        times = (node.ttft_ms.p50, node.ttft_ms.p99, node.first_late_ms, node.order_ms)
        rows.append((node.node, node.sent, node.ok, *times, None if busy is None else 100 * busy))
    columns = numbers("TTFT p50", "TTFT p99", "first late", "order came")
    yield table("Nodes, ms", (*numbers("sent", "ok", show=cell), *columns, *numbers("busy, %", show=cell)), rows)
    yield BLANK
