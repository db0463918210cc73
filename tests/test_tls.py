"""TLS to a target, from the first question to the metrics page, as a user sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from certificates import Authority
from processes import QUICK, Case, Ended, Script, agreed_rows, launching, serving


@pytest.fixture(scope="module")
def secured(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """Runs against a server whose certificate no system knows, and against one that answers one client only."""
    trusting = (*QUICK, "--ca", authority.path("solo.pem"))
    client = ("--cert", authority.path("unrelated.pem"), "--key", authority.path("unrelated.key"))
    strict = serving(Script(), authority.serving("solo", ask_client="unrelated.pem"))
    with serving(Script(), authority.serving("solo")) as url, strict as strict_url:
        cases = {
            "ca": Case(url="https://{}/good/ca", options=trusting),
            "insecure": Case(url="https://{}/good/insecure", options=(*QUICK, "--insecure")),
            "client": Case(url=f"{strict_url}/good/client", options=(*trusting, *client)),
            "both": Case(
                url=f"{strict_url}/good/both", options=(*trusting, "--cert", authority.path("unrelated-both.pem"))
            ),
        }
        with launching(cases, url, tmp_path_factory.mktemp("secured")) as launched:
            yield launched


@pytest.mark.parametrize("name", ["ca", "insecure", "client", "both"])
def test_a_certificate_is_accepted_by_its_authority_or_unchecked(secured: Callable[[str], Ended], name: str):
    """For the questions before the load, for the load, and for the metrics page at the same host; ours likewise."""
    run = secured(name)
    assert (0, "") == (run.code, run.err)
    agreed_rows(run, sent=8, ok=8)
    assert run.manifest["metrics_targets"][0]["url"].startswith("https://")
