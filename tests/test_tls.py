"""TLS to a target, from the first question to the metrics page, as a user sees it."""

from __future__ import annotations

import re
import signal
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Authority
from processes import BOUND_S, QUICK, Case, Ended, Script, agreed_rows, ended, engine, launching, serving, start, until


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


def test_a_watch_is_served_over_tls(authority: Authority, tmp_path: Path):
    """As it is typed: certificate and key behind one option, and the page's URL anywhere."""
    files = (authority.path("solo.pem"), authority.path("solo.key"))
    address = ("--listen", "127.0.0.1:0", "--otlp-listen", "127.0.0.1:0", "--json", "--out", tmp_path / "watch")
    with (
        engine() as (url, _),
        start("watch", "--listen-tls", *files, f"{url}/metrics", *address, SIDELIGHT_LISTEN_TOKEN="hush") as process,
    ):
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if page := re.findall(r"https://[\d.:]+/metrics", line):
                break
        else:
            raise AssertionError(said)
        context = ssl.create_default_context(cafile=files[0])
        context.check_hostname = False
        asked = urllib.request.Request(page[0], headers={"Authorization": "Bearer hush"})  # noqa: S310  on loopback

        def served() -> str:
            with urllib.request.urlopen(asked, context=context, timeout=BOUND_S) as reply:  # noqa: S310
                return reply.read().decode()

        until(lambda: served() != "", "the first snapshot, before which the page is empty")
        page_text = served()
        process.send_signal(signal.SIGTERM)
        assert 0 == ended(process, tmp_path).code
    assert page_text.startswith("# HELP sidelight_build_info")
