"""Pages from a file of Prometheus' service discovery: URLs of its targets, and its mistakes by code."""

from __future__ import annotations

from pathlib import Path

import pytest
from codes import raises
from hypothesis import given
from hypothesis import strategies as st

from sidelight.sidecar.options.discovery import Shard, listed_pages
from sidelight.sidecar.options.watch import WatchOptions, check_watch, pages_of


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


@given(total=st.integers(1, 8), ports=st.sets(st.integers(1, 9999), max_size=40))
def test_each_page_is_in_one_shard(total: int, ports: set[int]):
    """Whatever their number; one watch alone has all."""
    pages = tuple(f"http://a:{port}/metrics" for port in ports)
    shards = [pages_of(WatchOptions(metrics=pages, shard=f"{number}/{total}")) for number in range(total)]
    assert sorted(pages) == sorted(url for shard in shards for url in shard)


def test_a_page_stays_in_its_shard():
    """Where it is depends on its URL alone, in every process and version."""
    pages = [f"http://10.0.0.{number}:8000/metrics" for number in range(8)]
    assert [2, 1, 0, 3, 1, 0, 0, 2] == [next(k for k in range(4) if Shard(k, 4).has(url)) for url in pages]


@pytest.mark.parametrize("text", ["", "1", "4/4", "-1/4", "a/4", "0/0", "1/99999"])
def test_a_shard_that_is_none_is_named(text: str):
    """With what it must be."""
    with raises("option.value", says="^--shard "):
        check_watch(WatchOptions(shard=text))
