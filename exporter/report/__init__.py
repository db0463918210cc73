"""The report for people in a terminal: the answer first, then the client's numbers, where the TTFT went, the engine,
and how far to trust it.

One rendering serves the terminal and `report.txt`; it reads `summary.json` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from exporter.report.association import association_rows, variance_rows
from exporter.report.breakdown import answer, basis, breakdown_table, group_tables
from exporter.report.energy import energy_section
from exporter.report.format import cell, ms, percent, table
from exporter.summary.correlation import ServerTimes, TimePercentiles
from exporter.summary.result import Summary, Workload
from loadgen.requests.delivery import Delivery
from loadgen.requests.self_check import SelfCheck
from loadgen.requests.slo import SloResult
from loadgen.requests.summary import ClassSummary, ClientSummary
from rundir.stats import Statistics
from scraper.window.quantities import Counter, Gauge, Histogram, Range, SampleStatistics
from scraper.window.summary import Server

WIDTH = 100
WIDE = 0.2
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
HISTOGRAM_ROWS = (
    ("queue_time", "queue time"),
    ("prefill_time", "prefill time"),
    ("decode_time", "decode time"),
    ("ttft", "TTFT"),
    ("inter_token_latency", "ITL"),
    ("e2e_latency", "E2E"),
)
CLIENT_EYES = {"queue_time": "queue_ms", "prefill_time": "prefill_ms"}
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


def as_text(summary: Summary) -> str:
    """Return the report as plain text, 100 columns wide, ending in a newline."""
    console = Console(file=StringIO(), width=WIDTH, color_system=None, force_terminal=False, highlight=False)
    console.print(render(summary))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(row.rstrip() for row in text.splitlines()) + "\n"


def render(summary: Summary) -> Group:
    return Group(*_sections(summary))


def _sections(summary: Summary) -> Iterator[RenderableType]:
    if first_line := summary.self_check.first_line:
        yield Text(f"! {first_line}", style="bold red")
    yield _heading(summary)
    yield from (Text(f"! {warning}", style="yellow") for warning in summary.warnings)
    yield Text("")
    if summary.client.requests.sent:
        yield _client(summary.client)
        yield _throughput(summary.client)
        yield _first_tokens(summary.client.delivery)
        if summary.client.slo is not None:
            yield from _objectives(summary.client.slo)
        yield Text("")
        yield from _classes(summary.client.classes)
        correlation = summary.correlation
        if not correlation.missing:
            yield breakdown_table(correlation)
            yield from group_tables(correlation)
        yield Text(answer(correlation), style="bold")
        if not correlation.missing:
            if not correlation.breakdown.means_only:
                yield Text(correlation.tail_attribution.sentence, style="bold")
            yield from (Text(row, style="dim") for row in (*variance_rows(correlation), *basis(correlation)))
        yield from (Text(row, style="dim") for row in association_rows(correlation))
        yield Text("")
    yield from _server(summary.server, summary.correlation.server_percentiles)
    yield from energy_section(summary.hardware)
    if summary.client.requests.sent:
        yield Text(_generator(summary.self_check), style="dim")
        compliance = summary.methodology
        warm_up = compliance.warmup.sentence if compliance.warmup else ""
        yield Text(f"{compliance.draft}: {compliance.missing}. {warm_up}".rstrip(), style="dim")


def _heading(summary: Summary) -> Text:
    requests, window = summary.client.requests, summary.window
    target = summary.config.get("model") or "server metrics only"
    style = "green" if summary.status == "complete" else "red"
    counts = ", ".join(f"{getattr(requests, key)} {key}" for key in ("sent", "ok", "failed", "refused", "cancelled"))
    return Text.assemble(
        (f"sidelight {summary.tool.version}", "bold"),
        f"  run {summary.run_id}  ",
        (summary.status, style),
        f"\n{target} at {', '.join(urls_of(summary.config) or summary.config.get('metrics') or ())}",
        f"\nmeasured {window.start} to {window.end}, {window.duration_s:.1f} s",
        f"\n{_load(summary.config, summary.workload)}\nrequests: {counts}" if requests.sent else "",
    )


def _load(config: Mapping[str, Any], workload: Workload) -> str:
    limits = [f"{config['duration']:g} s"] if config["duration"] else []
    limits += [f"{config['requests']} requests"] if config["requests"] else []
    tokenizer = workload.tokenizer.name if workload.tokenizer else "an unknown tokenizer"
    parts = (_loop(config), " or ".join(limits), f"after a warm-up of {workload.warmup_requests}")
    return (
        f"load: {', '.join(part for part in parts if part)}; "
        f"{workload.name}, seed {workload.seed}, tokens of {tokenizer}"
    )


def _loop(config: Mapping[str, Any]) -> str:
    if config["concurrency"]:
        return f"closed loop, {config['concurrency']} " + ("at one instant" if config.get("barrier") else "in flight")
    if config.get("trace"):
        return f"open loop, arrivals of {config['trace']}"
    if not config["rate"]:
        return f"open loop, arrivals of {config.get('replay_requests')}"
    to = f" to {config['ramp_to']:g}" if config.get("ramp_to") else ""
    return f"open loop, {config['rate']:g}{to} requests/s {config['arrival']}"


def urls_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the URLs of a recorded configuration: a run has several, a scrape one or none."""
    urls = config.get("url") or ()
    return (urls,) if isinstance(urls, str) else tuple(urls)


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


