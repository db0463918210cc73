"""Scrapes of a vLLM made of columns, and requests beside them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from recordings import log_of
from series import endpoint_of_columns

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.table import EndpointSeries

SECOND = 10**9
NAMES = {
    "waiting": ("vllm:num_requests_waiting", "gauge"),
    "running": ("vllm:num_requests_running", "gauge"),
    "kv": ("vllm:kv_cache_usage_perc", "gauge"),
    "preemptions": ("vllm:num_preemptions_total", "counter"),
    "queries": ("vllm:prefix_cache_queries_total", "counter"),
    "finished": ("vllm:request_success_total", "counter"),
    "generated": ("vllm:generation_tokens_total", "counter"),
    "started": ("process_start_time_seconds", "gauge"),
    "hits": ("vllm:prefix_cache_hits_total", "counter"),
}


def requests(at_s: npt.ArrayLike, urls: str | list[str] = "http://engine:8000/v1") -> RequestLog:
    """Requests submitted at some seconds, of unknown tokens."""
    stamps = np.asarray(np.asarray(at_s, dtype=np.float64) * SECOND, dtype=np.int64)
    return log_of(len(stamps), submit_ns=stamps, endpoint_url=urls)


def engine(at_s: npt.ArrayLike, url: str = "http://engine:8000/metrics", **columns: npt.ArrayLike) -> EndpointSeries:
    """An engine's scrapes; columns [T] by a name of `NAMES`, or [T, K] of K label sets."""
    at_ns = np.asarray(np.asarray(at_s, dtype=np.float64) * SECOND, dtype=np.int64)
    series, values = [], []
    for short, column in columns.items():
        name, kind = NAMES[short]
        table = np.asarray(column, dtype=np.float64)
        for at, samples in enumerate(table.reshape(len(at_ns), -1).T):
            labels = (("engine", str(at)),)
            series.append(Series(name=name, labels=labels, family=name, type=kind, help=""))
            values.append(samples)
    matrix = np.column_stack(values) if values else np.zeros((len(at_ns), 0))
    return endpoint_of_columns(series, matrix, request_ns=at_ns, response_ns=at_ns, url=url)
