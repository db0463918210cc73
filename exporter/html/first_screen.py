"""First screen of the page: four figures, and the mean TTFT as one bar of its parts."""

from __future__ import annotations

from correlator.breakdown import TTFT_PARTS
from exporter.document import Prose
from exporter.html.markup import escape
from exporter.report.load import served_in_load
from exporter.summary.breakdown import is_certain, json_name, label_of
from exporter.summary.result import Summary
from loadgen.requests.summary import too_many_failed
from rundir.printable.numbers import cell, percent, spoken_together

UNSURE = 0.35  # opacity of a part within its own error


def figures(summary: Summary) -> Prose:
    """Return a line of the offered and served rates, the TTFT and the failures; a missing value is a dash."""
    client = summary.client
    rates, requests, ttft = client.rates, client.requests, client.ttft_ms
    offered = rates.offered_requests_per_s or rates.realised_requests_per_s
    growing = summary.methodology.stability.verdict == "growing"
    served = summary.methodology.stability.capacity_per_s if growing else served_in_load(summary)
    if summary.watch or offered is None:
        flow = f"{cell(client.throughput.requests_per_s)} requests/s"
    else:
        word = "sent" if rates.offered_requests_per_s is None else "offered"
        flow = f"{cell(offered)} requests/s {word}" + ("" if served is None else f", {cell(served)} served")
    p50, p99 = spoken_together(ttft.p50, ttft.p99)
    failed = f"{requests.sent - requests.ok:,} of {requests.sent:,} without success"
    return Prose(f"{flow} · TTFT p50 {p50} · TTFT p99 {p99} · {failed}", "strong")


def bar(summary: Summary) -> str:
    """Return the parts of the mean TTFT beside each other, pale within their own error.

    "" without a breakdown, and where too many requests failed to say where the wait of the others went.
    """
    correlation = summary.correlation
    if correlation.missing or too_many_failed(summary.client.requests):
        return ""
    parts = [(part, getattr(correlation.breakdown, json_name(part))) for part in TTFT_PARTS]
    known = [(part, described) for part, described in parts if (described.mean or 0.0) > 0]
    whole, left, pieces, words = sum(described.mean for _, described in known), 0.0, [], []
    for part, described in known:
        ratio, sure = described.mean / whole, is_certain(described)
        text = f"{escape(label_of(part, correlation.breakdown))} {percent(ratio) if sure else '(within its own error)'}"
        fill = f'height="100%" fill="var(--{part.name})"' + ("" if sure else f' opacity="{UNSURE}"')
        pieces.append(f'<rect x="{100 * left:.2f}%" width="{100 * ratio:.2f}%" {fill}><title>{text}</title></rect>')
        swatch = f'<svg width="11" height="11" aria-hidden="true"><rect width="100%" {fill}/></svg>'
        shown = text.replace(" %", "&nbsp;%")
        words.append(f'<span class="number">{swatch} {shown}</span>')
        left += ratio
    picture = f'<svg class="parts" role="img" aria-label="Mean TTFT by part">{"".join(pieces)}</svg>'
    return f"{picture}\n<p>Mean TTFT: {', '.join(words)}</p>" if known else ""
