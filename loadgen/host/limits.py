"""File descriptors and ports: what a load needs, and what this machine gives."""

from __future__ import annotations

import math
from pathlib import Path

from sidelight.rundir.process import descriptor_limit

# Standard streams, log, plan, event loop, timer, name service.
_OWN_DESCRIPTORS = 32
# Replies that take longer than this are not foreseen.
_ENOUGH_S = 30.0
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def port_count() -> int | None:
    """Return the number of simultaneous connections to one address and port, None if not known.

    The limit is this machine's range of local ports, None if that cannot be read.
    """
    try:
        first, last = map(int, _PORT_RANGE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    return last - first + 1


def shortage(connections: int, *, workers: int = 1, targets: int = 1) -> str | None:
    """Return a message about a shortage of files or ports for the connections, else None.

    It is one line and names the cure.

    connections  a closed loop's concurrency, or what an open loop is expected to have in flight
    targets      how many addresses they spread over evenly; each has all local ports for itself
    """
    needed, limit = math.ceil(connections / workers) + _OWN_DESCRIPTORS, descriptor_limit()
    if needed > limit:
        return (
            f"{connections} connections at once need {needed} open files in a load worker, and its limit is {limit}: "
            f"raise it (ulimit -Hn), or share them among more workers"
        )
    ports, wanted = port_count(), math.ceil(connections / targets)
    if ports is not None and wanted > ports:
        return (
            f"{wanted} connections at once to one address need as many local ports, and this machine has {ports}: "
            f"widen net.ipv4.ip_local_port_range, or name more than one --url"
        )
    return None


def outlasting(rate_per_s: float, *, workers: int = 1, targets: int = 1) -> str | None:
    """Return a message about the reply duration that exhausts files or ports, else None.

    None when an open loop cannot run out of either.

    In flight are rate x duration of a reply, so the limits over the rate are the longest that replies may take. Where
    there are no files for connections at all, that is said instead.
    """
    if rate_per_s <= 0:
        return None
    limit = descriptor_limit()
    if limit <= _OWN_DESCRIPTORS:
        return (
            f"a load worker has up to {_OWN_DESCRIPTORS} files open beside its connections, and its limit is {limit}: "
            f"requests may fail; raise it (ulimit -Hn)"
        )
    files_s = (limit - _OWN_DESCRIPTORS) * workers / rate_per_s
    ports = port_count()
    ports_s = math.inf if ports is None else ports * targets / rate_per_s
    longest_s = min(files_s, ports_s)
    if longest_s >= _ENOUGH_S:
        return None
    what, cure = ("open files", "ulimit -Hn") if files_s <= ports_s else ("local ports", "net.ipv4.ip_local_port_range")
    return (
        f"at {rate_per_s:g} requests/s, replies that take longer than {longest_s:.1f} s use up this machine's {what}; "
        f"raise {cure}"
    )
