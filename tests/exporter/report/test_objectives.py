"""What the report says of an objective: its value, and of how many requests it is."""

from __future__ import annotations

import msgspec
import pytest
import summaries

from sidelight.exporter.report.conclusion import objectives
from sidelight.loadgen.requests.slo.results import ObjectiveResult, SloResult

OBJECTIVE = ObjectiveResult(
    text="ttft_p99<1ms",
    metric="ttft",
    statistic="p99",
    unit="ms",
    bound=1.0,
    value=24.0,
    bound_ms=1.0,
    value_ms=24.0,
    count=4,
    requests=4,
    failed_requests=0,
    left_out_requests=0,
    met=False,
)


@pytest.mark.parametrize(
    ("failed", "left_out", "said"),
    [
        (0, 0, "MISSED, 24.0 ms over 4 requests"),
        (2, 0, "MISSED, 24.0 ms over 4 requests, of which 2 failed"),
        (0, 1, "MISSED, 24.0 ms over 4 requests; 1 more has no value"),
        (1, 3, "MISSED, 24.0 ms over 4 requests, of which 1 failed; 3 more have no value"),
    ],
)
def test_the_requests_that_an_objective_is_of_are_counted(failed: int, left_out: int, said: str):
    """Those without a value, as replies of blanks without a TTFT, neither meet nor miss it."""
    objective = msgspec.structs.replace(OBJECTIVE, failed_requests=failed, left_out_requests=left_out)
    slo = SloResult(text="ttft_p99<1ms", met=False, good_requests=0, undetermined_requests=0, objectives=[objective])
    client = msgspec.structs.replace(summaries.client(), slo=slo)
    (line,) = objectives(msgspec.structs.replace(summaries.summary(summaries.correlated()), client=client))
    assert f"Objective ttft_p99<1ms: {said}" == line.text
