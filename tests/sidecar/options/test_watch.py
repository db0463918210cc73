"""What can be said to a watch, and what of it can be said again while it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from codes import raises

from sidelight.recorded.errors import ConfigurationError
from sidelight.sidecar.options.watch import WatchOptions, check_watch, reloaded

PAGE = "http://127.0.0.1:8000/metrics"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "watch.yaml"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h", 3600), ("2d", 172800), ("45", 45)])
def test_how_long_logs_are_kept_is_said_in_units(text: str, seconds: float):
    """Seconds where there is no unit."""
    assert seconds == check_watch(WatchOptions(keep=text)).keep_s


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("2GiB", 2**31), ("1500kB", 1_500_000), ("5000000", 5_000_000)]
)
def test_how_much_is_kept_is_said_in_units(text: str, size: int):
    """Bytes where there is no unit."""
    assert size == check_watch(WatchOptions(keep_bytes=text)).kept_bytes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"keep": "soon"}, "--keep soon"),
        ({"keep": "0s"}, "--keep 0s"),
        ({"keep_bytes": "1 pile"}, "--keep-bytes 1 pile"),
        ({"keep_bytes": "1kB"}, "--keep-bytes 1kB"),
        ({"memory": "much"}, "--memory much"),
        ({"memory": "100MB"}, "--memory 100MB"),
        ({"listen": "off"}, "--listen off"),
        ({"listen": "here"}, "--listen here"),
        ({"otlp_listen": "4317"}, "--otlp-listen 4317"),
        ({"scrape_interval": 0.0}, "--scrape-interval 0"),
        ({"metrics": ("engine",)}, "--metrics engine"),
        ({"metrics": (PAGE, "http://u:p@e:1/perf_metrics")}, r"--metrics http://\*\*\*@e:1/perf_metrics"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, object], named: str):
    """The option with its value, and what would be valid."""
    with pytest.raises(ConfigurationError, match=f"^{named}: "):
        check_watch(replace(WatchOptions(), **changes))  # type: ignore[arg-type]


def test_a_bare_address_means_its_metrics_page():
    """What else has a path is taken as it is."""
    given = ("http://127.0.0.1:8000", "http://127.0.0.1:9000/custom")
    assert (PAGE, given[1]) == check_watch(WatchOptions(metrics=given)).metrics


def test_a_reload_takes_what_can_change(file: Path):
    """Targets, the interval, how much is kept; what the file does not name is as it is by default."""
    options = check_watch(WatchOptions(config=file, metrics=("http://old.test/metrics",), keep="9m"))
    file.write_text(f"metrics: {PAGE}\nscrape-interval: 5\nkeep-bytes: 20000000\n")
    after, refused = reloaded(options, ["watch", "--config", str(file)])
    expected = replace(options, metrics=(PAGE,), scrape_interval=5.0, keep="1h", keep_bytes="20000000")
    assert (expected, ()) == (after, refused)


def test_the_command_line_wins_over_a_reload_too(file: Path):
    """As it does at the start."""
    options = WatchOptions(config=file, scrape_interval=0.5)
    file.write_text("scrape_interval: 5\nlisten: 127.0.0.1:1\n")
    given = ["watch", "--scrape-interval=0.5", "--listen", "127.0.0.1:9464"]
    assert (options, ()) == reloaded(options, given)


def test_a_reload_says_what_cannot_change(file: Path):
    """And takes the rest."""
    options = WatchOptions(config=file)
    file.write_text("otlp-listen: 127.0.0.1:5000\nlisten: 127.0.0.1:9464\nscrape-interval: 2\n")
    after, refused = reloaded(options, [])
    assert 2.0 == after.scrape_interval
    assert ("otlp_listen cannot change while the watch runs; restart the watch to apply it",) == refused


@pytest.mark.parametrize(
    "text", ["metrics: [", "metrics: nowhere", "scrape_interval: often", "scrape_interval: 0", "colour: red", "keep: x"]
)
def test_a_file_that_is_broken_changes_nothing(file: Path, text: str):
    """It raises what the terminal and the log then say."""
    file.write_text(text)
    with pytest.raises(ConfigurationError):
        reloaded(WatchOptions(config=file), [])


def test_without_a_file_there_is_nothing_to_reload():
    """Which is said."""
    with raises("option.missing"):
        reloaded(WatchOptions(), [])
