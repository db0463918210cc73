"""Where the TTFT went, for people: the table, the answer in a sentence, and what moves with what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from exporter.format import ms, percent, table

BAR = 16
PARTS = (("queue_ms", "queue"), ("prefill_ms", "prefill"), ("other_ms", "other"))
OTHER = (
    ("outside_engine_ms", "outside the engine", "network, gateway, client"),
    ("engine_front_end_ms", "its front end", "tokenising, waiting for the running step"),
    ("blank_output_ms", "blank output", "before the first text"),
)
SOURCES = {"histogram": "engine", "remainder": "what is left"}


def answer(correlation: Mapping[str, Any]) -> str:
    """Return where the mean TTFT went, in a sentence; or why that cannot be said."""
    breakdown = correlation["breakdown"]
    ttft = breakdown["ttft_ms"]["mean"]
    if ttft is None or correlation.get("missing"):
        return f"Where the TTFT went is not known: {correlation.get('missing') or 'no reason was given'}."
    if not correlation["comparable"]:
        return "The engine's means are not those of your requests alone, so the TTFT is not shared out."
    shares = (
        f"{ms(breakdown[key]['mean'])} ms ({percent(breakdown[key]['share_of_ttft'])}) {name}" for key, name in PARTS
    )
    return f"Of a mean TTFT of {ms(ttft)} ms: {', '.join(shares)}."


def breakdown_table(correlation: Mapping[str, Any]) -> Table:
    """Return the parts of the mean TTFT; without shares where client and engine do not speak of the same requests."""
    shown = table("Where the TTFT went", "mean ms", "share", "", "source", label_width=20)
    breakdown = correlation["breakdown"]
    for key, name in PARTS:
        part = breakdown[key]
        share = part["share_of_ttft"] if correlation["comparable"] else None
        bar = Text("█" * max(0, round(BAR * (share or 0.0))), style="cyan")
        shown.add_row(name, ms(part["mean"]), percent(share), bar, SOURCES.get(part["source"], ""))
    of_which = breakdown["other_of_which"]
    for key, name, what in OTHER:
        if of_which[key] and _same_replies(correlation):
            shown.add_row(
                Text(f"  {name}", style="dim"), Text(ms(of_which[key]), style="dim"), "", "", Text(what, style="dim")
            )
    whole = breakdown["ttft_ms"]["mean"]
    shown.add_row(Text("TTFT", style="bold"), ms(whole), "100 %" if correlation["comparable"] else "", "", "client")
    return shown


def other_row(correlation: Mapping[str, Any]) -> str | None:
    """Return what `other` consists of where that is of other replies than have a TTFT; else it is in the table."""
    of_which = correlation["breakdown"]["other_of_which"]
    if _same_replies(correlation) or of_which[OTHER[0][0]] is None:
        return None
    shown = ", ".join(f"{ms(of_which[key])} ms {name}" for key, name, _ in OTHER)
    return f"Over all {correlation['server_requests']} replies, with or without a TTFT: {shown}."


def _same_replies(correlation: Mapping[str, Any]) -> bool:
    return bool(correlation["comparable"]) and correlation["client_requests"] == correlation["server_requests"]


def association_rows(correlation: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line an association."""
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
