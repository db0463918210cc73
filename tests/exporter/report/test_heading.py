"""The first lines of a report."""

from __future__ import annotations

import msgspec
import pytest
import summaries

from sidelight.exporter.report.heading import heading


@pytest.mark.parametrize(("status", "shown"), [("crashed", "not ended"), ("complete", "complete")])
def test_a_watch_that_goes_on_is_not_called_crashed(status: str, shown: str):
    """It can be reported on while it runs, and its logs do not say whether it was killed."""
    whole = msgspec.structs.replace(summaries.summary(summaries.correlated()), watch=summaries.WATCH, status=status)
    (first, *_) = heading(whole)
    assert first.text.endswith(f"  {shown}")


@pytest.mark.parametrize(("rate", "said"), [(1.0, "1 request/s (poisson)"), (1.5, "1.5 requests/s (poisson)")])
def test_one_request_a_second_is_in_the_singular(rate: float, said: str):
    whole = summaries.summary(summaries.correlated())
    loop = {"rate": rate, "concurrency": None, "arrival": "poisson", "requests": 5, "duration": None}
    requests = msgspec.structs.replace(whole.client.requests, sent=5, ok=5)
    client = msgspec.structs.replace(whole.client, requests=requests)
    whole = msgspec.structs.replace(whole, client=client, config={**whole.config, **loop})
    assert said in " ".join(line.text for line in heading(whole))


def test_one_request_in_flight_is_in_the_singular():
    whole = summaries.summary(summaries.correlated())
    loop = {"rate": None, "concurrency": 1, "requests": 1, "duration": None}
    whole = msgspec.structs.replace(whole, config={**whole.config, **loop})
    assert "1 request in flight, for 1 request," in " ".join(line.text for line in heading(whole))