def _objectives(slo: SloResult) -> Iterator[Text]:
    """Give for each objective whether it was met, and by what value."""
    for objective in slo.objectives:
        verdict = {True: "met", False: "MISSED", None: "unknown"}[objective.met]
        value = f"{ms(objective.value_ms)} ms" if objective.value_ms is not None else objective.missing or "-"
        yield Text(f"objective {objective.text}: {verdict}, {value}", style="green" if objective.met else "bold red")


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


def _server(server: Server, by_client: ServerTimes) -> Iterator[RenderableType]:
    """Show the engine's quantities; percentiles that the client's requests resolve better are taken from them."""
    engine = server.engine
    if engine is None:
        yield Text(f"Server: {server.reason}", style="yellow")
        yield Text("")
        return
    title = f"Server: {engine.name} {engine.version or ''}".rstrip()
    shown = table(title, "count", "mean", "p50", "p99", "max")
    for key, label in HISTOGRAM_ROWS:
        histogram: Histogram | UnsetType = getattr(server, key)
        if histogram and not isinstance(histogram.stats.mean, UnsetType):
            seen: TimePercentiles | None = getattr(by_client, CLIENT_EYES.get(key, ""), None)
            estimates = (
                _seen(seen, name) if seen and seen.source == "client spans" else _estimate(histogram, name)
                for name in ("p50", "p99")
            )
            stats = histogram.stats
            shown.add_row(f"{label}, ms", f"{stats.count:,}", ms(1e3 * histogram.stats.mean), *estimates, "")
    for key, label in GAUGE_ROWS:
        gauge: Gauge | UnsetType = getattr(server, key)
        if gauge and gauge.stats.mean is not UNSET:
            shown.add_row(label, "", *(cell(_known(gauge.stats, name)) for name in ("mean", "p50", "p99", "max")))
    for key, label in COUNTER_ROWS:
        counter: Counter | UnsetType = getattr(server, key)
        if counter and not isinstance(counter.stats.total, UnsetType):
            shown.add_row(label, cell(counter.stats.total), "", "", "", "")
    if shown.row_count:
        yield shown
    else:
        yield Text(f"Server: {engine.name}, nothing in the measured window\n", style="yellow")


def _generator(check: SelfCheck) -> str:
    late_ms, cpu = check.schedule_lateness_ms.p99, check.cpu_ratio.max
    late = f"submissions late by p99 {ms(late_ms)} ms" if late_ms is not None else ""
    busy = f"busiest process {percent(cpu)} of a core" if cpu is not None else ""
    facts = ", ".join(fact for fact in (late, busy) if fact)
    return f"The load generator {check.verdict}{f': {facts}' if facts else ''}."


def _known(of: SampleStatistics | Range, name: str) -> float | None:
    """Return a number, None where it is absent."""
    number = getattr(of, name)
    return None if number is UNSET else float(number)


def _estimate(histogram: Histogram, name: str) -> str:
    """Return a percentile in ms, its 90 % interval where that is wide, only its end where the value is lost in it."""
    value, interval = _known(histogram.stats, name), (histogram.intervals or {}).get(name, Range())
    if value is None:
        return "-"
    low, high = _known(interval, "low"), _known(interval, "high")
    low_ms, high_ms = -math.inf if low is None else 1e3 * low, math.inf if high is None else 1e3 * high
    if name in (histogram.unresolved or ()):
        return f"≤ {cell(high_ms)}" if math.isfinite(high_ms) else f"≥ {cell(max(low_ms, 0.0))}"
    return _between(1e3 * value, low_ms, high_ms)


def _seen(percentiles: TimePercentiles, name: str) -> str:
    """Return a percentile in ms that was read off the client's requests, as `_estimate` shows one of buckets."""
    value_ms, interval = getattr(percentiles, name), (percentiles.intervals or {}).get(name)
    if value_ms is None or interval is None or interval.low is None or interval.high is None:
        return ms(value_ms)
    return _between(value_ms, interval.low, interval.high)


def _between(value_ms: float, low_ms: float, high_ms: float) -> str:
    return f"{cell(low_ms)}-{cell(high_ms)}" if high_ms - low_ms > WIDE * value_ms else ms(value_ms)
