"""TLS to a target, from the first question to the metrics page, as a user sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from certificates import Authority
from processes import QUICK, Case, Ended, Script, kept, launching, refused, serving, sidelight


@pytest.fixture(scope="module")
def strict(authority: Authority) -> Iterator[str]:
    """A server, by a certificate that no system knows, that speaks to one client alone."""
    with serving(Script(), authority.serving("solo", ask_client="stranger.pem")) as url:
        yield url


@pytest.fixture(scope="module")
def secured(
    authority: Authority, strict: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Ended]]:
    """Runs against a server with TLS, and against one that asks who comes."""
    trusting = (*QUICK, "--ca", authority.path("solo.pem"))
    client = ("--cert", authority.path("stranger.pem"), "--key", authority.path("stranger.key"))
    cases = {
        "plain": Case(url="http://{}/good/plain"),
        "unknown": Case(url="https://{}/good/unknown"),
        "ca": Case(url="https://{}/good/ca", options=trusting),
        "insecure": Case(url="https://{}/good/insecure", options=(*QUICK, "--insecure")),
        "nobody": Case(url=f"{strict}/good/nobody", options=trusting),
        "client": Case(url=f"{strict}/good/client", options=(*trusting, *client)),
        "both": Case(url=f"{strict}/good/both", options=(*trusting, "--cert", authority.path("stranger-both.pem"))),
    }
    directory = tmp_path_factory.mktemp("secured")
    with serving(Script(), authority.serving("solo")) as url, launching(cases, url, directory) as found:
        yield found


def test_no_tls_to_a_server_with_it_is_exit_3(secured: Callable[[str], Ended]):
    """The line asks for what it is."""
    assert refused(secured("plain"), 3).endswith("is it an https:// server?\n")


def test_an_unknown_certificate_is_exit_3(secured: Callable[[str], Ended]):
    """With OpenSSL's reason and both cures."""
    line = refused(secured("unknown"), 3)
    assert "self-signed certificate" in line
    assert "--ca FILE" in line
    assert "--insecure" in line


@pytest.mark.parametrize("name", ["ca", "insecure", "client", "both"])
def test_a_certificate_is_good_by_its_authority_or_by_decree(secured: Callable[[str], Ended], name: str):
    """For the questions before the load, for the load, and for the metrics page at the same host; ours likewise."""
    run = secured(name)
    assert (0, "") == (run.code, run.err)
    kept(run, sent=8, ok=8)
    assert run.manifest["metrics_targets"][0]["url"].startswith("https://")


def test_a_server_that_asks_who_comes_is_told_or_the_run_is_exit_3(secured: Callable[[str], Ended]):
    """The line names the option. Why the server hung up it says where that could be read before the wire broke."""
    assert "--cert" in refused(secured("nobody"), 3)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_doctor_takes_the_same_options(authority: Authority, strict: str, named: bool):
    """What it says of a server is what a run would meet there, the metrics page included."""
    ours = ("--cert", authority.path("stranger.pem"), "--key", authority.path("stranger.key")) if named else ()
    done = sidelight("doctor", "--url", f"{strict}/good/doctor-{named}", "--ca", authority.path("solo.pem"), *ours)
    assert (0 if named else 3, "") == (done.code, done.err)
    assert named == ("ok    chat streams" in done.out)
    assert named == ("/metrics: 1 series" in done.out)
    assert named != ("(--cert)" in done.out or "--cert FILE" in done.out)
