"""OpenMetrics text: equal to prometheus-client's OpenMetrics parser wherever that accepts the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from exposed import pages
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from sidelight.scraper.exposition import MalformedPage, Page, PageReader, parse

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def by_oracle(text: str) -> list[tuple[str, tuple[tuple[str, str], ...], str, str]]:
    return [
        (
            sample.name,
            tuple(sorted(sample.labels.items())),
            repr(float(sample.value)),
            "gauge" if sample.name.endswith("_created") else family.type,
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def as_oracle(page: Page) -> list[tuple[str, tuple[tuple[str, str], ...], str, str]]:
    return [
        (series.name, series.labels, repr(value), series.type)
        for series, value in zip(page.series, page.values.tolist(), strict=True)
    ]


@given(pages(openmetrics=True))
def test_openmetrics_equals_the_oracle(text: str):
    """Names, labels, values and types of every sample are the oracle's; a `_created` sample is a gauge here."""
    assert by_oracle(text) == as_oracle(parse(text, openmetrics=True))
    assert by_oracle(text) == as_oracle(PageReader().read(text.encode(), OPENMETRICS))


@given(pages(openmetrics=True), st.floats(0, 1))
def test_any_cut_of_an_openmetrics_page_is_refused(text: str, share: float):
    """Without its `# EOF` no part of a page is one."""
    body = text.encode()
    part = body[: int(share * (len(body) - len(b"# EOF\n")))]  # a share: the page's length varies with its stamps
    with pytest.raises(MalformedPage):
        parse(part, openmetrics=True)


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        ("vllm_r_total", ("vllm_r_total", "counter", "Requests.")),
        ("vllm_h_sum", ("vllm_h", "histogram", "")),
        ("vllm_g", ("vllm_g", "gauge", "")),
        ("vllm_h_created", ("vllm_h_created", "gauge", "")),
        ("vllm_own", ("vllm_own", "summary", "")),
        ("vllm_none", ("vllm_none", "unknown", "")),
    ],
)
def test_declaration_that_differs_in_punctuation_counts(sample: str, expected: tuple[str, str, str]):
    """`# TYPE vllm:x` declares a sample `vllm_x` that has no declaration of its own; its name stays as exposed."""
    page = parse(
        "# HELP vllm:r Requests.\n# TYPE vllm:r counter\n# TYPE vllm:h histogram\n# TYPE vllm:g gauge\n"
        f"# TYPE vllm:own gauge\n# TYPE vllm_own summary\n{sample} 1.0\nz 1.0\n# EOF\n",
        openmetrics=True,
    )
    series = page.series[0]
    assert (sample, *expected) == (series.name, series.family, series.type, series.help)


def test_recorded_openmetrics_page_of_vllm_has_its_types(shared: Path):
    """prometheus-client refuses its own page of vLLM; here every sample of vLLM has the type that was declared."""
    path = shared / "fixtures/vllm/recorded/pages/openmetrics_trailing_slash.om"
    if not path.exists():
        pytest.skip(f"no {path.name}")
    text = path.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="Clashing name"):
        by_oracle(text)
    types = {series.family: series.type for series in parse(text, openmetrics=True).series}
    assert {"counter", "gauge", "histogram", "summary"} == set(types.values())
    assert "histogram" == types["vllm_time_to_first_token_seconds"]
    assert "counter" == types["vllm_generation_tokens_total"]
    assert "histogram" == types["vllm_iteration_tokens_total"]
