"""Why a connection failed, said in one way."""

from __future__ import annotations

import errno
import socket
import ssl

import aiohttp
import pytest

from sidelight.rundir.access import connection_problem, masked


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "no such host"),
        (ssl.SSLError(1, "[SSL] record layer failure"), "TLS failed"),
        (OSError("Multiple exceptions: one, another"), "Multiple exceptions: one, another"),
        (OSError(-2, "odd"), "[Errno -2] odd"),
        (OSError(), "OSError"),
    ],
)
def test_reasons_of_failed_connections(error: OSError, reason: str):
    """The number of an error is the system's only where the system said it."""
    assert reason == str(connection_problem(error))


def test_what_aiohttp_wraps_is_what_is_said():
    """The error of the system below a connector's; that of TLS where a server rejected a certificate later."""
    key = aiohttp.client_reqrep.ConnectionKey("h", 1, False, True, None, None, None)
    refused = aiohttp.ClientConnectorError(key, ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"))
    assert "Connection refused" == str(connection_problem(refused))
    late = aiohttp.ClientOSError(1, "odd")
    late.__cause__ = ssl.SSLError(1, "[SSL] alert")
    assert ("tls", "TLS failed") == ((problem := connection_problem(late)).kind, str(problem))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:hush@h:1/metrics?x=1", "http://***@h:1/metrics?x=1"),
        ("http://h/metrics?token=hush&target=a", "http://h/metrics?token=***&target=a"),
        ("http://h/m?X-Amz-Signature=hush&api%5Fkey=hush#f", "http://h/m?X-Amz-Signature=***&api%5Fkey=***#f"),
        ("http://h/m?Password=hush=hush", "http://h/m?Password=***"),
        ("http://h/m?token&x=b", "http://h/m?token&x=b"),
        ("http://h/m?shard=1&session=hush&match[]=up", "http://h/m?shard=***4461&session=***53ae&match[]=up"),
        ("http://h/m?shard=***9f38", "http://h/m?shard=***9f38"),
        ("http://h/metrics", "http://h/metrics"),
    ],
)
def test_secrets_of_a_url_are_masked(url: str, shown: str):
    """User and password, and of a query all values but those of harmless names; a hash distinguishes pages."""
    assert shown == masked(url)
