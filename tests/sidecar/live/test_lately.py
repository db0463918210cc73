"""What panels show of the last seconds: rates, and the peaks of a gauge."""

from __future__ import annotations

from sidelight.sidecar.live.lately import RATE_S, Flow, Peaks


def test_rates_are_of_the_last_seconds():
    """Not before there is a second of them; a load that stopped is offered less and less, and then nothing."""
    flow = Flow()
    assert (None, None) == flow.rates(100.0, 0, 0)
    assert (None, None) == flow.rates(100.5, 3, 0)
    assert (6.0, 2.0) == flow.rates(102.0, 12, 4)
    for second in range(3, 40):
        latest = flow.rates(100.0 + second, 12, 4 + second)
    assert (0.0, 1.0) == latest
    assert len(flow.counts) <= RATE_S + 1


def test_peaks_are_of_columns_of_time_and_unknown_where_nothing_was_seen():
    """The latest column is the last; what is older than the columns is forgotten, however long nothing came."""
    peaks = Peaks(columns=4, column_s=2.0)
    assert [1.0] == peaks.take(10.0, 1.0)
    assert [3.0] == peaks.take(11.0, 3.0)
    assert [3.0] == peaks.take(11.5, None)
    assert [3.0, None, 2.0] == peaks.take(14.1, 2.0)
    assert [None, 2.0, None, None] == peaks.take(18.0, None)
    assert [None, None, None, 7.0] == peaks.take(1e6, 7.0)
