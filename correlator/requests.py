"""Requests as read from a run's log or from clients' spans; and which engine each was sent to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

import numpy as np

from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Bools, Indices, Ints, Texts, ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """Columns of n requests that estimates and breakdowns are made of; stamps int64 ns Unix by our clock.

    Stamps and tokens are -1 where unknown. Names are those of `RequestLog`, which has these columns and more.
    """

    index: Ints
    endpoint_url: Texts
    trace_id: Texts
    status: Texts
    finish_reason: Texts
    dispatch_ns: Ints
    submit_ns: Ints
    first_output_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    end_ns: Ints
    declared_input_tokens: Ints
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    chunk_ns: Ints = field(metadata=ragged("chunk_start"))
    chunk_start: Ints

    def __len__(self) -> int:
        return len(self.submit_ns)


RequestColumns = Requests | RequestLog


def of_log(log: RequestLog) -> Requests:
    """Return the columns of a run's requests."""
    return Requests(**{column.name: getattr(log, column.name) for column in fields(Requests)})


def first_output_ns(requests: RequestColumns) -> Ints:
    """Return the stamps of first outputs [n], else of first tokens."""
    return np.where(requests.first_output_ns >= 0, requests.first_output_ns, requests.first_token_ns)


_TLS_SCHEMES = ("https", "wss", "grpcs")


def address(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL; ("", 0) where it has no host.

    The host is in lower case, without user and password. A port that is not stated is that of the scheme.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "", 0
    if not parts.hostname:
        return "", 0
    return parts.hostname, port or (443 if parts.scheme in _TLS_SCHEMES else 80)


def route(asked: Texts, engines: Sequence[str], usable: Bools | None = None) -> list[tuple[Indices, list[int]]]:
    """Divide requests by the engine that they were sent to: groups of rows, each with the engines it may have gone to.

    `asked` are the URLs [n] of the requests, `engines` those of the scraped pages, `usable` which of these count.

    - Addresses decide where no two engines share one, and some usable engine was asked by its own. None is then behind
      a gateway: each engine has a group, and a request to another address is in no group.
    - Else all requests may have gone to all engines.
    """
    urls = set(asked.tolist())
    by_url = {url: address(url) for url in urls}
    places = [address(url) for url in engines]
    direct = set(by_url.values()) & {place for at, place in enumerate(places) if usable is None or usable[at]}
    if len(set(places)) < len(places) or not direct - {("", 0)}:
        return [(np.arange(len(asked)), list(range(len(engines))))]
    rows: dict[tuple[str, int], list[int]] = {place: [] for place in places}
    for row, url in enumerate(asked.tolist()):
        if by_url[url] in rows:
            rows[by_url[url]].append(row)
    return [(np.array(rows[place], dtype=np.intp), [at]) for at, place in enumerate(places)]
