"""A test that is skipped in continuous integration fails there, unless it needs another machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import skips

pytest_plugins = ["pytester"]

SKIPPING = """
import pytest

@pytest.fixture
def tool():
    pytest.skip("promtool is not installed (Debian package prometheus)")

def test_a_tool(tool): ...

@pytest.mark.skipif(True, reason="needs /proc to find the receiver")
def test_a_mark(): ...

def test_a_body():
    pytest.skip("no recorded fixtures at ../shared")

def test_a_device():
    pytest.skip("this machine has an NVIDIA driver")

@pytest.mark.xfail
def test_a_known_failure():
    assert False
"""


@pytest.mark.parametrize(
    ("ci", "outcomes"),
    [
        ("true", {"errors": 2, "failed": 1, "skipped": 1, "xfailed": 1}),
        ("", {"skipped": 4, "xfailed": 1}),
    ],
)
def test_an_unexpected_skip_fails_in_continuous_integration(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcomes: dict[str, int]
):
    """From a fixture, a mark or a body; one of the machine stays a skip, and so do all on a developer's machine."""
    monkeypatch.setenv("CI", ci)
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(SKIPPING)
    monkeypatch.syspath_prepend(Path(skips.__file__).parent)
    options = ("-q", "-p", "no:cacheprovider", "-o", "asyncio_default_fixture_loop_scope=function")
    pytester.runpytest_inprocess(*options).assert_outcomes(**outcomes)
