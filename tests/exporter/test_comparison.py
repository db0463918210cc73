"""Several runs beside each other: what stands in their tables where something is not known, or nothing differs."""

from __future__ import annotations

import msgspec
import pytest
import summaries
from msgspec import UNSET

from sidelight.exporter.comparison import Compared, configuration_table, times_table, verdict_on
from sidelight.exporter.document import Figures, PartsBar, Prose


def compared(label: str, most: float) -> Compared:
    """A run that had so many requests running at once."""
    server = summaries.server(requests_running=summaries.gauge(mean=4.0, p50=4.0, p99=most, max=most))
    return Compared(label=label, name=label, summary=summaries.summary(summaries.correlated(), server))


def test_the_most_running_at_once_stands_where_no_setting_differs():
    """It may be a limit of the engine, which Sidelight does not record."""
    shown = configuration_table([compared("A", 16.0), compared("B", 18.0)])
    assert [
        ("nothing that Sidelight recorded", "", ""),
        ("most running at once (a limit of the engine may differ)", "16", "18"),
    ] == [row.cells for row in shown.rows]


def test_gaps_between_chunks_are_one_row_under_either_name():
    """Whatever the protocol of a run calls them; a time that a run lacks is a dash."""
    whole = compared("A", 1.0).summary
    gaps, unknown = (msgspec.structs.replace(whole.client.ttft_ms, p50=median_ms) for median_ms in (20.0, None))
    runs = [
        Compared(label=label, name=label, summary=msgspec.structs.replace(whole, client=client))
        for label, client in (
            ("A", msgspec.structs.replace(whole.client, itl_ms=gaps, time_between_chunks_ms=UNSET)),
            ("B", msgspec.structs.replace(whole.client, itl_ms=UNSET, time_between_chunks_ms=gaps)),
            ("C", msgspec.structs.replace(whole.client, itl_ms=unknown, time_between_chunks_ms=UNSET)),
        )
    ]
    shown = times_table(runs, {"itl_ms": ("p50",)})
    assert [("gaps between chunks, p50", 20.0, 20.0, None)] == [row.cells for row in shown.rows]


@pytest.mark.parametrize(
    ("verdict", "factor", "said"),
    [
        ("stable", 3.0, "B is 3.0 times slower than A at p99 of the TTFT: 3,702 ms and 1,234 ms."),
        ("stable", 0.9, "B is 10 % faster than A at p99 of the TTFT: 1,111 ms and 1,234 ms."),
        ("growing", 3.0, "Not comparable: B was overloaded."),
    ],
)
def test_the_difference_is_said_first_where_both_can_be_compared(verdict: str, factor: float, said: str):
    """Then both runs' figures and bars; times of an overloaded run are not the service's."""
    replace, first = msgspec.structs.replace, compared("A", 8.0)
    whole = first.summary
    times = replace(whole.client.ttft_ms, count=100, p99=1234.0)
    base = replace(whole, client=replace(whole.client, ttft_ms=times))
    stability = replace(whole.methodology.stability, verdict=verdict)
    changed = replace(
        base,
        client=replace(base.client, ttft_ms=replace(times, p99=factor * 1234.0)),
        methodology=replace(whole.methodology, stability=stability),
    )
    runs = [Compared(label=label, name=label, summary=each) for label, each in (("A", base), ("B", changed))]
    headline, *others = verdict_on(runs)
    assert isinstance(headline, Prose)
    assert headline.text == said
    assert [1, 2] == [sum(isinstance(block, kind) for block in others) for kind in (Figures, PartsBar)]
