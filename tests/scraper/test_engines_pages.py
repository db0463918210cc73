"""What every real page that we have says, engine by engine: quantity, metric or formula, moment, value; or why not.

`tests/data/engine_pages.txt` holds what is expected: a section a page of the recorded fixtures. No TGI page was found
in public; the one here is written by its source (3.3.6).
"""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.binding import CanonicalSource
from sidelight.scraper.engines.recognition import canonical, detect
from sidelight.scraper.exposition import Page, PageReader, parse
from sidelight.scraper.exposition import trtllm_iterations as trtllm_json

EXPECTED = Path(__file__).parents[1] / "data/engine_pages.txt"
SECTIONS = dict(
    section.split("\n", 1) for section in EXPECTED.read_text(encoding="utf-8").removeprefix("# ").split("\n# ")
)
TGI = """\
# TYPE tgi_request_count counter
tgi_request_count 5
# TYPE tgi_request_success counter
tgi_request_success 4
# TYPE tgi_request_failure counter
tgi_request_failure{err="overloaded"} 1
# TYPE tgi_queue_size gauge
tgi_queue_size 3
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 2
# TYPE tgi_batch_current_max_tokens gauge
tgi_batch_current_max_tokens 1500
# TYPE tgi_batch_max_total_tokens gauge
tgi_batch_max_total_tokens 6000
# TYPE tgi_request_input_length histogram
tgi_request_input_length_bucket{le="10"} 0
tgi_request_input_length_bucket{le="+Inf"} 5
tgi_request_input_length_sum 250
tgi_request_input_length_count 5
# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="+Inf"} 4
tgi_request_generated_tokens_sum 80
tgi_request_generated_tokens_count 4
# TYPE tgi_request_duration histogram
tgi_request_duration_bucket{le="+Inf"} 4
tgi_request_duration_sum 10
tgi_request_duration_count 4
# TYPE tgi_request_queue_duration histogram
tgi_request_queue_duration_bucket{le="+Inf"} 4
tgi_request_queue_duration_sum 6
tgi_request_queue_duration_count 4
# TYPE tgi_request_inference_duration histogram
tgi_request_inference_duration_bucket{le="+Inf"} 4
tgi_request_inference_duration_sum 3.5
tgi_request_inference_duration_count 4
# TYPE tgi_request_mean_time_per_token_duration histogram
tgi_request_mean_time_per_token_duration_bucket{le="+Inf"} 4
tgi_request_mean_time_per_token_duration_sum 0.175
tgi_request_mean_time_per_token_duration_count 4
# TYPE tgi_batch_inference_duration histogram
tgi_batch_inference_duration_bucket{method="prefill",le="+Inf"} 2
tgi_batch_inference_duration_sum{method="prefill"} 0.5
tgi_batch_inference_duration_count{method="prefill"} 2
tgi_batch_inference_duration_bucket{method="decode",le="+Inf"} 60
tgi_batch_inference_duration_sum{method="decode"} 3
tgi_batch_inference_duration_count{method="decode"} 60
# TYPE tgi_request_skipped_tokens summary
tgi_request_skipped_tokens{quantile="0.5"} 0
tgi_request_skipped_tokens_sum 0
tgi_request_skipped_tokens_count 80
"""


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "tgi"])
def test_real_pages(shared: Path, name: str):
    """The engine is recognised, and every quantity is found where the page has it, or its absence has a reason."""
    body = (shared / "fixtures" / name).read_bytes()
    if name.endswith(".gz"):
        body = gzip.decompress(body)
    if name.endswith(".json"):
        page = trtllm_json.page(body)
    else:
        openmetrics = "application/openmetrics-text; version=1.0.0"
        page = PageReader().read(body, openmetrics if name.endswith(".om") else "text/plain; version=0.0.4")
    assert SECTIONS[name].strip() == section(page)


def test_tgi_page_by_its_source():
    """TGI: quantities of a batch and of a request are distinguished, and reserved tokens are a share of the room."""
    assert SECTIONS["tgi"].strip() == section(parse(TGI))


def section(page: Page) -> str:
    """Return a page's quantities as text, one a line."""
    engine = detect(page.series)
    lines = [f"engine {engine.name}, by {engine.detected_by}"]
    for name, source in canonical(page.series, engine.name).items():
        if isinstance(source, Missing):
            lines.append(f"{name}: missing: {source.reason}")
        else:
            lines.append(f"{name}: {source.metric} at {source.quantity.observed}: {value(source, page.values)}")
    return "\n".join(lines)


def value(source: CanonicalSource, values: np.ndarray) -> str:
    """Return a histogram's count and sum, a ratio, or a sum over label sets."""
    unit = source.quantity.unit
    if source.histograms:
        count = math.fsum(values[histogram.count] for histogram in source.histograms)
        sums = [
            values[histogram.sum] - (values[histogram.less] if histogram.less >= 0 else 0.0)
            for histogram in source.histograms
        ]
        buckets = f", {len(source.histograms[0].bounds)} buckets" if source.histograms[0].bounds else ""
        return f"{count:g} of {math.fsum(sums):.9g} {unit}{buckets}"
    total = math.fsum(values[list(source.columns)])
    if source.over:
        total /= math.fsum(values[list(source.over)])
    return f"{total:.9g} {unit}"
