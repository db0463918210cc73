"""Why a connection failed, said in one way."""

from __future__ import annotations

import errno
import socket
import ssl

import aiohttp
import pytest

from rundir.access import connection_problem


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
