"""How the report begins: which run, of what, where, when, under which load, and what became of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from exporter.summary.result import Summary, Workload
from loadgen.requests.summary import RequestCounts


def heading(summary: Summary) -> Text:
    """Return the first lines."""
    config, engine = summary.config, summary.server.engine
    target = config.get("model") or "server metrics only"
    where = ", ".join(urls_of(config) or config.get("metrics") or ())
    server = f", {engine.name} {engine.version or ''}".rstrip() if engine else ""
    when = f"{summary.window.start[:10]} {summary.window.start[11:19]} UTC"
    sent = summary.client.requests.sent
    return Text.assemble(
        (f"sidelight {summary.tool.version}", "bold"),
        f"  run {summary.run_id}  ",
        (summary.status, "green" if summary.status == "complete" else "red"),
        f"\n{target} at {where}{server}",
        f"\n{when}, {summary.window.duration_s:.1f} s" if summary.window.duration_s else "",
        f": {_load(config, summary.workload)}" if sent else "",
        f"\n{_counts(summary.client.requests)}" if sent else "",
    )


def _counts(requests: RequestCounts) -> str:
    """Return what became of the requests; of what did not happen to any, nothing."""
    if requests.ok == requests.sent:
        return f"{requests.sent:,} requests, all ok"
    kinds = {"ok": "ok", "failed": "failed", "refused": "refused", "cancelled": "cancelled", "in_flight": "never ended"}
    counts = {label: getattr(requests, name) for name, label in kinds.items()}
    shown = (f"{count:,} {label}" for label, count in counts.items() if count or label == "ok")
    return f"{requests.sent:,} requests: {', '.join(shown)}"


def _load(config: Mapping[str, Any], workload: Workload) -> str:
    limits = [f"{config['requests']:,} requests"] if config["requests"] else []
    limits += [f"{config['duration']:g} s"] if config["duration"] else []
    warm_up = workload.warmup_requests
    parts = (
        _loop(config),
        " or ".join(limits),
        f"after a warm-up of {warm_up}" if warm_up else "no warm-up",
        f"workload {workload.name}",
        f"seed {workload.seed}",
    )
    return ", ".join(part for part in parts if part)


def _loop(config: Mapping[str, Any]) -> str:
    if config["concurrency"]:
        return f"{config['concurrency']} requests " + ("at one instant" if config.get("barrier") else "in flight")
    if config.get("trace"):
        return f"arrivals of {config['trace']}"
    if not config["rate"]:
        return f"arrivals of {config.get('replay_requests')}"
    to = f" to {config['ramp_to']:g}" if config.get("ramp_to") else ""
    return f"{config['rate']:g}{to} requests/s ({config['arrival']})"


def urls_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the URLs of a recorded configuration: a run has several, a scrape one or none."""
    urls = config.get("url") or ()
    return (urls,) if isinstance(urls, str) else tuple(urls)
