"""Which of the engine's quantities the TTFT went with, in a line; lags, intervals and the rest are in the summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from correlator.statistics.association import Association
from exporter.report.tables.server import GAUGE_ROWS

LABELS = dict(GAUGE_ROWS)


def association_line(associations: Sequence[Association]) -> Iterator[str]:
    """Yield the quantities with a significant rank correlation with the TTFT, the strongest first; nothing without
    any.
    """
    significant = {
        association.server: association.rho_lag0
        for association in associations
        if association.rho_lag0 is not None and _significant(association)
    }
    ranked = sorted(significant.items(), key=lambda pair: -abs(pair[1]))
    if ranked:
        shown = ", ".join(f"{LABELS.get(name, name.replace('_', ' '))} {rho:.2f}" for name, rho in ranked)
        yield (
            f"Rank correlation of TTFT with what the last scrape before submission showed: {shown}. Others are not "
            "significant."
        )


def _significant(association: Association) -> bool:
    """Return whether the 95 % interval of the correlation excludes zero."""
    ci95 = association.ci95_lag0
    return ci95 is not None and not ci95[0] <= 0 <= ci95[1]
