"""How the report begins: which run, of what, where, when, under which load, and what became of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from exporter.summary.result import Summary, Workload


def heading(summary: Summary) -> Text:
    """Return the first lines."""
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
