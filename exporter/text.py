"""The report for people in a terminal: the answer first, then the client's numbers, where the TTFT went, the engine,
and how far to trust it.

One rendering serves the terminal and `report.txt`; it reads `summary.json` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 100
BAR = 16
SOURCES = {"histogram": "engine", "remainder": "what is left"}
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
PARTS = (
    ("network_ms", "network"),
    ("gateway_ms", "gateway"),
    ("queue_ms", "queue"),
    ("prefill_ms", "prefill"),
    ("other_ms", "other"),
)
HISTOGRAM_ROWS = (
    ("queue_time", "queue time"),
    ("prefill_time", "prefill time"),
    ("decode_time", "decode time"),
    ("ttft", "TTFT"),
    ("inter_token_latency", "ITL"),
    ("e2e_latency", "E2E"),
)
GAUGE_ROWS = (
    ("requests_running", "requests running"),
    ("requests_waiting", "requests waiting"),
    ("kv_cache_usage", "KV cache usage"),
)
COUNTER_ROWS = (
    ("prompt_tokens", "prompt tokens"),
    ("generation_tokens", "generation tokens"),
    ("requests_finished", "requests finished"),
    ("preemptions", "preemptions"),
    ("prefix_cache_queries", "prefix cache queries"),
    ("prefix_cache_hits", "prefix cache hits"),
)


def as_text(summary: Mapping[str, Any]) -> str:
    """Return the report as plain text, 100 columns wide, ending in a newline."""
    console = Console(file=StringIO(), width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    console.print(render(summary))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(row.rstrip() for row in text.splitlines()) + "\n"


def render(summary: Mapping[str, Any]) -> Group:
    """Return the report as something rich can print."""
    return Group(*_sections(summary))


def answer(summary: Mapping[str, Any]) -> str:
    """Return where the mean TTFT went, in a sentence; or why that cannot be said."""
    breakdown = summary["correlation"].get("breakdown", {})
    ttft = breakdown.get("ttft_ms", {}).get("mean")
    if ttft is None:
        return f"Where the TTFT went is not known: {_reason(summary['correlation'])}."
    shares = [
        f"{_ms(breakdown[key]['mean'])} ms ({_percent(breakdown[key]['share_of_ttft'])}) {name}"
        for key, name in PARTS
        if breakdown[key].get("mean") is not None
    ]
    if not shares:
        return f"Where the mean TTFT of {_ms(ttft)} ms went is not known: {_reason(summary['correlation'])}."
    return f"Of a mean TTFT of {_ms(ttft)} ms: {', '.join(shares)}."


def _sections(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _heading(summary)
    yield from (Text(f"! {warning}", style="yellow") for warning in summary.get("warnings", ()))
    yield Text("")
    if summary["client"]["requests"]["sent"]:
        yield _client(summary["client"])
        yield _throughput(summary["client"])
        yield Text("")
    yield _breakdown(summary["correlation"])
    yield Text(answer(summary), style="bold")
    if summary["correlation"].get("missing") is None:
        counted = "Means over {client_requests} requests by the client's count, {server_requests} by the engine's."
        yield Text(counted.format_map(summary["correlation"]), style="dim")
    yield from (Text(row, style="dim") for row in _association(summary["correlation"]))
    yield Text("")
    yield from _server(summary["server"])
    yield Text(_trust(summary["self_check"]), style="dim")


def _heading(summary: Mapping[str, Any]) -> Text:
    requests = summary["client"]["requests"]
    target = summary["config"].get("model") or "server metrics only"
    style = "green" if summary["status"] == "complete" else "red"
    counts = ", ".join(f"{requests[key]} {key}" for key in ("sent", "ok", "failed", "refused", "cancelled"))
    return Text.assemble(
        (f"sidelight {summary['tool']['version']}", "bold"),
        f"  run {summary['run_id']}  ",
        (summary["status"], style),
        f"\n{target} at {summary['config'].get('url') or ', '.join(summary['config'].get('metrics') or ())}",
        f"\n{summary['started_at']} to {summary['ended_at'] or 'its crash'}",
        f"\nrequests: {counts}" if requests["sent"] else "",
    )


def _client(client: Mapping[str, Any]) -> Table:
    table = _table("Client", *STATISTICS)
    for key, label in CLIENT_ROWS:
        block = client.get(key)
        if block is None:
            continue
        if block.get("mean") is None:
            table.add_row(label, Text(block.get("missing", "missing"), style="dim"))
        else:
            table.add_row(label, *(_cell(block[statistic]) for statistic in STATISTICS))
    return table


def _throughput(client: Mapping[str, Any]) -> Text:
    flow = client["throughput"]
    shown = (
        ("requests_per_s", "requests/s"),
        ("input_tokens_per_s", "input tokens/s"),
        ("output_tokens_per_s", "output tokens/s"),
    )
    return Text("throughput: " + ", ".join(f"{_cell(flow.get(key))} {label}" for key, label in shown))


def _breakdown(correlation: Mapping[str, Any]) -> Table:
    table = _table("Where the TTFT went", "mean ms", "share", "", "source", label_width=10)
    breakdown = correlation.get("breakdown", {})
    for key, name in PARTS:
        part = breakdown.get(key, {})
        if part.get("mean") is None:
            table.add_row(name, "-", "-", "", Text(str(part.get("missing", "")), style="dim", overflow="fold"))
        else:
            share = part["share_of_ttft"]
            bar = "█" * max(0, round(BAR * (share or 0.0)))
            table.add_row(name, _ms(part["mean"]), _percent(share), Text(bar, style="cyan"), SOURCES[part["source"]])
    whole = breakdown.get("ttft_ms", {})
    if whole.get("mean") is not None:
        table.add_row(Text("TTFT", style="bold"), _ms(whole["mean"]), "100 %", "", "client")
    return table


def _association(correlation: Mapping[str, Any]) -> Iterator[str]:
    for found in correlation.get("association", ()):
        if found.get("rho") is None:
            yield f"{found['client']} against {found['server']}: not known, {found['missing']}"
            continue
        ci95 = found.get("ci95")
        clear = ci95 is not None and ci95[0] * ci95[1] > 0
        interval = (
            f"95 % interval {ci95[0]:.2f} to {ci95[1]:.2f}" if ci95 else "too few independent samples for an interval"
        )
        yield (
            f"{found['client']} and {found['server']}: rank correlation {found['rho']:.2f} "
            f"at a lag of {found['lag_s']:g} s, "
            f"{interval}{'' if clear else ' (not told apart from chance)'}"
        )


def _server(server: Mapping[str, Any]) -> Iterator[RenderableType]:
    engine = server.get("engine") or {}
    if not engine.get("name"):
        yield Text(f"Server: {server.get('reason')}", style="yellow")
        yield Text("")
        return
    title = f"Server: {engine['name']} {engine.get('version') or ''}".rstrip()
    table = _table(title, "count", "mean", "p50", "p99", "max")
    for key, label in HISTOGRAM_ROWS:
        if (stats := _stats(server, key)) and stats.get("mean") is not None:
            estimates = (_estimate(server[key], name) for name in ("p50", "p99"))
            table.add_row(f"{label}, ms", f"{stats['count']:,}", _ms(1e3 * stats["mean"]), *estimates, "")
    for key, label in GAUGE_ROWS:
        if (stats := _stats(server, key)) and stats.get("mean") is not None:
            table.add_row(label, "", *(_cell(stats.get(name)) for name in ("mean", "p50", "p99", "max")))
    for key, label in COUNTER_ROWS:
        if (stats := _stats(server, key)) and stats.get("total") is not None:
            table.add_row(label, _cell(stats["total"]), "", "", "", "")
    yield (
        table if table.row_count else Text(f"Server: {engine['name']}, nothing in the measured window", style="yellow")
    )
    yield Text("")


def _trust(check: Mapping[str, Any]) -> str:
    lateness = check.get("schedule_lateness_ms", {})
    late = f"submissions late by p99 {_ms(lateness['p99'])} ms" if lateness.get("p99") is not None else ""
    cpu = check.get("cpu_ratio", {}).get("max")
    busy = f"busiest process {_percent(cpu)} of a core" if cpu is not None else ""
    facts = ", ".join(fact for fact in (late, busy) if fact)
    return f"The load generator: {'; '.join(fact for fact in (facts, check['verdict']) if fact)}"


def _table(title: str, *columns: str, label_width: int = 20) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold cyan", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", min_width=label_width)
    for column in columns:
        table.add_column(column, justify="left" if column in {"", "source"} else "right")
    return table


def _stats(server: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    found = server.get(key)
    return found.get("stats") if isinstance(found, Mapping) else None


def _reason(part: Mapping[str, Any]) -> str:
    return str(part.get("missing") or "no reason was given")


def _estimate(quantity: Mapping[str, Any], name: str) -> str:
    """Return a percentile in ms; where its bucket is wider than its value, only the bound that is certain."""
    value, edges = quantity["stats"].get(name), quantity.get("brackets", {}).get(name, {})
    low, high = edges.get("low", 0.0), edges.get("high")
    if value is None or high is None:
        return f"> {_ms(1e3 * low)}" if low else "-"
    return f"≤ {_ms(1e3 * high)}" if high - low > value else _ms(1e3 * value)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.2f}"
