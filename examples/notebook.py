"""Read a finished run: which requests were slow, and why. Cells for a notebook; `python examples/notebook.py RUN`."""

# %% Open a run directory
import sys

import pyarrow.compute as pc

import sidelight

path = sys.argv[1]
requests = sidelight.open_run(path).arrow("requests")
requests = requests.filter(pc.equal(requests["phase"], "measure"))  # without the warm-up

# %% The slowest five, each with its parts
parts = ["ttft_ms", "network_ms", "gateway_ms", "queue_ms", "prefill_ms", "other_ms"]
slowest = requests.sort_by([("ttft_ms", "descending")]).slice(0, 5)
for row in slowest.select(["trace_id", *parts]).to_pylist():
    print(row)

# %% The same numbers that the report prints
summary = sidelight.summary(path)
print(f"TTFT p95: {summary.client.ttft_ms.p95:.0f} ms")
print(f"in the queue: {summary.correlation.breakdown.queue_ms.share_of_ttft:.0%} of the mean")
