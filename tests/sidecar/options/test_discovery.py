"""Pages from a file of Prometheus' service discovery: URLs of its targets, and its mistakes by code."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import raises

from sidecar.options.discovery import listed_pages
from sidecar.options.watch import WatchOptions, check_watch, pages_of


@pytest.mark.parametrize(
    ("content", "pages"),
    [
        ("", ()),
        ("[]", ()),
        ('[{"targets": []}]', ()),
        ('[{"targets": ["a:1", "b:2"]}, {"targets": ["a:1"]}]', ("http://a:1/metrics", "http://b:2/metrics")),
        ("- targets: [a:1]\n  labels: {__scheme__: https, __metrics_path__: /m, job: x}\n", ("https://a:1/m",)),
        ("- targets: ['a:1']\n  labels: {__param_pool: 7, __metrics_path__: m}\n", ("http://a:1/m?pool=7",)),
        ("- targets: ['[::1]:80']\n", ("http://[::1]:80/metrics",)),
    ],
)
def test_targets_become_urls_as_in_prometheus(tmp_path: Path, content: str, pages: tuple[str, ...]):
    """By the labels that make a URL; each page once, in the file's order."""
    file = tmp_path / "targets.yaml"
    file.write_text(content)
    assert pages == listed_pages(file)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("[", "file.not-yaml"),
        ("targets: [a:1]\n", "file.not-targets"),
        ("- [a:1]\n", "file.not-targets"),
        ("- targets: a:1\n", "file.not-targets"),
        ("- {targets: [a:1], labels: [x]}\n", "file.not-targets"),
        ("- targets: ['']\n", "option.value"),
        ("- targets: ['a:99999']\n", "option.value"),
        ("- {targets: [a:1], labels: {__scheme__: ftp}}\n", "option.value"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str, code: str):
    """With the option, in one line."""
    file = tmp_path / "targets.yaml"
    file.write_text(content)
    with raises(code, says=f"^--metrics-from {file}") as caught:
        listed_pages(file)
    assert "\n" not in str(caught.value)


def test_pages_of_the_command_line_come_first(tmp_path: Path):
    """And one that both name is scraped once; a page whose reading removes records is refused."""
    file = tmp_path / "targets.json"
    file.write_text('[{"targets": ["a:1", "b:2"]}]')
    options = check_watch(WatchOptions(metrics=("b:2",), metrics_from=file))
    assert ("http://b:2/metrics", "http://a:1/metrics") == pages_of(options)
    with raises("file.unreadable"):
        check_watch(WatchOptions(metrics_from=tmp_path / "none.json"))
    file.write_text('[{"targets": ["a:1"], "labels": {"__metrics_path__": "/perf_metrics"}}]')
    with raises("watch.perf-metrics"):
        check_watch(WatchOptions(metrics_from=file))
