"""TLS to a target, from the first question to the metrics page, as a user sees it."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import QUICK, Case, Ended, Script, kept, launching, refused, serving, sidelight


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A certificate that vouches for itself, its key, and a file with both."""

    cert: Path
    key: Path
    both: Path


def identity(directory: Path, name: str) -> Identity:
    """Make the identity of a host."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not here to make a certificate")
    cert, key, both = (directory / f"{name}-{part}.pem" for part in ("cert", "key", "both"))
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    return Identity(cert=cert, key=key, both=both)


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Identity, Identity]:
    """A server's, that no system knows, and a client's."""
    directory = tmp_path_factory.mktemp("tls")
    return identity(directory, "server"), identity(directory, "client")


@pytest.fixture(scope="module")
def strict(identities: tuple[Identity, Identity]) -> Iterator[str]:
    """A server that speaks to one client alone."""
    server, client = identities
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.cert, server.key)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(client.cert)
    with serving(Script(), context) as url:
        yield url


@pytest.fixture(scope="module")
def secured(
    identities: tuple[Identity, Identity], strict: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Ended]]:
    """Runs against a server with TLS, and against one that asks who comes."""
    server, client = identities
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.cert, server.key)
    authority = (*QUICK, "--ca", str(server.cert))
    cases = {
        "plain": Case(url="http://{}/good/plain"),
        "unknown": Case(url="https://{}/good/unknown"),
        "ca": Case(url="https://{}/good/ca", options=authority),
        "insecure": Case(url="https://{}/good/insecure", options=(*QUICK, "--insecure")),
        "nobody": Case(url=f"{strict}/good/nobody", options=authority),
        "client": Case(
            url=f"{strict}/good/client", options=(*authority, "--cert", str(client.cert), "--key", str(client.key))
        ),
        "both": Case(url=f"{strict}/good/both", options=(*authority, "--cert", str(client.both))),
    }
    with serving(Script(), context) as url, launching(cases, url, tmp_path_factory.mktemp("secured")) as found:
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
def test_doctor_takes_the_same_options(identities: tuple[Identity, Identity], strict: str, named: bool):
    """What it says of a server is what a run would meet there, the metrics page included."""
    server, client = identities
    ours = ["--cert", str(client.cert), "--key", str(client.key)] if named else []
    done = sidelight("doctor", "--url", f"{strict}/good/doctor-{named}", "--ca", server.cert, *ours)
    assert (0 if named else 3, "") == (done.code, done.err)
    assert named == ("ok    chat streams" in done.out)
    assert named == ("/metrics: 1 series" in done.out)
    assert named != ("(--cert)" in done.out or "--cert FILE" in done.out)
