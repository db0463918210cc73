"""Units from names and descriptions, as the export format has them."""

from __future__ import annotations

import pytest

from sidelight.exporter.server_metrics.units import infer_unit


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
        ("a_us_total", "", "microseconds"),
        ("a_microseconds", "", "microseconds"),
        ("a_minutes", "", "minutes"),
        ("a_duration", "Cumulative duration in microseconds (of cached requests)", "microseconds"),
        ("sglang:token_usage", "The token usage.", "ratio"),
        ("sglang:full_token_usage", "", "ratio"),
        ("sglang:cache_hit_rate", "The prefix cache hit rate.", "ratio"),
        ("sglang:utilization", "The utilization.", "ratio"),
        ("trtllm_kv_cache_utilization", "", "ratio"),
        ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", "percent"),
        ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", "watt"),
        ("sglang:gen_throughput", "The generation throughput (token/s).", "tokens/s"),
        ("llamacpp:prompt_tokens_seconds", "Average prompt throughput in tokens/s.", "tokens/s"),
        ("llamacpp:prompt_tokens_seconds", "", "tokens/s"),
        ("a_read", "Bytes read, in bytes per second", "bytes/s"),
        ("a_retries_seconds", "Time until a retry (0-1)", "seconds"),
        ("a_usage_percent", "GPU cache usage as a percentage (0.0-1.0)", "ratio"),
        ("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", "tokens"),
        ("vllm:prompt_tokens_by_source_total", "", "tokens"),
        ("llamacpp:tokens_predicted_total", "Number of generation tokens processed", "tokens"),
        ("a_limit", "Maximum number of request migrations", None),
        ("a_wait_seconds", "Number of requests that waited", "seconds"),
        ("a_calls_total", "Number of calls in requests", "count"),
    ],
)
def test_units(name: str, description: str, unit: str | None):
    """The longest suffix wins, a unit that the description gives wins over it, and `_total` alone is a count."""
    assert unit == infer_unit(name, description)


# The table of the format's documentation, suffix by suffix.
TABLE = {
    "seconds": "_seconds _seconds_total",
    "milliseconds": "_milliseconds _ms _ms_total",
    "nanoseconds": "_nanoseconds _ns _ns_total",
    "bytes": "_bytes _bytes_total",
    "kilobytes": "_kilobytes",
    "megabytes": "_megabytes",
    "gigabytes": "_gigabytes",
    "count": "_total _count",
    "tokens": "_tokens _tokens_total",
    "requests": "_requests _requests_total _reqs request_success",
    "errors": "_errors _errors_total _error_count _error_count_total",
    "blocks": "_blocks _blocks_total _block_count",
    "gb/s": "_gb_s",
    "ratio": "_ratio",
    "percent": "_percent _perc",
    "celsius": "_celsius",
    "joule": "_joules",
    "watt": "_watts",
}


@pytest.mark.parametrize("unit", TABLE)
def test_the_formats_own_table(unit: str):
    """Every suffix of it gives its unit."""
    assert {unit} == {infer_unit(f"x{suffix}", "") for suffix in TABLE[unit].split()}
