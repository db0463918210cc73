"""The network's round-trip time to a target, measured apart from any request (network-latency).

A TCP handshake takes one round trip and no work of the server's process: the kernel answers it. The kernel's own
estimate (TCP_INFO) is read off the last connection, where there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from sidelight.rundir import fields
from sidelight.rundir.fields import NO_UNIT, Count, doc
from sidelight.rundir.stats import Missing

HANDSHAKES = 5
TIMEOUT_S = 2.0
# struct tcp_info of linux/tcp.h: 8 bytes, then u32 fields, of which the sixteenth is rtt and the next rttvar, in us.
_RTT_AT, _TCP_INFO_BYTES = 68, 76


@dataclass(frozen=True, slots=True, kw_only=True)
class Rtt:
    """Round-trip time to host:port.

    connect_ms  what each of the TCP handshakes took, in order
    kernel_ms   the kernel's smoothed estimate of the last connection, and its deviation
    is_own      the address is one of this machine's
    """

    host: str
    port: int
    connect_ms: tuple[float, ...]
    kernel_ms: tuple[float, float] | Missing
    is_own: bool = False


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True):
    """Round-trip time to a target, by TCP handshakes apart from any request."""

    url: Annotated[str, doc("The target.")]
    host: Annotated[str | UnsetType, doc("Its host; absent where nothing was connected.")] = UNSET
    port: Annotated[int | UnsetType, doc("Its port; absent where nothing was connected.", NO_UNIT)] = UNSET
    handshakes: Annotated[Count, doc("Number of handshakes.", "handshakes", source="draft `network-latency`")]
    min: Annotated[float | None, doc("The shortest.", "ms")]
    median: Annotated[float | None, doc("Their median.", "ms")]
    max: Annotated[float | None, doc("The longest.", "ms")]
    kernel_rtt_ms: Annotated[float | None, doc("The kernel's smoothed estimate (TCP_INFO).", "ms")]
    kernel_deviation_ms: Annotated[float | None, doc("The deviation of the kernel's estimate.", "ms")]
    own_address: Annotated[
        bool | UnsetType,
        doc("Whether its address is one of this machine's; absent where nothing was connected."),
    ] = UNSET
    missing: fields.Missing = UNSET


async def measure_rtt(url: str, *, timeout_s: float = TIMEOUT_S) -> Rtt | Missing:
    """Connect five times, one after the other, and close again; the deadline is for all together.

    What was measured by the deadline counts. The name is looked up before, apart from what is timed. Missing when
    nothing could be connected, with the reason. Raises ValueError when the URL names no host.
    """
    host, port = _address(url)
    times_ms: list[float] = []
    kernel: tuple[float, float] | Missing = Missing(reason="no connection")
    is_own = False
    failure = f"no connection to {host}:{port} within {timeout_s:g} s"
    try:
        async with asyncio.timeout(timeout_s):
            entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, address = await _first_that_answers([(entry[0], entry[4]) for entry in entries])
            for _ in range(HANDSHAKES):
                took_ms, kernel, is_own = await _handshake(family, address)
                times_ms.append(took_ms)
    except TimeoutError:
        pass
    except OSError as error:
        failure = f"{host}:{port}: {error.strerror or error}"
    if not times_ms:
        return Missing(reason=failure)
    return Rtt(host=host, port=port, connect_ms=tuple(times_ms), kernel_ms=kernel, is_own=is_own)


def round_trip(url: str, rtt: Rtt | Missing) -> RoundTrip:
    """Return a round-trip time as the manifest and summary.json show it."""
    if isinstance(rtt, Missing):
        return RoundTrip(
            url=url,
            handshakes=0,
            min=None,
            median=None,
            max=None,
            kernel_rtt_ms=None,
            kernel_deviation_ms=None,
            missing=rtt.reason,
        )
    smoothed_ms, deviation_ms = (None, None) if isinstance(rtt.kernel_ms, Missing) else rtt.kernel_ms
    return RoundTrip(
        url=url,
        host=rtt.host,
        port=rtt.port,
        handshakes=len(rtt.connect_ms),
        min=min(rtt.connect_ms),
        median=float(np.median(rtt.connect_ms)),
        max=max(rtt.connect_ms),
        kernel_rtt_ms=smoothed_ms,
        kernel_deviation_ms=deviation_ms,
        own_address=rtt.is_own,
        missing=rtt.kernel_ms.reason if isinstance(rtt.kernel_ms, Missing) else UNSET,
    )


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"{url!r} names no host; write http://host:port")
    return parts.hostname, parts.port or (443 if parts.scheme in ("https", "wss", "grpcs") else 80)


async def _first_that_answers(addresses: Sequence[tuple[int, Any]]) -> tuple[int, Any]:
    """Return the first address that a connection can be opened to. Raises the last one's OSError when there is none."""
    for family, address in addresses[:-1]:
        with contextlib.suppress(OSError):
            await _handshake(family, address)
            return family, address
    await _handshake(*addresses[-1])
    return addresses[-1]


async def _handshake(family: int, address: Any) -> tuple[float, tuple[float, float] | Missing, bool]:
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as connection:
        connection.setblocking(False)
        started_ns = time.perf_counter_ns()
        await asyncio.get_running_loop().sock_connect(connection, address)
        took_ms = (time.perf_counter_ns() - started_ns) / 1e6
        # A connection to an address of one's own comes from that address.
        is_own = connection.getsockname()[0] == connection.getpeername()[0]
        return took_ms, _kernel_rtt(connection), is_own


def _kernel_rtt(connection: socket.socket) -> tuple[float, float] | Missing:
    """Return smoothed round-trip time and its deviation, ms."""
    if sys.platform != "linux":
        return Missing(reason="TCP_INFO is read on Linux only")
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        rtt_us, deviation_us = struct.unpack_from("=II", info, _RTT_AT)
    except (OSError, struct.error):
        return Missing(reason="this kernel does not tell TCP_INFO")
    return (rtt_us / 1e3, deviation_us / 1e3) if rtt_us else Missing(reason="the kernel has no estimate")
