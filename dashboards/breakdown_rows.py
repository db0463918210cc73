"""Where each request's wait went, part by part: the row that joins client and engine."""

from __future__ import annotations

from panels import SIDECAR, Row, heatmap, lines, quantile, stack, total

from correlator.breakdown import ENGINE_FRONTEND, SCHEDULER_INTAKE, TTFT_PARTS

QUEUE = f'{SIDECAR}, part="queue"'
TTFT_BY_PART = total("sidelight_ttft_part_seconds_sum", SIDECAR, by="part")
TTFT_SUM = total("sidelight_ttft_part_seconds_sum", SIDECAR)
# Every request that is broken down has an observation of this part, of the others only where it is known.
TTFT_COUNT = total("sidelight_ttft_part_seconds_count", f'{SIDECAR}, part="other"')
E2E_BY_PART = total("sidelight_e2e_part_seconds_sum", SIDECAR, by="part")
E2E_COUNT = total("sidelight_e2e_part_seconds_count", f'{SIDECAR}, part="other"')

WHERE_TTFT_WENT = Row(
    "Where the TTFT went",
    (
        stack(
            "Mean TTFT by part",
            {"{{part}}": f"{TTFT_BY_PART} / ignoring (part) group_left () ({TTFT_COUNT} > 0)"},
            "The height is the client's mean TTFT, each request's wait joined with the engine's own times of that "
            "very request. The thickest band is where to work first. Outside the engine are the network and every "
            "proxy that sends no spans; a gateway whose spans come has a band of its own. Other is the engine's front "
            "end (neither queue nor prefill) and what no source tells apart.",
        ),
        stack(
            "Share of TTFT",
            {"{{part}}": f"{TTFT_BY_PART} / ignoring (part) group_left () ({TTFT_SUM} > 0)"},
            "The same parts as shares of the whole. A share that moves with the load is the bottleneck; one that "
            "stays is a fixed cost.",
            unit="percentunit",
            highest=1.0,
        ),
        lines(
            "p99 of each part",
            {
                part.name: quantile(0.99, "sidelight_ttft_part_seconds", f'{SIDECAR}, part="{part.name}"')
                for part in TTFT_PARTS
            }
            | {
                part.name: quantile(0.99, "sidelight_inner_part_seconds", f'{SIDECAR}, part="{part.name}"')
                for part in (ENGINE_FRONTEND, SCHEDULER_INTAKE)
            },
            "Which part makes the worst requests slow: it is often another than the one that makes the mean. "
            "Quantiles of parts do not add up to the quantile of the whole.",
        ),
        stack(
            "Mean end-to-end time by part",
            {"{{part}}": f"{E2E_BY_PART} / ignoring (part) group_left () ({E2E_COUNT} > 0)"},
            "The same to the last token, decode taken in. Of production traffic whose first token nobody noted this "
            "is all there is.",
        ),
        heatmap(
            "Wait in the queue, request by request",
            "sidelight_ttft_part_seconds",
            QUEUE,
            "Two bands: some requests find a free slot and others do not. A band that climbs is a queue that grows.",
        ),
        stack(
            "Requests by source of their breakdown",
            {"{{source}}": total("sidelight_requests_total", SIDECAR, by="source")},
            "Trace and response are the engine's own times, exact; histogram is estimated from scrapes; none is not "
            "known. Estimates come up to a quarter of a minute later.",
            unit="reqps",
        ),
        stack(
            "Requests by quality",
            {"{{quality}}": total("sidelight_breakdown_quality_total", SIDECAR, by="quality")},
            "Exact, by_time and tight can be read one by one. Of shared and mixed_traffic read means and quantiles "
            "only; many mixed ones say that somebody else uses the engine.",
            unit="reqps",
            width=8,
            height=6,
        ),
        stack(
            "Requests by how their gateway's first output is known",
            {"{{first_output}}": total("sidelight_gateway_requests_total", SIDECAR, by="first_output")},
            "Of unknown, some of the gateway's time is in the part outside the engine: its spans came, and do not say "
            "when its first output left. Of no_gateway, no span of one came.",
            unit="reqps",
            width=8,
            height=6,
        ),
        stack(
            "Not broken down, by why",
            {"{{reason}}": total("sidelight_breakdown_missing_total", SIDECAR, by="reason")},
            "What to switch on or mend: spans that never come, clients that note no first token, pages that cannot be "
            "scraped. Filled by sidelight watch.",
            unit="reqps",
            width=8,
            height=6,
        ),
    ),
)
