"""Certificates for tests of TLS, made once by OpenSSL: an authority, those it signed, others signed by themselves."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
LOOPBACK = ("-addext", "subjectAltName=IP:127.0.0.1")


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate authority of our own, and a directory of NAME.pem with NAME.key.

    ca, solo, unrelated   signed by themselves; solo is at 127.0.0.1
    server, client        signed by ca; server is at 127.0.0.1
    locked                its key has a password
    both, unrelated-both  certificate and key of client, and of unrelated, in one file
    empty                 nothing
    """

    directory: Path

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def sign(self, name: str, *more: str, key: tuple[str, ...] = ("-nodes",)) -> None:
        subprocess.run(
            [shutil.which("openssl") or "", "req", "-x509", *KEY, *key, "-subj", f"/CN={name}", *more,
             "-keyout", self.path(f"{name}.key"), "-out", self.path(f"{name}.pem")],
            check=True, capture_output=True,
        )  # fmt: skip

    def join(self, name: str, of: str) -> None:
        text = "".join(Path(self.path(f"{of}.{part}")).read_text() for part in ("pem", "key"))
        Path(self.path(f"{name}.pem")).write_text(text)

    def serving(self, name: str = "server", *, ask_client: str = "") -> ssl.SSLContext:
        """Return a server's context; one that asks who comes trusts the certificate named."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path(f"{name}.pem"), self.path(f"{name}.key"))
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.path(ask_client))
        return context


def established(directory: Path) -> Authority:
    """Make them all; where there is no OpenSSL, the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make certificates")
    authority = Authority(directory)
    signed = (
        "-CA",
        authority.path("ca.pem"),
        "-CAkey",
        authority.path("ca.key"),
        "-addext",
        "basicConstraints=CA:FALSE",
    )
    authority.sign("ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 and newer want it
    authority.sign("server", *signed, *LOOPBACK)
    authority.sign("client", *signed)
    authority.sign("solo", *LOOPBACK)
    authority.sign("unrelated")
    authority.sign("locked", key=("-passout", "pass:hush"))
    authority.join("both", "client")
    authority.join("unrelated-both", "unrelated")
    Path(authority.path("empty.pem")).write_text("")
    return authority
