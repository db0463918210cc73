"""Verdict: the state, figures, parts, evidence and advice that every output begins with."""

from sidelight.exporter.report.verdict.now import Current, current_verdict
from sidelight.exporter.report.verdict.parts import (
    FEW_REQUESTS,
    described_parts,
    largest_part,
    largest_share,
    part_shares,
    spent,
)
from sidelight.exporter.report.verdict.run import beside_figures, verdict_of, where_it_went
from sidelight.exporter.report.verdict.shown import (
    LEVELS,
    TONES,
    failed_figure,
    served_figure,
    time_figures,
    verdict_blocks,
)
from sidelight.exporter.report.verdict.state import measured, page_means

__all__ = [
    "FEW_REQUESTS",
    "LEVELS",
    "TONES",
    "Current",
    "beside_figures",
    "current_verdict",
    "described_parts",
    "failed_figure",
    "largest_part",
    "largest_share",
    "measured",
    "page_means",
    "part_shares",
    "served_figure",
    "spent",
    "time_figures",
    "verdict_blocks",
    "verdict_of",
    "where_it_went",
]
