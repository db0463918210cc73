"""The options of access to metrics pages: what they become, what is refused, and what is never shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rundir.access import Access, basic
from sidecar.errors import ConfigurationError
from sidecar.options.access import AccessOptions, check_access, metrics_access
from sidecar.options.checks import check_run
from sidecar.options.config import as_recorded, command_as_recorded, load_yaml
from sidecar.options.load import RunOptions

URL = "http://127.0.0.1:8000"


def test_nothing_said_is_nothing_sent():
    """Without options there is neither a header nor a file."""
    assert Access() == metrics_access(AccessOptions())


def test_each_option_arrives():
    """Headers are taken apart at their first colon; credentials become an Authorization."""
    token = AccessOptions(metrics_token="t", metrics_header=("X-Scope-OrgID: a:b ", "X-Empty:"))
    assert {"X-Scope-OrgID": "a:b", "X-Empty": "", "Authorization": "Bearer t"} == dict(metrics_access(token).headers)
    user = AccessOptions(metrics_user="ann:p:w", metrics_insecure=True, metrics_cert=Path("c"), metrics_key=Path("k"))
    access = metrics_access(user)
    assert {"Authorization": basic("ann:p:w")} == dict(access.headers)
    assert (True, "c", "k") == (access.insecure, access.cert, access.key)


def test_the_api_key_goes_only_to_the_host_that_it_was_given_for():
    """And only where nothing else was said of credentials."""
    headers = {"127.0.0.1:8000": {"Authorization": "Bearer sk"}}
    assert headers == metrics_access(AccessOptions(), urls=(f"{URL}/v1",), api_key="sk").host_headers
    assert {} == metrics_access(AccessOptions(metrics_token="t"), urls=(URL,), api_key="sk").host_headers
    assert (
        {}
        == metrics_access(AccessOptions(metrics_header=("authorization: x",)), urls=(URL,), api_key="sk").host_headers
    )
    assert {} == metrics_access(AccessOptions(), urls=(URL,), api_key=None).host_headers


def test_a_url_with_a_user_is_a_metrics_url_only():
    """The user of a page is asked for there and masked in what is recorded; the target's key is an option."""
    page = "http://ann:hush@127.0.0.1:9400/metrics"
    options = check_run(RunOptions(url=(URL,), metrics=(page,)))
    assert (page,) == options.metrics
    assert ["http://***@127.0.0.1:9400/metrics"] == as_recorded(options)["metrics"]
    with pytest.raises(ConfigurationError, match="would be written to every file of the run"):
        check_run(RunOptions(url=("http://ann:hush@127.0.0.1:8000",)))


def test_what_is_recorded_has_no_secret():
    """Of a header its name, of a token and a user only that there was one."""
    options = RunOptions(
        url=(URL,), metrics_user="ann:hush", metrics_token="hush", metrics_header=("X-Key: hush", "hush")
    )
    recorded = as_recorded(options)
    assert ("***", "***", ["X-Key: ***", "***"]) == (
        recorded["metrics_user"],
        recorded["metrics_token"],
        recorded["metrics_header"],
    )
    assert "hush" not in json.dumps(recorded)


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (["--metrics-token", "hush", "--seed", "1"], ["--metrics-token", "***", "--seed", "1"]),
        (["--metrics-token=hush"], ["--metrics-token=***"]),
        (["--api_key", "hush", "--url", "http://h"], ["--api_key", "***", "--url", "http://h"]),
        (["--metrics_user=a:hush=x"], ["--metrics_user=***"]),
        (["--metrics-header", "X: hush"], ["--metrics-header", "***"]),
        (["--metrics", "http://a:hush@h/m?x=1"], ["--metrics", "http://***@h/m?x=1"]),
        (["--metrics=http://a:hush@h/m?x=1"], ["--metrics=http://***@h/m?x=1"]),
        (["--metrics", "http://h/m?x=1"], ["--metrics", "http://h/m?x=1"]),
    ],
)
def test_the_command_is_recorded_without_secrets(given: list[str], recorded: list[str]):
    """As it was typed otherwise."""
    assert ["run", *recorded] == command_as_recorded(["run", *given], RunOptions)


def test_both_names_of_the_timeout(tmp_path: Path):
    """`metrics-timeout` and `scrape-timeout` are one option."""
    for key in ("metrics-timeout", "metrics_timeout", "scrape-timeout"):
        (tmp_path / "c.yaml").write_text(f"{key}: 2\n", encoding="utf-8")
        assert {"scrape_timeout": 2} == load_yaml(tmp_path / "c.yaml", RunOptions)


def test_options_without_fault_pass():
    """What is complete is not complained of."""
    check_access(AccessOptions(metrics_user="ann:p w", metrics_header=("X: 1", "Y: ä")))
    check_access(AccessOptions(metrics_token="t", metrics_insecure=True))
