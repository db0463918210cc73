"""Where each request's wait went, part by part: the row that joins client and engine."""

from __future__ import annotations

from panels import SIDECAR, Panel, Query, Row, heatmap, quantile, total

QUEUE = f'{SIDECAR}, part="queue"'
TTFT_PARTS = total("sidelight_ttft_part_seconds_sum", SIDECAR, by="part")
TTFT_SUM = total("sidelight_ttft_part_seconds_sum", SIDECAR)
# Every request that is broken down has an observation of this part, of the others only where it is told.
TTFT_COUNT = total("sidelight_ttft_part_seconds_count", f'{SIDECAR}, part="other"')
E2E_PARTS = total("sidelight_e2e_part_seconds_sum", SIDECAR, by="part")
E2E_COUNT = total("sidelight_e2e_part_seconds_count", f'{SIDECAR}, part="other"')

WHERE_TTFT_WENT = Row(
    title="Where the TTFT went",
    panels=(
        Panel(
            kind="stack",
            title="Mean TTFT by part",
            unit="s",
            queries=(
                Query(expr=f"{TTFT_PARTS} / ignoring (part) group_left () ({TTFT_COUNT} > 0)", legend="{{part}}"),
            ),
            description="The height is the client's mean TTFT, each request's wait joined with the engine's own times "
            "of that very request. The thickest band is where to work first. Other is what no source tells apart.",
        ),
        Panel(
            kind="stack",
            title="Share of TTFT",
            unit="percentunit",
            queries=(Query(expr=f"{TTFT_PARTS} / ignoring (part) group_left () ({TTFT_SUM} > 0)", legend="{{part}}"),),
            highest=1.0,
            description="The same parts as shares of the whole. A share that moves with the load is the bottleneck; "
            "one that stays is a fixed cost.",
        ),
        Panel(
            kind="lines",
            title="p99 of each part",
            unit="s",
            queries=tuple(
                Query(expr=quantile(0.99, "sidelight_ttft_part_seconds", f'{SIDECAR}, part="{part}"'), legend=part)
                for part in ("network", "gateway", "admission", "queue", "prefill", "other")
            ),
            description="Which part makes the worst requests slow: it is often another than the one that makes the "
            "mean. Quantiles of parts do not add up to the quantile of the whole.",
        ),
        Panel(
            kind="stack",
            title="Mean end-to-end time by part",
            unit="s",
            queries=(Query(expr=f"{E2E_PARTS} / ignoring (part) group_left () ({E2E_COUNT} > 0)", legend="{{part}}"),),
            description="The same to the last token, decode taken in. Of production traffic whose first token nobody "
            "noted this is all there is.",
        ),
        heatmap(
            "Wait in the queue, request by request",
            "sidelight_ttft_part_seconds",
            QUEUE,
            "Two bands: some requests find a free slot and others do not. A band that climbs is a queue that grows.",
        ),
        Panel(
            kind="stack",
            title="Requests by source of their breakdown",
            unit="reqps",
            queries=(Query(expr=total("sidelight_requests_total", SIDECAR, by="source"), legend="{{source}}"),),
            description="Trace and response are the engine's own times, exact; histogram is estimated from scrapes; "
            "none is not told. Estimates come up to a quarter of a minute later.",
        ),
        Panel(
            kind="stack",
            title="Requests by quality",
            unit="reqps",
            queries=(
                Query(expr=total("sidelight_breakdown_quality_total", SIDECAR, by="quality"), legend="{{quality}}"),
            ),
            height=6,
            description="Exact and tight can be read one by one. Of shared and foreign read means and quantiles only; "
            "many foreign ones say that somebody else uses the engine.",
        ),
        Panel(
            kind="stack",
            title="Not broken down, by why",
            unit="reqps",
            queries=(
                Query(expr=total("sidelight_breakdown_missing_total", SIDECAR, by="reason"), legend="{{reason}}"),
            ),
            height=6,
            description="What to switch on or mend: spans that never come, clients that note no first token, pages "
            "that cannot be scraped. Filled by sidelight watch.",
        ),
    ),
)
