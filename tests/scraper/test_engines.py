"""What a page's metrics mean: vLLM's names, new and old."""

from __future__ import annotations

from pathlib import Path

import pytest

from scraper.engines import ENGINES, QUANTITIES, CanonicalSource, Engine, canonical, detect, quantities
from scraper.exposition import parse
from scraper.missing import Missing
from scraper.series import ScrapeRecord, build


def test_every_engine_describes_known_quantities():
    """Each engine's file names canonical quantities only, each with a kind, a unit and at least one metric."""
    for engine in ENGINES:
        table = quantities(engine)
        assert set() == set(table) - set(QUANTITIES)
        for quantity in table.values():
            assert quantity.kind in ("histogram", "gauge", "counter")
            assert quantity.metrics
            assert quantity.across in ("sum", "max")


def test_unknown_engine():
    """An engine that nobody described is named, with those that are."""
    with pytest.raises(ValueError, match="no engine foo; known: vllm"):
        quantities("foo")


def test_recorded_vllm_has_every_quantity(vllm_scrapes: list[ScrapeRecord]):
    """A current vLLM provides every canonical quantity under its current name."""
    (endpoint,) = build(vllm_scrapes)
    found = canonical(endpoint.series, "vllm")
    assert list(QUANTITIES) == list(found)
    for name, source in found.items():
        assert isinstance(source, CanonicalSource), name
        assert quantities("vllm")[name].metrics[0] == source.metric
    finished = found["requests_finished"]
    assert isinstance(finished, CanonicalSource)
    assert 5 == len(finished.columns)
    assert Engine(name="vllm", version=None, detected_by="metric vllm:num_requests_running") == detect(endpoint.series)


def test_old_names_are_fallbacks():
    """An old page's names are used where the current ones are absent, and never counted twice beside them."""
    page = parse("# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc 0.5\n")
    source = canonical(page.series, "vllm")["kv_cache_usage"]
    assert isinstance(source, CanonicalSource)
    assert ("vllm:gpu_cache_usage_perc", (0,)) == (source.metric, source.columns)
    both = parse(
        "# TYPE vllm:gpu_cache_usage_perc gauge\nvllm:gpu_cache_usage_perc 0.5\n"
        "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0.5\n"
    )
    source = canonical(both.series, "vllm")["kv_cache_usage"]
    assert isinstance(source, CanonicalSource)
    assert ("vllm:kv_cache_usage_perc", (1,)) == (source.metric, source.columns)
    assert (
        Missing("the page shows no gauge vllm:num_requests_running")
        == canonical(page.series, "vllm")["requests_running"]
    )


def test_v0_and_foreign_pages(shared: Path):
    """vLLM is recognised by its canonical metrics on pages of all its ages; other engines' pages are not vLLM's."""
    fixtures = shared / "fixtures"
    for name in ("vllm/worker_v1.prom", "vllm/v0_gauges.prom"):
        engine = detect(parse((fixtures / name).read_text()).series)
        assert engine is not None
        assert "vllm" == engine.name
    for name in ("sglang/server.prom", "trtllm/prometheus_metrics.prom", "llamacpp/metrics.prom"):
        assert detect(parse((fixtures / name).read_text()).series) is None
