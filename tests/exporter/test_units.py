"""Units told from names and descriptions, as the export format has them."""

from __future__ import annotations

import pytest

from exporter.units import infer_unit


@pytest.mark.parametrize(
    ("name", "description", "unit"),
    [
        ("a_seconds", "", "seconds"),
        ("a_seconds_total", "", "seconds"),
        ("a_milliseconds", "", "milliseconds"),
        ("a_ms", "", "milliseconds"),
        ("a_ns_total", "", "nanoseconds"),
        ("a_bytes_total", "", "bytes"),
        ("a_gigabytes", "", "gigabytes"),
        ("a_tokens_total", "", "tokens"),
        ("a_requests_total", "", "requests"),
        ("num_reqs", "", "requests"),
        ("vllm:request_success_total", "Count of successfully processed requests.", "requests"),
        ("vllm:num_requests_running", "Number of requests in model execution batches.", "requests"),
        ("a_error_count_total", "", "errors"),
        ("a_block_count", "", "blocks"),
        ("a_gb_s", "", "gb/s"),
        ("a_celsius", "", "celsius"),
        ("a_joules", "", "joule"),
        ("a_watts", "", "watt"),
        ("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", "count"),
        ("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "ratio"),
        ("a_perc", "", "percent"),
        ("a_usage", "Fill (0.0-1.0)", "ratio"),
        ("a_usage", "Fill 0-100%", "percent"),
        ("a_retries", "Number of retries 0-1 per request", None),
        ("a_latency", "Latency in milliseconds", "milliseconds"),
        ("a_latency", "Latest ping latency to remote backends (ms)", "milliseconds"),
        ("a_throughput", "Bandwidth (GB/s)", "gb/s"),
        ("a_seconds", "Histogram of time spent in PREFILL phase for request.", "seconds"),
        ("something", "", None),
    ],
)
def test_units(name: str, description: str, unit: str | None):
    """The longest suffix wins, a description's own word wins over it, and `_total` alone is a count."""
    assert unit == infer_unit(name, description)
