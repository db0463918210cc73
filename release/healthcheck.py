"""Ask the command that a container runs whether it is well; exit 0 where it is, and where it serves nothing.

    python healthcheck.py [PID ...]     # by default each `sidelight` there is

The address is not guessed: it is what the process listens at. The live page of run, watch and demo answers /healthz,
wherever --listen has put it; report, scrape and a load without a page listen at nothing, and a simulated engine does
not know the path. Linux only, and nothing but Python's own library, so that a check costs little.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
COMMAND = b"/sidelight\0"
TIMEOUT_S = 4.0
_LISTENS = "0A"


def commands() -> Iterator[int]:
    """Yield the processes that are a `sidelight` command: not their workers, which listen for others than us."""
    for path in PROC.glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if COMMAND in path.read_bytes():
                yield int(path.parent.name)


def addresses(process: int) -> Iterator[tuple[str, int]]:
    """Yield where a process listens by TCP; nothing of one that has ended."""
    home = PROC / str(process)
    with suppress(OSError):
        sockets = set(map(_target, (home / "fd").iterdir()))
        for table in ("tcp", "tcp6"):
            for line in (home / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                    yield address(fields[1])


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # closed meanwhile
        return ""


def address(text: str) -> tuple[str, int]:
    """Return a local address as the kernel's tables have it; of one that stands for all the loopback one."""
    host, port = text.split(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family, loopback = (socket.AF_INET, "127.0.0.1") if len(words) == 1 else (socket.AF_INET6, "::1")
    return socket.inet_ntop(family, packed) if any(words) else loopback, int(port, 16)


def is_well(host: str, port: int) -> bool:
    """Tell whether what listens there answers in time, over TLS or without, and with no error of its own.

    One that does not know the question, or not who asks, is well. Of TLS not even a certificate is asked for: that the
    process answers is all there is to know.
    """
    plain = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        return _status(plain) < http.client.INTERNAL_SERVER_ERROR
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        secure = http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=anybody)
    try:
        secure.connect()
    except ssl.SSLError:
        return True  # it wants a certificate of ours
    except OSError:
        return False
    try:
        return _status(secure) < http.client.INTERNAL_SERVER_ERROR
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return True  # as above, and it hangs up behind the handshake


def _status(connection: http.client.HTTPConnection) -> int:
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """Ask all, and return the exit code: 1 where one is not well."""
    processes = map(int, arguments) if arguments else commands()
    asked = [where for process in processes for where in addresses(process)]
    return int(not all(is_well(*where) for where in asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
